"""A machine profile: the few figures that a schedule or a simulator needs, and their origin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ghoffload.bandwidth.results import Results, Row, best, fewest_blocks, largest
from ghoffload.bandwidth.table import size

_KERNELS = {"words": "load/store kernel", "bulk": "bulk-copy kernel"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One figure of a profile.

    Attributes:
        name: its table in the file.
        value: the figure.
        unit: of the figure.
        how: how it was measured.
        blocks: blocks (CTAs) of the kernel, else 0.
    """

    name: str
    value: float
    unit: str
    how: str
    blocks: int = 0


def entries(results: Results) -> list[Entry]:
    """What of a profile these results hold."""
    found = [*_links(results), *_memories(results), *_costs(results)]
    return [entry for entry in found if entry is not None]


def to_toml(results: Results) -> str:
    """The profile as TOML: what the machine is, then a table for each figure."""
    about = results.environment
    lines = ["# A machine profile, written by: ghoffload bandwidth --save-profile"]
    for name, key in (
        ("machine", "gpu"),
        ("date", "date"),
        ("compute_capability", "compute_capability"),
        ("multiprocessors", "multiprocessors"),
        ("hbm_bytes", "hbm_bytes"),
        ("host_bytes", "host_bytes"),
        ("cpus", "cpus"),
        ("ghoffload", "ghoffload"),
    ):
        if about.get(key) is not None:
            lines.append(f"{name} = {_literal(about[key])}")
    for entry in entries(results):
        lines += ["", f"[{entry.name}]", f"value = {float(f'{entry.value:.4g}')}"]
        lines.append(f"unit = {_literal(entry.unit)}")
        if entry.blocks:
            lines.append(f"blocks = {entry.blocks}")
        lines += [f"how = {_literal(entry.how)}", f"date = {_literal(about.get('date', ''))}"]
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    """A TOML string or integer. JSON's escapes are TOML's as long as no pair of them is needed."""
    return json.dumps(value, ensure_ascii=False)


def _entry(name: str, row: Row | None, how: str) -> Entry | None:
    if row is None:
        return None
    how = f"{how}, median of {row.samples}"
    return Entry(name=name, value=row.value, unit=row.unit, how=how, blocks=row.blocks)


def _links(results: Results) -> Iterator[Entry | None]:
    for direction in ("h2d", "d2h", "both"):
        copies = results.select(what="copy", memory="pinned", direction=direction)
        row = largest(r for r in copies if r.by == "engine")
        if row is not None:
            ways = ", two copies at once, sum" if direction == "both" else ""
            how = f"copy engine, pinned memory, copies of {size(row.nbytes)}{ways}"
            yield _entry(f"{direction}_engine", row, how)
        row = fewest_blocks([r for r in copies if r.by in _KERNELS])
        if row is not None:
            ways = ", read and written by one kernel, sum" if direction == "both" else ""
            how = (
                f"{_KERNELS[row.by]}, pinned memory, copies of {size(row.nbytes)}{ways}, the "
                "fewest CTAs within 3 % of the best"
            )
            yield _entry(f"{direction}_kernel", row, how)


def _memories(results: Results) -> Iterator[Entry | None]:
    row = best(results.select(what="hbm", direction="copy"))
    yield _entry("hbm", row, "copy within HBM, read + write")
    row = best(results.select(what="host", direction="update"))
    if row is not None:
        how = f"fp32 arrays read and written in place by {row.threads} CPU threads"
        yield _entry("host_read_write", row, how)
    row = best(results.select(what="host", direction="triad"))
    if row is not None:
        yield _entry("host_triad", row, f"STREAM triad by {row.threads} CPU threads")


def _costs(results: Results) -> Iterator[Entry | None]:
    for name, direction, what in (
        ("launch", "launch", "an empty kernel"),
        ("copy", "h2d", "a copy of 4 KB to the device"),
    ):
        for by, how in (("call", "host time of one call"), ("device", "device time of one")):
            rows = results.select(what="latency", direction=direction, by=by)
            yield _entry(f"{name}_{by}", best(rows), f"{how} among 20, {what}")
