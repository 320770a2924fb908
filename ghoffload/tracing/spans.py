"""What ran when: spans by track, and the figures that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

TRACKS = ("model", "runtime", "h2d", "d2h", "hbm", "cpu")
"""The model's kernels, the runtime's, copies each way and within HBM, and steps on the CPU."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that ran.

    Attributes:
        name: of the kernel or the copy.
        track: of ``TRACKS``.
        stream: by name.
        begin, end: in seconds.
        nbytes: that it moved, where that is known.
    """

    name: str
    track: str
    stream: str
    begin: float
    end: float
    nbytes: int = 0


@dataclass
class Timeline:
    """What ran in a block of a program.

    Attributes:
        machine: its name.
        simulated: whether times are a model's and not a clock's.
        begin, end: of the block, in seconds; the end when all that it queued was over.
        spans: by their begins.
        memory: (seconds, bytes in HBM) at each change that was noticed.
    """

    machine: str
    simulated: bool
    begin: float = 0.0
    end: float = 0.0
    spans: list[Span] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of the block."""
        return self.end - self.begin

    @property
    def exposed_seconds(self) -> float:
        """In which none of the model's own kernels ran."""
        return self.seconds - self.busy("model")

    @property
    def peak_bytes(self) -> int:
        """The most that was in HBM."""
        return max((nbytes for _, nbytes in self.memory), default=0)

    def busy(self, *tracks: str) -> float:
        """Seconds in which something of these tracks ran."""
        return _length(self._of(tracks))

    def moved(self, track: str) -> int:
        """Bytes that the track's spans moved."""
        return sum(span.nbytes for span in self.spans if span.track == track)

    def overlap(self) -> float:
        """Of the time in which copies crossed the link, the share beside the model's kernels."""
        link, model = self._of(("h2d", "d2h")), self._of(("model",))
        both = _length(link) + _length(model) - _length([*link, *model])
        return both / _length(link) if link else 0.0

    def _of(self, tracks: Sequence[str]) -> list[tuple[float, float]]:
        return [(span.begin, span.end) for span in self.spans if span.track in tracks]


def _length(spans: Iterable[tuple[float, float]]) -> float:
    """Of the union."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return total


def sentences(timeline: Timeline) -> list[str]:
    """The figures, for a person."""
    how = "simulated" if timeline.simulated else "measured"
    lines = [
        f"{timeline.machine} ({how}): {_ms(timeline.seconds)}, of which the model's kernels ran "
        f"{_ms(timeline.busy('model'))}; exposed: {_ms(timeline.exposed_seconds)}"
    ]
    for track, words in (("h2d", "from the host"), ("d2h", "to the host")):
        busy = timeline.busy(track)
        if busy:
            rate = timeline.moved(track) / busy / 1e9
            share = busy / timeline.seconds if timeline.seconds else 0.0
            lines.append(
                f"  {words}: {timeline.moved(track) / 1e9:.2f} GB in {_ms(busy)}, {rate:.1f} GB/s; "
                f"the link was in use {100 * share:.0f} % of the time"
            )
    if timeline.busy("h2d", "d2h"):
        lines.append(f"  beside the model's kernels: {100 * timeline.overlap():.0f} % of that")
    for track, words in (("runtime", "kernels of the runtime"), ("cpu", "steps on the CPU")):
        if busy := timeline.busy(track):
            lines.append(f"  {words}: {_ms(busy)}")
    if timeline.memory:
        lines.append(f"  HBM in use: {timeline.peak_bytes / 1e9:.2f} GB at most")
    return lines


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
