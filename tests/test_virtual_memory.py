"""Capacities of the virtual machine, and what becomes of memory that is given back."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from test_virtual_machine import register
from torch import nn

from ghoffload import use_machine
from ghoffload.machine.virtual import VirtualMachine

MB = 1 << 20


@pytest.fixture(params=[False, True], ids=["plain", "check"])
def small(request: pytest.FixtureRequest) -> Iterator[VirtualMachine]:
    machine = VirtualMachine(hbm_bytes=MB, host_bytes=MB, check=request.param)
    with use_machine(machine):
        yield machine


def test_empty_counts_until_it_is_freed_or_dies(small: VirtualMachine) -> None:
    first = small.empty((MB // 8,), torch.float32)
    second = small.empty((MB // 2,), torch.uint8)
    assert small.memory_allocated() == MB
    with pytest.raises(
        torch.OutOfMemoryError,
        match=rf"virtual HBM out of memory. Tried to allocate 1 bytes. .* capacity of {MB} bytes "
        rf"of which 0 bytes is free. {MB} bytes is allocated",
    ):
        small.empty((1,), torch.uint8)
    small.free(first)
    assert small.memory_allocated() == MB // 2
    del second
    third = small.empty((MB,), torch.uint8)
    del third
    assert small.memory_allocated() == 0


def test_eager_tensors_count_once_while_they_live(small: VirtualMachine) -> None:
    tensor = torch.zeros(MB // 8)
    views = [tensor[1:], tensor.view(2, -1), tensor.detach()]
    tensor.add_(1)
    assert small.memory_allocated() == MB // 2
    with pytest.raises(torch.OutOfMemoryError, match="virtual HBM out of memory"):
        torch.cat([tensor, tensor])
    del tensor
    assert small.memory_allocated() == MB // 2
    del views
    assert small.memory_allocated() == 0


def test_parameters_count_when_they_are_used() -> None:
    model = nn.Linear(512, 256, bias=False)
    machine = VirtualMachine(hbm_bytes=MB // 2)
    with use_machine(machine):
        assert machine.memory_allocated() == 0
        model.weight.detach()
        assert machine.memory_allocated() == MB // 2
        with pytest.raises(torch.OutOfMemoryError):
            model(torch.ones(1, 512))


def test_resized_storage_counts_as_it_is_now(small: VirtualMachine) -> None:
    tensor = torch.zeros(1024)
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(1024 * 4 * 16)
    tensor.add_(1)
    assert small.memory_allocated() == 1024 * 4 * 16


def test_host_capacity(small: VirtualMachine) -> None:
    one, two = (torch.frombuffer(bytearray(n), dtype=torch.uint8) for n in (MB, 64))
    assert small.register_host(one.data_ptr(), MB, pin=True) is True
    with pytest.raises(torch.OutOfMemoryError, match=r"virtual host out of memory. Tried to allo"):
        small.register_host(two.data_ptr(), 64, pin=True)
    small.unregister_host(one.data_ptr())
    assert small.register_host(two.data_ptr(), 64, pin=False) is False
    two.add_(1)


def test_arenas_are_not_hbm(small: VirtualMachine) -> None:
    buffer = bytearray(MB)
    arena = torch.frombuffer(buffer, dtype=torch.float32)
    register(small, arena)
    arena[: MB // 8].add_(1)
    torch.frombuffer(buffer, dtype=torch.float32, count=4).mul_(2)
    assert small.memory_allocated() == 0
    assert arena[0].item() == 2


def test_many_views_of_an_arena_do_not_pile_up() -> None:
    machine = VirtualMachine(check=True)
    buffer = bytearray(1 << 16)
    with use_machine(machine):
        register(machine, torch.frombuffer(buffer, dtype=torch.uint8))
        for offset in range(1 << 14):
            torch.frombuffer(buffer, dtype=torch.uint8, count=4, offset=offset).add_(1)
    arena = machine._memory.arena_at(torch.frombuffer(buffer, dtype=torch.uint8).data_ptr())
    assert arena is not None
    assert len(arena.storages) < 2000


@pytest.mark.parametrize("order", ["earliest", "latest"])
def test_free_waits_for_queued_work_and_poisons(order: str) -> None:
    machine = VirtualMachine(order=order)
    buffer = machine.empty((4,), torch.float32)
    arena = torch.ones(4)
    register(machine, arena)
    with torch.no_grad():
        buffer.fill_(5)
    machine.copy(arena, buffer, stream=machine.d2h[0])
    machine.free(buffer)
    assert arena.tolist() == [5] * 4
    assert buffer.view(torch.int32).tolist() == [-1] * 4
    machine.copy(arena, other := torch.ones(4), stream=machine.d2h[1])
    machine.unregister_host(arena.data_ptr())
    assert arena.tolist() == [1] * 4
    del other


def test_fresh_memory_is_poisoned_where_order_matters() -> None:
    for machine in (VirtualMachine(order="latest"), VirtualMachine(check=True)):
        assert machine.empty((3,), torch.int16).tolist() == [-1] * 3


def test_refusals() -> None:
    machine = VirtualMachine()
    buffer, other = machine.empty((4,), torch.float32), torch.zeros(4)
    with pytest.raises(ValueError, match=re.escape("free expects memory from empty(), got other")):
        machine.free(other)
    machine.free(buffer)
    with pytest.raises(ValueError, match="got memory that was freed before"):
        machine.free(buffer)
    register(machine, other)
    with pytest.raises(ValueError, match="expected host memory that is not registered yet"):
        machine.register_host(other.data_ptr() + 4, 64, pin=True)
    with pytest.raises(ValueError, match="unregister_host expects a registered address"):
        machine.unregister_host(other.data_ptr() + 4)
    with pytest.raises(ValueError, match="positive number of bytes, got 0"):
        machine.register_host(4096, 0, pin=True)
    with pytest.raises(ValueError, match="one side in HBM, got two tensors in host arenas"):
        machine.copy(other[:2], other[2:], stream=machine.h2d)
    empty = machine.empty((0, 3), torch.float32)
    machine.free(empty)
