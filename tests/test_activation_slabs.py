"""Slabs: ranges are disjoint, nothing is lost, and who read a block before is always told."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ghoffload.activations import slabs as slabs_module
from ghoffload.activations.slabs import Block, Slabs
from ghoffload.machine.protocol import Event
from ghoffload.machine.virtual import VirtualMachine
from ghoffload.memory.extents import Extents
from ghoffload.memory.ledger import ledger

SLAB = 4096
OWNER = "slabs under test"


@contextmanager
def slabs_of(machine: VirtualMachine | None = None, **options: Any) -> Iterator[Slabs]:
    """Slabs that are closed at the end."""
    slabs = Slabs(machine or VirtualMachine(), owner=OWNER, **({"slab_bytes": SLAB} | options))
    try:
        yield slabs
    finally:
        slabs.close()


def read(slabs: Slabs, block: Block) -> Event:
    """Have a copy read a block, and give it back."""
    block.free_after = slabs.machine.event("a reader")
    slabs.machine.record(block.free_after, slabs.machine.h2d)
    slabs.give(block)
    return block.free_after


def span(block: Block) -> range:
    start = block.memory.data_ptr()
    return range(start, start + block.nbytes)


# -- what is in it


def test_block_is_registered_host_memory_of_its_size() -> None:
    machine = VirtualMachine()
    with slabs_of(machine) as slabs:
        block = slabs.take(300)
        assert (block.nbytes, block.memory.shape, block.memory.dtype) == (300, (300,), torch.uint8)
        assert (block.after, block.free_after) == ((), None)
        assert ledger.total("pinned", OWNER) == SLAB
        source = torch.arange(300).to(torch.uint8)
        machine.copy(block.memory, source, stream=machine.d2h[0])
        assert torch.equal(block.memory, source)
    assert ledger.total(owner=OWNER) == 0


def test_second_step_makes_no_slab() -> None:
    with slabs_of() as slabs:
        sizes = [700, 64, 1024, 3000, 2000, 9000]
        reserved = []
        for _ in range(3):
            blocks = [slabs.take(size) for size in sizes]
            reserved.append((slabs.reserved_bytes, slabs.allocations))
            for block in blocks:
                read(slabs, block)
        assert reserved[0] == reserved[1] == reserved[2]
        assert reserved[0][1] == 3  # 9,000 bytes have a slab of their own
        assert slabs.used_bytes == 0
        slabs.give(slabs.take(1))
        assert slabs.peak_bytes == sum(sizes)


def test_tightest_range_of_all_slabs_is_taken() -> None:
    with slabs_of() as slabs:
        wide, tight = slabs.take(SLAB), slabs.take(SLAB - 512)
        slabs.give(wide)
        assert slabs.take(500).memory.data_ptr() == tight.memory.data_ptr() + SLAB - 512


# -- readers


def test_takers_are_told_of_the_readers_of_their_bytes_alone() -> None:
    with slabs_of() as slabs:
        first, second, third, rest = (slabs.take(size) for size in (256, 512, 1024, 2304))
        before = {name: read(slabs, b) for name, b in (("first", first), ("second", second))}
        over = slabs.take(500)  # the first and half of the second, as none of this size is idle
        assert set(over.after) == {before["first"], before["second"]}
        assert slabs.take(256).after == (before["second"],)  # the other half
        mine = read(slabs, over)
        assert slabs.take(512).after == (mine,)  # what it waited for is behind it
        slabs.give(third)
        assert slabs.take(1024).after == ()
        slabs.give(rest)


def test_an_idle_block_of_the_same_size_comes_first_whatever_is_tighter() -> None:
    with slabs_of() as slabs:
        blocks = [slabs.take(size) for size in (300, 512, 300)]
        events = [read(slabs, block) for block in blocks]
        for number in (0, 2):  # the one that was given first has waited longest
            again = slabs.take(300)
            assert (again.start, again.after) == (blocks[number].start, (events[number],))
        assert slabs.take(300).start not in {block.start for block in blocks[::2]}


def test_who_read_before_is_told_on_where_a_taker_queued_nothing() -> None:
    with slabs_of() as slabs:
        event = read(slabs, slabs.take(1000))
        slabs.give(slabs.take(1000))
        assert slabs.take(1000).after == (event,)


def test_readers_do_not_add_up_from_step_to_step() -> None:
    """More blocks than any bound on a list would hold; each is told of one reader."""
    with slabs_of(slab_bytes=1 << 20) as slabs:
        for _ in range(6):
            blocks = [slabs.take(4096) for _ in range(200)]
            assert max(len(block.after) for block in blocks) <= 1
            for block in blocks:
                read(slabs, block)
        slabs.take(5000)  # none is idle any more
        assert 190 <= len(slabs._slabs[0].readers) <= 200


_moves = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 2 * SLAB)),
        st.tuples(st.sampled_from(["read", "give"]), st.integers(0, 99)),
        st.tuples(st.just("trim"), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(_moves)
def test_any_sequence_keeps_ranges_apart_and_readers_known(moves: list[tuple[str, int]]) -> None:
    readers: dict[int, Event] = {}  # by byte: the last that read it
    with slabs_of() as slabs:
        taken: list[Block] = []
        for move, number in moves:
            if move == "take":
                block = slabs.take(number)
                expected = {readers[byte] for byte in span(block) if byte in readers}
                assert expected <= set(block.after)
                assert not any(set(span(block)) & set(span(other)) for other in taken)
                taken.append(block)
            elif move == "trim":
                before = {byte for slab in slabs._slabs for byte in _bytes(slab)}
                slabs.trim()
                gone = before - {byte for slab in slabs._slabs for byte in _bytes(slab)}
                assert not any(byte in gone for block in taken for byte in span(block))
                readers = {byte: event for byte, event in readers.items() if byte not in gone}
            elif taken:
                block = taken.pop(number % len(taken))
                if move == "give":
                    slabs.give(block)
                else:
                    readers.update(dict.fromkeys(span(block), read(slabs, block)))
            assert slabs.used_bytes == sum(block.nbytes for block in taken)
            assert ledger.total("pinned", OWNER) == slabs.reserved_bytes
            for slab in slabs._slabs:
                ends = [(reader.start, reader.end) for reader in slab.readers]
                assert all(a < b for a, b in ends)
                assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
        for block in taken:
            slabs.give(block)
        slabs.trim()
        assert slabs.reserved_bytes == 0  # nothing is lost
    assert ledger.total(owner=OWNER) == 0


def _bytes(slab: Any) -> range:
    return range(slab.arena.address, slab.arena.address + slab.arena.nbytes)


# -- refusals


def test_a_block_given_twice_is_an_internal_error() -> None:
    with slabs_of() as slabs:
        block = slabs.take(512)
        slabs.give(block)
        again = slabs.take(512)  # the same bytes, another owner
        with pytest.raises(AssertionError, match="internal error: 512 bytes at 0 are given back"):
            slabs.give(block)
        assert slabs.used_bytes == 512
        slabs.give(again)


def test_limit_refuses_with_figures_and_takes_nothing() -> None:
    with slabs_of(limit_bytes=6000) as slabs:
        kept = slabs.take(4000)
        assert slabs.reserved_bytes == 4096
        slabs.take(1700)  # a slab of what is left
        assert slabs.reserved_bytes == 4096 + 1792
        before = (slabs.used_bytes, slabs.reserved_bytes, slabs.allocations)
        with pytest.raises(
            torch.OutOfMemoryError,
            match=r"512 more bytes .* beside 5,888 held, but the limit is 6,000",
        ):
            slabs.take(300)
        assert (slabs.used_bytes, slabs.reserved_bytes, slabs.allocations) == before
        slabs.give(kept)
        slabs.take(300)


def test_idle_slabs_make_room_for_a_larger_block() -> None:
    with slabs_of(limit_bytes=2 * SLAB) as slabs:
        for block in [slabs.take(SLAB), slabs.take(SLAB)]:
            read(slabs, block)
        block = slabs.take(SLAB + 512)
        assert block.after == ()  # closing slabs waited for their readers
        assert slabs.reserved_bytes <= 2 * SLAB


def test_full_host_is_refused_with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs_module, "available_host_bytes", lambda: 1234)
    with slabs_of(VirtualMachine(host_bytes=SLAB + 1024)) as slabs:
        slabs.take(SLAB)
        slabs.take(1024)  # less than a slab, as there is no more
        with pytest.raises(torch.OutOfMemoryError, match=r"256 more .* 5,120 held, but 1,234") as e:
            slabs.take(100)
        assert "offload less" in str(e.value)
        assert slabs.used_bytes == SLAB + 1024


# -- ends


def test_trim_gives_back_what_is_wholly_free() -> None:
    with slabs_of() as slabs:
        first, second = slabs.take(SLAB), slabs.take(SLAB)
        read(slabs, first)
        slabs.trim()
        assert slabs.reserved_bytes == SLAB
        assert second.memory.fill_(7).eq(7).all()


def test_trimming_waits_for_what_is_queued() -> None:
    machine = VirtualMachine(order="latest", check=True)
    with slabs_of(machine) as slabs:
        block = slabs.take(256)
        hbm = torch.zeros(256, dtype=torch.uint8)
        machine.copy(hbm, block.memory.fill_(1), stream=machine.h2d)
        read(slabs, block)
        slabs.trim()
        assert hbm.eq(1).all()
        assert slabs.reserved_bytes == 0


def test_closing_waits_for_what_is_queued() -> None:
    machine = VirtualMachine(order="latest", check=True)
    with slabs_of(machine) as slabs:
        block = slabs.take(256)
        source = torch.ones(256, dtype=torch.uint8)
        machine.copy(block.memory, source, stream=machine.d2h[0])
        slabs.close()
        assert block.memory.eq(1).all()
        slabs.give(block)  # its owner may die later
        assert (slabs.reserved_bytes, slabs.used_bytes) == (0, 0)


def test_ranges_are_changed_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    with slabs_of() as slabs:

        def guarded(name: str) -> Any:
            original = getattr(Extents, name)

            def checked(extents: Extents, *args: int) -> Any:
                assert slabs._lock.locked()
                return original(extents, *args)

            return checked

        for name in ("fit", "take", "give"):
            monkeypatch.setattr(Extents, name, guarded(name))
        slabs.give(slabs.take(100))


def test_several_threads_at_once() -> None:
    with slabs_of() as slabs:
        failures: list[str] = []

        def work(mark: int) -> None:
            for turn in range(150):
                block = slabs.take(1 + (turn * 37 + mark * 101) % 1500)
                block.memory.fill_(mark)
                if not block.memory.eq(mark).all():
                    failures.append(f"{mark} in turn {turn}")
                slabs.give(block)

        threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert slabs.used_bytes == 0
        slabs.trim()
        assert slabs.reserved_bytes == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking with threads about
def test_a_forked_child_gives_nothing_back() -> None:
    with slabs_of() as slabs:
        slabs.take(100)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                slabs.close()
                status = 0 if slabs.reserved_bytes == SLAB else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert slabs.reserved_bytes == SLAB
