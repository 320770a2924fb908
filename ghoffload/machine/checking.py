"""Checking mode: an access that nothing orders after an earlier one is an error that names both.

Values alone cannot show a side stream that failed to wait for compute, because compute is eager on
the virtual machine. So every operation carries a vector clock (clocks.py), and each access is
compared with what other threads did to the same bytes.

Note [allocation]
    A caching allocator hands out memory whose last owner's work may still be running on the stream
    that allocates. So fresh memory counts as written on that stream when it is allocated, and a
    copy on another stream into it has to wait for that, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ghoffload.errors import OrderingError
from ghoffload.machine.clocks import HOST, Access, Clock, join, joined
from ghoffload.machine.virtual_memory import Memory, Region
from ghoffload.machine.virtual_queue import Queues, VirtualEvent, VirtualStream
from ghoffload.machine.virtual_refs import extent


class Checker:
    """The clocks of a machine's threads, and the verdict on each access.

    Attributes:
        reported: whether an error was found already; what follows from it is not worth another.
    """

    def __init__(self, queues: Queues, memory: Memory) -> None:
        self._queues = queues
        self._memory = memory
        self._host: Clock = {HOST: 1}
        self.reported = False

    def issue(self, stream: VirtualStream) -> Clock:
        """The clock of an operation that the host queues on ``stream`` now."""
        join(stream.clock, self._host)
        stream.clock[stream.thread] = stream.clock.get(stream.thread, 0) + 1
        return stream.clock

    def issue_on_host(self) -> Clock:
        """The clock of something the host does itself now."""
        self._host[HOST] += 1
        return self._host

    def record(self, event: VirtualEvent, stream: VirtualStream) -> None:
        event.clock = dict(self.issue(stream))

    def wait(self, stream: VirtualStream, event: VirtualEvent) -> None:
        join(self.issue(stream), event.clock)

    def synchronize(self, clock: Clock) -> None:
        """The host has waited for everything before ``clock``."""
        join(self._host, clock)

    def access(
        self,
        name: str,
        thread: int,
        clock: Clock,
        *,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> None:
        """Enter one operation's accesses, made by ``thread`` at ``clock``.

        Raises:
            OrderingError: an earlier access of the same bytes is not before ``clock``, or the
                memory was given back. Nothing is entered then.
        """
        home = self._queues.current.thread
        accesses = []
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in tensors:
                region = self._memory.region(tensor, home)
                start, end = extent(tensor) if region is not None else (0, 0)
                if region is None or start == end:
                    continue
                time = clock[thread]
                by = Access(thread, time, name, writing, tuple(tensor.shape), tensor.dtype)
                self._judge(region, start, end, clock, by)
                accesses.append((region, start, end, by))
        for region, start, end, by in accesses:
            region.history.enter(start, end, by, clock)
            if thread not in (region.home, HOST) and not region.arena:
                self._memory.watched[region] = None

    def died(self, region: Region) -> None:
        """The storage of ``region`` is gone: was everything done with it?

        Raises:
            OrderingError: the memory could be handed out again while an operation still uses it.
        """
        other = self._in_use(region)
        if other is not None:
            raise self.report(
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
            raise self.report(
                f"{by} gives back memory while {self._who(other)}, which {_verb(other)} it as a "
                f"tensor of {_form(other)}, may still be running"
            )

    def report(self, message: str) -> OrderingError:
        """The error to raise."""
        self.reported = True
        return OrderingError(message)

    def _judge(self, region: Region, start: int, end: int, clock: Clock, by: Access) -> None:
        if region.freed:
            raise self.report(
                f"{self._who(by)} {_verb(by)} a tensor of {_form(by)} "
                "after its memory was given back with free()"
            )
        other = region.history.conflict(start, end, by.writes, clock)
        if other is not None:
            raise self.report(
                f"{self._who(by)} {_verb(by)} a tensor of {_form(by)}, and nothing orders it "
                f"after {self._who(other)}, which {_verb(other)} the same memory as {_form(other)}:"
                " a wait is missing between the two"
            )

    def _in_use(self, region: Region) -> Access | None:
        reuse = self._host  # the memory's next use comes after what the host has waited for ...
        if region.home != HOST:  # ... and after what is on the stream that it returns to
            reuse = joined(reuse, self._queues.streams[region.home - 1].clock)
        for access in region.history.unordered(reuse):
            if access.time > region.recorded.get(access.thread, 0):
                return access
        return None

    def _name(self, thread: int) -> str:
        if thread == HOST:
            return "the host"
        return f"stream {self._queues.streams[thread - 1].name!r}"

    def _who(self, access: Access) -> str:
        return f"{access.name!r} on {self._name(access.thread)}"


def _verb(access: Access) -> str:
    return "writes" if access.writes else "reads"


def _form(access: Access) -> str:
    return f"shape {tuple(access.shape)} and {access.dtype}"
