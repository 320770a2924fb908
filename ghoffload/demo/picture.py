"""The picture the demo leaves behind: both loss curves, and where the bytes were."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from ghoffload.demo.page import called, comparison, places, size
from ghoffload.demo.place import Place
from ghoffload.demo.train import Result

INCHES = (12.0, 5.2)
DPI = 150

# The second curve is drawn inside the first, so that both are seen where they agree.
_LINES: tuple[dict[str, Any], ...] = (
    {"color": "#8ec1e8", "linewidth": 5.0},
    {"color": "#c0392b", "linewidth": 1.2},
)
_POINTS: tuple[dict[str, Any], ...] = (
    {"marker": "o", "markersize": 10, "color": "#1b6ca8"},
    {"marker": "x", "color": "black"},
)
_THINGS: dict[str, tuple[str, ...]] = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "master": ("master", "rest"),
    "moments": ("exp_avg", "exp_avg_sq"),
    "staging buffers": ("staging buffers", "step counters", "scratch"),
}
_MORE = "activations and temporaries, at the peak"
_COLOURS = {
    "weights": "#1b6ca8",
    "gradients": "#6baed6",
    "master": "#c0392b",
    "moments": "#e8927c",
    "staging buffers": "#7b5ea7",
    _MORE: "#d5d8dc",
}


def draw(path: Path, place: Place, title: str, results: Sequence[Result]) -> None:
    """Write the PNG."""
    with mpl.rc_context(_STYLE):
        # A Figure of its own, not pyplot: no window system is asked for, whatever the backend.
        figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
        losses, memory = figure.subplots(1, 2, width_ratios=(1, 1.15))
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        _draw_losses(losses, results)
        _draw_memory(memory, place, results)
        figure.savefig(path, format="png")


_STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "figure.facecolor": "white",
}


def _draw_losses(axes: Any, results: Sequence[Result]) -> None:
    for result, line, point in zip(results, _LINES, _POINTS, strict=False):
        steps = range(1, len(result.losses) + 1)
        axes.plot(steps, result.losses, label=f"{result.name}, training", **line)
        if result.validation:
            axes.plot(
                *zip(*result.validation, strict=True),
                label=f"{result.name}, validation",
                linestyle="none",
                zorder=3,
                **point,
            )
    both = comparison(results)
    far = f": at most {both['max_loss_difference']:.1g} apart" if both else ""
    axes.set_title(f"Loss{far}", loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel("cross entropy, nats a byte")
    axes.legend(frameon=False)


def _draw_memory(axes: Any, place: Place, results: Sequence[Result]) -> None:
    bars = _bars(place, results)
    longest = max(sum(parts.values()) for _, parts in bars) or 1
    scale, unit = (1e9, "GB") if longest >= 1e9 else (1e6, "MB")
    drawn: dict[str, Any] = {}
    for at, (_, parts) in enumerate(bars):
        start = 0.0
        for thing, nbytes in parts.items():
            width = nbytes / scale
            bar = axes.barh(
                at, width, left=start, height=0.62, color=_COLOURS[thing], edgecolor="white"
            )
            drawn.setdefault(thing, bar)
            start += width
        axes.text(start + longest / scale * 0.012, at, size(sum(parts.values())), va="center")
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, longest / scale * 1.18)
    axes.set_xlabel(f"{unit} (10$^{9 if unit == 'GB' else 6}$ bytes)")
    axes.set_title("Where the bytes live", loc="left")
    order = [thing for thing in _COLOURS if thing in drawn]
    axes.legend(
        [drawn[thing] for thing in order],
        order,
        frameon=False,
        ncols=3,
        loc="upper center",
        bbox_to_anchor=(0.42, -0.13),
        fontsize=9,
    )


def _bars(place: Place, results: Sequence[Result]) -> list[tuple[str, dict[str, int]]]:
    """For each run a bar of HBM up to its peak and one of the host, as (name, bytes by thing)."""
    bars = []
    for result in results:
        in_hbm: dict[str, int] = {}
        on_host: dict[str, int] = {}
        for thing, parts in _THINGS.items():
            for kind, nbytes in places(result, *parts).items():
                into = in_hbm if kind == "device" else on_host
                into[thing] = into.get(thing, 0) + nbytes
        more = (result.peak_hbm_bytes or 0) - sum(in_hbm.values())
        if more > 0:
            in_hbm[_MORE] = more
        peak = ", peak" if result.peak_hbm_bytes else ""
        bars.append((f"{result.name}\n{place.hbm}{peak}", in_hbm))
        kinds = dict.fromkeys(called(row.memory_kind, place) for row in result.held)
        hosts = [kind for kind in kinds if kind != place.hbm]
        bars.append((f"{result.name}\n{', '.join(hosts) or 'host'}", on_host))
    return bars
