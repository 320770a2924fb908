"""ghoffload: train models whose optimizer states and activations do not fit in HBM.

Importing this package touches no GPU, driver, thread or file; the names below are loaded at their
first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ghoffload._version import __version__

if TYPE_CHECKING:
    from ghoffload.activations import offload_activations, offload_module
    from ghoffload.config import OffloadConfig
    from ghoffload.errors import (
        GhoffloadError,
        InterruptedStepError,
        KernelBuildError,
        MachineUnavailableError,
        OrderingError,
    )
    from ghoffload.machine import use_machine
    from ghoffload.machine.simulated import SimulatedMachine
    from ghoffload.machine.virtual import VirtualMachine
    from ghoffload.memory import TensorManager, memory_summary
    from ghoffload.optim import OffloadAdam, OffloadAdamW
    from ghoffload.sweeping.sweep import sweep
    from ghoffload.tracing import timeline

_HOMES = {
    "OffloadAdam": "ghoffload.optim",
    "OffloadAdamW": "ghoffload.optim",
    "OffloadConfig": "ghoffload.config",
    "SimulatedMachine": "ghoffload.machine.simulated",
    "TensorManager": "ghoffload.memory",
    "VirtualMachine": "ghoffload.machine.virtual",
    "memory_summary": "ghoffload.memory",
    "offload_activations": "ghoffload.activations",
    "offload_module": "ghoffload.activations",
    "sweep": "ghoffload.sweeping.sweep",
    "timeline": "ghoffload.tracing",
    "use_machine": "ghoffload.machine",
    "GhoffloadError": "ghoffload.errors",
    "InterruptedStepError": "ghoffload.errors",
    "KernelBuildError": "ghoffload.errors",
    "MachineUnavailableError": "ghoffload.errors",
    "OrderingError": "ghoffload.errors",
}

__all__ = [
    "GhoffloadError",
    "InterruptedStepError",
    "KernelBuildError",
    "MachineUnavailableError",
    "OffloadAdam",
    "OffloadAdamW",
    "OffloadConfig",
    "OrderingError",
    "SimulatedMachine",
    "TensorManager",
    "VirtualMachine",
    "__version__",
    "memory_summary",
    "offload_activations",
    "offload_module",
    "sweep",
    "timeline",
    "use_machine",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ghoffload' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
