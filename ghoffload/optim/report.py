"""Where an optimizer's bytes live, as a page a person reads."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from typing import Any

from ghoffload.optim.engine import Engine


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes of one thing in one place."""

    what: str
    memory_kind: str
    nbytes: int
    bytes_per_parameter: float


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What ``optimizer.report()`` returns.

    Attributes:
        parameters: elements with reserved state.
        rows: one row a thing and place.
    """

    title: str
    parameters: int
    rows: tuple[MemoryRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def total(self, memory_kind: str) -> int:
        """Bytes in one memory kind."""
        return sum(row.nbytes for row in self.rows if row.memory_kind == memory_kind)

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"{self.title}: {self.parameters:,} parameters", title_justify="left")
        table.add_column("what")
        table.add_column("memory kind")
        table.add_column("bytes", justify="right")
        table.add_column("bytes a parameter", justify="right")
        for row in self.rows:
            table.add_row(
                row.what, row.memory_kind, f"{row.nbytes:,}", f"{row.bytes_per_parameter:.2f}"
            )
        text = io.StringIO()
        Console(file=text, width=88).print(table)
        return text.getvalue().rstrip()


def memory_report(engine: Engine, param_groups: list[dict[str, Any]]) -> MemoryReport:
    """Count weights, gradients and state where they are."""
    hbm = "system" if engine.machine is None else "device"
    parameters = sum(spec.count for section in engine.sections for spec in section.specs)
    sizes: dict[tuple[str, str], int] = {}

    def add(what: str, kind: str, nbytes: int) -> None:
        sizes[what, kind] = sizes.get((what, kind), 0) + nbytes

    for group in param_groups:
        for parameter in group["params"]:
            add("weights", hbm, parameter.numel() * parameter.element_size())
            if parameter.grad is not None:
                grad = parameter.grad
                add("gradients", hbm, grad.numel() * grad.element_size())
    for section in engine.sections:
        host = section.host_kind or "system"
        for space in section.spaces:
            for name, array in space.arrays.items():
                kind = hbm if space.plan.resident else host
                add(name, kind, array.numel() * array.element_size())
        counters = (section.steps, section.scalars)
        on = "system" if engine.on_host else hbm
        add("step counters", on, sum(t.numel() * t.element_size() for t in counters))
        for tensor in section.scratch.values():
            add("scratch", hbm, tensor.numel() * tensor.element_size())
    add("staging buffers", hbm, engine.staging_bytes)
    if engine.staging_arena is not None:
        kind = engine.staging_arena.kind
        add("staging buffers", kind, engine.staging_arena.nbytes)
    rows = tuple(
        MemoryRow(what, kind, nbytes, nbytes / max(parameters, 1))
        for (what, kind), nbytes in sizes.items()
        if nbytes
    )
    return MemoryReport(engine.owner, parameters, rows)
