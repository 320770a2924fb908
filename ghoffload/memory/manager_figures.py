"""Figures of a tensor manager, by memory kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KindStatistics:
    """Figures of one memory kind.

    Attributes:
        in_use: bytes of living tensors, as they were asked for.
        peak: the most that ``in_use`` ever was.
        reserved: bytes held from the system; for ``"device"``, ``in_use`` (torch holds the rest).
        allocations: living tensors.
        total_allocations: tensors made so far.
        largest_free: bytes of the largest range that is free within ``reserved``.
        budget: the most that ``reserved`` may be; ``None`` for no limit but the system's.
    """

    in_use: int
    peak: int
    reserved: int
    allocations: int
    total_allocations: int
    largest_free: int
    budget: int | None


@dataclass
class Counts:
    """What is counted as tensors come and go."""

    in_use: int = 0
    peak: int = 0
    allocations: int = 0
    total_allocations: int = 0

    def add(self, nbytes: int) -> None:
        """A tensor was made."""
        self.in_use += nbytes
        self.peak = max(self.peak, self.in_use)
        self.allocations += 1
        self.total_allocations += 1

    def remove(self, nbytes: int) -> None:
        """A tensor died."""
        self.in_use -= nbytes
        self.allocations -= 1

    def figures(self, reserved: int, largest_free: int, budget: int | None) -> KindStatistics:
        """All of it, frozen."""
        return KindStatistics(
            in_use=self.in_use,
            peak=self.peak,
            reserved=reserved,
            allocations=self.allocations,
            total_allocations=self.total_allocations,
            largest_free=largest_free,
            budget=budget,
        )
