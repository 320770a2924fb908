"""Measurements the benchmark is made of: the link, one step, a whole training step, memory."""

from __future__ import annotations

import gc
import itertools
import mmap
import statistics
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from _bench_optimizers import Optimizer
from torch import Tensor

DEVICE = "cuda"
LINK_BYTES = 2 << 30  # each way: about 45 ms on PCIe 5
CHUNK_BYTES = 64 << 20  # large enough for the full rate

median = statistics.median


class PinnedBlock:
    """Pinned host memory on huge pages, touched by all of torch's threads: the fastest there is.

    Attributes:
        tensor: its bytes.
    """

    def __init__(self, nbytes: int) -> None:
        pages = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                pages.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without huge pages: small ones do
        self.tensor = torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
        _check(torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), nbytes, 0))

    def close(self) -> None:
        _check(torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr()))
        del self.tensor


def link(repeats: int) -> dict[str, float]:
    """Rates of the copy engines over the host link in GB/s, and of a copy within HBM.

    ``two_way`` is the bytes of both directions at once over the time until the later one ends.
    """
    out, back = PinnedBlock(LINK_BYTES), PinnedBlock(LINK_BYTES)
    above = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=DEVICE)
    below = torch.zeros_like(above)
    up, down = torch.cuda.Stream(), torch.cuda.Stream()

    def timed(directions: list[tuple[torch.cuda.Stream, Tensor, Tensor]]) -> float:
        torch.cuda.synchronize()
        start = torch.cuda.Event(enable_timing=True)
        start.record()
        ends = []
        for stream, _, _ in directions:
            stream.wait_event(start)
        for first in range(0, LINK_BYTES, CHUNK_BYTES):
            chunk = slice(first, first + CHUNK_BYTES)
            for stream, to, source in directions:
                with torch.cuda.stream(stream):
                    to[chunk].copy_(source[chunk], non_blocking=True)
        for stream, _, _ in directions:
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record(stream)
        torch.cuda.synchronize()
        return max(start.elapsed_time(end) for end in ends) / 1e3

    h2d, d2h = (up, above, out.tensor), (down, back.tensor, below)
    cases = {"h2d": [h2d], "d2h": [d2h], "two_way": [h2d, d2h]}
    times: dict[str, list[float]] = {name: [] for name in [*cases, "hbm"]}
    for repeat in range(repeats + 1):
        for name, directions in cases.items():
            elapsed = timed(directions)
            if repeat:
                times[name].append(elapsed)
        elapsed = timed([(torch.cuda.current_stream(), above, below)])
        if repeat:
            times["hbm"].append(elapsed)
    rates = {
        name: (1 if name in ("h2d", "d2h") else 2) * LINK_BYTES / median(values) / 1e9
        for name, values in times.items()
    }
    out.close()
    back.close()
    return rates


def step_alone(optimizer: Optimizer, parameters: int, repeats: int, warmup: int) -> dict[str, Any]:
    """Time from gradients that lie in HBM until everything is done, in two ways.

    ``step_ms`` is ``step()`` alone until drained, with what backward's hooks began finished before;
    ``with_gradients_ms`` also has those hooks: an offload that moves gradients does it there.
    """
    model = optimizer.model
    model.given = [torch.randn_like(weight).mul_(1e-3) for weight in model.parameters()]
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    alone, returned, together = [], [], []
    for repeat in range(-warmup, repeats):
        optimizer.zero_grad()
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.backward(optimizer.forward(tokens))
        optimizer.step()
        torch.cuda.synchronize()
        end = time.perf_counter()
        if repeat >= 0:
            together.append(end - start)
    for repeat in range(-1, repeats):
        optimizer.zero_grad()
        optimizer.backward(optimizer.forward(tokens))
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        back = time.perf_counter()
        torch.cuda.synchronize()
        end = time.perf_counter()
        if repeat >= 0:
            alone.append(end - start)
            returned.append(back - start)
    optimizer.zero_grad()
    model.given = None
    return {
        "step_ms": 1e3 * median(alone),
        "step_ms_fastest": 1e3 * min(alone),
        "step_ms_slowest": 1e3 * max(alone),
        "step_returned_ms": 1e3 * median(returned),
        "with_gradients_ms": 1e3 * median(together),
        "gparam_per_s": parameters / median(alone) / 1e9,
        "gparam_per_s_with_gradients": parameters / median(together) / 1e9,
    }


def whole_step(optimizer: Optimizer, tokens: Tensor, repeats: int) -> dict[str, Any]:
    """Training steps one behind the other, as in training: time of one, and peak HBM.

    ``outside_torch`` is what the device holds beyond torch's allocator: contexts, kernels, and
    whatever a library takes from the driver directly.
    """
    for _ in range(2):
        train(optimizer, tokens)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    start = time.perf_counter()
    marks[0].record()
    for mark in marks[1:]:
        train(optimizer, tokens)
        mark.record()
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    free, total = torch.cuda.mem_get_info()
    return {
        "ms": median(times),
        "ms_mean_until_drained": 1e3 * elapsed / repeats,
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "outside_torch": total - free - torch.cuda.memory_reserved(),
    }


def train(optimizer: Optimizer, tokens: Tensor) -> Tensor:
    """One training step; the loss is not waited for."""
    optimizer.zero_grad()
    loss = optimizer.forward(tokens)
    optimizer.backward(loss)
    optimizer.step()
    return loss.detach()


def steady(optimizer: Optimizer, tokens: Tensor, steps: int) -> dict[str, Any]:
    """HBM and RSS after each of many training steps: the first, the last and the largest drift."""
    settle = min(20, steps // 2)
    allocated, reserved, resident = [], [], []
    start = time.perf_counter()
    for _ in range(steps):
        train(optimizer, tokens)
        allocated.append(torch.cuda.memory_allocated())
        reserved.append(torch.cuda.memory_reserved())
        resident.append(rss())
    torch.cuda.synchronize()
    result: dict[str, Any] = {"steps": steps, "settle": settle}
    result["ms"] = 1e3 * (time.perf_counter() - start) / steps
    for name, values in (("hbm", allocated), ("reserved", reserved), ("rss", resident)):
        later = values[settle:]
        result[name] = {
            "first": values[0],
            "settled": later[0],
            "last": values[-1],
            "drift": max(later) - min(later),
        }
    return result


def item_latency(optimizer: Optimizer, tokens: Tensor, repeats: int, d2h: float) -> dict[str, Any]:
    """How long ``loss.item()`` takes while state is still on its way to the host.

    ``at_once_ms`` is from the end of the last update kernel to the return of an ``item()`` called
    right after ``step()``; ``after_update_ms`` is an ``item()`` called when that kernel has ended.
    ``outstanding`` is the bytes then still to be written back: the time until the device is idle
    times ``d2h``, the rate of the link in GB/s.
    """
    at_once, after, outstanding = [], [], []
    for repeat in range(-1, repeats):
        for wait in (False, True):
            optimizer.zero_grad()
            loss = optimizer.forward(tokens)
            optimizer.backward(loss)
            base, updated = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            base.record()
            base.synchronize()
            origin = time.perf_counter()
            optimizer.step()
            updated.record()
            if wait:
                updated.synchronize()
                origin = time.perf_counter()
            loss.item()
            returned = time.perf_counter()
            torch.cuda.synchronize()
            drained = time.perf_counter()
            if not wait:
                origin += base.elapsed_time(updated) / 1e3
            if repeat >= 0:
                (after if wait else at_once).append(1e3 * (returned - origin))
                outstanding.append((drained - origin) * d2h * 1e9)
    return {
        "at_once_ms": median(at_once),
        "at_once_ms_worst": max(at_once),
        "after_update_ms": median(after),
        "after_update_ms_worst": max(after),
        "outstanding": min(outstanding),
    }


def item_latency_unpaced(nbytes: int, repeats: int) -> float:
    """Milliseconds an ``item()`` takes behind ``nbytes`` of copies to the host queued at once."""
    host, scalar = PinnedBlock(1 << 30), torch.ones(1, device=DEVICE)
    device = torch.zeros(1 << 30, dtype=torch.uint8, device=DEVICE)
    stream, chunk, times = torch.cuda.Stream(), 32 << 20, []
    for _ in range(repeats):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for first in range(0, nbytes, chunk):
                piece = slice(first % (1 << 30), first % (1 << 30) + chunk)
                host.tensor[piece].copy_(device[piece], non_blocking=True)
        start = time.perf_counter()
        scalar.item()
        times.append(1e3 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    host.close()
    return median(times)


def unsynchronised(optimizer: Optimizer, tokens: Tensor, steps: int) -> dict[str, Any]:
    """What torch's check for hidden waits says of ``step()`` and of a whole training step.

    ``allocations`` is how many ``steps`` calls of ``step()`` make on the device.
    """
    result: dict[str, Any] = {}
    allocations = 0
    for _ in range(steps):
        optimizer.zero_grad()
        optimizer.backward(optimizer.forward(tokens))
        before = torch.cuda.memory_stats().get("allocation.all.allocated", 0)
        result["step"] = result.get("step") or _waits(optimizer.step)
        allocations += torch.cuda.memory_stats().get("allocation.all.allocated", 0) - before
    for _ in range(steps):
        result["training"] = result.get("training") or _waits(lambda: train(optimizer, tokens))
    torch.cuda.synchronize()
    return {**result, "allocations": allocations}


def _waits(call: Callable[[], Any]) -> str:
    """What torch says if ``call`` waits for the device; empty where it does not."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def rss() -> int:
    """Bytes of host memory that belong to this process."""
    return psutil.Process().memory_info().rss


def host_used() -> int:
    """Bytes of host memory in use on this machine: also what a driver holds for a process."""
    memory = psutil.virtual_memory()
    return memory.total - memory.available


def collect() -> None:
    """Give back what nothing refers to any more, on both sides."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _check(status: Any) -> None:
    if int(status) != 0:
        raise RuntimeError(f"the CUDA runtime refused host memory: error {int(status)}")
