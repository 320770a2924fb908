"""How much HBM a forward and backward need by themselves, beside what is on its way.

Note [between hooks]
    What is on its way changes in the hooks alone. So between two of them the peak, less what was on
    its way, is what the program needed: its temporaries and all that it still holds.
    Readings reset the machine's peak statistics, which on a GPU are torch's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ghoffload.activations.mover import Mover


def usage_of(mover: Mover) -> Usage | None:
    """Readings of a pass that begins; ``None`` where the machine has no statistics.

    torch has none of an allocator that was plugged in.
    """
    try:
        mover.machine.reset_peak()
    except RuntimeError:
        return None
    return Usage(mover)


def budget_left(budget: int, grown: int, before: int | None) -> int:
    """A budget for a program that was learned when ``grown`` fewer bytes were in use.

    Args:
        budget: bytes in HBM.
        grown: bytes that are in use at the beginning of a forward, beyond those when it was learned
            (an optimizer that has its state since, say).
        before: what this gave last; it holds where it is nearly as much.
    """
    left = budget - grown
    if before is not None and before <= left < before + max(budget // 64, 1):
        return before
    return left


class Usage:
    """Readings of one pass.

    Attributes:
        base: bytes in use when it began, beside what was on its way.
        saved: bytes needed from when a number was saved to the next hook that notes anything.
        served: the same from when it was asked for.
    """

    def __init__(self, mover: Mover) -> None:
        self.base = mover.in_use()
        self.saved: dict[int, int] = {}
        self.served: dict[int, int] = {}
        self._mover = mover
        self._now: tuple[dict[int, int], int] | None = None
        self._on_its_way = 0

    def pause(self) -> None:
        """A hook begins."""
        if self._now is not None:
            readings, index = self._now
            needed = max(self._mover.machine.memory_peak() - self._on_its_way, 0)
            readings[index] = max(readings.get(index, 0), needed)

    def save(self, index: int) -> None:
        """What follows is after this number was saved."""
        self._now = self.saved, index

    def serve(self, index: int) -> None:
        """What follows is after this number was asked for."""
        self._now = self.served, index

    def resume(self) -> None:
        """A hook ends."""
        self._on_its_way = self._mover.on_its_way()
        self._mover.machine.reset_peak()
