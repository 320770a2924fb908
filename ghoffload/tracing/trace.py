"""A timeline as a trace that chrome://tracing and ui.perfetto.dev read, and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ghoffload.tracing.spans import TRACKS, Timeline

_COLOURS = {
    "model": "#4c72b0",
    "runtime": "#dd8452",
    "h2d": "#55a868",
    "d2h": "#c44e52",
    "hbm": "#8c8c8c",
    "cpu": "#8172b3",
}


def to_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace events format: complete events in microseconds, a counter for HBM."""
    streams = sorted({(TRACKS.index(s.track), s.stream) for s in timeline.spans})
    thread = {stream: number for number, (_, stream) in enumerate(dict.fromkeys(streams), 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": timeline.machine}}
    ]
    for stream, number in thread.items():
        said = {"ph": "M", "pid": 1, "tid": number}
        events.append(said | {"name": "thread_name", "args": {"name": stream}})
        events.append(said | {"name": "thread_sort_index", "args": {"sort_index": number}})
    events += [
        {
            "ph": "X",
            "pid": 1,
            "tid": thread[span.stream],
            "name": span.name,
            "cat": span.track,
            "ts": 1e6 * (span.begin - timeline.begin),
            "dur": 1e6 * (span.end - span.begin),
            "args": {"bytes": span.nbytes},
        }
        for span in timeline.spans
    ]
    for seconds, nbytes in timeline.memory:
        at = 1e6 * (seconds - timeline.begin)
        events.append(
            {"ph": "C", "pid": 1, "name": "HBM", "ts": at, "args": {"bytes in use": nbytes}}
        )
    about = {
        "machine": timeline.machine,
        "simulated": timeline.simulated,
        "seconds": timeline.seconds,
        "exposed_seconds": timeline.exposed_seconds,
        "overlap": timeline.overlap(),
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def write_trace(timeline: Timeline, path: Path) -> None:
    """As JSON."""
    path.write_text(json.dumps(to_trace(timeline)) + "\n", encoding="utf-8")


def draw(timeline: Timeline, path: Path) -> None:
    """Tracks over time and HBM below them, as PNG or SVG by the file's suffix."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [track for track in TRACKS if any(s.track == track for s in timeline.spans)]
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(11, 1.6 + 0.5 * len(rows) + 1.8), sharex=True, height_ratios=(len(rows), 3)
    )
    for row, track in enumerate(reversed(rows)):
        bars = [
            (1e3 * (span.begin - timeline.begin), 1e3 * (span.end - span.begin))
            for span in timeline.spans
            if span.track == track
        ]
        above.broken_barh(bars, (row - 0.4, 0.8), facecolors=_COLOURS[track], linewidth=0)
    above.set_yticks(range(len(rows)), [*reversed(rows)])
    how = "simulated" if timeline.simulated else "measured"
    above.set_title(f"{timeline.machine} ({how})")
    times = [1e3 * (seconds - timeline.begin) for seconds, _ in timeline.memory]
    below.step(times, [nbytes / 1e9 for _, nbytes in timeline.memory], where="post")
    below.set_ylabel("HBM, GB")
    below.set_ylim(bottom=0)
    below.set_xlabel("ms")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
