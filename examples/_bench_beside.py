"""Work on the GPU alone, and beside an optimizer's steps that run throughout.

Note [covered]
    The steps are queued on a stream of their own, by the host, before the work is. So from the
    start of the work they run one behind the other until the last one's updates end, whatever the
    host does, and the share of the work up to there was covered. Where that is not all of it, more
    steps are queued and the sample is taken again.

Note [a step beside]
    The other way round: one step, begun while the work runs, with more work queued behind it until
    all of the step was beside work. A host that is late with that work gives the step a pause to
    itself, which is why slowdown is measured the first way.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

MOST_STEPS = 12
MOST_WORK = 40
LIKELY = 1.25  # times the work's time alone: what the first try covers


@dataclass(frozen=True)
class Work:
    """What the GPU is busy with.

    Attributes:
        name: what one of it is, for tables.
        run: queues it on the current stream.
        count: how many are in one ``run``; times are of one.
    """

    name: str
    run: Callable[[], object]
    count: int = 1


class Clock(Protocol):
    """Marks on the stream of the work and on that of the steps, and the host's time."""

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        """What is queued within is queued beside the work."""

    def mark(self) -> Any:
        """A mark at the present end of the current stream."""

    def ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two marks that were passed; negative for one that was later."""

    def now(self) -> float:
        """The host's time in milliseconds."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""


class CudaClock:
    """The clock of a CUDA device. Neither stream waits for the other."""

    def __init__(self) -> None:
        self._side = torch.cuda.Stream()

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._side)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end)

    def now(self) -> float:
        return 1e3 * time.perf_counter()

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def beside(work: Work, step: Callable[[], object], clock: Clock, *, repeats: int) -> dict[str, Any]:
    """Times of ``work`` and of ``step`` in milliseconds, each alone and beside the other.

    ``covered`` is the least share of the work that had a step running beside it in any sample;
    ``step_beside_ms`` is ``None`` where no amount of work covered a step.
    """
    _step_alone(step, clock)  # kernels are loaded, memory is taken, the device's clocks settle
    _work_alone(work, clock)
    works, found = [_work_alone(work, clock)], [_step_alone(step, clock) for _ in range(2)]
    step_alone, returned = (statistics.median(column) for column in zip(*found, strict=True))
    steps = steps_to_cover(works[0], step_alone, returned)
    spans: list[tuple[float, float]] = []
    while len(spans) < repeats:
        span = _work_beside(work, step, clock, steps)
        if span[1] < 1 and steps < MOST_STEPS:
            steps += 1
            continue
        spans.append(span)
        works.append(_work_alone(work, clock))
    alone = statistics.median(works)
    slowed = statistics.median(ms for ms, _ in spans)
    times: list[float] = []
    behind = min(MOST_WORK, max(1, math.ceil(step_alone / slowed)))
    while len(times) < min(2, repeats) and behind <= MOST_WORK:
        ms, enough = _step_beside(work, step, clock, behind)
        if enough:
            times.append(ms)
        else:
            behind += 1
    return {
        "alone_ms": alone / work.count,
        "beside_ms": slowed / work.count,
        "slowdown": slowed / alone - 1,
        "covered": min(share for _, share in spans),
        "steps": steps,
        "step_alone_ms": step_alone,
        "step_beside_ms": statistics.median(times) if times else None,
    }


def steps_to_cover(work_ms: float, step_ms: float, returned_ms: float) -> int:
    """How many steps to queue before work of ``work_ms``: queueing one takes ``returned_ms``."""
    if step_ms <= returned_ms:  # each has ended before the next is queued
        return MOST_STEPS
    return max(1, min(MOST_STEPS, math.ceil(LIKELY * work_ms / (step_ms - returned_ms))))


def _work_alone(work: Work, clock: Clock) -> float:
    clock.synchronize()
    start = clock.mark()
    work.run()
    end = clock.mark()
    clock.synchronize()
    return clock.ms(start, end)


def _step_alone(step: Callable[[], object], clock: Clock) -> tuple[float, float]:
    """Until its last update, and until the host may go on."""
    clock.synchronize()
    begun = clock.now()
    with clock.aside():
        start = clock.mark()
        step()
        end = clock.mark()
    returned = clock.now() - begun
    clock.synchronize()
    return clock.ms(start, end), returned


def _work_beside(
    work: Work, step: Callable[[], object], clock: Clock, steps: int
) -> tuple[float, float]:
    """Its time and the share of it that was covered: Note [covered]."""
    clock.synchronize()
    with clock.aside():
        for _ in range(steps):
            step()
        last = clock.mark()
    start = clock.mark()
    work.run()
    end = clock.mark()
    clock.synchronize()
    ms = clock.ms(start, end)
    return ms, min(1.0, max(0.0, clock.ms(start, last) / ms))


def _step_beside(
    work: Work, step: Callable[[], object], clock: Clock, behind: int
) -> tuple[float, bool]:
    """Its time, and whether there was work beside all of it: Note [a step beside]."""
    clock.synchronize()
    work.run()
    with clock.aside():
        start = clock.mark()
        step()
        end = clock.mark()
    for _ in range(behind):
        work.run()
    idle = clock.mark()
    clock.synchronize()
    return clock.ms(start, end), clock.ms(end, idle) >= 0
