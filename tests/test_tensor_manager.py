from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ghoffload
from ghoffload import TensorManager, VirtualMachine
from ghoffload.machine.protocol import Launch
from ghoffload.memory import KindStatistics, ledger, limits, manager_pool, numa
from ghoffload.memory.extents import Extents

ROOT = Path(__file__).resolve().parents[1]
PAGE = mmap.PAGESIZE
MIB = 1 << 20
HOST_KINDS = ("pinned", "managed", "system")
KINDS = ("device", *HOST_KINDS)

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")


@pytest.fixture
def manager(virtual: VirtualMachine, monkeypatch: pytest.MonkeyPatch) -> Iterator[TensorManager]:
    """On a checking virtual machine; small segments, and nothing left behind."""
    monkeypatch.setattr(manager_pool, "SEGMENT_BYTES", MIB)
    made = TensorManager(owner="test", debug=True)
    assert made.machine is virtual
    yield made
    made.close()
    gc.collect()
    assert ledger.total(owner="test") == 0


def figures(manager: TensorManager, kind: str) -> KindStatistics:
    return manager.statistics()[kind]


# --- extents ---


@settings(max_examples=150)
@given(st.data())
def test_extents_are_disjoint_joined_and_best_fit(data: st.DataObject) -> None:
    alignment, slots = data.draw(st.sampled_from([1, 64, 256])), 64
    extents = Extents(slots * alignment, alignment)
    taken: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        if taken and data.draw(st.booleans()):
            start = data.draw(st.sampled_from(sorted(taken)))
            extents.give(start, taken.pop(start))
        else:
            nbytes = data.draw(st.integers(1, 12 * alignment))
            fit = extents.fit(nbytes)
            size = -(-nbytes // alignment) * alignment
            possible = [length for _, length in extents.free_ranges() if length >= size]
            assert (fit is None) == (not possible)
            if fit is None:
                continue
            assert fit[0] == min(possible) - size
            extents.take(fit[1], nbytes)
            taken[fit[1]] = nbytes
        # The free ranges are exactly the gaps between what is taken, as large as they can be.
        gaps, at = [], 0
        for start in sorted(taken):
            if start > at:
                gaps.append((at, start - at))
            assert start >= at
            at = start + extents.rounded(taken[start])
        if at < extents.nbytes:
            gaps.append((at, extents.nbytes - at))
        assert extents.free_ranges() == gaps
        assert extents.free_bytes == sum(length for _, length in gaps)
        assert extents.largest == max((length for _, length in gaps), default=0)
    for start, nbytes in taken.items():
        extents.give(start, nbytes)
    assert extents.whole
    assert extents.free_ranges() == [(0, extents.nbytes)]


def test_giving_back_twice_is_our_own_error() -> None:
    extents = Extents(1024, 256)
    extents.take(0, 300)
    extents.give(0, 300)
    with pytest.raises(AssertionError, match=r"\[0, 512\) is given back twice"):
        extents.give(0, 300)


# --- tensors, kinds, figures ---


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_each_kind_is_a_plain_tensor(manager: TensorManager, kind: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.bool):
        tensor = manager.empty((3, 5), dtype, kind)
        assert (tensor.shape, tensor.dtype) == ((3, 5), dtype)
        assert tensor.is_contiguous()
        tensor.zero_()
        assert manager.kind_of(tensor) == kind
        assert manager.kind_of(tensor[1:, 2]) == kind
        assert kind == "device" or tensor.data_ptr() % 256 == 0
        assert kind != "managed" or tensor.data_ptr() % PAGE == 0
    assert manager.empty((0, 4), torch.float32, kind).shape == (0, 4)
    assert manager.empty(7, torch.float32, kind).shape == (7,)


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_figures_by_formula(manager: TensorManager, kind: str) -> None:
    align = PAGE if kind == "managed" else 256
    first = manager.empty(1000, torch.float32, kind)
    second = manager.empty((3, 100), torch.bfloat16, kind)
    rounded = -(-4000 // align) * align + -(-600 // align) * align
    now = KindStatistics(
        in_use=4600,
        peak=4600,
        reserved=MIB,
        allocations=2,
        total_allocations=2,
        largest_free=MIB - rounded,
        budget=figures(manager, kind).budget,
    )
    assert figures(manager, kind) == now
    assert ledger.total(kind, "test") == MIB
    del first
    third = manager.empty(2 * MIB, torch.uint8, kind)
    after = figures(manager, kind)
    assert (after.in_use, after.peak, after.reserved) == (2 * MIB + 600, 2 * MIB + 600, 3 * MIB)
    assert (after.allocations, after.total_allocations) == (2, 3)
    assert ledger.total(kind, "test") == 3 * MIB
    del second, third
    assert figures(manager, kind).in_use == 0
    assert manager.trim() == 3 * MIB
    assert (figures(manager, kind).reserved, ledger.total(kind, "test")) == (0, 0)
    assert figures(manager, kind).peak == 2 * MIB + 600


def test_device_tensors_are_counted_and_freed(manager: TensorManager) -> None:
    tensor = manager.empty(1000, torch.float32)
    view = tensor[10:]
    del tensor
    assert figures(manager, "device").in_use == 4000  # its storage lives
    assert ledger.total("device", "test") == 4000
    del view
    assert figures(manager, "device").in_use == 0
    assert ledger.total("device", "test") == 0


def test_freed_memory_is_reused_and_joined(manager: TensorManager) -> None:
    parts = [manager.empty(MIB // 4, torch.uint8, "pinned") for _ in range(4)]
    start = min(part.data_ptr() for part in parts)
    assert figures(manager, "pinned").largest_free == 0
    del parts
    whole = manager.empty(MIB, torch.uint8, "pinned")
    assert whole.data_ptr() == start
    assert figures(manager, "pinned").reserved == MIB


@pytest.mark.parametrize("virtual", range(4), indirect=True)
def test_memory_is_reused_after_the_work_that_is_queued_on_it(
    manager: TensorManager, virtual: VirtualMachine
) -> None:
    source = manager.empty(MIB, torch.uint8, "pinned").fill_(1)
    arrived = manager.empty(MIB, torch.uint8)
    filled, there = virtual.event("filled"), virtual.event("arrived")
    virtual.record(filled, virtual.current_stream())
    virtual.wait(virtual.h2d, filled, label="filled")
    virtual.copy(arrived, source, stream=virtual.h2d)
    virtual.record(there, virtual.h2d)
    del source
    again = manager.empty(MIB, torch.uint8, "pinned").fill_(2)
    virtual.wait(virtual.current_stream(), there, label="arrived")
    assert arrived.eq(1).all()
    assert again.eq(2).all()


def test_the_host_waits_for_queued_work_only_when_nothing_else_fits(
    manager: TensorManager, virtual: VirtualMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []
    monkeypatch.setattr(virtual, "synchronize_all", lambda: waits.append(1))
    first = manager.empty(MIB // 2, torch.uint8, "pinned")
    address = first.data_ptr()
    del first
    second = manager.empty(MIB // 2, torch.uint8, "pinned")
    assert (second.data_ptr(), waits) == (address + MIB // 2, [])
    third = manager.empty(MIB // 2, torch.uint8, "pinned")
    assert (third.data_ptr(), waits) == (address, [1])


@linux
@pytest.mark.parametrize("kind", KINDS)
def test_1000_cycles_leave_memory_flat(manager: TensorManager, kind: str) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE

    def cycle(index: int) -> None:
        first = manager.empty(10_000 + 300 * (index % 50), torch.float32, kind)
        second = manager.empty(5_000, torch.float32, kind)
        first[-1] = second[0] = 1

    for index in range(100):
        cycle(index)
    before, reserved = resident(), figures(manager, kind).reserved
    for index in range(1000):
        cycle(index)
    assert resident() - before < 4 * MIB
    after = figures(manager, kind)
    assert (after.in_use, after.allocations, after.reserved) == (0, 0, reserved)
    assert after.total_allocations == 2200


def test_threads_share_a_manager_without_sharing_bytes() -> None:
    def work(number: int) -> None:
        kept: list[Tensor] = []
        for index in range(300):
            kept.append(manager.empty(100 + index, torch.uint8, "system").fill_(number))
            if index % 3 == 2:
                assert kept.pop(index // 4).eq(number).all()
        assert all(tensor.eq(number).all() for tensor in kept)

    with TensorManager("cpu") as manager, ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
        assert figures(manager, "system").allocations == 0


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_moves_keep_bits(manager: TensorManager, source: str, target: str) -> None:
    bits = torch.randint(0, 256, (6, 1000), dtype=torch.uint8)
    tensor = manager.empty((6, 1000), torch.uint8, source).copy_(bits)
    moved = manager.move(tensor, target)
    assert manager.kind_of(moved) == target
    assert (moved is tensor) == (source == target)
    assert torch.equal(moved, bits)
    slanted = manager.move(tensor.t()[::2], target) if source != target else moved
    assert source == target or torch.equal(slanted, bits.t()[::2])


@pytest.mark.parametrize(("source", "target"), [("managed", "system"), ("managed", "device")])
def test_a_move_waits_for_what_is_queued(
    manager: TensorManager, virtual: VirtualMachine, source: str, target: str
) -> None:
    tensor = manager.empty(100, torch.float32, source)

    def fill(reads: object, writes: list[Tensor]) -> None:
        writes[0].fill_(2)

    virtual.launch(Launch("fill", (), (tensor,), lambda stream: None, fill), stream=virtual.h2d)
    moved = manager.move(tensor, target)
    assert moved.eq(2).all()


def test_a_move_is_done_when_it_returns(manager: TensorManager) -> None:
    moved = manager.move(manager.empty(100, torch.float32).fill_(2), "pinned")
    assert moved.eq(2).all()  # the host reads it, and nothing else orders that


def test_a_foreign_tensor_moves_in(manager: TensorManager) -> None:
    foreign = torch.randn(100, dtype=torch.bfloat16).requires_grad_()
    moved = manager.move(foreign, "pinned")
    assert torch.equal(moved, foreign)
    assert not moved.requires_grad


# --- budgets and refusals ---


@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_refuses_with_its_figures(virtual: VirtualMachine, kind: str) -> None:
    with TensorManager(budgets={kind: "1 MiB"}, owner="tight") as manager:
        held = manager.empty(MIB // 2, torch.uint8, kind)
        with pytest.raises(torch.OutOfMemoryError) as refused:
            manager.empty(MIB // 2 + 1, torch.uint8, kind)
        said = str(refused.value)
        assert f"tight: 524,289 bytes of {kind} memory do not fit. Budget: 1,048,576" in said
        assert "in use: 524,288" in said
        del held
        # What was reserved for smaller tensors makes room.
        assert manager.empty(MIB, torch.uint8, kind).nbytes == MIB
        assert manager.statistics()[kind].budget == MIB


def test_a_budget_makes_idle_segments_go(manager: TensorManager, virtual: VirtualMachine) -> None:
    with TensorManager(budgets={"pinned": 3 * MIB}, owner="tight") as tight:
        small = [tight.empty(MIB, torch.uint8, "pinned") for _ in range(3)]
        del small
        assert tight.empty(3 * MIB, torch.uint8, "pinned").nbytes == 3 * MIB
        assert ledger.total("pinned", "tight") == 3 * MIB


def test_managed_memory_is_held_to_what_the_host_has(
    virtual: VirtualMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [2 * MIB]
    monkeypatch.setattr(manager_pool, "SEGMENT_BYTES", MIB)
    monkeypatch.setattr(manager_pool, "available_host_bytes", lambda: room[0])
    monkeypatch.setattr(limits, "host_rooms", lambda: {None: room[0]})
    with TensorManager() as manager:
        held = manager.empty(MIB, torch.uint8, "managed")
        assert figures(manager, "managed").budget == 2 * MIB
        room[0] = 64 * MIB  # the budget is of the first use
        with pytest.raises(torch.OutOfMemoryError, match=r"available on the host: 67,108,864"):
            manager.empty(3 * MIB, torch.uint8, "managed")
        del held
        room[0] = MIB // 2  # others have taken it since
        with pytest.raises(torch.OutOfMemoryError, match=r"Budget: 2,097,152 .*host: 524,288"):
            manager.empty(3 * MIB // 2, torch.uint8, "managed")


def test_a_full_host_is_out_of_memory_and_leaves_nothing() -> None:
    with ghoffload.use_machine(VirtualMachine(host_bytes=MIB)), TensorManager(owner="x") as manager:
        for kind in HOST_KINDS:
            with pytest.raises(torch.OutOfMemoryError, match="virtual host out of memory"):
                manager.empty(2 * MIB, torch.uint8, kind)
            assert ledger.total(owner="x") == 0
        # A segment of the usual size does not fit, one of the tensor's does.
        assert manager.empty(MIB // 2, torch.uint8, "pinned").nbytes == MIB // 2


def test_a_refused_pin_is_out_of_memory(
    virtual: VirtualMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = virtual.register_host
    monkeypatch.setattr(
        virtual, "register_host", lambda *a, pin, node: register(*a, pin=False) and False
    )
    with (
        TensorManager(owner="x") as manager,
        pytest.raises(torch.OutOfMemoryError, match=r"x: pinning .* was refused"),
    ):
        manager.empty(1, torch.uint8, "pinned")
    assert ledger.total(owner="x") == 0


def test_refusals_are_one_sentence(manager: TensorManager, virtual: VirtualMachine) -> None:
    pinned = manager.empty(8, torch.float32, "pinned")
    managed = manager.empty(8, torch.float32, "managed")
    stream = virtual.h2d
    calls = [
        (lambda: TensorManager(budgets={"hbm": 1}), "kind expects one of 'device', .* got 'hbm'"),
        (lambda: TensorManager(budgets={"pinned": "x"}), r"budgets\['pinned'\] expects bytes"),
        (lambda: manager.empty(4, torch.float32, "paged"), "kind expects one of .* got 'paged'"),
        (lambda: manager.empty(-4, torch.float32), r"shape expects .* got \(-4,\)"),
        (lambda: manager.empty(4, torch.float32, numa=0), "numa expects host memory, got numa=0"),
        (lambda: manager.empty(4, torch.float32, "system", 77), r"node with memory .*, got 77"),
        (lambda: manager.advise(pinned, "accessed_by"), "advise expects managed memory, got pin"),
        (lambda: manager.advise(managed, "stay"), "advice expects one of .* got 'stay'"),
        (lambda: manager.advise(managed, "accessed_by", "moon"), "location expects .* got 'moon'"),
        (lambda: manager.prefetch(pinned, "host", stream=stream), "prefetch expects managed memo"),
        (lambda: manager.prefetch(managed, torch.device("meta"), stream=stream), "location expe"),
        (lambda: manager.discard(managed[2:], stream=stream), "whole tensors, got a view of 24"),
        (lambda: manager.discard(managed[::2], stream=stream), "contiguous"),
        (lambda: manager.kind_of(torch.zeros(3)), "expected a tensor of this manager"),
        (lambda: manager.kind_of(torch.zeros(3, device="meta")), "tensor of this manager"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message) as refused:
            call()
        assert "\n" not in str(refused.value)
    with pytest.raises(TypeError, match="stream expects one of the machine's streams"):
        manager.prefetch(managed, "host", stream=0)  # type: ignore[arg-type]


def test_a_tensor_that_cannot_be_made_holds_nothing(
    manager: TensorManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise TypeError("no such dtype")

    with monkeypatch.context() as patch:
        patch.setattr("ghoffload.memory.manager.tensor_over", refuse)
        with pytest.raises(TypeError, match="no such dtype"):
            manager.empty(MIB, torch.uint8, "pinned")
    assert figures(manager, "pinned").allocations == 0
    assert manager.empty(MIB, torch.uint8, "pinned").nbytes == MIB
    assert figures(manager, "pinned").reserved == MIB


def test_without_a_machine_there_is_system_memory() -> None:
    with TensorManager("cpu") as manager:
        assert manager.machine is None
        tensor = manager.empty((2, 3), torch.float32, "system").fill_(1)
        assert manager.kind_of(tensor) == "system"
        assert torch.equal(manager.move(torch.ones(2, 3), "system"), tensor)
        for kind in ("device", "pinned", "managed"):
            with pytest.raises(ValueError, match=f"'{kind}' needs a GPU or the virtual machine"):
                manager.empty(1, torch.float32, kind)


def test_the_machine_is_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with ghoffload.use_machine("virtual") as machine:
        assert TensorManager().machine is machine
        assert TensorManager("cpu").machine is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("ghoffload.machine.topology.unusable_gpu", lambda: None)
    assert TensorManager().machine is None
    with pytest.raises(ghoffload.MachineUnavailableError, match="needs a GPU that torch can use"):
        TensorManager("cuda")
    monkeypatch.setenv("GHOFFLOAD_MACHINE", "virtual")
    made = TensorManager().machine
    assert isinstance(made, VirtualMachine)
    with pytest.raises(ValueError, match=r"expects a Machine or one of .* got 'tpu'"):
        TensorManager("tpu")


# --- migration and the registry ---


def test_advice_prefetch_and_discard_on_the_virtual_machine(
    manager: TensorManager, virtual: VirtualMachine
) -> None:
    first, second = (manager.empty(64, torch.float32, "managed").fill_(3) for _ in range(2))
    for advice in ("accessed_by", "unset_preferred_location", "read_mostly"):
        manager.advise(first, advice, "device")
    manager.prefetch([first, second[8:]], "device", stream=virtual.current_stream())
    manager.prefetch(first, torch.device("cpu"), stream=virtual.current_stream())
    assert first.eq(3).all()
    manager.discard([first], stream=virtual.current_stream())
    virtual.synchronize_all()
    assert not first.eq(3).any()  # indeterminate, and made to look so
    assert second.eq(3).all()


def test_a_kernel_works_in_place_on_managed_memory(
    manager: TensorManager, virtual: VirtualMachine
) -> None:
    tensor = manager.empty(100, torch.float32, "managed").fill_(2)

    def double(reads: object, writes: list[Tensor]) -> None:
        writes[0].mul_(2)

    launch = Launch("double", (), (tensor,), lambda stream: None, double)
    virtual.launch(launch, stream=virtual.current_stream())
    virtual.synchronize_all()
    assert tensor.eq(4).all()


def test_the_registry_refuses_what_a_kernel_must_not_get(manager: TensorManager) -> None:
    pinned = manager.empty(8, torch.float32, "pinned")
    manager.check(pinned)
    manager.check(pinned[2:], kinds="pinned", device="cpu")
    with pytest.raises(ValueError, match="of kind device or managed, got pinned memory"):
        manager.check(pinned, kinds=("device", "managed"))
    with pytest.raises(ValueError, match="machine of cuda:0, got that of cpu"):
        manager.check(pinned, device="cuda:0")
    with pytest.raises(ValueError, match="bound to NUMA node 1, got node None"):
        manager.check(pinned, numa=1)
    with pytest.raises(ValueError, match="expected a tensor of this manager"):
        manager.check(torch.zeros(3))
    manager.debug = False
    manager.check(torch.zeros(3))


# --- NUMA ---


def test_nodes_with_memory_are_read_from_the_system(tmp_path: Path) -> None:
    assert numa.memory_nodes(tmp_path) == (0,)
    folder = tmp_path / "sys/devices/system/node"
    folder.mkdir(parents=True)
    (folder / "has_memory").write_text("0-1,8\n")
    assert numa.memory_nodes(tmp_path) == (0, 1, 8)


@linux
def test_binding_is_done_and_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    node = numa.memory_nodes()[0]
    try:
        with numa.placed_on(node):
            pass
    except OSError as error:
        pytest.skip(f"this system lets no policy be set: {error}")
    # As on a machine of two nodes: then the calls are made, and node 0 is there.
    monkeypatch.setattr(numa, "memory_nodes", lambda: (node, node + 1))
    with TensorManager("cpu", debug=True, owner="bound") as manager:
        bound = manager.empty(MIB, torch.uint8, "system", numa=node)
        assert numa.off_node(bound.data_ptr(), MIB, node) == (0, MIB // PAGE)
        elsewhere, looked_at = numa.off_node(bound.data_ptr(), MIB, node + 1)
        assert elsewhere == looked_at > 0
        manager.check(bound, numa=node)
        monkeypatch.setattr(numa, "off_node", lambda *a: (3, 7))
        with pytest.warns(RuntimeWarning, match=r"bound: expected .* but 3 of 7 pages looked at"):
            manager.empty(64 * MIB, torch.uint8, "system", numa=node)

        def forbidden(*arguments: object) -> None:
            raise OSError(1, "mbind: not permitted")

        monkeypatch.setattr(numa, "_call", forbidden)
        with pytest.raises(RuntimeError, match=rf"node {node} is refused .*not permitted"):
            manager.empty(128 * MIB, torch.uint8, "system", numa=node)


# --- ends ---


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_tensors_outlive_their_manager(virtual: VirtualMachine, kind: str) -> None:
    manager = TensorManager(owner="short")
    tensor = manager.empty(1000, torch.float32, kind).fill_(5)
    dies = manager.empty(1000, torch.float32, kind)
    manager.close()
    manager.close()
    assert manager.closed
    assert ledger.total(owner="short") == 0
    del dies
    gc.collect()
    assert tensor.eq(5).all()
    with pytest.raises(RuntimeError, match="TensorManager 'short' is closed"):
        manager.empty(1, torch.float32, kind)
    del tensor


@linux
@pytest.mark.parametrize("manager_first", [True, False])
def test_either_may_die_first(virtual: VirtualMachine, manager_first: bool) -> None:
    def mapped(address: int) -> bool:
        lines = Path("/proc/self/maps").read_text().splitlines()
        ranges = (line.split()[0].split("-") for line in lines)
        return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)

    manager = TensorManager(owner="short")
    tensors = [manager.empty(40 * MIB, torch.uint8, kind) for kind in HOST_KINDS]
    on_device = manager.empty(10, torch.float32)
    addresses = [tensor.data_ptr() + 20 * MIB for tensor in tensors]
    if manager_first:
        del manager
        gc.collect()
        assert all(map(mapped, addresses))
        assert all(tensor.fill_(1).eq(1).all() for tensor in tensors)
        del tensors, on_device
    else:
        del tensors, on_device
        assert all(map(mapped, addresses))  # kept for reuse
        del manager
    gc.collect()
    assert not any(map(mapped, addresses))
    assert ledger.total(owner="short") == 0


def python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "GHOFFLOAD_MACHINE": "virtual"},
    )


def test_the_interpreters_end_gives_back_and_nothing_crashes() -> None:
    done = python(
        """
        import atexit
        # Before anything else registers: so it runs after all of that.
        atexit.register(lambda: print(ledger.total(), [t.sum().item() for t in tensors]))
        import sys, torch
        from ghoffload import TensorManager
        from ghoffload.memory import ledger
        tensors, managers = [], []
        manager = TensorManager()
        managers.append(manager)
        for kind in ("device", "pinned", "managed", "system"):
            tensors.append(manager.empty(4, torch.float32, kind).fill_(1))
        manager.cycle = tensors
        sys.modules["keeper"] = tensors
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "0 [4.0, 4.0, 4.0, 4.0]\n"


@linux
def test_a_forked_child_is_refused_and_gives_nothing_back() -> None:
    done = python(
        """
        import os, sys, torch, warnings
        from ghoffload import TensorManager, memory_summary
        from ghoffload.memory import ledger
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forks with threads
        manager = TensorManager(owner="mine")
        pinned, system = (manager.empty(4, torch.float32, k).fill_(1) for k in ("pinned", "system"))
        child = os.fork()
        if child == 0:
            try:
                manager.empty(4, torch.float32, "pinned")
            except RuntimeError as error:
                print(error)
            own = TensorManager().empty(4, torch.float32, "pinned").fill_(7)
            memory_summary()
            print(pinned.sum().item(), system.sum().item(), own.sum().item(), flush=True)
            del pinned, system
            manager.close()
            sys.exit(0)
        print(os.waitpid(child, 0)[1], pinned.sum().item(), ledger.total(owner="mine"))
        assert manager.kind_of(pinned) == "pinned"
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("'mine' belongs to process ")
    assert lines[1:] == ["0.0 4.0 28.0", f"0 4.0 {2 * 32 * MIB}"]


# --- memory_summary ---


def test_the_summary_adds_up(manager: TensorManager) -> None:
    tensors = [manager.empty(1000, torch.float32, kind) for kind in KINDS]
    found = ghoffload.memory_summary(as_dict=True)
    held = {row["kind"]: row["nbytes"] for row in found["held"] if row["owner"] == "test"}
    assert held == {"device": 4000, "pinned": MIB, "managed": MIB, "system": MIB}
    (row,) = (r for r in found["managers"] if (r["owner"], r["kind"]) == ("test", "pinned"))
    assert (row["in_use"], row["reserved"], row["allocations"]) == (4000, MIB, 1)
    assert set(found["host"]) == {"available", "cgroup_available", "memlock"}
    text = ghoffload.memory_summary()
    assert max(map(len, text.splitlines())) <= 78
    assert "pinned: test" in text
    assert f"{held['pinned']:,}" in text
    del tensors
    assert not [
        row
        for row in ghoffload.memory_summary(as_dict=True)["held"]
        if (row["kind"], row["owner"]) == ("device", "test")
    ]
