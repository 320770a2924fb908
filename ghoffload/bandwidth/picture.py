"""The picture: rate over size by copy engine, rate over CTAs by kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from ghoffload.bandwidth.results import Results
from ghoffload.bandwidth.table import size

INCHES = (12.0, 5.0)
DPI = 150

_COLOURS = {"h2d": "#1b6ca8", "d2h": "#c0392b", "both": "#7b5ea7"}
_NAMES = {"h2d": "host to device", "d2h": "device to host", "both": "both ways, sum"}
_LINES = {"words": "--", "bulk": "-"}
_KERNELS = {"words": "load/store", "bulk": "bulk copy"}
_STYLE: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}


def draw(path: Path, results: Results) -> None:
    """Write the PNG: of pinned memory, and of host memory by threads where there is no GPU."""
    with mpl.rc_context(_STYLE):
        # A Figure of its own, not pyplot: no window system is asked for, whatever the backend.
        figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
        about = results.environment
        title = f"{about.get('gpu') or 'host memory'}, {about.get('date', '')}"
        figure.suptitle(title, fontweight="bold", x=0.01, ha="left")
        if results.select(what="copy"):
            left, right = figure.subplots(1, 2)
            _by_size(left, results)
            _by_blocks(right, results)
        else:
            _by_threads(figure.subplots(), results)
        figure.savefig(path, format="png")


def _by_size(axes: Any, results: Results) -> None:
    for direction, colour in _COLOURS.items():
        rows = results.select(what="copy", memory="pinned", by="engine", direction=direction)
        sizes, values = [row.nbytes for row in rows], [row.value for row in rows]
        axes.plot(sizes, values, marker="o", color=colour, label=_NAMES[direction])
    _finish(axes, "copy engine, pinned memory", "size of a copy")
    ticks = sorted({row.nbytes for row in results.select(what="copy", by="engine")})
    axes.set_xticks(ticks, [size(tick) for tick in ticks], rotation=45)


def _by_blocks(axes: Any, results: Results) -> None:
    for kernel, line in _LINES.items():
        for direction, colour in _COLOURS.items():
            rows = results.select(what="copy", memory="pinned", by=kernel, direction=direction)
            if rows:
                axes.plot(
                    [row.blocks for row in rows],
                    [row.value for row in rows],
                    line,
                    marker="o",
                    color=colour,
                    label=f"{_KERNELS[kernel]}: {_NAMES[direction]}",
                )
    _finish(axes, "kernels, pinned memory", "CTAs")
    ticks = sorted({row.blocks for row in results.select(what="copy") if row.blocks})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])


def _by_threads(axes: Any, results: Results) -> None:
    for name in dict.fromkeys(row.direction for row in results.select(what="host")):
        rows = results.select(what="host", direction=name)
        axes.plot([r.threads for r in rows], [r.value for r in rows], marker="o", label=name)
    _finish(axes, "host memory", "threads")
    ticks = sorted({row.threads for row in results.select(what="host")})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])


def _finish(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xlabel(unit)
    axes.set_ylabel("GB/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False, loc="lower right")  # the curves rise
