"""One run: group after group, each of which may be left out or fail without ending the others."""

from __future__ import annotations

import datetime
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ghoffload._version import __version__
from ghoffload.bandwidth import host
from ghoffload.bandwidth.plan import Plan, make_plan
from ghoffload.bandwidth.results import Results, Row
from ghoffload.errors import PinWarning
from ghoffload.kernels import bandwidth as kernels
from ghoffload.kernels import bandwidth_host, cuda
from ghoffload.machine.topology import cpu_count, unusable_gpu
from ghoffload.memory import HostArena, available_host_bytes, carved_bytes

Say = Callable[[str], None]
_OWNER = "ghoffload bandwidth"


class Runner:
    """Collects rows and goes on where a group cannot be measured."""

    def __init__(self, say: Say) -> None:
        self.results = Results()
        self._say = say

    def group(self, name: str, rows: Iterator[Row]) -> None:
        """Take a group's rows; an error ends the group and is kept as a failure."""
        self._say(name)
        with self.kept_going(name):
            for row in rows:
                self.results.rows.append(row)

    @contextmanager
    def kept_going(self, name: str) -> Iterator[None]:
        """An error within becomes a failure of ``name``: what was measured is not lost with it."""
        try:
            yield
        except (RuntimeError, OSError, ValueError, MemoryError) as error:
            self.results.failures.append(f"{name}: {' '.join(str(error).split())}")

    def left_out(self, name: str, reason: str) -> None:
        """Note a group that this machine has nothing for."""
        self.results.notes.append(f"{name}: left out, {reason}")


def measure(*, quick: bool, device: int | None, say: Say) -> Results:
    """Measure this machine.

    Args:
        quick: fewer sizes, counts and samples.
        device: CUDA device index; ``None`` measures host memory alone.
        say: told what is being measured.
    """
    start = time.perf_counter()
    runner = Runner(say)
    runner.results.environment = environment(device)
    hbm_free, hbm_total = (0, 0) if device is None else torch.cuda.mem_get_info(device)
    plan = make_plan(
        quick=quick,
        cpus=cpu_count(),
        host_free=available_host_bytes(),
        hbm_free=hbm_free,
        hbm_total=hbm_total,
    )
    say("compiling")
    bandwidth_host.prepare()
    runner.group("host memory", host.measure(plan))
    if device is not None:
        with runner.kept_going("the device"):
            _measure_device(runner, plan, device)
    runner.results.seconds = round(time.perf_counter() - start, 1)
    return runner.results


def no_gpu_sentence() -> str:
    """Why only host memory is measured here."""
    reason = unusable_gpu()
    if reason is not None:
        return f"Only host memory was measured: {reason}."
    return "Only host memory was measured: no CUDA GPU was found on this machine."


def environment(device: int | None) -> dict[str, Any]:
    """What the figures belong to."""
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "ghoffload": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": cpu_count(),
        "host_bytes": _host_bytes(),
        "gpu": None,
    }
    if device is None:
        return found
    properties = torch.cuda.get_device_properties(device)
    return found | {
        "gpu": properties.name,
        "device": device,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "hbm_bytes": properties.total_memory,
        "cuda_of_torch": torch.version.cuda,
    }


def _host_bytes() -> int | None:
    try:
        import psutil

        return int(psutil.virtual_memory().total)
    except Exception:  # a figure for the report is not worth a crash
        return None


def _measure_device(runner: Runner, plan: Plan, index: int) -> None:
    from ghoffload.bandwidth.device import hbm, latencies
    from ghoffload.bandwidth.link import Bench, by_engine, by_kernel, pageable
    from ghoffload.bandwidth.managed import Driver, managed, system
    from ghoffload.machine.cuda import CudaMachine
    from ghoffload.measure.clock import DeviceClock
    from ghoffload.measure.link import kernels_for
    from ghoffload.measure.raw import Raw

    torch.cuda.set_device(index)  # managed.Driver calls on the current context
    machine = CudaMachine.of(index)
    cuda.preload(index, (kernels.SOURCE,))
    runnable = kernels_for(torch.cuda.get_device_capability(index))
    if "bulk" not in runnable:
        runner.left_out("bulk-copy kernel", "it needs compute capability 9.0 or later")
    clock = DeviceClock(machine)
    buffers = machine.empty((2, plan.buffer_bytes), torch.uint8)
    try:
        bench = Bench(
            clock=clock,
            raw=Raw(machine),
            plan=plan,
            hbm=(buffers[0], buffers[1]),
            kernels=runnable,
        )
        runner.group("HBM", hbm(bench))
        with _pinned(machine, plan.buffer_bytes) as pair:
            runner.group("latency", latencies(bench, pair[0] if pair else None))
            if pair:
                addresses = [tensor.data_ptr() for tensor in pair]
                runner.group("pinned memory by copy engine", by_engine(bench, addresses, "pinned"))
                runner.group(
                    "pinned memory by kernel",
                    by_kernel(bench, addresses, plan.kernel_bytes, "pinned"),
                )
            else:
                runner.left_out("pinned memory", "this system lets no memory be pinned")
        runner.group("pageable memory", pageable(bench))
        driver = Driver(index)
        if not driver.attribute("CONCURRENT_MANAGED_ACCESS"):
            runner.left_out("managed memory", "ConcurrentManagedAccess is 0 here")
        elif plan.managed_bytes < 1 << 20:
            runner.left_out("managed memory", "there is too little room for it")
        else:
            runner.group("managed memory", managed(bench, driver))
        if not driver.attribute("PAGEABLE_MEMORY_ACCESS"):
            runner.left_out("system memory", "PageableMemoryAccess is 0 here")
        elif plan.managed_bytes < 1 << 20:
            runner.left_out("system memory", "there is too little room for it")
        else:
            runner.group("system memory", system(bench, driver))
        runner.results.exposed = clock.exposed
    finally:
        clock.close()
        machine.free(buffers)


@contextmanager
def _pinned(machine: Any, nbytes: int) -> Iterator[list[torch.Tensor]]:
    """Two pinned buffers; an empty list where pinning is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PinWarning)  # it becomes a note
        size = carved_bytes([(nbytes, torch.uint8)] * 2)
        arena = HostArena(size, machine=machine, owner=_OWNER)
    try:
        yield [arena.carve(nbytes, torch.uint8) for _ in range(2)] if arena.pinned else []
    finally:
        machine.synchronize_all()
        arena.close()
