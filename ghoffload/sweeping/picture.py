"""The picture: what granularity exposes, and what it reaches of the link; or a heat map."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from ghoffload.sweeping.rows import Row
from ghoffload.sweeping.settings import NUMERIC
from ghoffload.sweeping.table import best, measured, title, value_text, varied

INCHES = (12.0, 5.0)
DPI = 150

_STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "ghoffload",  # the same picture is the same file
}
_LEGEND: Any = {"loc": "outside lower center", "ncols": 3, "frameon": False}
_DASHES = ("-", "--", ":")


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Write the PNG or SVG.

    Over ``bucket_bytes``, or the first other axis with several numbers: a line for each remaining
    setting. Two axes of numbers and no other make a heat map. Points without figures are left out.

    Args:
        path: its suffix says which.
        rows: of one sweep, or of several whose machines or models differ.
    """
    axes = varied(rows)
    numeric = [name for name in NUMERIC if name in axes and _numbers(rows, name)]
    with mpl.rc_context(_STYLE):
        # A Figure of its own, not pyplot: no window system is asked for, whatever the backend.
        figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
        titles = [*dict.fromkeys(title([row]) for row in rows)]
        one = len(titles) == 1
        figure.suptitle("\n".join(titles), fontweight="bold", x=0.01, ha="left")
        if len(axes) == len(numeric) == 2 and one:
            _heat_map(figure, rows, numeric[0], numeric[1])
        elif numeric:
            left, right = figure.subplots(1, 2)
            _lines(left, rows, numeric[0], _exposed)
            _lines(right, rows, numeric[0], _rate)
            left.set_ylabel("exposed by the optimizer, ms a step")
            right.set_ylabel("bytes both ways over the optimizer's time, GB/s")
            if left.lines:
                figure.legend(*left.get_legend_handles_labels(), **_LEGEND)
        else:
            _bars(figure.subplots(), rows, axes)
        date = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, format=path.suffix[1:], metadata=date)


def _exposed(row: Row) -> float:
    return float(row["exposed_seconds"]) * 1e3


def _rate(row: Row) -> float:
    moved = int(row["h2d_bytes"]) + int(row["d2h_bytes"])
    return moved / float(row["optimizer_seconds"]) / 1e9


def _numbers(rows: Sequence[Row], name: str) -> bool:
    return all(isinstance(row[name], int) for row in rows)


def _named(row: Row, axes: Sequence[str], rows: Sequence[Row]) -> str:
    """What sets a line apart."""
    parts = [str(row[k]) for k in ("model", "machine") if len({r[k] for r in rows}) > 1]
    for name in axes:
        text = value_text(name, row[name])
        plain = name in ("transfer", "step_device")
        parts.append(text if plain else f"{name.replace('_', ' ')} {text}")
    return ", ".join(parts) or str(row["machine"])


def _lines(axes: Any, rows: Sequence[Row], over: str, figure: Any) -> None:
    rest = [name for name in varied(rows) if name != over]
    lines: dict[str, list[Row]] = {}
    for row in measured(rows):
        lines.setdefault(_named(row, rest, rows), []).append(row)
    for number, (label, points) in enumerate(lines.items()):
        points = sorted(points, key=lambda row: row[over])
        axes.plot(
            [row[over] for row in points],
            [figure(row) for row in points],
            _DASHES[number // 10 % len(_DASHES)],  # there are ten colours
            marker="o",
            markersize=4,
            label=label,
        )
    ticks = sorted({row[over] for row in rows})
    if ticks[0] > 0:
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [value_text(over, tick) for tick in ticks], rotation=45)
    axes.minorticks_off()
    axes.set_xlabel(over.replace("_", " "))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _heat_map(figure: Figure, rows: Sequence[Row], across: str, up: str) -> None:
    columns, lines = (sorted({row[name] for row in rows}) for name in (across, up))
    cells = [[float("nan")] * len(columns) for _ in lines]
    axes = figure.subplots()
    axes.grid(visible=False)
    winner = best(rows)
    for row in measured(rows):
        x, y = columns.index(row[across]), lines.index(row[up])
        cells[y][x] = _exposed(row)
    shown = [_exposed(row) for row in measured(rows)]
    # By ratios, or the worst cell leaves the others without a difference.
    norm = LogNorm() if shown and min(shown) > 0 else None
    image: Any = axes.imshow(cells, origin="lower", aspect="auto", cmap="viridis_r", norm=norm)
    for row in measured(rows):
        x, y = columns.index(row[across]), lines.index(row[up])
        value = cells[y][x]
        text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        text += "\nbest" if row is winner else ""
        dark = image.norm(value) > 0.5
        axes.text(x, y, text, ha="center", va="center", color="white" if dark else "black")
    for set_ticks, name, values in (
        (axes.set_xticks, across, columns),
        (axes.set_yticks, up, lines),
    ):
        set_ticks(range(len(values)), [value_text(name, value) for value in values])
    axes.set_xlabel(across.replace("_", " "))
    axes.set_ylabel(up.replace("_", " "))
    figure.colorbar(image, label="exposed by the optimizer, ms a step")


def _bars(axes: Any, rows: Sequence[Row], names: Sequence[str]) -> None:
    shown = measured(rows)
    labels = [_named(row, names, rows) for row in shown]
    axes.barh(range(len(shown)), [_exposed(row) for row in shown], height=0.6)
    axes.set_yticks(range(len(shown)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("exposed by the optimizer, ms a step")
    axes.grid(axis="x", alpha=0.3)
