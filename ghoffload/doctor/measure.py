"""A quick measurement: pinned copies of 256 MB, one direction after the other."""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from ghoffload.doctor.findings import Copies
from ghoffload.errors import PinWarning
from ghoffload.machine.cuda import CudaMachine, CudaStream
from ghoffload.machine.protocol import Stream
from ghoffload.memory.arena import HostArena

_NBYTES = 256_000_000
_WARM, _TIMED = 2, 9  # copies of each direction: 0.1 s in all over PCIe 5

_T = TypeVar("_T")


def measure_copies(during: Callable[[], _T]) -> tuple[Copies, _T]:
    """Copy between host and the current GPU, and call ``during`` while copies are in flight.

    An idle link may have been slowed to save power, so whoever wants to judge it looks at it then.

    Raises:
        Exception: whatever keeps copies from running, such as ``torch.OutOfMemoryError``.
    """
    machine = CudaMachine.of(torch.cuda.current_device())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PinWarning)  # it becomes a finding
        arena = HostArena(_NBYTES, machine=machine, owner="doctor")
    try:
        host = arena.carve(_NBYTES, torch.uint8)
        hbm = machine.empty((_NBYTES,), torch.uint8)
        start = machine.event("copies may start")
        machine.record(start, machine.current_stream())
        machine.wait(machine.h2d, start, label="the block's earlier users")
        inwards = _queue(machine, hbm, host, machine.h2d)
        machine.record(start, machine.h2d)
        machine.wait(machine.d2h[0], start, label="one direction at a time")
        outwards = _queue(machine, host, hbm, machine.d2h[0])
        seen = during()
        machine.synchronize_all()
        copies = Copies(
            gpu=machine.device.index,
            nbytes=_NBYTES,
            pinned=arena.pinned,
            refusal=machine.pin_refusal if not arena.pinned else None,
            h2d=_rate(inwards),
            d2h=_rate(outwards),
        )
        machine.free(hbm)
    finally:
        arena.close()
    return copies, seen


def _queue(
    machine: CudaMachine, destination: torch.Tensor, source: torch.Tensor, stream: Stream
) -> list[torch.cuda.Event]:
    assert isinstance(stream, CudaStream)
    for _ in range(_WARM):
        machine.copy(destination, source, stream=stream)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_TIMED + 1)]
    events[0].record(stream.torch_stream)
    for event in events[1:]:
        machine.copy(destination, source, stream=stream)
        event.record(stream.torch_stream)
    return events


def _rate(events: list[torch.cuda.Event]) -> float:
    times: list[float] = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return _NBYTES / (statistics.median(times) * 1e-3)
