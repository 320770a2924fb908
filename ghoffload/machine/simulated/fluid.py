"""Time: streams of tasks that share what they need, as fluids share pipes.

Note [sharing]
    A task alone takes its seconds. Beside others it goes slower where a resource has less than all
    of them ask for: then every task that needs the resource is held back to the same share of its
    own speed, and what that leaves of other resources goes to the rest (max-min fairness).
    A stream's tasks follow each other; a task begins when those before it on its stream, those it
    waits for, and the host's call that queued it are over.

Note [lazy]
    Nothing is computed when a task is queued: later ones can only begin later. Time goes on when
    somebody needs to know an end, and then no further.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_EQUAL = 1e-12
"""Of a time: what does not tell two ends apart."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a task needs.

    Attributes:
        seconds: it takes alone.
        demands: of each resource, in its unit a second, while it goes at full speed.
        latency: seconds before it needs anything.
    """

    seconds: float
    demands: Mapping[str, float] = field(default_factory=dict)
    latency: float = 0.0


@dataclass(eq=False, slots=True)
class Task:
    """Some work on a stream.

    Attributes:
        name: for the timeline.
        stream: its stream's name.
        work: what it needs.
        after: tasks that it waits for.
        queued: when the host queued it, in seconds.
        begin, end: once known.
        tag: what the one who queued it wants to remember.
    """

    name: str
    stream: str
    work: Work
    after: Sequence[Task]
    queued: float
    tag: object = None
    begin: float = math.inf
    end: float = math.inf
    left: float = 0.0
    waits: float = 0.0

    @property
    def done(self) -> bool:
        return self.end < math.inf


class Fluid:
    """Streams of tasks and the resources that they share.

    Args:
        capacity: of each resource, in its unit a second.

    Attributes:
        now: seconds up to which everything is known.
        finished: tasks by their ends.
    """

    def __init__(self, capacity: Mapping[str, float]) -> None:
        self.capacity = dict(capacity)
        self.now = 0.0
        self.finished: list[Task] = []
        self._queues: dict[str, deque[Task]] = {}
        self._running: list[Task] = []
        self._last: dict[str, Task] = {}

    def queue(
        self,
        name: str,
        stream: str,
        work: Work,
        *,
        at: float,
        after: Sequence[Task] = (),
        tag: object = None,
    ) -> Task:
        """Add a task to a stream.

        Args:
            name: for the timeline.
            stream: a name; a new one makes a new stream.
            work: what it needs.
            at: when the host does so; not before anything that is known.
            after: tasks that it waits for.
            tag: kept with it.

        Raises:
            ValueError: a resource that is not there.
        """
        for resource in work.demands:
            if resource not in self.capacity:
                raise ValueError(f"expected one of {sorted(self.capacity)}, got {resource!r}")
        task = Task(name, stream, work, [t for t in after if not t.done], max(at, self.now), tag)
        self._queues.setdefault(stream, deque()).append(task)
        self._last[stream] = task
        return task

    def last(self, stream: str) -> Task | None:
        """What was queued last on a stream."""
        return self._last.get(stream)

    def run(self, until: Task | None = None) -> float:
        """Let time go on until a task is over, or all are. When that is.

        Raises:
            RuntimeError: tasks wait for each other.
        """
        while not (until.done if until is not None else self._idle()):
            self._start()
            if until is not None and until.done:
                break
            soon = self._next()
            if soon is None:
                if self._idle():
                    break
                raise RuntimeError("tasks wait for each other, or for one that was never queued")
            self._go_on(soon)
        return self.now if until is None else until.end

    def _idle(self) -> bool:
        return not self._running and not any(self._queues.values())

    def _start(self) -> None:
        """Begin what can begin now. What takes no time is over at once, and others may follow."""
        again = True
        while again:
            again = False
            for queue in self._queues.values():
                while queue:
                    task = queue[0]
                    if task.begin < math.inf or task.queued > self.now:
                        break
                    if not all(other.done for other in task.after):
                        break
                    task.begin = self.now
                    task.left, task.waits = task.work.seconds, task.work.latency
                    if task.left <= 0 and task.waits <= 0:
                        self._finish(queue, task)
                        again = True
                        continue
                    self._running.append(task)
                    break

    def _finish(self, queue: deque[Task], task: Task) -> None:
        task.end = self.now
        task.after = ()
        queue.popleft()
        self.finished.append(task)

    def _next(self) -> float | None:
        """In how many seconds something changes."""
        self._speeds = self._shares()
        self._needs = [
            task.waits if task.waits > 0 else task.left / speed if speed > 0 else math.inf
            for task, speed in zip(self._running, self._speeds, strict=True)
        ]
        self._calls = [
            queue[0].queued
            for queue in self._queues.values()
            if queue and queue[0].begin == math.inf and queue[0].queued > self.now
        ]
        found = [*(need for need in self._needs if need < math.inf)]
        found += [call - self.now for call in self._calls]
        return min(found, default=None)

    def _go_on(self, passed: float) -> None:
        # What is said to be over then is over, however little that adds to so many seconds.
        calls = [call for call in self._calls if call - self.now <= passed]
        self.now = max([self.now + passed, *calls])
        still = []
        for task, speed, need in zip(self._running, self._speeds, self._needs, strict=True):
            over = need <= passed * (1 + _EQUAL)
            if task.waits > 0:
                task.waits = 0.0 if over else task.waits - passed
                over = over and task.left <= 0
            elif not over:
                task.left -= passed * speed
            if over:
                self._finish(self._queues[task.stream], task)
            else:
                still.append(task)
        self._running = still

    def _shares(self) -> list[float]:
        """Each running task's share of its own speed: Note [sharing]."""
        share = [0.0 if task.waits > 0 else 1.0 for task in self._running]
        open_ = {i for i, s in enumerate(share) if s > 0 and self._running[i].work.demands}
        room = dict(self.capacity)
        while open_:
            wanted: dict[str, float] = {}
            for index in open_:
                for resource, demand in self._running[index].work.demands.items():
                    wanted[resource] = wanted.get(resource, 0.0) + demand
            tightest, level = "", 1.0
            for resource, total in wanted.items():
                if total * level > room[resource] * (1 + 1e-12):
                    tightest, level = resource, room[resource] / total
            if not tightest:
                break
            held = {i for i in open_ if tightest in self._running[i].work.demands}
            for index in held:
                share[index] = level
                for resource, demand in self._running[index].work.demands.items():
                    room[resource] = max(room[resource] - level * demand, 0.0)
            open_ -= held
        return share
