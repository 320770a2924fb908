"""How a config's ``auto`` resolves for one optimizer, and what does not go together."""

from __future__ import annotations

from dataclasses import dataclass

from ghoffload.config import OffloadConfig
from ghoffload.machine.protocol import Machine
from ghoffload.memory import require_reached

DEFAULT_CTAS = 4
"""Thread blocks of an update in place where nothing was measured: enough on an H200."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """What an optimizer does.

    Attributes:
        on_host: whether the update is computed on the CPU.
        memory_kind: of host state; ``"device"`` where all state stays in HBM.
        in_place: whether the kernel updates host state where it lies.
        ctas: thread blocks of an update in place.
    """

    on_host: bool
    memory_kind: str
    in_place: bool
    ctas: int


def resolve(machine: Machine | None, config: OffloadConfig) -> Resolved:
    """The settings in force.

    Raises:
        ValueError: settings that exclude one another, or that the machine does not have.
    """
    on_host = machine is None or config.step_device == "cpu"
    if on_host:
        _check_host(machine, config)
        pinned = config.memory_kind in ("auto", "pinned") and config.pin_memory
        kind = "pinned" if pinned and machine is not None else "system"
        return Resolved(True, kind, False, 0)
    assert machine is not None, "it would step on the host"
    kind, transfer = config.memory_kind, config.transfer
    if kind in ("managed", "system"):
        if transfer == "copy_engine":
            raise ValueError(
                f"memory_kind={kind!r} expects transfer='kernel': copy engines are slow on managed "
                "memory, and from pageable memory they block the host; got transfer='copy_engine'"
            )
        require_reached(kind, machine)
        transfer = "kernel"
    elif kind == "auto":
        kind = "pinned"
    if transfer == "kernel" and kind == "pinned" and not config.pin_memory:
        raise ValueError(
            "transfer='kernel' lets the GPU update host state where it lies; it expects memory "
            "that the GPU reaches, got pin_memory=False"
        )
    if kind == "pinned" and not config.pin_memory:
        return Resolved(False, "pageable", False, 0)
    in_place = transfer == "kernel" and kind != "device"
    return Resolved(False, kind, in_place, (config.ctas or DEFAULT_CTAS) if in_place else 0)


def _check_host(machine: Machine | None, config: OffloadConfig) -> None:
    if machine is None and config.step_device == "cuda":
        raise ValueError(
            "step_device='cuda' expects parameters in HBM, got parameters on the CPU; move the "
            "model to the GPU first, or use step_device='auto'"
        )
    if config.transfer == "kernel" or config.memory_kind == "managed":
        raise ValueError(
            "transfer='kernel' and memory_kind='managed' let the GPU update host state where it "
            "lies; they expect parameters in HBM and a step there, got "
            + ("parameters on the CPU" if machine is None else "step_device='cpu'")
        )
    if config.memory_kind == "device" or config.hbm_state_bytes or config.min_offload_bytes:
        raise ValueError(
            "memory_kind='device', hbm_state_bytes and min_offload_bytes keep state in HBM, which "
            "a step on the CPU cannot update; drop them, or step with step_device='cuda'"
        )
