"""What one optimizer does with its config, and what does not go together."""

from __future__ import annotations

from dataclasses import dataclass

from ghoffload import measure
from ghoffload.config import OffloadConfig
from ghoffload.errors import MachineUnavailableError
from ghoffload.kernels.build import LEAST_CAPABILITY, too_old
from ghoffload.machine.protocol import Machine
from ghoffload.memory import require_reached


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
    in_place: bool = False
    ctas: int = 0


def resolve(machine: Machine | None, config: OffloadConfig) -> Resolved:
    """The settings in force; ``auto`` as the machine was measured.

    Raises:
        ValueError: settings that exclude one another, or that the machine does not have.
        MachineUnavailableError: the GPU is too old for the kernels.
    """
    if machine is None or config.step_device == "cpu":
        _check_host(machine, config)
        pinned = config.memory_kind in ("auto", "pinned") and config.pin_memory
        return Resolved(True, "pinned" if pinned and machine is not None else "system")
    if machine.compute_capability < LEAST_CAPABILITY:
        raise MachineUnavailableError(
            f"a step on the GPU expects {too_old(*machine.compute_capability)}; "
            "step_device='cpu' steps on the CPU"
        )
    for kind in ("managed", "system"):
        if config.memory_kind == kind:
            require_reached(kind, machine)
    measure.resolve(config, machine, None)  # what contradicts itself is not worth a measurement
    open_kind = config.memory_kind == "auto" and config.pin_memory
    open_way = config.transfer == "auto"
    open_ctas = config.ctas == 0 and config.transfer != "copy_engine"
    crosses = config.memory_kind != "device"  # or nothing depends on the link
    measured = crosses and (open_kind or open_way or open_ctas)
    rates = measure.rates_of(machine) if measured else None
    choice = measure.resolve(config, machine, rates)
    in_place = choice.transfer == "kernel" and choice.memory_kind != "device"
    return Resolved(False, choice.memory_kind, in_place, choice.ctas if in_place else 0)


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
