"""Streams as queues, and the order in which what is queued runs.

Note [queue]
    Every operation holds the operations it must run after: the one before it in its stream and the
    marks of events it waits for. An operation on the current stream is *forced*: all it depends on
    runs, then it runs itself, because the caller's own operations are eager. What waits on other
    streams runs by the machine's order: at once (earliest), when forced (latest), or at moments and
    in an order that a seeded generator picks among those the rules allow (adversarial).
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, get_args

from ghoffload.machine.clocks import Clock
from ghoffload.machine.protocol import Event, Stream
from ghoffload.machine.virtual_refs import TensorRef

Order = Literal["earliest", "latest", "adversarial"]


class Operation:
    """Something queued on a stream; see Note [queue]."""

    __slots__ = ("after", "done", "name", "run", "stream", "uses")

    done: bool

    def __init__(
        self,
        name: str,
        stream: VirtualStream,
        run: Callable[[], None] | None = None,
        *,
        after: Operation | None = None,
        uses: Sequence[TensorRef] = (),
    ) -> None:
        self.name = name
        self.stream = stream
        self.run = run
        self.uses = uses
        self.after = tuple(op for op in (stream.tail, after) if op is not None and not op.done)
        self.done = False


class VirtualStream(Stream):
    """A queue of operations, and the clock of the last one queued."""

    def __init__(self, name: str, thread: int) -> None:
        self.name = name
        self.thread = thread
        self.clock: Clock = {}
        self.queue: deque[Operation] = deque()
        self.tail: Operation | None = None

    def __repr__(self) -> str:
        return f"<VirtualStream {self.name}, {len(self.queue)} queued>"


class VirtualEvent(Event):
    """The end of a stream when it was recorded: an operation, and its clock."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.mark: Operation | None = None
        self.clock: Clock = {}

    def __repr__(self) -> str:
        state = "not recorded" if self.mark is None else "done" if self.mark.done else "pending"
        return f"<VirtualEvent {self.name}, {state}>"


def own_stream(stream: Stream) -> VirtualStream:
    """``stream``, which has to be one of a virtual machine."""
    if not isinstance(stream, VirtualStream):
        raise TypeError(f"expected a stream of a virtual machine, got {stream!r}")
    return stream


def own_event(event: Event) -> VirtualEvent:
    """``event``, which has to be one of a virtual machine."""
    if not isinstance(event, VirtualEvent):
        raise TypeError(f"expected an event of a virtual machine, got {event!r}")
    return event


def recorded(event: Event, what: str) -> VirtualEvent:
    """``event``, which ``what`` waits for and which therefore has to be recorded."""
    event = own_event(event)
    if event.mark is None:
        raise RuntimeError(f"{what}: event {event.name!r} was never recorded")
    return event


class Queues:
    """The streams of a machine, and when what is on them runs."""

    def __init__(self, order: Order, seed: int) -> None:
        if order not in get_args(Order):
            expected = ", ".join(map(repr, get_args(Order)))
            raise ValueError(f"order expects one of {expected}, got {order!r}")
        self.order = order
        self.streams: list[VirtualStream] = []
        self.current = self.stream("compute")
        self.running = False
        self._random = random.Random(seed)
        self._lazy: set[int] = set()

    def stream(self, name: str) -> VirtualStream:
        stream = VirtualStream(name, len(self.streams) + 1)
        self.streams.append(stream)
        return stream

    def immediate(self, stream: VirtualStream) -> bool:
        """Whether what is queued on ``stream`` now runs at once."""
        return self.order == "earliest" or stream is self.current

    def add(self, operation: Operation) -> None:
        stream = operation.stream
        stream.queue.append(operation)
        stream.tail = operation
        if self.immediate(stream):
            self.force(operation)

    def force(self, operation: Operation | None) -> None:
        """Run ``operation`` now, after everything it depends on."""
        stack = [] if operation is None or operation.done else [operation]
        while stack:
            missing = [op for op in stack[-1].after if not op.done]
            if missing:
                stack.extend(reversed(missing))
            else:
                top = stack.pop()
                if not top.done:
                    self._execute(top)

    @contextlib.contextmanager
    def own_work(self) -> Iterator[None]:
        """What torch does inside is the machine's work, or one eager operation's inside."""
        outer, self.running = self.running, True
        try:
            yield
        finally:
            self.running = outer

    def settle(self) -> None:
        """Run what is left on the current stream, before something eager runs on it."""
        self.force(self.current.tail)

    def disturb(self) -> None:
        """In adversarial order: run some of what may run, or nothing."""
        if self.order != "adversarial" or self.running:
            return
        if self._random.random() < 0.1:  # a stream that stands still for a while finds more
            self._lazy = {s.thread for s in self.streams if self._random.random() < 0.5}
        for _ in range(self._random.choice((0, 0, 0, 1, 2, 4, 16))):
            heads = [op for op in self._eligible() if op.stream.thread not in self._lazy]
            if not heads:
                return
            self._execute(self._random.choice(heads))

    def run_all(self) -> None:
        """Run everything that is queued, in an order of the machine's kind."""
        while heads := list(self._eligible()):
            pick = self._random.randrange(len(heads)) if self.order == "adversarial" else 0
            self._execute(heads[pick])

    def using(self, start: int, end: int) -> Iterator[Operation]:
        """Queued operations with a tensor in [start, end)."""
        for stream in self.streams:
            for operation in tuple(stream.queue):
                if any(use.start < end and start < use.end for use in operation.uses):
                    yield operation

    def _eligible(self) -> Iterator[Operation]:
        for stream in self.streams:
            if stream.queue and all(op.done for op in stream.queue[0].after):
                yield stream.queue[0]

    def _execute(self, operation: Operation) -> None:
        """Run one operation. Each passes here exactly once: the place where a clock prices it."""
        first = operation.stream.queue.popleft()
        assert first is operation, "a stream runs in the order it was queued"
        run = operation.run
        operation.done, operation.run = True, None
        operation.after, operation.uses = (), ()
        if run is not None:
            with self.own_work():
                run()
