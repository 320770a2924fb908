"""Rows, and the file of JSON lines that a sweep continues from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ghoffload.sweeping.point import FIGURES
from ghoffload.sweeping.settings import AXES, Setting

Row = dict[str, Any]

IDENTITY = ("model", "machine", "simulated", "tokens", *AXES)
"""What tells one point from another."""
COLUMNS = (*IDENTITY, *FIGURES, "skipped", "error")
"""What every row has; ``None`` where there is nothing to say."""


def row_of(about: Mapping[str, Any], setting: Setting, found: Mapping[str, Any]) -> Row:
    """A row: what a sweep is about, one setting, and what was found."""
    known = {**about, **dataclasses.asdict(setting), **found}
    return {name: known.get(name) for name in COLUMNS}


def identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes a row the one of its point."""
    return tuple(row.get(name) for name in IDENTITY)


class RowFile:
    """Rows that are appended to a file as soon as they are known.

    Args:
        path: of JSON lines; made where it is not there. A last line that was not written to its
            end, as by a process that was killed, is dropped when the first row is appended.
        expected: a row for every point of this sweep; figures do not matter.

    Attributes:
        found: rows that were there.

    Raises:
        ValueError: a line that is no row, or the row of a point that is not expected.
        OSError: it cannot be read, or written.
    """

    def __init__(self, path: str | Path, expected: Iterable[Row]) -> None:
        self.path = Path(path)
        with self.path.open("a+b") as file:  # one that cannot be written is found out now
            file.seek(0)
            content = file.read()
        self._whole = content.rfind(b"\n") + 1
        points = {identity(row): row for row in expected}
        self.found = [
            self._read(number, line, points)
            for number, line in enumerate(content[: self._whole].splitlines(), 1)
            if line.strip()
        ]
        self._cut = self._whole < len(content)

    def _read(self, number: int, line: bytes, points: Mapping[tuple[Any, ...], Row]) -> Row:
        where = f"{self.path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not set(row) >= set(IDENTITY):
            raise ValueError(f"{where} is not a row of a sweep; take another file")
        if identity(row) not in points:
            raise ValueError(f"{where}: {_difference(row, points.values())}; take another file")
        return row

    def append(self, row: Row) -> None:
        """Write a row; it is in the file when this returns."""
        with self.path.open("r+b") as file:
            if self._cut:
                file.truncate(self._whole)
                self._cut = False
            file.seek(0, 2)
            file.write(json.dumps(row).encode() + b"\n")


def _difference(row: Row, expected: Iterable[Row]) -> str:
    """What sets a row apart from this sweep's nearest point."""
    nearest = max(expected, key=lambda other: sum(row[k] == other[k] for k in IDENTITY))
    name = next(k for k in IDENTITY if row[k] != nearest[k])
    return f"its point is not of this sweep: expected {name}={nearest[name]!r}, got {row[name]!r}"
