"""The table that a person reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from ghoffload.sweeping.rows import Row
from ghoffload.sweeping.settings import AXES

_BYTE_AXES = ("bucket_bytes", "activations")
_TITLES = (
    *("step\nms", "exposed\nms", "fwd + bwd\nms", "optimizer\nms"),
    *("peak HBM\nGB", "host\nGB", "h2d\nGB", "d2h\nGB"),
)


def best(rows: Sequence[Row]) -> Row | None:
    """The first row with the shortest step; ``None`` where no row has one."""
    return min(measured(rows), key=lambda row: row["step_seconds"], default=None)


def measured(rows: Sequence[Row]) -> list[Row]:
    """Rows that have figures."""
    return [row for row in rows if row["step_seconds"] is not None]


def varied(rows: Sequence[Row]) -> list[str]:
    """Axes that have more than one value."""
    return [name for name in AXES if len({row[name] for row in rows}) > 1]


def value_text(name: str, value: Any) -> str:
    """A value of an axis: ``64 MiB``, ``kernel``."""
    return size(value) if name in _BYTE_AXES and isinstance(value, int) else str(value)


def size(nbytes: int) -> str:
    """Bytes in the largest unit that they are whole in: ``64 MiB``, ``40 GB``, ``4,097 B``."""
    units = ("GiB", 1 << 30), ("GB", 10**9), ("MiB", 1 << 20), ("MB", 10**6), ("KiB", 1 << 10)
    for unit, factor in units:
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes:,} B"


def title(rows: Sequence[Row]) -> str:
    """What was swept, where, and whether that is a measurement."""
    first = rows[0]
    how = "simulated" if first["simulated"] else "measured"
    return f"{first['model']}, {first['tokens']} tokens, {first['machine']} ({how})"


def table(rows: Sequence[Row]) -> Table:
    """A line for each row, in their order; the best is marked."""
    axes, winner, why = varied(rows), best(rows), reasons(rows)
    fixed = [f"{name} {value_text(name, rows[0][name])}" for name in AXES if name not in axes]
    found = Table(
        title=title(rows),
        title_justify="left",
        title_style="bold",
        caption=", ".join(fixed),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in (*(name.replace("_", "\n") for name in axes), *_TITLES):
        found.add_column(name, justify="right", no_wrap=True)
    found.add_column("", no_wrap=True)
    for row in rows:
        note = "best" if row is winner else ""
        if row["skipped"] or row["error"]:
            note = f"{'skipped' if row['skipped'] else 'failed'} ({why.index(_reason(row)) + 1})"
        style = "bold green" if row is winner else "dim" if note else None
        cells = [value_text(name, row[name]) for name in axes]
        found.add_row(*cells, *_figures(row), note, style=style)
    return found


def reasons(rows: Sequence[Row]) -> list[str]:
    """Why rows have no figures, each reason once: the table has their numbers, from 1."""
    return list(dict.fromkeys(_reason(row) for row in rows if row["skipped"] or row["error"]))


def _reason(row: Row) -> str:
    return str(row["skipped"] or row["error"])


def _figures(row: Row) -> list[str]:
    times = ("step", "exposed", "forward_backward", "optimizer")
    nbytes = ("peak_hbm", "host", "h2d", "d2h")
    return [
        *(_scaled(row[f"{name}_seconds"], 1e3) for name in times),
        *(_scaled(row[f"{name}_bytes"], 1e-9) for name in nbytes),
    ]


def _scaled(value: float | None, by: float) -> str:
    if value is None:
        return ""
    scaled = value * by
    return f"{scaled:,.0f}" if scaled >= 1000 else f"{scaled:.1f}"
