"""Results: medians with their spread, and how to find one among them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ghoffload.measure.link import FILLS

GB_PER_S = "GB/s"
MICROSECONDS = "us"

_KEYS = ("what", "memory", "direction", "by", "nbytes", "blocks", "threads")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure.

    Attributes:
        what: the group: ``copy``, ``prefetch``, ``hbm``, ``host`` or ``latency``.
        memory: memory kind of the host's side: ``pinned``, ``pageable``, ``managed``, ``system``;
            empty where there is none.
        direction: ``h2d``, ``d2h``, ``both``; for other groups the name of the pass or call.
        by: ``engine``, ``words`` (a load and store kernel), ``bulk`` (a kernel of bulk copies),
            ``driver``, ``cpu``; for latencies the side that it is seen from.
        nbytes: bytes of one copy, in one direction; 0 where it does not matter.
        blocks: blocks (CTAs) of the kernel, else 0.
        threads: CPU threads, else 0.
        value: the median of the samples.
        unit: ``GB/s`` (decimal; of both directions together) or ``us``.
        low: the least sample.
        high: the greatest.
        samples: how many.
    """

    what: str
    memory: str = ""
    direction: str
    by: str
    nbytes: int = 0
    blocks: int = 0
    threads: int = 0
    value: float
    unit: str
    low: float
    high: float
    samples: int


def rate(seconds: Sequence[float], moved: int, **keys: Any) -> Row:
    """A row in GB/s from how long ``moved`` bytes, all of a sample's, took in each sample."""
    return _row([moved / s / 1e9 for s in seconds], GB_PER_S, keys)


def latency(seconds: Sequence[float], **keys: Any) -> Row:
    """A row in microseconds."""
    return _row([s * 1e6 for s in seconds], MICROSECONDS, keys)


def _row(values: Sequence[float], unit: str, keys: dict[str, Any]) -> Row:
    if not values:
        raise ValueError("expected one sample or more, got none")
    return Row(
        **keys,
        value=statistics.median(values),
        unit=unit,
        low=min(values),
        high=max(values),
        samples=len(values),
    )


@dataclass
class Results:
    """Everything one run found out.

    Attributes:
        environment: machine, versions and date.
        rows: the figures.
        notes: sentences: what was left out and why.
        failures: sentences: what went wrong.
        exposed: samples that the host was too slow for: they contain the cost of launching.
        seconds: how long it all took.
    """

    environment: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    exposed: int = 0
    seconds: float = 0.0

    def select(self, **keys: Any) -> list[Row]:
        """The rows that have these values, in the order they were measured."""
        for key in keys:
            if key not in _KEYS:
                raise ValueError(f"expected one of {', '.join(_KEYS)}, got {key!r}")
        return [r for r in self.rows if all(getattr(r, k) == v for k, v in keys.items())]

    def to_json(self) -> dict[str, Any]:
        """What ``--json`` writes."""
        return {**asdict(self), "rows": [asdict(row) for row in self.rows]}


def best(rows: Iterable[Row]) -> Row | None:
    """The row with the highest value; ``None`` of none."""
    return max(rows, key=lambda row: row.value, default=None)


def largest(rows: Iterable[Row]) -> Row | None:
    """The row of the largest copy; ``None`` of none."""
    return max(rows, key=lambda row: row.nbytes, default=None)


def fewest_blocks(rows: Sequence[Row], share: float = FILLS) -> Row | None:
    """Of rows that differ in blocks, the one with the fewest that still reaches ``share``."""
    top = best(rows)
    if top is None:
        return None
    return min((r for r in rows if r.value >= share * top.value), key=lambda row: row.blocks)
