"""Measurements kept between processes, and the rule when to measure.

Note [whose figures]
    An entry is named by the device's UUID (under MIG the slice's), the driver, the host's machine
    id, the digest of the kernels and the version of this format. No name of a host: containers get
    a new one each time, and the UUID is one GPU's alone. What is damaged, or says that it belongs
    to another device, is measured again; so is what was incomplete, in the next process.

Note [one at a time]
    GPUs of one host share its memory, so ranks that measured side by side would measure each other.
    One lock a host keeps them apart, and whoever waited looks whether its figures are there by now.
    After a while it is not waited for any more: a stopped process must not stop all others.
"""

from __future__ import annotations

import json
import os
import platform
import threading
from pathlib import Path

import torch

from ghoffload.kernels import bandwidth, cache, cuda
from ghoffload.machine.cuda import CudaMachine
from ghoffload.machine.protocol import Machine
from ghoffload.machine.simulated import SimulatedMachine
from ghoffload.machine.topology import read_text
from ghoffload.measure.measuring import COPY_BYTES, measure, source_digest
from ghoffload.measure.profiled import rates_from
from ghoffload.measure.rates import Rates
from ghoffload.measure.raw import Raw
from ghoffload.memory import available_host_bytes

ENVIRONMENT_VARIABLE = "GHOFFLOAD_MEASURE"
FORMAT = 1
"""Changes with what is measured and how, so that older figures are not taken for today's."""

_ROOM = 8 * COPY_BYTES  # free bytes on either side below which a machine is left alone
_PATIENCE = 20.0  # seconds
_MACHINE_ID = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))

_known: dict[str, Rates] = {}
_known_lock = threading.Lock()


def measuring_is_on() -> bool:
    """Whether ``GHOFFLOAD_MEASURE`` leaves measuring on, as it is where the variable is not set.

    Raises:
        ValueError: it is neither on nor off.
    """
    text = os.environ.get(ENVIRONMENT_VARIABLE, "1").lower()
    if text not in ("0", "1", "true", "false"):
        raise ValueError(f"{ENVIRONMENT_VARIABLE} expects 0, 1, true or false, got {text!r}")
    return text in ("1", "true")


def rates_of(machine: Machine | None) -> Rates | None:
    """The figures of a machine: remembered, or measured now if that was never done here.

    Of a simulated machine: its profile's.

    Measuring waits for the caller's current stream and takes well under a second. ``None``, so that
    defaults hold: without a GPU and on the virtual machine, with ``GHOFFLOAD_MEASURE=0``, while a
    CUDA graph is captured, with less than 537 MB free in HBM or on the host, and where measuring
    fails altogether. Never an error of the device: whoever works on it next will see it.

    Raises:
        ValueError: ``GHOFFLOAD_MEASURE`` is neither on nor off.
    """
    if isinstance(machine, SimulatedMachine):
        return rates_from(machine.profile)
    if not measuring_is_on() or machine is None or machine.kind != "cuda":
        return None
    try:
        return look_up(machine, only_if_quiet=True)  # type: ignore[arg-type]
    except (RuntimeError, OSError):
        return None


def look_up(
    machine: CudaMachine, *, fresh: bool = False, only_if_quiet: bool = False
) -> Rates | None:
    """The figures of a CUDA machine: remembered, else measured and remembered.

    Args:
        machine: of the device.
        fresh: measure in any case.
        only_if_quiet: give ``None`` instead of measuring where that would be in the way.

    Raises:
        KernelBuildError: the kernels could not be built or loaded.
        RuntimeError: the device is in no state to measure anything.
    """
    entry = _entry(machine)
    if not fresh and (found := _read(entry, machine)) is not None:
        return found
    if only_if_quiet and not _quiet(machine):
        return None
    # Built before the lock is taken: others need no quiet host for their compiler.
    cuda.preload(int(machine.device.index), (bandwidth.SOURCE,))
    with cache.locked(f"measuring-{cache.digest(platform.node())[:16]}", timeout=_PATIENCE):
        if not fresh and (found := _read(entry, machine)) is not None:
            return found
        rates = measure(machine)
    with _known_lock:
        _known[_place(entry)] = rates
    if rates.complete:
        cache.write(entry, json.dumps(rates.to_dict()).encode())
    return rates


def _entry(machine: CudaMachine) -> str:
    """The entry's file name: Note [whose figures]."""
    raw = Raw(machine)
    host = next((text for path in _MACHINE_ID if (text := read_text(path))), "").strip()
    name = cache.digest(raw.uuid(), raw.driver_version(), host, source_digest(), str(FORMAT))
    return f"rates-{name[:32]}.json"


def _place(entry: str) -> str:
    return f"{cache.directory()}/{entry}"


def _read(entry: str, machine: CudaMachine) -> Rates | None:
    """What is remembered, in this process or in the cache's directory."""
    with _known_lock:
        if (found := _known.get(_place(entry))) is not None:
            return found
    payload = cache.read(entry)
    if payload is None:
        return None
    try:
        values = json.loads(payload)
        found = Rates.of(values) if isinstance(values, dict) else None
    except ValueError:
        return None
    if found is None or found.uuid != Raw(machine).uuid():
        return None
    with _known_lock:
        _known[_place(entry)] = found
    return found


def _quiet(machine: CudaMachine) -> bool:
    """Whether a measurement would be in nobody's way."""
    if torch.cuda.is_current_stream_capturing():
        return False
    free, _ = torch.cuda.mem_get_info(machine.device)
    room = available_host_bytes()
    return free >= _ROOM and (room is None or room >= _ROOM)
