"""A frame: one look at processes, GPUs and host, with rates from the looks before.

Note [rates]
    A page counts at each step and says when that was. So a rate is what was counted between the
    last steps of two looks, over the time between these steps: exact however long a step takes and
    however often one looks. It holds until the next step, and falls to zero once that is overdue.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ghoffload.memory.neighbours import Published
from ghoffload.memory.page_format import Counters
from ghoffload.watch.gpus import GpuNow

_OVERDUE_STEPS = 5


@dataclass(frozen=True)
class Rates:
    """What a process does a second; bytes for the directions of the link."""

    steps: float = 0.0
    parameters: float = 0.0
    h2d: float = 0.0
    d2h: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ProcessNow:
    """A process at one moment.

    Attributes:
        page: what it says of itself.
        rates: see there; ``None`` before its second step was seen.
        idle: seconds since its last step, if one is overdue.
        hbm: bytes of HBM that it holds by NVML, torch's included; ``None`` if NVML does not say.
    """

    page: Published
    rates: Rates | None
    idle: float | None
    hbm: int | None

    def held(self, kind: str) -> int:
        """Bytes of a memory kind that the runtime holds in it."""
        return sum(row.nbytes for row in self.page.held if row.kind == kind)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One look; ``host_available`` in bytes, ``None`` if unknown."""

    processes: tuple[ProcessNow, ...]
    gpus: tuple[GpuNow, ...]
    host_available: int | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, in bytes and seconds."""
        return {
            "processes": [_process(process) for process in self.processes],
            "gpus": [dataclasses.asdict(gpu) for gpu in self.gpus],
            "host_available": self.host_available,
        }


class History:
    """The last counters of each process, from which the next rates come: Note [rates]."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], tuple[Counters, Rates | None]] = {}

    def look(
        self, pages: Sequence[Published], gpus: Sequence[GpuNow], *, now: float
    ) -> tuple[ProcessNow, ...]:
        """The processes with their rates; those that are gone are forgotten.

        Args:
            pages: what they say.
            gpus: for their HBM.
            now: ``time.monotonic()`` of this look.
        """
        before, self._last = self._last, {}
        found = []
        for page in pages:
            key, counters = (page.pid, page.started), page.counters
            old, rates = before.get(key, (counters, None))
            if counters.at > old.at > 0:
                rates = _between(old, counters)
            self._last[key] = (counters, rates)
            idle = now - counters.at if counters.steps else None
            expected = _expected_seconds(rates, counters)
            if idle is not None and expected is not None and idle <= _OVERDUE_STEPS * expected + 1:
                idle = None
            elif rates is not None:
                rates = Rates()
            hbm = [gpu.processes[page.pid] for gpu in gpus if page.pid in gpu.processes]
            found.append(
                ProcessNow(page=page, rates=rates, idle=idle, hbm=sum(hbm) if hbm else None)
            )
        return tuple(found)


def _between(old: Counters, new: Counters) -> Rates:
    seconds = new.at - old.at
    return Rates(
        steps=(new.steps - old.steps) / seconds,
        parameters=(new.parameters - old.parameters) / seconds,
        h2d=(new.h2d_bytes - old.h2d_bytes) / seconds,
        d2h=(new.d2h_bytes - old.d2h_bytes) / seconds,
    )


def _expected_seconds(rates: Rates | None, counters: Counters) -> float | None:
    """Between steps."""
    if rates is not None and rates.steps:
        return max(1 / rates.steps, counters.step_ns * 1e-9)
    return counters.step_ns * 1e-9 if counters.step_ns else None


def _process(process: ProcessNow) -> dict[str, Any]:
    page = process.page
    return {
        "pid": page.pid,
        "command": page.command,
        "devices": [{"name": name, "bus_id": bus_id} for name, bus_id in page.devices],
        "held": [row._asdict() for row in page.held],
        "claims": [claim._asdict() for claim in page.claims],
        "counters": page.counters._asdict(),
        "rates": None if process.rates is None else dataclasses.asdict(process.rates),
        "idle": process.idle,
        "hbm": process.hbm,
    }
