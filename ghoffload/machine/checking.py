"""Checking mode: an access that nothing orders after an earlier one is an error that names both.

Values alone cannot show a side stream that failed to wait for compute, because compute is eager on
the virtual machine. So every operation carries a vector clock (see clocks.py), and each access is
compared with what other threads did to the same bytes.
"""

from __future__ import annotations

from torch import Tensor

from ..errors import OrderingError
from .clocks import HOST, Access, Clock, join, joined
from .virtual_memory import Memory, Region
from .virtual_queue import VirtualEvent, VirtualStream, extent


class Checker:
    """The clocks of a machine's threads, and the verdict on each access."""

    def __init__(self, streams: list[VirtualStream]) -> None:
        self._streams = streams  # the machine's own list: it grows
        self.host: Clock = {HOST: 1}

    def issue(self, stream: VirtualStream) -> Clock:
        """The clock of an operation that the host queues on ``stream`` now."""
        join(stream.clock, self.host)
        stream.clock[stream.thread] = stream.clock.get(stream.thread, 0) + 1
        return stream.clock

    def issue_on_host(self) -> Clock:
        """The clock of something the host does itself now."""
        self.host[HOST] += 1
        return self.host

    def record(self, event: VirtualEvent, stream: VirtualStream) -> None:
        event.clock = dict(self.issue(stream))

    def wait(self, stream: VirtualStream, event: VirtualEvent) -> None:
        join(self.issue(stream), event.clock)

    def synchronize(self, clock: Clock) -> None:
        join(self.host, clock)

    def access(
        self, memory: Memory, region: Region, tensor: Tensor, clock: Clock, by: Access
    ) -> None:
        """Enter an access of ``tensor``, made at ``clock``.

        Raises:
            OrderingError: an earlier access of the same bytes is not before ``clock``, or the
                memory was given back.
        """
        if region.freed:
            raise OrderingError(
                f"{self._who(by)} {_verb(by)} a tensor of {_form(by)} "
                "after its memory was given back with free()"
            )
        start, end = extent(tensor)
        if start == end:
            return
        other = region.history.touch(start, end, by, clock)
        if other is not None:
            raise OrderingError(
                f"{self._who(by)} {_verb(by)} a tensor of {_form(by)}, and nothing orders it "
                f"after {self._who(other)}, which {_verb(other)} it as {_form(other)}: "
                "a wait is missing between the two"
            )
        if by.thread not in (region.home, HOST) and not region.arena:
            memory.watched[region] = None

    def died(self, region: Region) -> None:
        """The storage of ``region`` is gone: was everything done with it?

        Raises:
            OrderingError: the memory could be handed out again while an operation still uses it.
        """
        other = self._in_use(region)
        if other is not None and not region.freed:
            raise OrderingError(
                f"a tensor of {_form(other)} was freed while {self._who(other)}, which "
                f"{_verb(other)} it, may still be running: the allocator would hand its memory out "
                f"again. Hold the tensor until {self._name(region.home)} has waited for that, or "
                "call record_stream"
            )

    def unused(self, region: Region, by: str) -> None:
        """Check that nothing in flight uses ``region``, which ``by`` gives back.

        Raises:
            OrderingError: something does.
        """
        other = self._in_use(region)
        if other is not None:
            raise OrderingError(
                f"{by} gives back memory while {self._who(other)}, which {_verb(other)} it as a "
                f"tensor of {_form(other)}, may still be running"
            )

    def _in_use(self, region: Region) -> Access | None:
        home = self.host
        if region.home != HOST:  # the next owner's first operation comes after both
            home = joined(self.host, self._streams[region.home - 1].clock)
        for access in region.history.unordered(home):
            if access.time > region.recorded.get(access.thread, 0):
                return access
        return None

    def _name(self, thread: int) -> str:
        return "the host" if thread == HOST else f"stream {self._streams[thread - 1].name!r}"

    def _who(self, access: Access) -> str:
        return f"{access.name!r} on {self._name(access.thread)}"


def _verb(access: Access) -> str:
    return "writes" if access.writes else "reads"


def _form(access: Access) -> str:
    return f"shape {tuple(access.shape)} and {access.dtype}"
