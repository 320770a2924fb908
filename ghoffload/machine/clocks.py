"""Vector clocks, and the history of accesses that they are compared with.

Note [order]
    Threads are the host (0) and the streams (1, 2, ...). A clock says how much of each thread lies
    before a point; an access with stamp (thread, time) lies before that point exactly if
    ``clock[thread] >= time``. Operations are stamped in the order they are issued, which every
    happens-before order agrees with, so comparing each access with the earlier ones finds every
    unordered pair, in whatever order the queues run.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

Clock = dict[int, int]
HOST = 0


def join(clock: Clock, other: Clock) -> None:
    """Everything before ``other`` is now before ``clock``, too."""
    for thread, time in other.items():
        if clock.get(thread, 0) < time:
            clock[thread] = time


def joined(*clocks: Clock) -> Clock:
    """A new clock that has everything before it that any of ``clocks`` has."""
    result: Clock = {}
    for clock in clocks:
        join(result, clock)
    return result


@dataclass(frozen=True, slots=True)
class Access:
    """One operation's use of one tensor: who, when, and what to call it in a message."""

    thread: int
    time: int
    name: str
    writes: bool
    shape: tuple[int, ...]
    dtype: torch.dtype

    def before(self, clock: Clock) -> bool:
        """Whether ``clock`` has this access behind it."""
        return clock.get(self.thread, 0) >= self.time


@dataclass(slots=True)
class Segment:
    """A byte range whose bytes were all used alike: the last write and the reads since."""

    start: int
    end: int
    write: Access | None
    reads: dict[int, Access] = field(default_factory=dict)

    def cut(self, start: int, end: int) -> Segment:
        return Segment(start, end, self.write, dict(self.reads))


class History:
    """Last write and later reads of every byte of a region, as sorted disjoint segments.

    An access that lies before a later one of at least its strength is forgotten: whoever is
    unordered with the former is unordered with the latter. So a segment holds at most one write
    and one read per thread.
    """

    __slots__ = ("segments", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.segments: list[Segment] = []

    def conflict(self, start: int, end: int, writes: bool, clock: Clock) -> Access | None:
        """An earlier access in [start, end) that an access at ``clock`` is unordered with."""
        first, last = self._overlapping(start, end)
        for segment in self.segments[first:last]:
            if segment.write is not None and not segment.write.before(clock):
                return segment.write
            if writes:
                for read in segment.reads.values():
                    if not read.before(clock):
                        return read
        return None

    def enter(self, start: int, end: int, access: Access, clock: Clock) -> None:
        """Note ``access`` of bytes [start, end), made at ``clock`` and without a conflict."""
        first, last = self._overlapping(start, end)
        self._replace(first, last, self._merged(start, end, access, clock, first, last))

    def _overlapping(self, start: int, end: int) -> tuple[int, int]:
        first = max(bisect_right(self.starts, start) - 1, 0)
        if first < len(self.segments) and self.segments[first].end <= start:
            first += 1
        return first, max(bisect_left(self.starts, end), first)

    def _merged(
        self, start: int, end: int, access: Access, clock: Clock, first: int, last: int
    ) -> list[Segment]:
        """What stands in place of segments [first, last) once ``access`` is entered."""
        old = self.segments[first:last]
        new: list[Segment] = []
        if old and old[0].start < start:
            new.append(old[0].cut(old[0].start, start))
        if access.writes:
            new.append(Segment(start, end, access))
        else:
            at = start
            for segment in old:
                if at < segment.start:
                    new.append(Segment(at, segment.start, None, {access.thread: access}))
                inner = segment.cut(max(start, segment.start), min(end, segment.end))
                inner.reads = {t: r for t, r in inner.reads.items() if not r.before(clock)}
                inner.reads[access.thread] = access
                new.append(inner)
                at = inner.end
            if at < end:
                new.append(Segment(at, end, None, {access.thread: access}))
        if old and end < old[-1].end:
            new.append(old[-1].cut(end, old[-1].end))
        return new

    def _replace(self, first: int, last: int, segments: list[Segment]) -> None:
        self.segments[first:last] = segments
        self.starts[first:last] = [segment.start for segment in segments]

    def absorb(self, other: History) -> None:
        """Take over the segments of another region, disjoint from ours."""
        merged = sorted((*self.segments, *other.segments), key=lambda segment: segment.start)
        self._replace(0, len(self.segments), merged)

    def unordered(self, clock: Clock) -> Iterator[Access]:
        """The accesses that ``clock`` does not have behind it."""
        for segment in self.segments:
            if segment.write is not None and not segment.write.before(clock):
                yield segment.write
            for read in segment.reads.values():
                if not read.before(clock):
                    yield read
