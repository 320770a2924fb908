"""A short measurement of one device's link.

Note [rounds]
    What is compared must be measured side by side: hosts are shared, and their noise comes in
    waves. So all figures are taken in turn, round after round, and each is the median of its
    rounds. The first rounds only wake the link and are not counted.

Note [no trace]
    Streams of its own, HBM from the driver and not from torch's allocator, copies that no machine
    counts. Giving pinned memory back waits for the device once, at the end.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ghoffload.kernels import bandwidth, cuda
from ghoffload.kernels.build import read_source, source_directory
from ghoffload.kernels.cache import digest
from ghoffload.machine.cuda import CudaMachine, CudaStream
from ghoffload.machine.managed import Driver
from ghoffload.measure import link
from ghoffload.measure.clock import DeviceClock, Work
from ghoffload.measure.link import Ends
from ghoffload.measure.rates import KernelRate, Rates
from ghoffload.measure.raw import Raw
from ghoffload.memory import state_arena

COPY_BYTES = 64 << 20
"""Bytes of one copy in one direction; two buffers of it on either side are all that is taken."""

_OWNER = "measuring the link"
_ROUNDS = 5
_WARM_SECONDS = 0.03
_IMPLAUSIBLE = 1.5  # times the best rate of pinned memory: then it was not the link
_LOAD_SECONDS = 0.15
_ASSUMED = 50e9  # bytes a second, to tell how many copies that time takes
_MOST_COPIES = 2000

_T = TypeVar("_T")


def source_digest() -> str:
    """What stands for the kernels in a measurement's name.

    Raises:
        KernelBuildError: the sources are not there.
    """
    return digest(read_source(source_directory() / f"{bandwidth.SOURCE}.cu"))


@dataclass
class _Job:
    """One figure to be: ``name`` and, of a kernel, its blocks."""

    name: str
    work: Work
    moved: int
    lanes: int = 1
    blocks: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.moved / statistics.median(self.seconds)


def measure(machine: CudaMachine) -> Rates:
    """Measure now: 0.3 s over PCIe 5, on at most 135 MB of pinned memory and as much of HBM.

    What does not fit, is refused or fails gives fewer figures: ``Rates.left_out`` has the reason.

    Raises:
        KernelBuildError: the kernels could not be built or loaded.
        RuntimeError: the device is in no state to measure anything.
    """
    index = int(machine.device.index)
    cuda.preload(index, (bandwidth.SOURCE,))
    raw, left_out = Raw(machine), list[str]()
    figures: dict[str, Any] = {"pinned_bytes": 0}
    with _lanes(machine) as streams:
        jobs: list[_Job] = []
        with ExitStack() as held:
            clock = DeviceClock(machine, streams=streams, cold=False)
            hbm = _hbm(raw, held, left_out)
            for kind in ("pinned", "managed", "system"):
                if kind not in machine.memory_kinds:
                    continue
                host = _host(machine, kind, held, figures, left_out)
                if host is not None:
                    jobs += _kernel_jobs(machine, kind, host)
                    if kind == "pinned" and hbm is not None:
                        jobs += _engine_jobs(raw, Ends(hbm=hbm, host=host))
            if hbm is not None:
                jobs.append(_hbm_job(machine, hbm))
            jobs = _timed(clock, jobs, left_out)
    for job in jobs:
        if not job.blocks:
            figures[job.name] = job.rate
    for kind in ("pinned", "managed", "system"):
        tried = [job for job in jobs if job.name == kind]
        if tried:
            figures[kind] = _fewest(tried)
    return _plausible(
        Rates(
            uuid=raw.uuid(),
            driver=raw.driver_version(),
            source=source_digest(),
            measured=time.time(),
            left_out=tuple(left_out),
            **figures,
        )
    )


def under_load(machine: CudaMachine, during: Callable[[], _T], *, rate: float | None = None) -> _T:
    """What ``during`` returns, called while pinned copies in both directions are in flight.

    An idle link may have been slowed to save power, so whoever wants to judge it looks at it then.

    Args:
        machine: of the device whose link is to be busy, for 0.15 s or until ``during`` returns.
        during: called once.
        rate: bytes a second of one direction, as far as it is known.

    Raises:
        torch.OutOfMemoryError: there is no room for the buffers.
    """
    raw, notes = Raw(machine), list[str]()
    with _lanes(machine) as streams, ExitStack() as held:
        hbm = _hbm(raw, held, notes)  # given back last, after what uses it
        host = _host(machine, "pinned", held, {}, notes)
        if notes:
            raise torch.OutOfMemoryError("; ".join(notes))
        if hbm is None or host is None:
            return during()  # no pin: a copy from pageable memory would block this thread
        work = link.by_engine(raw, Ends(hbm=hbm, host=host), "both", COPY_BYTES)
        copies = int(_LOAD_SECONDS * (rate or _ASSUMED) / COPY_BYTES)
        for _ in range(max(1, min(_MOST_COPIES, copies))):
            work(streams)
        return during()


@contextmanager
def _lanes(machine: CudaMachine) -> Iterator[tuple[CudaStream, CudaStream]]:
    """Two streams of our own, with the first as torch's current one, behind the caller's work.

    The host waits until that is done: beside it nothing could be measured.
    """
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(machine.device))
    done.synchronize()
    first, second = (torch.cuda.Stream(machine.device) for _ in range(2))
    with torch.cuda.stream(first):  # managed memory is placed on the current stream
        yield CudaStream("measuring", first), CudaStream("measuring too", second)


def _hbm(raw: Raw, held: ExitStack, left_out: list[str]) -> tuple[int, int] | None:
    try:
        address = raw.allocate(2 * COPY_BYTES)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        left_out.append(f"copies by engine: {_said(error)}")
        return None
    held.callback(raw.free, address)
    return address, address + COPY_BYTES


def _host(
    machine: CudaMachine, kind: str, held: ExitStack, figures: dict[str, Any], left_out: list[str]
) -> tuple[int, int] | None:
    """Two buffers of host memory, as an optimizer's state would be in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a refused pin becomes a figure; nodes are the doctor's
        try:
            arena = state_arena(kind, 2 * COPY_BYTES, machine=machine, owner=_OWNER)
        except (RuntimeError, OSError, ValueError) as error:
            left_out.append(f"{kind} memory: {_said(error)}")
            return None
    held.callback(arena.close)
    if kind == "pinned":
        if arena.kind != "pinned":
            figures["pin_refusal"] = machine.pin_refusal or "no reason given"
            return None
        figures["pinned_bytes"] = arena.nbytes
    if kind == "system":
        try:
            Driver.of(machine).stay_on_host(arena.address, arena.nbytes)
        except RuntimeError:
            pass  # where it then lies is looked at by _plausible
    return arena.address, arena.address + COPY_BYTES


def _engine_jobs(raw: Raw, ends: Ends) -> Iterator[_Job]:
    for direction in link.DIRECTIONS:
        count = link.lanes(direction)
        work = link.by_engine(raw, ends, direction, COPY_BYTES)
        yield _Job(direction, work, COPY_BYTES * count, lanes=count)


def _kernel_jobs(machine: CudaMachine, kind: str, host: tuple[int, int]) -> Iterator[_Job]:
    kernel = link.kernels_for(torch.cuda.get_device_capability(machine.device))[-1]
    ends = Ends(hbm=(0, 0), host=host)  # both ways: HBM has no part in it
    for blocks in link.BLOCKS:
        work = link.by_kernel(
            ends,
            "both",
            COPY_BYTES,
            kernel=kernel,
            blocks=blocks,
            device=int(machine.device.index),
        )
        yield _Job(kind, work, 2 * COPY_BYTES, blocks=blocks)


def _hbm_job(machine: CudaMachine, hbm: tuple[int, int]) -> _Job:
    count = torch.cuda.get_device_properties(machine.device).multi_processor_count
    work = link.by_kernel(
        Ends(hbm=hbm, host=hbm),
        "both",
        COPY_BYTES,
        kernel="words",
        blocks=link.BLOCKS_PER_SM * count,
        device=int(machine.device.index),
    )
    return _Job("hbm", work, 2 * COPY_BYTES)


def _timed(clock: DeviceClock, jobs: list[_Job], left_out: list[str]) -> list[_Job]:
    """The jobs with their samples: Note [rounds]. One that fails takes its namesakes with it."""
    warm = time.perf_counter() + _WARM_SECONDS
    rounds = -1
    while jobs and rounds < _ROUNDS:
        for job in list(jobs):
            if job not in jobs:
                continue
            try:
                seconds = clock.seconds(job.work, calls=job.lanes, lanes=job.lanes)
            except RuntimeError as error:
                left_out.append(f"{job.name}: {_said(error)}")
                jobs = [other for other in jobs if other.name != job.name]
                continue
            if rounds >= 0:
                job.seconds.append(seconds)
        if rounds >= 0 or time.perf_counter() >= warm:
            rounds += 1
    return jobs


def _fewest(jobs: list[_Job]) -> KernelRate:
    top = max(job.rate for job in jobs)
    job = min((j for j in jobs if j.rate >= link.FILLS * top), key=lambda j: j.blocks)
    return KernelRate(rate=job.rate, ctas=job.blocks)


def _plausible(rates: Rates) -> Rates:
    """Without what cannot have crossed the link.

    Pages of ordinary memory may move to HBM when a kernel touches them, and the figure is HBM's.
    """
    known = [x for x in (rates.both, rates.pinned and rates.pinned.rate) if x]
    kept: dict[str, Any] = {"managed": rates.managed, "system": rates.system}
    notes = list(rates.notes)
    for kind, found in kept.items():
        if found is not None and known and found.rate > _IMPLAUSIBLE * max(known):
            notes.append(
                f"{kind} memory: its pages moved to HBM ({found.rate / 1e9:,.0f} GB/s is more than "
                "the link carries)"
            )
            kept[kind] = None
    return dataclasses.replace(rates, notes=tuple(notes), **kept)


def _said(error: BaseException) -> str:
    return " ".join(str(error).split())
