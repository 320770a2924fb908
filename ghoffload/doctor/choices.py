"""What ghoffload will use on this machine, and why: how ``OffloadConfig``'s ``auto`` resolves."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ghoffload.config import ENVIRONMENT_PREFIX, OffloadConfig
from ghoffload.doctor.findings import Readings
from ghoffload.doctor.units import gb, rate
from ghoffload.machine.select import ENVIRONMENT_VARIABLE
from ghoffload.machine.topology import Gpu, Topology, unusable_gpu


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
    kind: str = "pinned" if config.memory_kind == "auto" else config.memory_kind
    if kind == "pinned" and (
        not config.pin_memory or (readings.copies is not None and not readings.copies.pinned)
    ):
        kind = "system"
    found = [
        Choice(
            what="step device",
            value=step,
            why=_set("step_device", config.step_device)
            or "for parameters in HBM, whose state streams through it; parameters on the CPU "
            "step there",
        ),
        Choice(what="memory kind", value=kind, why=_why_kind(kind, config, gpu, readings)),
    ]
    if kind != "device":
        engines = gpu.copy_engines
        why = _set("transfer", config.transfer) or "the only way in this version"
        if engines is not None:
            both = "both directions at once" if engines > 1 else "one direction at a time"
            why += f"; {engines} copy engine{'s' if engines != 1 else ''}, so {both}"
        if readings.copies is not None:
            why += (
                f"; {rate(readings.copies.h2d)} to the GPU and {rate(readings.copies.d2h)} from "
                "it measured just now"
            )
        found.append(Choice(what="transfer", value="copy engine", why=why))
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


def _why_kind(kind: str, config: OffloadConfig, gpu: Gpu, readings: Readings) -> str:
    if config.memory_kind != "auto":
        return _set("memory_kind", config.memory_kind) or ""
    if kind == "system":
        if not config.pin_memory:
            return f"{ENVIRONMENT_PREFIX}PIN_MEMORY turns pinning off"
        return "pinning was refused here"
    can = gpu.capabilities
    if can.pageable_memory_access_uses_host_page_tables:
        also = "this GPU could also read ordinary memory in place, by the host's page tables"
    elif can.pageable_memory_access:
        also = "this GPU could also read ordinary memory, by HMM's page faults, which are slow"
    elif can.pageable_memory_access is False:
        also = "this GPU cannot read ordinary memory"
    else:
        return "copies from it are fast and do not block the host"
    return f"copies from it are fast and do not block the host; {also}"


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
