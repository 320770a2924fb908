"""What may be handed to a kernel or a copy: Note [pointers] in host_ranges.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from ghoffload.machine.host_ranges import HostRange, HostRanges, debug_wanted
from ghoffload.machine.protocol import Launch
from ghoffload.machine.virtual import VirtualMachine
from ghoffload.memory import HostArena, ManagedArena, TensorManager

EVERYTHING = frozenset({"device", "pinned", "managed", "system"})


def add_one(tensor: Tensor) -> Launch:
    def host(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        writes[0].add_(1)

    def device(stream: int) -> None:
        raise AssertionError("no device here")

    return Launch("add_one", (), (tensor,), device, host)


@pytest.fixture
def managed() -> Iterator[ManagedArena]:
    machine = VirtualMachine()
    arena = ManagedArena(4096, machine=machine, owner="test")
    arena.machine = machine  # type: ignore[attr-defined]
    yield arena
    arena.close()


def test_the_range_of_a_tensor_is_where_its_whole_storage_is() -> None:
    ranges, tensor = HostRanges(), torch.zeros(100)
    assert ranges.of(tensor) is None
    ranges.add(HostRange(tensor.data_ptr(), tensor.nbytes - 1, "pinned"))
    assert ranges.of(tensor) is None
    ranges.add(HostRange(tensor.data_ptr(), tensor.nbytes, "managed", 1))
    found = ranges.of(tensor[3:])
    assert found is not None
    assert (found.kind, found.node) == ("managed", 1)
    assert ranges.remove(tensor.data_ptr()) == found
    assert ranges.of(tensor) is None
    assert ranges.remove(tensor.data_ptr()) is None


def test_a_kernel_gets_the_kinds_its_device_reaches() -> None:
    for reached in (("device", "pinned"), ("device", "pinned", "system")):
        machine = VirtualMachine(memory_kinds=reached)
        arena = HostArena(4096, machine=machine, owner="test", pin=False)
        tensor = arena.carve(8, torch.float32)
        if "system" in reached:
            machine.launch(add_one(tensor), stream=machine.current_stream())
            machine.synchronize_all()
            assert tensor.tolist() == [1.0] * 8
        else:
            with pytest.raises(ValueError, match=r"'add_one' expects .*\(pinned\), got system"):
                machine.launch(add_one(tensor), stream=machine.current_stream())
        arena.close()


def test_managed_memory_is_for_machines_that_have_it() -> None:
    machine = VirtualMachine(memory_kinds=("device", "pinned"))
    with pytest.raises(ValueError, match=r"ConcurrentManagedAccess, which this virtual machine"):
        ManagedArena(4096, machine=machine, owner="test")


def test_debug_mode_refuses_engine_copies_of_what_is_not_pinned(managed: ManagedArena) -> None:
    machine: VirtualMachine = managed.machine  # type: ignore[attr-defined]
    host, hbm = managed.carve(8, torch.float32), machine.empty((8,), torch.float32)
    machine.copy(hbm, host, stream=machine.h2d)  # slow, and right
    machine.debug = True
    with pytest.raises(ValueError, match=r"copy on stream 'h2d' expects pinned memory .*managed"):
        machine.copy(hbm, host, stream=machine.h2d)
    pageable = HostArena(4096, machine=machine, owner="test", pin=False)
    with pytest.raises(ValueError, match=r"expects pinned memory .*got system"):
        machine.copy(pageable.carve(8, torch.float32), hbm, stream=machine.d2h[0])
    pinned = HostArena(4096, machine=machine, owner="test")
    machine.copy(pinned.carve(8, torch.float32), hbm, stream=machine.d2h[0])
    machine.synchronize_all()
    pageable.close()
    pinned.close()
    machine.free(hbm)


def test_debug_mode_knows_the_node() -> None:
    ranges, tensor = HostRanges(), torch.zeros(8)
    ranges.add(HostRange(tensor.data_ptr(), tensor.nbytes, "pinned", 1))
    ranges.check_kernel(tensor, EVERYTHING, 1, "kernel", debug=True)
    ranges.check_kernel(tensor, EVERYTHING, None, "kernel", debug=True)
    ranges.check_kernel(tensor, EVERYTHING, 0, "kernel", debug=False)
    with pytest.raises(ValueError, match=r"node 0, the nearest to the device, .* to node 1"):
        ranges.check_kernel(tensor, EVERYTHING, 0, "kernel", debug=True)
    with pytest.raises(ValueError, match="copy expects memory on NUMA node 0"):
        ranges.check_copy(tensor, 0, "copy")
    ranges.remove(tensor.data_ptr())
    with pytest.raises(ValueError, match=r"not registered \(any more\)"):
        ranges.check_copy(tensor, 0, "copy")


@pytest.mark.parametrize(("value", "wanted"), [(None, False), ("0", False), ("1", True)])
def test_the_environment_turns_debug_mode_on(
    monkeypatch: pytest.MonkeyPatch, value: str | None, wanted: bool
) -> None:
    monkeypatch.delenv("GHOFFLOAD_DEBUG", raising=False)
    if value is not None:
        monkeypatch.setenv("GHOFFLOAD_DEBUG", value)
    assert debug_wanted() is wanted
    assert VirtualMachine().debug is wanted


def test_tensors_of_a_manager_are_known_to_their_machine() -> None:
    machine = VirtualMachine(memory_kinds=("device", "pinned", "managed"))
    with TensorManager(machine) as manager:
        for kind in ("pinned", "managed"):
            tensor = manager.empty(8, torch.float32, kind).zero_()
            machine.launch(add_one(tensor), stream=machine.current_stream())
            machine.synchronize_all()
            assert tensor.tolist() == [1.0] * 8
        system = manager.empty(8, torch.float32, "system")
        with pytest.raises(ValueError, match="got system memory"):
            machine.launch(add_one(system), stream=machine.current_stream())
