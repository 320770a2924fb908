"""What ghoffload will use on this machine, and why: how ``OffloadConfig``'s ``auto`` resolves."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ghoffload.config import ENVIRONMENT_PREFIX, OffloadConfig
from ghoffload.doctor.findings import Readings
from ghoffload.doctor.units import gb
from ghoffload.kernels.build import BULK_COPIES
from ghoffload.machine.select import ENVIRONMENT_VARIABLE
from ghoffload.machine.topology import Gpu, Topology, unusable_gpu
from ghoffload.measure import resolve


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One thing that is decided.

    Attributes:
        what: the thing.
        value: what it will be.
        why: the reason, in a sentence without its full stop.
    """

    what: str
    value: str
    why: str


def choices(
    topology: Topology, config: OffloadConfig, readings: Readings | None = None
) -> list[Choice]:
    """What an optimizer made here with ``config`` will use."""
    readings = Readings() if readings is None else readings
    if topology.evidence.cuda_available:
        return _on_gpu(topology, config, readings)
    if unusable_gpu(topology.evidence) is not None and not os.environ.get(ENVIRONMENT_VARIABLE):
        return [
            Choice(
                what="step device",
                value="none",
                why="there is a GPU that torch cannot use, so making an optimizer stops with that "
                f"message; {ENVIRONMENT_VARIABLE}=cpu steps on the CPU all the same",
            )
        ]
    return _on_cpu(topology, config)


def _on_gpu(topology: Topology, config: OffloadConfig, readings: Readings) -> list[Choice]:
    gpu = topology.gpus[0] if topology.gpus else Gpu()
    step = "cuda" if config.step_device == "auto" else config.step_device
    chosen = resolve(config, _Reached(gpu), readings.rates)
    why = {name: _named(name, reason, config) for name, reason in chosen.reasons.items()}
    found = [
        Choice(
            what="step device",
            value=step,
            why=_set("step_device", config.step_device)
            or "for parameters in HBM, whose state streams through it; parameters on the CPU "
            "step there",
        ),
        Choice(what="memory kind", value=chosen.memory_kind, why=why["memory_kind"]),
    ]
    if chosen.memory_kind == "device":
        return found
    found.append(
        Choice(
            what="transfer",
            value=chosen.transfer.replace("_", " "),
            why=why["transfer"] + _engines(gpu),
        )
    )
    if chosen.transfer == "kernel":
        found.append(Choice(what="CTAs", value=str(chosen.ctas), why=why["ctas"]))
    room = topology.host.limits.room_bytes
    if room is not None:
        found.append(
            Choice(
                what="host state",
                value=f"up to {gb(room)}",
                why="what this process may take now; 12 bytes a bf16 parameter, so "
                f"{room / 12e9:,.1f} B parameters",
            )
        )
    return found


class _Reached:
    """What kernels of a GPU reach, as far as a machine would say."""

    def __init__(self, gpu: Gpu) -> None:
        kinds = {"device", "pinned"}
        if gpu.capabilities.concurrent_managed_access:
            kinds.add("managed")
        if gpu.capabilities.pageable_memory_access:
            kinds.add("system")
        self.memory_kinds = frozenset(kinds)
        self.compute_capability = gpu.compute_capability or BULK_COPIES  # unknown: as most are


def _engines(gpu: Gpu) -> str:
    if gpu.copy_engines is None:
        return ""
    both = "both directions at once" if gpu.copy_engines > 1 else "one direction at a time"
    return f"; {gpu.copy_engines} copy engine{'s' if gpu.copy_engines != 1 else ''}, so {both}"


def _on_cpu(topology: Topology, config: OffloadConfig) -> list[Choice]:
    threads = config.cpu_threads or topology.host.cpus
    forced = os.environ.get(ENVIRONMENT_VARIABLE)
    why = "no GPU that torch can use was found"
    if forced:
        why = f"{ENVIRONMENT_VARIABLE} is {forced!r}"
    return [
        Choice(
            what="step device",
            value="cpu",
            why=f"{why}; {threads} thread{'s' if threads != 1 else ''}",
        ),
        Choice(what="memory kind", value="system", why="no GPU to pin host memory for"),
    ]


def _set(name: str, value: str) -> str | None:
    """The reason where the environment decides."""
    if value == "auto":
        return None
    return f"{ENVIRONMENT_PREFIX}{name.upper()} says so"


def _named(name: str, reason: str, config: OffloadConfig) -> str:
    """A reason that names a setting, with the variable that it came from."""
    said = f"{name}={getattr(config, name)!r} asks for it"
    return reason.replace(said, f"{ENVIRONMENT_PREFIX}{name.upper()} says so")
