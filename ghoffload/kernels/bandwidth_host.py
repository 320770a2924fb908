"""Plain passes over host memory by n threads, to see what it gives.

The streams of McCalpin's STREAM, and one that reads and writes in place as an optimizer does.
Compilers use ordinary stores here, so a line that is only written is read first: ``copy`` and
``triad`` move 4/3 as much as they count, ``update`` exactly what it counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ghoffload.kernels import pool
from ghoffload.kernels.jit import compiled

Array = npt.NDArray[np.float32]

BYTES_PER_ELEMENT: Mapping[str, int] = {"copy": 8, "triad": 12, "update": 8}
"""Bytes counted for an element, in fp32: each array read or written once."""

_TASKS_PER_THREAD = 4  # so that one slow thread does not hold up all


def _copy(a: Array, b: Array, c: Array, factor: Any) -> None:
    for i in range(a.size):
        a[i] = b[i]


def _triad(a: Array, b: Array, c: Array, factor: Any) -> None:
    for i in range(a.size):
        a[i] = b[i] + factor * c[i]


def _update(a: Array, b: Array, c: Array, factor: Any) -> None:
    for i in range(a.size):
        a[i] = a[i] * factor


@lru_cache(None)
def _kernel(name: str) -> Any:
    return compiled({"copy": _copy, "triad": _triad, "update": _update}[name])


def run(name: str, a: Array, b: Array, c: Array, *, threads: int) -> None:
    """One pass: ``a = b``, ``a = b - c`` or ``a = -a``.

    Args:
        name: a key of ``BYTES_PER_ELEMENT``.
        a: written; all three are fp32, contiguous and of one size.
        b: read.
        c: read.
        threads: 1 or more.
    """
    if name not in BYTES_PER_ELEMENT:
        expected = ", ".join(BYTES_PER_ELEMENT)
        raise ValueError(f"name expects one of {expected}, got {name!r}")
    if threads < 1:
        raise ValueError(f"threads expects 1 or more, got {threads}")
    if not a.size == b.size == c.size:
        raise ValueError(f"expected arrays of one size, got {a.size}, {b.size} and {c.size}")
    # -1 and not a fraction: repeated, that would end in subnormals, which are slow.
    kernel, factor = _kernel(name), np.float32(-1)
    tasks = threads if threads == 1 else threads * _TASKS_PER_THREAD
    cuts = [a.size * k // tasks for k in range(tasks + 1)]

    def task(k: int) -> None:
        part = slice(cuts[k], cuts[k + 1])
        kernel(a[part], b[part], c[part], factor)

    pool.run(task, range(tasks), count=threads)


def prepare() -> None:
    """Compile everything, so that no measurement waits for it."""
    a, b, c = np.zeros((3, 16), dtype=np.float32)
    for name in BYTES_PER_ELEMENT:
        run(name, a, b, c, threads=1)
