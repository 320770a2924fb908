"""What speaks for a GPU on this machine, and why torch cannot use it where it cannot."""

from __future__ import annotations

import functools
import os
import platform
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from ghoffload.machine.topology.files import ROOT, names


@dataclass(frozen=True, kw_only=True)
class GpuEvidence:
    """What speaks for a GPU here, and what torch can do with it.

    Attributes:
        cuda_available: ``torch.cuda.is_available()``.
        torch_version: ``torch.__version__``.
        torch_cuda: ``torch.version.cuda``; ``None`` is a build without CUDA.
        torch_warning: what torch said while it looked for a GPU.
        visible_devices: ``CUDA_VISIBLE_DEVICES``; ``None`` if it is not set.
        nvml_count: GPUs that NVML sees; ``None`` where NVML cannot be asked.
        nodes: names under ``/dev`` that begin with ``nvidia``.
        driver_gpus: entries in ``/proc/driver/nvidia/gpus``.
        architecture: ``platform.machine()``.
    """

    cuda_available: bool = False
    torch_version: str = ""
    torch_cuda: str | None = None
    torch_warning: str = ""
    visible_devices: str | None = None
    nvml_count: int | None = None
    nodes: tuple[str, ...] = ()
    driver_gpus: int = 0
    architecture: str = ""

    @classmethod
    def gather(cls, root: Path = ROOT) -> GpuEvidence:
        """Look at this machine."""
        available, said = _ask_torch()
        return cls(
            cuda_available=available,
            torch_version=str(torch.__version__),
            torch_cuda=torch.version.cuda,
            torch_warning=said,
            visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
            # NVML costs milliseconds and has nothing to add where torch works.
            nvml_count=None if available else _nvml_count(),
            nodes=tuple(name for name in names(root / "dev") if name.startswith("nvidia")),
            driver_gpus=len(names(root / "proc/driver/nvidia/gpus")),
            architecture=platform.machine(),
        )

    def sign(self) -> str | None:
        """What shows that there is a GPU, in words; ``None`` if nothing does."""
        if self.nvml_count:
            return f"NVML sees {self.nvml_count} GPU{'s' if self.nvml_count > 1 else ''}"
        if self.driver_gpus:
            return f"/proc/driver/nvidia/gpus lists {self.driver_gpus}"
        numbered = [name for name in self.nodes if re.fullmatch(r"nvidia\d+", name)]
        if numbered:
            return f"/dev/{numbered[0]} is there"
        # The control node says only that the driver is loaded, so NVML's word goes before it.
        if "nvidiactl" in self.nodes and self.nvml_count is None:
            return "/dev/nvidiactl is there"
        return None


@functools.cache
def _evidence() -> GpuEvidence:
    return GpuEvidence.gather()


def unusable_gpu(evidence: GpuEvidence | None = None) -> str | None:
    """Why torch cannot use a GPU that this machine has, with the mend, in a sentence or two.

    ``None`` where torch can use one, where nothing shows one, or where ``CUDA_VISIBLE_DEVICES``
    hides all of them, which is the user's choice.

    Args:
        evidence: made up, for tests; gathered once and kept when ``None``.
    """
    if evidence is None:
        evidence = _evidence()
    sign = evidence.sign()
    visible = evidence.visible_devices
    # CUDA's own rule: devices from the first that is not one on are hidden.
    hidden = visible is not None and visible.split(",")[0].strip() in ("", "-1", "NoDevFiles")
    if evidence.cuda_available or sign is None or hidden:
        return None
    start = f"this machine has a GPU ({sign}) that torch cannot use: "
    if evidence.torch_cuda is None:
        trap = " (the default wheels for aarch64 can be that)" * (
            evidence.architecture in ("aarch64", "arm64")
        )
        return (
            f"{start}torch {evidence.torch_version} was built without CUDA{trap}. Install a CUDA "
            "build: https://pytorch.org/get-started/locally"
        )
    said = " ".join(evidence.torch_warning.split())
    if "driver" in said and "too old" in said:
        return (
            f"{start}the driver is too old for CUDA {evidence.torch_cuda}. Update the driver, or "
            f"install a build of torch for an older CUDA. torch says: {said}"
        )
    if visible is not None:
        return (
            f"{start}CUDA_VISIBLE_DEVICES={visible!r} selects none that works. Unset it, or name "
            f"one that 'nvidia-smi -L' lists{f'. torch says: {said}' if said else ''}"
        )
    return (
        f"{start}CUDA {evidence.torch_cuda} finds no device"
        f"{f' and torch says: {said}' if said else ''}. Usually the driver is too old, or the "
        "container was started without access to the GPU ('--gpus all'); 'nvidia-smi' tells"
    )


def _ask_torch() -> tuple[bool, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            available = bool(torch.cuda.is_available())
        except Exception as error:  # a broken driver is an answer, not a crash
            return False, str(error)
    return available, " ".join(str(warning.message) for warning in caught)


def _nvml_count() -> int | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # not installed, no driver, no permission: NVML has nothing to say
        return None
