"""Real text that is on every machine: the source files of Python's standard library."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

# Installed packages differ from machine to machine, and much of the tests is tables of data.
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_VALIDATION_EVERY = 20

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes to validate on, from different files."""

    files: int
    train: Bytes
    validation: Bytes


def standard_library() -> Path:
    """Where the running Python has its standard library."""
    return Path(sysconfig.get_path("stdlib"))


def read_text(root: Path | None = None, *, context: int) -> Text:
    """Read the ``.py`` files below ``root``, in an order that is the same everywhere.

    Args:
        root: a directory; the standard library's where ``None``.
        context: bytes of a sequence: either part has to hold more than one.

    Raises:
        FileNotFoundError: there is no text, or too little.
    """
    root = standard_library() if root is None else root
    names = sorted(
        relative.as_posix()
        for path in root.rglob("*.py")
        if _SKIPPED.isdisjoint((relative := path.relative_to(root)).parts)
    )
    contents = []
    for name in names:
        try:
            contents.append((root / name).read_bytes())
        except OSError:  # a file that cannot be read is as good as none
            continue
    parts = [
        np.frombuffer(b"".join(part), dtype=np.uint8)
        for part in (
            [text for at, text in enumerate(contents) if at % _VALIDATION_EVERY],
            contents[::_VALIDATION_EVERY],
        )
    ]
    if min(map(len, parts)) <= context:
        raise FileNotFoundError(
            f"expected the source files of Python's standard library under '{root}', got "
            f"{sum(map(len, contents)):,} bytes in {len(contents)} .py files; a Python whose "
            "library is in a zip file cannot run the demo"
        )
    return Text(len(contents), *parts)


class Batches:
    """Draws ``[batch, context + 1]`` int64 arrays of tokens at random places, endlessly.

    The same seed draws the same.
    """

    def __init__(self, data: Bytes, *, batch: int, context: int, seed: int) -> None:
        self._data, self._shape = data, (batch, context)
        self._random = np.random.default_rng(seed)

    def draw(self) -> npt.NDArray[np.int64]:
        """The next batch: in each row, tokens 1 to ``context`` follow those before them."""
        batch, context = self._shape
        starts = self._random.integers(0, len(self._data) - context, size=batch)
        return np.stack([self._data[s : s + context + 1] for s in starts]).astype(np.int64)
