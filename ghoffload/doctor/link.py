"""The link of the current GPU: its figures, and a look at it while it is busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ghoffload import measure
from ghoffload.machine.cuda import CudaMachine

_T = TypeVar("_T")


def read(during: Callable[[], _T], *, fresh: bool = False) -> tuple[dict[str, Any], _T]:
    """What ``Readings`` has of the link, and what ``during`` saw while copies were in flight.

    Args:
        during: called once.
        fresh: measure in any case; else what was measured before will do.

    Raises:
        Exception: whatever keeps copies from running, such as ``torch.OutOfMemoryError``.
    """
    machine = CudaMachine.of(torch.cuda.current_device())
    found: dict[str, Any] = {"gpu": machine.device.index}
    rates = None
    if measure.measuring_is_on():
        rates = measure.look_up(machine, fresh=fresh)
    if rates is not None:
        found.update(rates=rates, age=max(0.0, time.time() - rates.measured))
        if rates.left_out:
            found["copies_error"] = "; ".join(rates.left_out)
    return found, measure.under_load(machine, during, rate=rates.h2d if rates is not None else None)
