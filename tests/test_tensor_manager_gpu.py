"""The tensor manager on a real GPU. Managed memory stays below 256 MB."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ghoffload
from ghoffload import TensorManager
from ghoffload.kernels import bandwidth
from ghoffload.machine.cuda import CudaMachine
from ghoffload.machine.managed import Driver
from ghoffload.machine.protocol import Launch
from ghoffload.memory import ledger, numa

pytestmark = pytest.mark.gpu

MIB = 1 << 20
HOST_KINDS = ("pinned", "managed", "system")
KINDS = ("device", *HOST_KINDS)


@pytest.fixture
def machine() -> CudaMachine:
    return CudaMachine.of("cuda")


@pytest.fixture
def manager(machine: CudaMachine) -> Iterator[TensorManager]:
    made = TensorManager(machine, budgets={"managed": 200 * MIB}, debug=True, owner="gpu test")
    if not Driver.of(machine).attribute("CONCURRENT_MANAGED_ACCESS"):
        pytest.skip("ConcurrentManagedAccess is 0 here")
    yield made
    made.close()
    gc.collect()
    assert ledger.total(owner="gpu test") == 0


def random_bytes(nbytes: int) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def kernel_copy(machine: CudaMachine, destination: Tensor, source: Tensor) -> None:
    """By a load/store kernel, in place on whatever memory it is."""

    def device(stream: int) -> None:
        bandwidth.copy(
            destination.data_ptr(),
            source.data_ptr(),
            source.nbytes,
            bulk=False,
            blocks=8,
            device=machine.device.index,
            stream=stream,
        )

    launch = Launch("copy", (source,), (destination,), device, lambda reads, writes: None)
    machine.launch(launch, stream=machine.current_stream())


@pytest.mark.parametrize("kind", ["pinned", "managed"])
def test_a_kernel_reads_and_writes_in_place(
    manager: TensorManager, machine: CudaMachine, kind: str
) -> None:
    bits = random_bytes(16 * MIB)
    source = manager.empty(bits.shape, torch.uint8, kind).copy_(bits)
    target = manager.empty(bits.shape, torch.uint8, kind).zero_()
    hbm = manager.empty(bits.shape, torch.uint8)
    for tensor in (source, target):
        manager.check(tensor, kinds=kind, device=machine.device)
    kernel_copy(machine, hbm, source)
    kernel_copy(machine, target, hbm)
    machine.synchronize_all()
    assert torch.equal(hbm.cpu(), bits)
    assert torch.equal(target, bits)
    # And written by the host again, read by the kernel again.
    source.copy_(255 - bits)
    kernel_copy(machine, target, source)
    machine.synchronize_all()
    assert torch.equal(target, 255 - bits)


def test_a_kernel_does_not_get_memory_that_was_given_back(
    manager: TensorManager, machine: CudaMachine
) -> None:
    tensor = manager.empty(MIB, torch.uint8, "managed")
    kernel_copy(machine, tensor[: MIB // 2], tensor[MIB // 2 :])
    machine.synchronize_all()
    system = manager.empty(MIB, torch.uint8, "system")
    if not Driver.of(machine).attribute("PAGEABLE_MEMORY_ACCESS"):
        with pytest.raises(ValueError, match="expects tensors in HBM or in its own host memory"):
            kernel_copy(machine, tensor, system)
    else:
        kernel_copy(machine, tensor, system.fill_(3))
        machine.synchronize_all()
        assert tensor.eq(3).all()


@pytest.mark.parametrize("own_stream", [True, False])
def test_prefetches_both_ways_keep_bits(
    manager: TensorManager, machine: CudaMachine, own_stream: bool
) -> None:
    bits = random_bytes(8 * MIB)
    pair = [manager.empty(bits.shape, torch.uint8, "managed").copy_(bits) for _ in range(2)]
    stream = torch.cuda.Stream() if own_stream else machine.current_stream()
    for _ in range(3):
        manager.prefetch(pair, "device", stream=stream)
        manager.prefetch(pair[0], "host", stream=stream)
        machine.synchronize_all()
        assert all(torch.equal(tensor, bits) for tensor in pair)
        manager.prefetch(pair, "device", stream=stream)
        machine.synchronize_all()
        kernel_copy(machine, pair[0], pair[1])
        machine.synchronize_all()
        assert torch.equal(pair[0], bits)


@pytest.mark.parametrize("advice", ["read_mostly", "preferred_location", "accessed_by"])
def test_advice_keeps_bits(manager: TensorManager, machine: CudaMachine, advice: str) -> None:
    bits = random_bytes(4 * MIB)
    source = manager.empty(bits.shape, torch.uint8, "managed").copy_(bits)
    target = manager.empty(bits.shape, torch.uint8, "managed")
    for step in (advice, f"unset_{advice}"):
        manager.advise(source, step, "device")
        target.zero_()
        kernel_copy(machine, target, source)
        machine.synchronize_all()
        assert torch.equal(target, bits)
        assert torch.equal(source, bits)
    manager.advise(source, advice, "device")
    del source
    assert manager.statistics()["managed"].allocations == 1  # which takes the advice back, too


@pytest.mark.parametrize("own_stream", [True, False])
def test_a_discard_or_its_refusal(
    manager: TensorManager, machine: CudaMachine, own_stream: bool
) -> None:
    bits = random_bytes(4 * MIB)
    tensor = manager.empty(bits.shape, torch.uint8, "managed").copy_(bits)
    beside = manager.empty(bits.shape, torch.uint8, "managed").copy_(bits)
    stream = torch.cuda.Stream() if own_stream else machine.current_stream()
    if not Driver.of(machine).batched:
        with pytest.raises(RuntimeError, match=r"CUDA 13\.0 or later"):
            manager.discard(tensor, stream=stream)
        return
    manager.discard(tensor, stream=stream)
    machine.synchronize_all()
    tensor.copy_(255 - bits)  # written again, it holds
    machine.synchronize_all()
    assert torch.equal(tensor, 255 - bits)
    assert torch.equal(beside, bits)


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_moves_keep_bits(manager: TensorManager, source: str, target: str) -> None:
    bits = random_bytes(3 * MIB).view(3, MIB)
    tensor = manager.empty(bits.shape, torch.uint8, source)
    tensor.copy_(bits)
    moved = manager.move(tensor, target)
    assert manager.kind_of(moved) == target
    assert moved.is_cuda == (target == "device")
    assert torch.equal(moved.cpu(), bits)
    assert torch.equal(
        manager.move(torch.full((5,), 7.0, device="cuda"), target).cpu().sum(), torch.tensor(35.0)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_1000_cycles_leave_memory_flat(manager: TensorManager, kind: str) -> None:
    def resident() -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.split("VmRSS:")[1].split()[0]) * 1024

    def cycle(index: int) -> None:
        first = manager.empty(100_000 + 3000 * (index % 50), torch.float32, kind)
        second = manager.empty(50_000, torch.float32, kind)
        first.fill_(1)
        second.fill_(2)

    for index in range(100):
        cycle(index)
    before, hbm = resident(), torch.cuda.mem_get_info()[0]
    reserved = manager.statistics()[kind].reserved
    for index in range(1000):
        cycle(index)
    after = manager.statistics()[kind]
    assert (after.in_use, after.reserved) == (0, reserved)
    assert resident() - before < 16 * MIB
    assert hbm - torch.cuda.mem_get_info()[0] < 16 * MIB


def test_100_managers_leave_nothing(machine: CudaMachine) -> None:
    for index in range(100):
        with TensorManager(machine, owner="many") as manager:
            tensor = manager.empty(MIB, torch.uint8, HOST_KINDS[index % 3]).fill_(index)
        assert tensor.eq(index).all()
        del tensor
    gc.collect()
    assert ledger.total(owner="many") == 0


def test_a_managed_budget_refuses(manager: TensorManager) -> None:
    held = manager.empty(128 * MIB, torch.uint8, "managed")
    with pytest.raises(
        torch.OutOfMemoryError, match=r"managed memory do not fit\. Budget: 209,715"
    ):
        manager.empty(128 * MIB, torch.uint8, "managed")
    assert held.nbytes == 128 * MIB


def test_the_summary_has_torchs_figures(manager: TensorManager) -> None:
    tensor = manager.empty(1000, torch.float32)
    found = ghoffload.memory_summary(as_dict=True)
    (row,) = (r for r in found["devices"] if r["device"] == f"cuda:{tensor.get_device()}")
    assert row["allocated"] == torch.cuda.memory_allocated()
    assert {"kind": "device", "owner": "gpu test", "nbytes": 4000} in found["held"]
    assert "torch, HBM" in ghoffload.memory_summary()


def test_managed_memory_is_on_the_node_that_was_asked_for(manager: TensorManager) -> None:
    node = numa.memory_nodes()[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        tensor = manager.empty(1 << 20, torch.float32, "managed", numa=node)
    driver = Driver.of(CudaMachine.of("cuda"))
    assert driver.is_on_node(tensor.data_ptr(), tensor.nbytes, node)
    assert not driver.is_on_node(tensor.data_ptr(), tensor.nbytes, node + 1)
    manager.prefetch(tensor, "device", stream=torch.cuda.current_stream())
    torch.cuda.synchronize()
    assert not driver.is_on_node(tensor.data_ptr(), tensor.nbytes, node)
