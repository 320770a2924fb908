"""Extents: which ranges of a segment are free. Best fit, no size classes, neighbours joined."""

from __future__ import annotations

from bisect import bisect_left, insort


class Extents:
    """The free ranges of [0, nbytes), largest possible and disjoint. Not thread-safe.

    Args:
        nbytes: of the segment, free to begin with.
        alignment: of every range; sizes are rounded up to it.
    """

    def __init__(self, nbytes: int, alignment: int) -> None:
        if alignment < 1 or nbytes < 1 or nbytes % alignment:
            raise ValueError(
                f"expected a positive multiple of the alignment {alignment}, got {nbytes} bytes"
            )
        self.nbytes = nbytes
        self.alignment = alignment
        self.free_bytes = nbytes
        self._starts = [0]
        self._length = {0: nbytes}

    @property
    def whole(self) -> bool:
        """Whether everything is free."""
        return self.free_bytes == self.nbytes

    @property
    def largest(self) -> int:
        """Bytes of the largest free range."""
        return max(self._length.values(), default=0)

    def free_ranges(self) -> list[tuple[int, int]]:
        """(start, bytes) of every free range, by start."""
        return [(start, self._length[start]) for start in self._starts]

    def fit(self, nbytes: int) -> tuple[int, int] | None:
        """(bytes left over, start) of the smallest free range that holds ``nbytes``, if any."""
        size = self.rounded(nbytes)
        left = ((length - size, start) for start, length in self._length.items() if length >= size)
        return min(left, default=None)

    def take(self, start: int, nbytes: int) -> None:
        """Use ``nbytes`` at the beginning of the free range at ``start``."""
        size = self.rounded(nbytes)
        length = self._length.get(start, 0)
        assert size <= length, "a range that fit() named"
        del self._length[start]
        at = bisect_left(self._starts, start)
        if length == size:
            del self._starts[at]
        else:
            self._starts[at] = start + size
            self._length[start + size] = length - size
        self.free_bytes -= size

    def give(self, start: int, nbytes: int) -> None:
        """Free what ``take`` took, joining it with its free neighbours.

        Raises:
            AssertionError: some of it is free already: an internal error.
        """
        size = self.rounded(nbytes)
        end = start + size
        at = bisect_left(self._starts, start)
        before = self._starts[at - 1] if at else None
        after = self._starts[at] if at < len(self._starts) else None
        overlaps_before = before is not None and before + self._length[before] > start
        if overlaps_before or (after is not None and after < end) or end > self.nbytes:
            raise AssertionError(f"internal error: [{start:,}, {end:,}) is given back twice")
        self.free_bytes += size
        if after == end:
            size += self._length.pop(end)
            del self._starts[at]
        if before is not None and before + self._length[before] == start:
            self._length[before] += size
        else:
            self._length[start] = size
            insort(self._starts, start)

    def rounded(self, nbytes: int) -> int:
        """``nbytes`` as they are taken."""
        return -(-nbytes // self.alignment) * self.alignment
