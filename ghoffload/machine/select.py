"""Which machine serves a device: named by the caller, by ``use_machine``, by the environment.

In that order; failing all, parameters on a GPU get its ``CudaMachine`` and parameters on the CPU
get none: they simply step on the CPU.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ghoffload.errors import MachineUnavailableError
from ghoffload.machine.protocol import Machine
from ghoffload.machine.simulated import SimulatedMachine
from ghoffload.machine.virtual import VirtualMachine
from ghoffload.machine.virtual_dispatch import EagerMode

ENVIRONMENT_VARIABLE = "GHOFFLOAD_MACHINE"
KINDS = ("virtual", "cuda", "simulated")
"""What ``use_machine`` makes."""
WORDS = ("virtual", "cuda", "cpu")
"""What stands for a machine where one is given by a word."""


class WrongDeviceError(ValueError):
    """A machine was asked for that serves other devices."""


@dataclass(frozen=True, slots=True)
class _Entry:
    machine: Machine
    by_kind: bool  # "cuda" was asked for, not one machine: each device then gets its own
    mode: EagerMode | None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.virtual: VirtualMachine | None = None


_thread = _Thread()


@contextlib.contextmanager
def use_machine(machine: Machine | str, **options: Any) -> Iterator[Machine]:
    """Use a machine in this thread for what is built inside the ``with`` block.

    Args:
        machine: a machine, or the kind of one: ``"virtual"`` makes a ``VirtualMachine(**options)``,
            ``"simulated"`` a ``SimulatedMachine(**options)``, ``"cuda"`` is the machine of the
            current CUDA device.
        options: of the one that is made.

    Yields:
        The machine.

    Raises:
        ValueError: an unknown kind.
        TypeError: options for something that takes none.
    """
    by_kind = isinstance(machine, str)
    if isinstance(machine, str):
        machine = _of_kind(machine, options)
    elif not isinstance(machine, Machine):
        raise TypeError(f"use_machine expects a Machine or a kind, got {machine!r}")
    elif options:
        raise TypeError(f"use_machine takes options for a new machine only, got {sorted(options)}")
    outer = _thread.entries[-1] if _thread.entries else None
    mode = machine.eager_mode() if isinstance(machine, VirtualMachine) else None
    with contextlib.ExitStack() as stack:
        if outer is not None and outer.mode is not None:
            outer.mode.enabled = False
            stack.callback(setattr, outer.mode, "enabled", True)
        if mode is not None:
            stack.enter_context(mode)
        if isinstance(machine, SimulatedMachine):
            stack.enter_context(machine.modes())
        _thread.entries.append(_Entry(machine, by_kind, mode))
        stack.callback(_thread.entries.pop)
        yield machine
        if isinstance(machine, VirtualMachine):
            machine.finish_checks()


def active_machine() -> Machine | None:
    """The machine of the innermost ``use_machine`` of this thread."""
    return _thread.entries[-1].machine if _thread.entries else None


def machine_for(device: torch.device, explicit: Machine | str | None = None) -> Machine | None:
    """The machine that serves parameters on ``device``.

    Args:
        device: where the parameters are.
        explicit: what the caller asked for: a machine, ``"virtual"``, ``"cuda"``, or ``"cpu"`` for
            plain stepping on the CPU.

    Returns:
        The machine, or ``None`` where parameters on the CPU simply step on the CPU.

    Raises:
        ValueError: an unknown kind.
        WrongDeviceError: a machine that cannot serve this device.
        MachineUnavailableError: the kind cannot be had here, or nothing was asked for and there is
            a GPU that torch cannot use.
    """
    if device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"expected parameters on the CPU or a CUDA device, got {device}")
    machine: Machine | str | None = explicit
    source = "the machine argument"
    if machine is None and _thread.entries:
        entry = _thread.entries[-1]
        machine, source = entry.machine, "use_machine"
        if entry.by_kind and entry.machine.kind == "cuda":
            machine = "cuda"
    if machine is None and os.environ.get(ENVIRONMENT_VARIABLE):
        machine, source = os.environ[ENVIRONMENT_VARIABLE].lower(), ENVIRONMENT_VARIABLE
    if machine is None:
        return _own_machine(device)
    if machine == "simulated":
        raise ValueError(
            f"{source} expects a SimulatedMachine, or use_machine('simulated', profile=...): the "
            "word does not say which profile"
        )
    if machine == "cpu":
        _require_device(device, "cpu", "plain stepping on the CPU", source)
        return None
    if machine == "virtual":
        _require_device(device, "cpu", "the virtual machine", source)
        if _thread.virtual is None:
            _thread.virtual = VirtualMachine()
        return _thread.virtual
    if machine == "cuda":
        _require_device(device, "cuda", "the cuda machine", source)
        return _cuda_machine(device)
    if not isinstance(machine, Machine):
        raise ValueError(f"{source} expects a Machine or one of {_listed(WORDS)}, got {machine!r}")
    what = f"the {machine.kind} machine"
    _require_device(device, machine.device.type, what, source)
    if device.type == "cuda" and _indexed(device) != _indexed(machine.device):
        raise WrongDeviceError(
            f"expected parameters on {machine.device} for the machine from {source}, got {device}"
        )
    return machine


def _of_kind(kind: str, options: dict[str, Any]) -> Machine:
    if kind == "virtual":
        return VirtualMachine(**options)
    if kind == "simulated":
        return SimulatedMachine(**options)
    if kind != "cuda":
        raise ValueError(f"expected a machine kind of {_listed(KINDS)}, got {kind!r}")
    if options:
        raise TypeError(f"the cuda machine takes no options, got {sorted(options)}")
    if not torch.cuda.is_available():
        from ghoffload.machine import topology

        raise MachineUnavailableError(
            topology.unusable_gpu() or "the cuda machine needs a GPU that torch can use: none found"
        )
    return _cuda_machine(torch.device("cuda", torch.cuda.current_device()))


def _own_machine(device: torch.device) -> Machine | None:
    """What a device gets where nobody asked for anything."""
    if device.type == "cuda":
        return _cuda_machine(device)
    if device.type == "meta":
        raise ValueError(
            "parameters on meta have no numbers to step: use a SimulatedMachine for times and "
            "bytes, or move the model to a device first"
        )
    from ghoffload.machine import topology

    sentence = topology.unusable_gpu()
    if sentence is not None:
        raise MachineUnavailableError(
            f"{sentence} (or set {ENVIRONMENT_VARIABLE}=cpu to step on the CPU all the same)"
        )
    return None


def _cuda_machine(device: torch.device) -> Machine:
    from ghoffload.machine.cuda import CudaMachine

    return CudaMachine.of(_indexed(device))


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _require_device(device: torch.device, expected: str, what: str, source: str) -> None:
    if device.type != expected:
        where = {"cpu": "the CPU", "cuda": "a CUDA device"}.get(expected, expected)
        raise WrongDeviceError(
            f"{what} (from {source}) expects parameters on {where}, got parameters on {device}"
        )


def _listed(kinds: tuple[str, ...]) -> str:
    return ", ".join(map(repr, kinds))
