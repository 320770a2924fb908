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


class Usage:
    """Readings of one pass.

    Attributes:
        saved: bytes needed from when a number was saved to the next hook that notes anything.
        served: the same from when it was asked for.
    """

    def __init__(self, mover: Mover) -> None:
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
