"""A frame as a person sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ghoffload.watch.frame import Frame, ProcessNow
from ghoffload.watch.gpus import GpuNow

_Row = TypeVar("_Row")

_NONE = "-"
_MEDIUM, _WIDE = 72, 100  # columns of a terminal


def page(frame: Frame, width: int, height: int | None) -> RenderableType:
    """The page; what needs more than ``height`` lines (``None`` for any) is counted, not shown."""
    parts: list[RenderableType] = []
    if frame.gpus:
        parts.append(_table(_GPU_COLUMNS, frame.gpus, width))
    parts.append(_table(_COLUMNS, frame.processes, width))
    room = None
    if height is not None:
        room = height - 2 * len(parts) - len(frame.gpus) - len(frame.processes) - 5
    parts.append(_memory(frame, room))
    available = frame.host_available
    left = "unknown" if available is None else gigabytes(available)
    parts.append(Text(f"host memory available: {left}"))
    return Group(*parts)


def gigabytes(nbytes: float | None) -> str:
    """``"1.25 GB"``, small amounts in MB or kB."""
    if nbytes is None:
        return _NONE
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            value = nbytes / scale
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{nbytes:.0f} B"


def _rate(value: float | None, scale: float = 1e9) -> str:
    return _NONE if value is None else f"{value / scale:.{1 if value >= 10 * scale else 2}f}"


def _of(process: ProcessNow, name: str, scale: float) -> str:
    return _rate(None if process.rates is None else getattr(process.rates, name), scale)


def _steps(process: ProcessNow) -> str:
    if process.idle is not None:
        return f"idle {process.idle:,.0f} s"
    if process.rates is None and process.page.counters.step_ns:
        return _rate(1e9 / process.page.counters.step_ns, 1)  # between the last two, before we came
    return _of(process, "steps", 1)


def _device(process: ProcessNow) -> str:
    return ", ".join(name for name, _ in process.page.devices) or _NONE


def _hbm(process: ProcessNow) -> str:
    held = gigabytes(process.held("device"))
    return held if process.hbm is None else f"{held} of {gigabytes(process.hbm)}"


def _host(process: ProcessNow) -> str:
    return gigabytes(sum(row.nbytes for row in process.page.held if row.kind != "device"))


def _used(gpu: GpuNow) -> str:
    if gpu.hbm_used is None:
        return _NONE
    return f"{gigabytes(gpu.hbm_used)} of {gigabytes(gpu.hbm_total)}"


# Title, least width of the terminal, text; the first is to the left.
_COLUMNS: tuple[tuple[str, int, Callable[[ProcessNow], str]], ...] = (
    ("process", 0, lambda process: str(process.page.pid)),
    ("device", _MEDIUM, _device),
    ("HBM", 0, _hbm),
    ("host", 0, _host),
    ("h2d GB/s", 0, lambda process: _of(process, "h2d", 1e9)),
    ("d2h GB/s", 0, lambda process: _of(process, "d2h", 1e9)),
    ("steps/s", 0, _steps),
    ("Gparam/s", _MEDIUM, lambda process: _of(process, "parameters", 1e9)),
    ("command", _WIDE, lambda process: process.page.command),
)
_GPU_COLUMNS: tuple[tuple[str, int, Callable[[GpuNow], str]], ...] = (
    ("GPU", 0, lambda gpu: str(gpu.index)),
    ("name", _MEDIUM, lambda gpu: gpu.name or _NONE),
    ("busy", 0, lambda gpu: _NONE if gpu.busy is None else f"{gpu.busy:.0%}"),
    ("HBM", 0, _used),
    ("power", 0, lambda gpu: _NONE if gpu.watts is None else f"{gpu.watts:.0f} W"),
    ("temp.", 0, lambda gpu: _NONE if gpu.celsius is None else f"{gpu.celsius} C"),
    ("PCIe in GB/s", _MEDIUM, lambda gpu: _rate(gpu.pcie_h2d)),
    ("out", _MEDIUM, lambda gpu: _rate(gpu.pcie_d2h)),
)


def _table(
    columns: Sequence[tuple[str, int, Callable[[_Row], str]]], rows: Sequence[_Row], width: int
) -> Table:
    shown = [column for column in columns if column[1] <= width]
    # A command is as long as it likes: it gets what the others leave.
    rest = "command" if shown[-1][0] == "command" else None
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", expand=rest is not None)
    for title, _, _ in shown:
        left = title in ("command", "name", "device") or title == shown[0][0]
        table.add_column(
            title,
            justify="left" if left else "right",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if title == rest else None,
        )
    for row in rows:
        table.add_row(*(Text(text(row)) for _, _, text in shown))
    return table


def _memory(frame: Frame, room: int | None) -> Table:
    """What each process holds and was promised, by memory kind and owner, the most first."""
    rows = []
    for process in frame.processes:
        held = [(row.nbytes, row.kind, row.owner, "") for row in process.page.held]
        held += [
            (claim.outstanding, claim.kind, claim.owner, "promised")
            for claim in process.page.claims
            if claim.outstanding
        ]
        rows += [(str(process.page.pid), *row) for row in sorted(held, reverse=True)]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for title in ("process", "memory", "owner", "bytes", ""):
        table.add_column(
            title,
            justify="right" if title == "bytes" else "left",
            no_wrap=True,
            overflow="ellipsis",
        )
    most = len(rows) if room is None else max(1, room)
    for pid, nbytes, kind, owner, note in rows[:most]:
        table.add_row(pid, kind, Text(owner), gigabytes(nbytes), note)
    if len(rows) > most:
        table.add_row("...", f"{len(rows) - most} more", "", "", "")
    return table
