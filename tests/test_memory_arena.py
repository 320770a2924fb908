from __future__ import annotations

import contextlib
import gc
import io
import mmap
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ghoffload.errors import PinWarning
from ghoffload.memory import HostArena, arena, carved_bytes, ledger, limits

ROOT = Path(__file__).resolve().parents[1]
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


class FakeMachine:
    """Registers host memory as told, and notes it."""

    host_node = None
    imaginary = False

    def __init__(self, *, grants: bool = True) -> None:
        self.grants = grants
        self.registered: dict[int, int] = {}
        self.asked: list[bool] = []
        self.unregistered_while_mapped: list[bool] = []

    def register_host(
        self, address: int, nbytes: int, *, pin: bool, node: int | None = None
    ) -> bool:
        assert node is None
        self.registered[address] = nbytes
        self.asked.append(pin)
        return pin and self.grants

    def unregister_host(self, address: int) -> None:
        del self.registered[address]
        self.unregistered_while_mapped.append(mapped(address))


def mapped(address: int) -> bool:
    if not sys.platform.startswith("linux"):
        return True
    lines = Path("/proc/self/maps").read_text().splitlines()
    bounds = (line.split()[0].split("-") for line in lines)
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in bounds)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.fixture
def machine() -> FakeMachine:
    return FakeMachine()


def made(nbytes: int, machine: FakeMachine | None, **options: object) -> HostArena:
    return HostArena(nbytes, machine=machine, owner="test arena", **options)  # type: ignore[arg-type]


def test_carved_tensors_are_zero_aligned_and_have_their_own_storage() -> None:
    pieces = [(3, torch.float32), (5, torch.bfloat16), (0, torch.float32), (7, torch.uint8)]
    with_room = made(carved_bytes(pieces), None)
    tensors = [with_room.carve(count, dtype) for count, dtype in pieces]
    assert with_room.remaining == 0
    for (count, dtype), tensor in zip(pieces, tensors, strict=True):
        assert tensor.dtype == dtype
        assert tensor.shape == (count,)
        assert not tensor.view(torch.uint8).any()
        assert tensor.untyped_storage().nbytes() == count * dtype.itemsize
        assert tensor.data_ptr() % 256 == 0
        tensor.fill_(count)
    offsets = [tensor.data_ptr() - with_room.address for tensor in tensors if tensor.numel()]
    assert offsets == [0, 256, 512]
    assert [tensor.unique().tolist() for tensor in tensors] == [[3], [5], [], [7]]


def test_nothing_is_rounded_up() -> None:
    assert carved_bytes([(1, torch.float32)]) == 4
    assert carved_bytes([(1, torch.float32), (1, torch.float32)]) == 260
    assert carved_bytes([(1, torch.float32), (1, torch.float32)], alignment=64) == 68
    assert carved_bytes([]) == 0


def test_saving_a_carved_tensor_writes_its_bytes_alone() -> None:
    whole = made(4 << 20, None)
    whole.carve(1 << 19, torch.float32)
    buffer = io.BytesIO()
    torch.save(whole.carve(10, torch.float32), buffer)
    assert buffer.tell() < 4096


def test_tensor_shares_memory_with_what_was_carved_there() -> None:
    whole = made(1 << 12, None)
    whole.carve(4, torch.float32)
    carved = whole.carve(4, torch.float32)
    view = whole.tensor(256 + 4, 3, torch.float32)
    carved.copy_(torch.arange(4.0))
    assert view.tolist() == [1.0, 2.0, 3.0]
    assert view.untyped_storage().nbytes() == 12
    assert view.storage_offset() == 0


@pytest.mark.parametrize(
    ("offset", "count", "message"),
    [
        (1020, 2, "within the 1,024 bytes"),
        (-4, 1, "within the 1,024 bytes"),
        (0, -1, "within the 1,024 bytes"),
        (2, 1, "aligned for torch.float32, got byte 2"),
    ],
)
def test_ranges_beyond_the_arena_are_refused(offset: int, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(1024, None).tensor(offset, count, torch.float32)


def test_carving_too_much_is_refused_and_takes_nothing() -> None:
    whole = made(1024, None)
    whole.carve(1, torch.uint8)
    with pytest.raises(ValueError, match=r"got 193 elements of torch.float32 at byte 256"):
        whole.carve(193, torch.float32)
    assert whole.carve(192, torch.float32).shape == (192,)


@pytest.mark.parametrize("alignment", [0, 2, 24, 2 * mmap.PAGESIZE])
def test_bad_alignment_is_refused(alignment: int) -> None:
    with pytest.raises(ValueError, match=f"alignment expects .* got {alignment}"):
        made(1024, None).carve(1, torch.float32, alignment=alignment)


@pytest.mark.parametrize("options", [{"nbytes": -1}, {"nbytes": 1, "threads": -2}])
def test_bad_sizes_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expects 0 or more, got -"):
        HostArena(machine=None, owner="test arena", **options)


def test_empty_arena(machine: FakeMachine) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        empty = made(0, machine)
    assert empty.carve(0, torch.float32).shape == (0,)
    assert machine.asked == []
    empty.close()


def test_threads_carve_disjoint_pieces() -> None:
    whole = made(256 * 4000, None)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as executor:
            tensors = list(executor.map(lambda _: whole.carve(1, torch.float32), range(4000)))
    finally:
        sys.setswitchinterval(interval)
    assert len({tensor.data_ptr() for tensor in tensors}) == 4000


def test_pinned_arena_is_registered_counted_and_given_back_once(machine: FakeMachine) -> None:
    before = ledger.rows()
    pinned = made(1 << 20, machine)
    assert pinned.pinned
    assert pinned.kind == "pinned"
    assert machine.registered == {pinned.address: 1 << 20}
    assert ledger.total("pinned", "test arena") == 1 << 20
    pinned.close()
    pinned.close()
    assert pinned.closed
    assert not pinned.pinned
    assert machine.unregistered_while_mapped == [True]
    assert not sys.platform.startswith("linux") or not mapped(pinned.address)
    assert ledger.rows() == before
    with pytest.raises(RuntimeError, match="arena of 'test arena' is closed"):
        pinned.carve(1, torch.float32)


@linux
def test_death_unregisters_then_unmaps(machine: FakeMachine) -> None:
    before = ledger.rows()
    pinned = made(1 << 20, machine)
    address = pinned.address
    del pinned
    gc.collect()
    assert machine.registered == {}
    assert machine.unregistered_while_mapped == [True]
    assert not mapped(address)
    assert ledger.rows() == before


@linux
def test_tensors_keep_the_memory_but_not_the_arena(machine: FakeMachine) -> None:
    whole = made(1 << 20, machine)
    address = whole.address
    first, second = (whole.carve(1000, torch.float32) for _ in range(2))
    second.copy_(torch.arange(1000.0))
    whole.close()
    del whole, first
    gc.collect()
    assert machine.registered == {}
    assert mapped(address)
    assert torch.equal(second, torch.arange(1000.0))
    second.add_(1)
    del second
    gc.collect()
    assert not mapped(address)


def test_refused_pin_warns_and_goes_on() -> None:
    machine = FakeMachine(grants=False)
    machine.pin_refusal = "CUDA_ERROR_OUT_OF_MEMORY"  # type: ignore[attr-defined]
    with pytest.warns(PinWarning) as caught:
        pageable = made(1 << 20, machine)
    said = str(caught[0].message)
    assert caught[0].filename == __file__
    assert "pinning 1,048,576 bytes of host memory for test arena was refused" in said
    assert "CUDA_ERROR_OUT_OF_MEMORY" in said
    assert "pageable" in said
    assert (pageable.pinned, pageable.kind) == (False, "system")
    assert ledger.total("system", "test arena") == 1 << 20
    pageable.carve(10, torch.float32).add_(1)
    pageable.close()
    assert machine.registered == {}
    assert ledger.total(owner="test arena") == 0


@pytest.mark.parametrize(("limit", "cause"), [(65536, "RLIMIT_MEMLOCK is 65,536"), (None, "free")])
def test_refused_pin_names_the_likely_cause(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, cause: str
) -> None:
    monkeypatch.setattr(arena, "memlock_limit", lambda: limit)
    with pytest.warns(PinWarning, match=cause):
        made(1 << 20, FakeMachine(grants=False))


def test_refused_pin_with_warnings_as_errors_leaves_nothing() -> None:
    machine = FakeMachine(grants=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PinWarning) as caught:
            made(1 << 20, machine)
    assert caught.tb is not None  # and so the arena itself is alive still
    assert machine.registered == {}
    assert ledger.total(owner="test arena") == 0


def test_pageable_on_request_is_known_to_the_machine_without_a_warning(
    machine: FakeMachine,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pageable = made(4096, machine, pin=False)
    assert machine.asked == [False]
    assert pageable.kind == "system"


def test_refusal_by_the_machine_leaves_nothing(machine: FakeMachine) -> None:
    def full(address: int, nbytes: int, *, pin: bool, node: int | None) -> bool:
        raise torch.OutOfMemoryError("the virtual host is full")

    machine.register_host = full  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError, match="virtual host is full"):
        made(4096, machine)
    assert ledger.total(owner="test arena") == 0


def test_a_cgroup_that_is_too_small_refuses_before_anything_is_mapped(
    monkeypatch: pytest.MonkeyPatch, machine: FakeMachine
) -> None:
    monkeypatch.setattr(limits, "host_rooms", lambda: {Path("/made/up"): 4095})
    monkeypatch.setattr(arena.pages, "reserve", lambda nbytes: pytest.fail("mapped"))
    with pytest.raises(torch.OutOfMemoryError, match=r"needs 4,096 bytes .* cgroup leaves 4,095"):
        made(4096, machine)
    assert machine.asked == []


def test_small_mem_available_alone_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "available_host_bytes", lambda: 1)
    made(4096, None).close()


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 70])
def test_a_refused_mapping_is_out_of_memory(nbytes: int) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=rf"needs {nbytes:,} bytes of host memory"):
        made(nbytes, None)
    assert ledger.total(owner="test arena") == 0


def test_a_refused_page_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(mapping: mmap.mmap, *, threads: int) -> None:
        raise MemoryError("the kernel has no memory left to populate it")

    monkeypatch.setattr(arena.pages, "populate", none_left)
    with pytest.raises(torch.OutOfMemoryError, match=r"no memory left .* bytes available\)"):
        made(64 << 20, None, threads=2)
    assert ledger.total(owner="test arena") == 0


@linux
def test_200_cycles_leave_memory_flat(machine: FakeMachine) -> None:
    def cycle() -> None:
        whole = made(8 << 20, machine)
        whole.carve(1000, torch.float32).add_(1)

    for _ in range(20):
        cycle()
    before = resident_bytes()
    for _ in range(200):
        cycle()
    assert resident_bytes() - before < 4 << 20
    assert machine.registered == {}
    assert ledger.total(owner="test arena") == 0


FAKE = """
import os, sys, torch
from ghoffload.memory import HostArena, ledger

class Machine:
    host_node = None
    imaginary = False
    def register_host(self, address, nbytes, *, pin, node=None):
        return pin
    def unregister_host(self, address):
        print("unregistered", os.getpid() == parent, flush=True)

parent = os.getpid()
"""


def python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", FAKE + textwrap.dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_an_arena_alive_at_exit_is_given_back_and_nothing_crashes() -> None:
    done = python(
        """
        arena = HostArena(1 << 20, machine=Machine(), owner="x")
        tensor = arena.carve(100, torch.float32)
        sys.modules["keeper"] = tensor  # outlives the module's own names
        arena.cycle = arena
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "unregistered True\n", "")


@linux
@pytest.mark.parametrize(
    ("pin", "seen"), [(True, "0.0 RuntimeError"), (False, "1.0 [1.0, 1.0, 1.0, 1.0]")]
)
def test_a_forked_child_neither_crashes_nor_gives_back(pin: bool, seen: str) -> None:
    done = python(
        f"""
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forks with threads
        arena = HostArena(1 << 20, machine=Machine(), owner="x", pin={pin})
        tensor = arena.carve(4, torch.float32).fill_(1)
        child = os.fork()
        if child == 0:
            try:
                again = arena.tensor(0, 4, torch.float32).tolist()
            except RuntimeError as error:
                assert f"belongs to process {{parent}}" in str(error), error
                again = "RuntimeError"
            print(tensor[0].item(), again, flush=True)
            tensor.fill_(2)
            sys.exit(0)  # with atexit and all, as a child that is no data-loader worker ends
        print(os.waitpid(child, 0)[1], tensor.tolist(), ledger.total(), flush=True)
        """
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        seen,
        "0 [1.0, 1.0, 1.0, 1.0] 1048576",
        "unregistered True",
    ]
    assert done.returncode == 0


@pytest.mark.parametrize(("host_node", "node"), [(None, None), (3, None), (3, 1)])
def test_memory_prefers_the_node_near_the_device_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, machine: FakeMachine, host_node: int | None, node: int | None
) -> None:
    asked: list[tuple[str, int | None]] = []

    @contextlib.contextmanager
    def policy(name: str, wanted: int | None) -> Iterator[None]:
        asked.append((name, wanted))
        yield

    monkeypatch.setattr(arena.numa, "placed_on", lambda n: policy("bind", n))
    monkeypatch.setattr(arena.numa, "preferring", lambda n: policy("prefer", n))
    monkeypatch.setattr(arena.numa, "bind", lambda address, nbytes, n: asked.append(("range", n)))
    confirmed: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        arena.numa, "confirm", lambda a, n, wanted, owner, quiet: confirmed.append((wanted, quiet))
    )
    machine.host_node = host_node  # type: ignore[assignment]
    monkeypatch.setattr(
        machine, "register_host", lambda address, nbytes, pin, node: pin, raising=True
    )
    monkeypatch.setattr(machine, "unregister_host", lambda address: None)
    made(4096, machine, **({} if node is None else {"node": node})).close()
    near = host_node if node is None else None
    assert asked == [("bind", node), ("prefer", near)] + [("range", node)] * (node is not None)
    wanted = near if node is None else node
    assert confirmed == ([] if wanted is None else [(wanted, node is None)])
