"""``ghoffload.timeline``: what ran when, as a trace, a picture and a few sentences."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import torch

from ghoffload.errors import MachineUnavailableError
from ghoffload.machine import active_machine
from ghoffload.machine.protocol import Machine
from ghoffload.tracing.sources import recorded
from ghoffload.tracing.spans import Span, Timeline, sentences
from ghoffload.tracing.trace import draw, write_trace

__all__ = ["Span", "Timeline", "timeline"]


@contextlib.contextmanager
def timeline(
    path: str | Path | None = None,
    *,
    picture: str | Path | None = None,
    machine: Machine | None = None,
    quiet: bool = False,
) -> Iterator[Timeline]:
    """Record what runs within it: kernels, copies each way, steps on the CPU, bytes in HBM.

    On a simulated machine by its clock; on a GPU by torch's profiler, which costs time by itself.
    It waits for the machine at both ends.

    Args:
        path: a ``.json`` that chrome://tracing and ui.perfetto.dev read.
        picture: a ``.png`` or ``.svg``.
        machine: the one of ``use_machine`` by default, else that of the current GPU.
        quiet: print nothing.

    Yields:
        The timeline, complete when it is left: ``exposed_seconds``, ``busy``, ``overlap``,
        ``peak_bytes``. Where the block fails nothing is written.

    Raises:
        ValueError: another suffix, or a folder that is not there; before anything runs.
        ImportError: a picture without matplotlib; likewise.
        TypeError: a machine without a clock.
        MachineUnavailableError: no machine, and no GPU that torch can use.
    """
    trace = _place(path, "path", (".json",))
    drawn = _place(picture, "picture", (".png", ".svg"))
    if drawn is not None:
        _require_matplotlib()
    with recorded(machine or active_machine() or _of_the_gpu()) as found:
        yield found
    if trace is not None:
        write_trace(found, trace)
    if drawn is not None:
        draw(found, drawn)
    if not quiet:
        print("\n".join(sentences(found)))


def _place(path: str | Path | None, name: str, suffixes: tuple[str, ...]) -> Path | None:
    if path is None:
        return None
    place = Path(path)
    if place.suffix not in suffixes:
        raise ValueError(f"{name} expects a file name with {' or '.join(suffixes)}, got {path}")
    if not place.absolute().parent.is_dir():
        raise ValueError(f"{name} expects a folder that is there, got {place.parent}")
    return place


def _require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("a picture needs matplotlib: pip install 'ghoffload[demo]'")


def _of_the_gpu() -> Machine:
    from ghoffload.machine.cuda import CudaMachine

    if not torch.cuda.is_available():
        raise MachineUnavailableError(
            "timeline expects a GPU that torch can use, or use_machine('simulated', profile=...)"
        )
    return CudaMachine.of(torch.cuda.current_device())
