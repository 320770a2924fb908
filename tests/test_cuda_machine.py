from __future__ import annotations

import builtins
import enum
import gc
import mmap
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ghoffload.errors import MachineUnavailableError
from ghoffload.machine import cuda
from ghoffload.machine.cuda import CudaMachine
from ghoffload.machine.protocol import Event, Launch, Stream, Vetted
from ghoffload.memory import HostArena, ledger, pages

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20


# Without a GPU: refusals, and the order of driver calls against a driver made up here.


def test_without_a_gpu_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(cuda, "unusable_gpu", lambda: None)
    with pytest.raises(MachineUnavailableError, match=r"torch \S+ finds no CUDA GPU"):
        CudaMachine()
    monkeypatch.setattr(cuda, "unusable_gpu", lambda: "torch was built without CUDA. Install one")
    with pytest.raises(MachineUnavailableError, match=r"cannot be used: torch was built without"):
        CudaMachine.of("cuda:0")


@pytest.mark.parametrize("device", ["cpu", torch.device("meta")])
def test_other_devices_are_refused(device: object) -> None:
    with pytest.raises(ValueError, match="device expects a CUDA device, got "):
        CudaMachine.of(device)  # type: ignore[arg-type]


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.hip", None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    cuda._driver.cache_clear()


def test_an_index_beyond_the_last_gpu_is_refused(one_gpu: None) -> None:
    with pytest.raises(MachineUnavailableError, match=r"expected a device .*got cuda:3"):
        CudaMachine.of(3)


def test_missing_bindings_are_named_with_the_mend(
    one_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def importer(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("cuda"):
            raise ModuleNotFoundError("No module named 'cuda'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr("builtins.__import__", importer)
    with pytest.raises(MachineUnavailableError, match=r"pip install 'cuda-bindings>=12\.9,<14'"):
        CudaMachine.of("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA driver")
def test_a_missing_driver_is_named(one_gpu: None) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    with pytest.raises(MachineUnavailableError, match="the CUDA driver cannot be reached"):
        CudaMachine.of("cuda")


class Code(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_DEINITIALIZED = 4
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712
    CUDA_ERROR_NOT_SUPPORTED = 801


class FakeDriver:
    """Notes each call; answers success, or what ``answers`` says."""

    VALUES = frozenset({"cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPopCurrent"})

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, Code] = {}
        self.depth = 0

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            code = self.answers.get(name, Code.CUDA_SUCCESS)
            if name == "cuCtxPushCurrent":
                self.depth += code == 0
            elif name == "cuCtxPopCurrent":
                self.depth -= 1
            else:
                self.calls.append((name, self.depth, *arguments))
            return (code, f"<{name}>") if name in self.VALUES else (code,)

        return call


class FakeTorchStream:
    handles = iter(range(0x100, 0x10000))

    def __init__(self, device: torch.device) -> None:
        self.cuda_stream = next(self.handles)

    def wait_event(self, event: object) -> None:
        pass


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> CudaMachine:
    """A CudaMachine on the made-up driver; tensors of more than one dimension count as in HBM."""
    monkeypatch.setattr(cuda, "_usable", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(cuda, "_driver", lambda: driver)
    monkeypatch.setattr("torch.cuda.Stream", FakeTorchStream)
    monkeypatch.setattr(
        "torch.cuda.Event", lambda: SimpleNamespace(record=lambda s: None, synchronize=lambda: None)
    )
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(CudaMachine, "_in_hbm", lambda self, tensor: tensor.ndim > 1)
    machine = CudaMachine()
    driver.calls.clear()
    return machine


def test_copies_run_in_the_devices_context_and_are_counted_by_direction(
    fake: CudaMachine, driver: FakeDriver
) -> None:
    host, hbm = torch.zeros(10), torch.zeros(5, 2)
    fake.copy(hbm, host, stream=fake.h2d)
    assert isinstance(fake.h2d, cuda.CudaStream)
    assert driver.calls == [
        ("cuMemcpyAsync", 1, hbm.data_ptr(), host.data_ptr(), 40, fake.h2d.handle)
    ]
    fake.copy(host[:4], hbm[:2], stream=fake.d2h[1])
    fake.copy(hbm, hbm.clone(), stream=fake.h2d)
    fake.copy(hbm[:0], host[:0], stream=fake.h2d)
    assert driver.depth == 0
    assert len(driver.calls) == 3
    traffic = fake.traffic
    assert (traffic.h2d_bytes, traffic.d2h_bytes, traffic.copies) == (40, 16, 3)


def test_misused_copies_are_refused_before_the_driver_is_asked(
    fake: CudaMachine, driver: FakeDriver
) -> None:
    with pytest.raises(ValueError, match="got 36 for a destination of 40"):
        fake.copy(torch.zeros(5, 2), torch.zeros(9), stream=fake.h2d)
    with pytest.raises(ValueError, match="expects contiguous tensors"):
        fake.copy(torch.zeros(2, 5).t(), torch.zeros(10), stream=fake.h2d)
    with pytest.raises(ValueError, match="got two host tensors"):
        fake.copy(torch.zeros(5), torch.zeros(5), stream=fake.h2d)
    with pytest.raises(TypeError, match="expected a stream of a CUDA machine, got Stream"):
        fake.copy(torch.zeros(5, 1), torch.zeros(5), stream=Stream())
    assert driver.calls == []
    assert fake.traffic.copies == 0


def test_a_failed_copy_says_what_it_was(fake: CudaMachine, driver: FakeDriver) -> None:
    driver.answers["cuMemcpyAsync"] = Code.CUDA_ERROR_ILLEGAL_ADDRESS
    said = r"copy of 20 bytes on stream 'd2h 0' failed: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"
    with pytest.raises(RuntimeError, match=said):
        fake.copy(torch.zeros(5), torch.zeros(5, 1), stream=fake.d2h[0])
    assert driver.depth == 0
    assert fake.traffic.copies == 0


def test_unrecorded_events_are_never_awaited(fake: CudaMachine) -> None:
    event = fake.event("bucket 3 updated")
    said = "event 'bucket 3 updated' was never recorded; it is awaited by "
    with pytest.raises(RuntimeError, match=said + "'write-back' on stream 'd2h 0'"):
        fake.wait(fake.d2h[0], event, label="write-back")
    with pytest.raises(RuntimeError, match=said + "'save' on the host"):
        fake.synchronize(event, label="save")
    with pytest.raises(TypeError, match="expected an event of a CUDA machine, got Event"):
        fake.record(Event(), fake.h2d)
    fake.record(event, fake.h2d)
    fake.wait(fake.d2h[0], event, label="write-back")
    fake.synchronize(event, label="save")


def test_pins_are_undone_after_the_device_is_idle(fake: CudaMachine, driver: FakeDriver) -> None:
    assert fake.register_host(4096, 100, pin=True)
    with pytest.raises(ValueError, match="at 0x1000 is registered already"):
        fake.register_host(4096, 100, pin=True)
    fake.unregister_host(4096)
    assert driver.calls == [
        ("cuMemHostRegister", 1, 4096, 100, 1),
        ("cuCtxSynchronize", 1),
        ("cuMemHostUnregister", 1, 4096),
    ]
    with pytest.raises(ValueError, match="no host memory is registered at 0x1000"):
        fake.unregister_host(4096)


@pytest.mark.parametrize("code", [Code.CUDA_ERROR_OUT_OF_MEMORY, Code.CUDA_ERROR_NOT_SUPPORTED])
def test_a_refused_pin_is_an_answer(fake: CudaMachine, driver: FakeDriver, code: Code) -> None:
    driver.answers["cuMemHostRegister"] = code
    assert not fake.register_host(4096, 100, pin=True)
    assert fake.pin_refusal == code.name
    fake.unregister_host(4096)
    assert "cuMemHostUnregister" not in [call[0] for call in driver.calls]


def test_pageable_memory_is_not_pinned(fake: CudaMachine, driver: FakeDriver) -> None:
    assert not fake.register_host(4096, 100, pin=False)
    assert driver.calls == []


def test_a_pin_that_fails_otherwise_is_an_error(fake: CudaMachine, driver: FakeDriver) -> None:
    driver.answers["cuMemHostRegister"] = Code.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    with pytest.raises(RuntimeError, match=r"pinning 100 bytes .*ALREADY_REGISTERED \(712\)"):
        fake.register_host(4096, 100, pin=True)
    driver.answers.clear()
    assert fake.register_host(4096, 100, pin=True)


@pytest.mark.parametrize(
    "answers",
    [
        {"cuCtxPushCurrent": Code.CUDA_ERROR_DEINITIALIZED},
        {
            "cuCtxSynchronize": Code.CUDA_ERROR_ILLEGAL_ADDRESS,
            "cuMemHostUnregister": Code.CUDA_ERROR_ILLEGAL_ADDRESS,
        },
    ],
)
def test_a_lost_context_does_not_hide_the_first_error(
    fake: CudaMachine, driver: FakeDriver, answers: dict[str, Code]
) -> None:
    fake.register_host(4096, 100, pin=True)
    driver.answers.update(answers)
    fake.unregister_host(4096)
    assert driver.depth == 0


def test_a_failed_unpin_is_an_error(fake: CudaMachine, driver: FakeDriver) -> None:
    fake.register_host(4096, 100, pin=True)
    driver.answers["cuMemHostUnregister"] = Code.CUDA_ERROR_NOT_SUPPORTED
    with pytest.raises(RuntimeError, match=r"unpinning host memory at 0x1000 failed"):
        fake.unregister_host(4096)


def fill_launch(*tensors: Tensor, device: Callable[[int], None]) -> Launch:
    return Launch("fill", (), tensors, device, lambda reads, writes: None)


def test_kernels_get_host_memory_that_the_device_reaches_and_no_other(fake: CudaMachine) -> None:
    vars(fake)["memory_kinds"] = frozenset({"device", "pinned"})
    handles: list[int] = []
    memory = HostArena(8192, machine=fake, owner="test")
    launch = fill_launch(memory.carve(10, torch.float32), device=handles.append)
    fake.launch(launch, stream=fake.d2h[0])
    assert isinstance(fake.d2h[0], cuda.CudaStream)
    assert handles == [fake.d2h[0].handle]
    assert fake.traffic.launches == 1
    memory.close()
    said = r"kernel 'fill' on cuda:0 expects tensors in HBM .*\(pinned\), got other host memory"
    with pytest.raises(ValueError, match=said):
        fake.launch(launch, stream=fake.d2h[0])
    pageable = HostArena(8192, machine=fake, owner="test", pin=False)
    tensor = pageable.carve(10, torch.float32)
    with pytest.raises(ValueError, match=r"kernel 'fill' on cuda:0 expects .* got system memory"):
        fake.launch(fill_launch(tensor, device=handles.append), stream=fake.h2d)
    assert len(handles) == 1
    vars(fake)["memory_kinds"] = frozenset({"device", "pinned", "managed", "system"})
    fake.launch(fill_launch(tensor, device=handles.append), stream=fake.h2d)
    pageable.close()
    managed = torch.zeros(10)
    fake.admit(managed.data_ptr(), managed.nbytes)
    fake.launch(fill_launch(managed, device=handles.append), stream=fake.h2d)
    assert len(handles) == 3
    fake.dismiss(managed.data_ptr())
    with pytest.raises(ValueError, match="got other host memory"):
        fake.launch(fill_launch(managed, device=handles.append), stream=fake.h2d)


def vetted_launch(vetted: Vetted, *tensors: Tensor) -> Launch:
    return Launch("fill", (), tensors, lambda stream: None, lambda reads, writes: None, vetted)


def test_what_was_vetted_is_looked_at_again_when_host_memory_comes_or_goes(
    fake: CudaMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    vars(fake)["memory_kinds"] = frozenset({"device", "pinned"})
    vars(fake)["host_node"] = None
    looked: list[Tensor] = []
    of = fake._host.of
    monkeypatch.setattr(fake._host, "of", lambda tensor: (looked.append(tensor), of(tensor))[1])
    memory = HostArena(8192, machine=fake, owner="test")
    state = memory.carve(10, torch.float32)
    vetted = Vetted((state,))
    for _ in range(3):
        fake.launch(vetted_launch(vetted, state), stream=fake.h2d)
    assert len(looked) == 1
    other = HostArena(8192, machine=fake, owner="test")
    for _ in range(3):
        fake.launch(vetted_launch(vetted, state), stream=fake.h2d)
    assert len(looked) == 2
    fake.debug = True
    for _ in range(3):
        fake.launch(vetted_launch(vetted, state), stream=fake.h2d)
    with pytest.raises(ValueError, match="got other host memory"):
        fake.launch(vetted_launch(vetted, state, torch.zeros(3)), stream=fake.h2d)
    fake.debug = False
    memory.close()
    for _ in range(2):
        with pytest.raises(ValueError, match="got other host memory"):
            fake.launch(vetted_launch(vetted, state), stream=fake.h2d)
    other.close()


def test_events_from_beyond_a_capture_stand_for_the_current_stream(
    fake: CudaMachine, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = FakeTorchStream(fake.device)
    recorded: list[object] = []
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: current)
    handle = lambda index: current.cuda_stream  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", handle, raising=False)
    event = fake.event("last update")
    event.torch_event = SimpleNamespace(record=recorded.append, synchronize=lambda: None)
    fake.record(event, fake.h2d)
    fake.wait(fake.d2h[0], event, label="write-back")
    assert recorded == [fake.h2d.torch_stream]

    number = 0
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: number > 0)
    driver.cuStreamGetCaptureInfo = lambda stream: (0, 1, number, "graph", [], None, 0)
    assert not fake.capturing
    for number in (5, 6, 0):  # from outside, from an earlier capture, from inside
        recorded.clear()
        assert fake.capturing == (number > 0)
        for _ in range(2):
            fake.wait(fake.d2h[0], event, label="write-back")
        assert recorded == [current]
    fake.synchronize(event, label="save")
    assert recorded == [current]
    number = 7
    with pytest.raises(RuntimeError, match="'save' blocks the host, which a CUDA graph capture"):
        fake.synchronize(event, label="save")
    fake.record(event, fake.h2d)
    number = 0
    recorded.clear()
    fake.synchronize(event, label="save")
    assert recorded == [current]


def test_debug_mode_looks_at_the_host_side_of_copies(fake: CudaMachine) -> None:
    vars(fake)["host_node"] = None
    memory, pageable = torch.zeros(4, 4), torch.zeros(16)
    fake.copy(memory, pageable, stream=fake.h2d)
    fake.debug = True
    with pytest.raises(ValueError, match=r"copy on stream 'h2d' expects pinned memory .*any more"):
        fake.copy(memory, pageable, stream=fake.h2d)
    pinned = HostArena(8192, machine=fake, owner="test")
    fake.copy(memory, pinned.carve(16, torch.float32), stream=fake.h2d)
    assert fake.traffic.copies == 2
    pinned.close()


def test_record_stream_takes_registered_host_memory_and_no_other(fake: CudaMachine) -> None:
    pageable = HostArena(8192, machine=fake, owner="test", pin=False)
    fake.record_stream(pageable.carve(10, torch.float32), fake.h2d)
    with pytest.raises(ValueError, match="got another host tensor"):
        fake.record_stream(torch.zeros(10), fake.h2d)
    with pytest.raises(ValueError, match="free expects a tensor on cuda:0, got a host tensor"):
        fake.free(torch.zeros(10))
    pageable.close()


# On a GPU.


@pytest.fixture
def gpu() -> CudaMachine:
    return CudaMachine.of("cuda")


def numbers(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, generator=generator)


def busy(stream: Stream, milliseconds: int = 100) -> None:
    """Keep a stream busy for about so long."""
    assert isinstance(stream, cuda.CudaStream)
    with torch.cuda.stream(stream.torch_stream):
        torch.cuda._sleep(2_000_000 * milliseconds)


def in_fresh_thread(work: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@pytest.mark.gpu
def test_one_machine_a_device(gpu: CudaMachine) -> None:
    assert CudaMachine.of("cuda") is gpu
    assert CudaMachine.of(gpu.device) is gpu
    assert gpu.device == torch.device("cuda", torch.cuda.current_device())
    assert len({gpu.h2d, *gpu.d2h, gpu.current_stream()}) == 4
    assert gpu.current_stream() == gpu.current_stream()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert gpu.current_stream().torch_stream == side


@pytest.mark.gpu
@pytest.mark.parametrize("huge", [True, False])
def test_pinning_rate(
    gpu: CudaMachine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    huge: bool,
) -> None:
    nbytes = 2048 * MIB
    if not huge:
        monkeypatch.setattr(pages, "huge_page_size", lambda: None)
    populate = pages.populate
    spent = []

    def timed(mapping: mmap.mmap, *, threads: int) -> None:
        start = time.perf_counter()
        populate(mapping, threads=threads)
        spent.append(time.perf_counter() - start)

    monkeypatch.setattr(pages, "populate", timed)
    rates = []
    for _ in range(2):
        start = time.perf_counter()
        arena = HostArena(nbytes, machine=gpu, owner="rate")
        total = time.perf_counter() - start
        rates.append((nbytes / total, nbytes / spent[-1], nbytes / (total - spent[-1])))
        tensor = arena.tensor(nbytes // 2, 1000, torch.float32)
        assert arena.pinned
        assert tensor.is_pinned()
        arena.close()
        assert not tensor.is_pinned()
    both, touch, register = (max(column) / 1e9 for column in zip(*rates, strict=True))
    with capsys.disabled():
        print(
            f"\nreserved at {both:.1f} GB/s (touch {touch:.1f}, register {register:.1f}), "
            f"{'huge' if huge else 'ordinary'} pages"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 7, 1025, 3 * MIB + 5])
@pytest.mark.parametrize("pin", [True, False])
def test_copies_move_every_bit_both_ways(gpu: CudaMachine, count: int, pin: bool) -> None:
    arena = HostArena(2 * count * 4 + 1024, machine=gpu, owner="test", pin=pin)
    there, back = (arena.carve(count, torch.int32) for _ in range(2))
    there.copy_(numbers(count))
    hbm = gpu.empty((count + 1,), torch.int32)
    hbm.fill_(7)
    filled, arrived, done = gpu.event("filled"), gpu.event("arrived"), gpu.event("done")
    gpu.traffic.reset()
    gpu.record(filled, gpu.current_stream())
    gpu.wait(gpu.h2d, filled, label="reload after fill")
    gpu.copy(hbm[1:], there, stream=gpu.h2d)
    gpu.record(arrived, gpu.h2d)
    gpu.wait(gpu.d2h[0], arrived, label="write-back after reload")
    gpu.copy(back, hbm[1:], stream=gpu.d2h[0])
    gpu.record(done, gpu.d2h[0])
    gpu.synchronize(done, label="test")
    assert torch.equal(back, numbers(count))
    assert hbm[0].item() == 7
    traffic = gpu.traffic
    assert (traffic.h2d_bytes, traffic.d2h_bytes, traffic.copies) == (4 * count, 4 * count, 2)
    gpu.free(hbm)
    arena.close()


@pytest.mark.gpu
def test_misuse_on_the_gpu(gpu: CudaMachine) -> None:
    hbm, host = gpu.empty((10,), torch.float32), torch.zeros(10)
    with pytest.raises(ValueError, match="got 36 for a destination of 40"):
        gpu.copy(hbm, host[:9], stream=gpu.h2d)
    with pytest.raises(ValueError, match="got two host tensors"):
        gpu.copy(host, host.clone(), stream=gpu.h2d)
    with pytest.raises(ValueError, match="expected a tensor on cuda:0 or the CPU, got meta"):
        gpu.copy(hbm, torch.empty(10, device="meta"), stream=gpu.h2d)
    with pytest.raises(RuntimeError, match="event 'x' was never recorded"):
        gpu.wait(gpu.h2d, gpu.event("x"), label="y")
    with pytest.raises(ValueError, match=r"got other host memory of shape"):
        gpu.launch(fill_launch(host, device=lambda handle: None), stream=gpu.h2d)
    with pytest.raises(torch.OutOfMemoryError):
        gpu.empty((1 << 50,), torch.uint8)
    arena = HostArena(MIB, machine=gpu, owner="test")
    with pytest.raises(RuntimeError, match="ALREADY_REGISTERED"):
        gpu.register_host(arena.address + mmap.PAGESIZE, mmap.PAGESIZE, pin=True)
    torch.ones(1, device=gpu.device).add_(1).item()  # and torch sees none of these as its own error
    arena.close()


@pytest.mark.gpu
@pytest.mark.parametrize("waits", [True, False])
def test_wait_orders_a_copy_after_compute(gpu: CudaMachine, waits: bool) -> None:
    """The run without the wait shows that the other would fail if ``wait`` did nothing."""
    arena = HostArena(4 * MIB, machine=gpu, owner="test")
    host = arena.carve(MIB, torch.int32)
    hbm = torch.full((MIB,), 3, dtype=torch.int32, device=gpu.device)
    torch.cuda.synchronize()
    updated, done = gpu.event("updated"), gpu.event("done")
    busy(gpu.current_stream())
    hbm.fill_(5)
    gpu.record(updated, gpu.current_stream())
    if waits:
        gpu.wait(gpu.d2h[0], updated, label="write-back waits for its source")
    gpu.copy(host, hbm, stream=gpu.d2h[0])
    gpu.record(done, gpu.d2h[0])
    gpu.synchronize(done, label="test")
    assert host.unique().tolist() == [5 if waits else 3]
    torch.cuda.synchronize()
    arena.close()


@pytest.mark.gpu
def test_write_back_by_turns_loses_no_bit(gpu: CudaMachine) -> None:
    count, chunk = 48 * MIB, 2 * MIB + 3
    arena = HostArena(4 * count, machine=gpu, owner="test")
    host = arena.carve(count, torch.int32)
    hbm = numbers(count).to(gpu.device)
    ready, last = gpu.event("ready"), gpu.event("last")
    for step in range(3):
        busy(gpu.current_stream(), 10)
        hbm.add_(step)
        gpu.record(ready, gpu.current_stream())
        gpu.wait(gpu.d2h[0], ready, label="write-back waits for its source")
        for turn, start in enumerate(range(0, count, chunk)):
            stream = gpu.d2h[turn % 2]
            if turn:
                gpu.wait(stream, last, label="write-back keeps its order")
            gpu.copy(host[start : start + chunk], hbm[start : start + chunk], stream=stream)
            gpu.record(last, stream)
        gpu.wait(gpu.current_stream(), last, label="next update waits for the write-back")
    gpu.synchronize(last, label="test")
    assert torch.equal(host, numbers(count) + 3)
    arena.close()


@pytest.mark.gpu
def test_freed_memory_is_not_reused_while_a_lane_reads_it(gpu: CudaMachine) -> None:
    arena = HostArena(4 * MIB, machine=gpu, owner="test")
    host = arena.carve(MIB, torch.int32)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    hbm = gpu.empty((MIB,), torch.int32)
    hbm.fill_(1)
    ready, done = gpu.event("ready"), gpu.event("done")
    gpu.record(ready, gpu.current_stream())
    gpu.wait(gpu.d2h[1], ready, label="write-back waits for its source")
    busy(gpu.d2h[1])
    gpu.copy(host, hbm, stream=gpu.d2h[1])
    gpu.record(done, gpu.d2h[1])
    gpu.free(hbm)
    del hbm
    again = torch.full((MIB,), 2, dtype=torch.int32, device=gpu.device)
    gpu.synchronize(done, label="test")
    assert host.unique().tolist() == [1]
    del again
    arena.close()


@pytest.mark.gpu
def test_the_steady_state_never_synchronises(gpu: CudaMachine) -> None:
    arena = HostArena(4 * MIB, machine=gpu, owner="test")
    host = arena.carve(MIB, torch.int32)
    hbm = gpu.empty((MIB,), torch.int32)
    event = gpu.event("x")
    torch.cuda.set_sync_debug_mode("error")
    try:
        busy(gpu.current_stream(), 300)
        start = time.perf_counter()
        gpu.record(event, gpu.current_stream())
        gpu.wait(gpu.h2d, event, label="y")
        gpu.copy(hbm, host, stream=gpu.h2d)
        gpu.record(event, gpu.h2d)
        gpu.wait(gpu.d2h[0], event, label="z")
        gpu.copy(host, hbm, stream=gpu.d2h[0])
        gpu.launch(fill_launch(hbm, host, device=lambda handle: None), stream=gpu.h2d)
        gpu.record_stream(hbm, gpu.d2h[0])
        gpu.free(hbm)
        gpu.memory_allocated()
        assert time.perf_counter() - start < 0.1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    arena.close()  # waits for the queued copies
    assert torch.cuda.current_stream().query()


def memset_launch(tensor: Tensor, value: int) -> Launch:
    """A launch in the form of csrc's, by a driver call that acts on the current context."""
    from cuda.bindings import driver

    def device(handle: int) -> None:
        (code,) = driver.cuMemsetD8Async(tensor.data_ptr(), value, tensor.nbytes, handle)
        assert int(code) == 0, code

    return fill_launch(tensor, device=device)


@pytest.mark.gpu
def test_a_fresh_thread_can_copy_launch_and_pin(gpu: CudaMachine) -> None:
    def work() -> None:
        arena = HostArena(MIB, machine=gpu, owner="thread")
        assert arena.pinned
        host = arena.carve(1000, torch.uint8)
        hbm = gpu.empty((1000,), torch.uint8)
        ready, done = gpu.event("ready"), gpu.event("done")
        gpu.launch(memset_launch(hbm, 9), stream=gpu.current_stream())
        gpu.record(ready, gpu.current_stream())
        gpu.wait(gpu.d2h[0], ready, label="write-back waits for the launch")
        gpu.copy(host, hbm, stream=gpu.d2h[0])
        gpu.record(done, gpu.d2h[0])
        gpu.synchronize(done, label="test")
        assert host.unique().tolist() == [9]
        arena.close()

    in_fresh_thread(work)


@pytest.mark.gpu
def test_a_kernel_writes_pinned_memory_in_place(gpu: CudaMachine) -> None:
    arena = HostArena(MIB, machine=gpu, owner="test")
    host = arena.carve(1000, torch.uint8)
    done = gpu.event("done")
    gpu.launch(memset_launch(host, 3), stream=gpu.current_stream())
    gpu.record(done, gpu.current_stream())
    gpu.synchronize(done, label="test")
    assert host.unique().tolist() == [3]
    arena.close()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one() -> None:
    machine = CudaMachine.of("cuda:1")
    assert torch.cuda.current_device() == 0
    arena = HostArena(MIB, machine=machine, owner="test")
    host = arena.carve(1000, torch.uint8)
    hbm = machine.empty((1000,), torch.uint8)
    assert hbm.device == torch.device("cuda:1")
    ready, done = machine.event("ready"), machine.event("done")
    machine.launch(memset_launch(hbm, 9), stream=machine.current_stream())
    machine.record(ready, machine.current_stream())
    machine.wait(machine.d2h[0], ready, label="write-back waits for the launch")
    machine.copy(host, hbm, stream=machine.d2h[0])
    machine.record(done, machine.d2h[0])
    machine.synchronize(done, label="test")
    assert host.unique().tolist() == [9]
    assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="expected a tensor on cuda:1 or the CPU, got cuda:0"):
        machine.copy(host, torch.zeros(1000, dtype=torch.uint8, device=0), stream=machine.h2d)
    machine.free(hbm)
    arena.close()


@pytest.mark.gpu
def test_200_cycles_leave_memory_flat_on_both_sides(gpu: CudaMachine) -> None:
    def cycle() -> None:
        arena = HostArena(16 * MIB, machine=gpu, owner="cycle")
        host = arena.carve(MIB, torch.int32)
        hbm = gpu.empty((MIB,), torch.int32)
        ready = gpu.event("ready")
        gpu.record(ready, gpu.current_stream())
        gpu.wait(gpu.h2d, ready, label="reload waits for the memory's last use")
        gpu.copy(hbm, host, stream=gpu.h2d)
        gpu.free(hbm)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    for _ in range(20):
        cycle()
    gc.collect()
    torch.cuda.synchronize()
    before, allocated = resident(), gpu.memory_allocated()
    registered = list(gpu._host)  # other tests' arenas may live still
    for _ in range(200):
        cycle()
    gc.collect()
    torch.cuda.synchronize()
    assert resident() - before < 16 * MIB
    assert gpu.memory_allocated() == allocated
    assert ledger.total(owner="cycle") == 0
    assert list(gpu._host) == registered


def python(script: str) -> subprocess.CompletedProcess[str]:
    start = """
        import os, sys, torch
        from ghoffload.machine.cuda import CudaMachine
        from ghoffload.memory import HostArena, ledger
        gpu = CudaMachine.of("cuda")
        arena = HostArena(64 << 20, machine=gpu, owner="x")
        host = arena.carve(8 << 20, torch.int32)
        hbm = torch.ones(8 << 20, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(start) + textwrap.dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def assert_clean(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    for sign in ("Traceback", "Error", "ignored", "terminate"):
        assert sign not in done.stderr


@pytest.mark.gpu
def test_exit_with_an_arena_alive_and_copies_queued() -> None:
    done = python(
        """
        with torch.cuda.stream(gpu.d2h[0].torch_stream):
            torch.cuda._sleep(200_000_000)
        gpu.copy(host, hbm, stream=gpu.d2h[0])
        """
    )
    assert_clean(done)


@pytest.mark.gpu
def test_a_forked_child_leaves_the_parents_pins_alone() -> None:
    done = python(
        """
        import warnings, weakref
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.set_num_threads(1)  # torch's own pool does not survive a fork
        host.fill_(3)
        child = os.fork()
        if child == 0:
            host.fill_(4)
            weakref.finalize._exitfunc()  # ours; others' exit functions are not our subject
            os._exit(0)
        print("child", os.waitpid(child, 0)[1], host.unique().tolist())
        gpu.copy(host, hbm, stream=gpu.d2h[0])
        event = gpu.event("done")
        gpu.record(event, gpu.d2h[0])
        gpu.synchronize(event, label="test")
        print(host.unique().tolist(), host.is_pinned(), ledger.total("pinned"))
        """
    )
    assert_clean(done)
    assert done.stdout.splitlines() == ["child 0 [3]", f"[1] True {64 * MIB}"]


@pytest.mark.gpu
def test_a_failed_kernel_elsewhere_does_not_keep_the_arena() -> None:
    done = python(
        """
        try:
            hbm[torch.tensor([1 << 40], device="cuda")].sum().item()
        except RuntimeError as error:
            print("failed")
        arena.close()
        print(ledger.total(), list(gpu._host))
        """
    )
    assert done.stdout.splitlines() == ["failed", "0 []"]
    assert done.returncode == 0
