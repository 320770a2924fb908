"""The tables that a person reads."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from ghoffload.bandwidth.results import Results, Row

_BY = {"engine": "copy engine", "words": "load/store kernel", "bulk": "bulk-copy kernel"}
_DIRECTIONS = ("h2d", "d2h", "both")
_TITLES = {"h2d": "host to device", "d2h": "device to host", "both": "both ways"}


def tables(results: Results) -> list[Table]:
    """One table for each group that has rows."""
    found = [
        _copies(f"{memory} memory, {_BY[by]}", results.select(what="copy", memory=memory, by=by))
        for memory in ("pinned", "pageable", "managed", "system")
        for by in _BY
    ]
    found.append(_copies("managed memory, prefetch", results.select(what="prefetch")))
    found.append(_hbm(results.select(what="hbm")))
    found.append(_host(results.select(what="host")))
    found.append(_latencies(results.select(what="latency")))
    return [table for table in found if table.row_count]


def size(nbytes: int) -> str:
    """A power of two in words: ``4 KB``."""
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes:,} B"


def figure(value: float) -> str:
    """Three digits or so: ``0.53``, ``54.9``, ``4,191``."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", min_width=len(title))
    for k, column in enumerate(columns):
        table.add_column(column, justify="left" if k == 0 else "right")
    return table


def _pivot(
    table: Table, names: Sequence[str], rows: Sequence[Row], label: str, column: str
) -> None:
    """A line for each value of ``label``, in order, with a cell for each name of ``column``."""
    lines: dict[object, dict[object, str]] = {}
    for row in rows:
        cells = lines.setdefault(getattr(row, label), {})
        cells[getattr(row, column)] = figure(row.value)
    for key, cells in lines.items():
        first = size(key) if label == "nbytes" and isinstance(key, int) else str(key)
        table.add_row(first, *(cells.get(name, "") for name in names))


def _copies(title: str, rows: Sequence[Row]) -> Table:
    by_blocks = any(row.blocks for row in rows)
    if by_blocks:
        title += f", {size(rows[0].nbytes)}"
    first = "CTAs" if by_blocks else "size"
    names = [name for name in _DIRECTIONS if any(row.direction == name for row in rows)]
    table = _table(f"{title} (GB/s)", first, *(_TITLES[name] for name in names))
    _pivot(table, names, rows, "blocks" if by_blocks else "nbytes", "direction")
    return table


def _hbm(rows: Sequence[Row]) -> Table:
    table = _table("HBM (GB/s; copies count read and write)", "pass", "size", "rate")
    for row in rows:
        by = {"words": "load/store kernel", "driver": "driver's copy"}[row.by]
        table.add_row(f"{row.direction}, {by}", size(row.nbytes), figure(row.value))
    return table


def _host(rows: Sequence[Row]) -> Table:
    names = list(dict.fromkeys(row.direction for row in rows))
    title = f"host memory, arrays of {size(rows[0].nbytes)} (GB/s)" if rows else ""
    table = _table(title, "threads", *names)
    _pivot(table, names, rows, "threads", "direction")
    return table


def _latencies(rows: Sequence[Row]) -> Table:
    names = list(dict.fromkeys(row.by for row in rows))
    table = _table("one call (us)", "what", *names)
    called = {"launch": "kernel launch", "h2d": "copy 4 KB to device", "d2h": "copy 4 KB to host"}
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        lines.setdefault(row.direction, {})[row.by] = figure(row.value)
    for key, cells in lines.items():
        table.add_row(called.get(key, key), *(cells.get(name, "") for name in names))
    return table
