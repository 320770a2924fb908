"""Topology: what this machine offers, read from the system. Never from a device's name.

Every function takes what it reads as an argument (a file system root, a ``GpuEvidence``), so that
tests can make machines up, and none of them raises: a probe that fails knows less, no more.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import platform
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

_ROOT = Path("/")


def read_text(path: Path) -> str | None:
    """A small file's text, ``None`` where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None


def page_size() -> int:
    """Bytes of an ordinary page: 4 KiB on x86, 4 or 64 KiB on aarch64."""
    return mmap.PAGESIZE


def huge_page_size(root: Path = _ROOT) -> int | None:
    """Bytes of a transparent huge page (2 MiB, or 512 MiB with 64 KiB pages), ``None`` if off."""
    folder = root / "sys/kernel/mm/transparent_hugepage"
    text = (read_text(folder / "hpage_pmd_size") or "").strip()
    if not text.isdigit() or "[never]" in (read_text(folder / "enabled") or "[never]"):
        return None
    return int(text) or None


def cgroup_directories(controller: str, root: Path = _ROOT) -> list[Path]:
    """The directories of this process's cgroup and those above it for ``controller``, v1 and v2.

    A limit in any of them holds. Directories that this process cannot see are left out.
    """
    found: dict[Path, None] = {}
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        # Inside a container the path may be the host's, of which only the mount's root is seen.
        parts = [part for part in path.split("/") if part]
        if ".." in parts:
            parts = []
        for depth in range(len(parts), -1, -1):
            directory = base.joinpath(*parts[:depth])
            if directory.is_dir():
                found[directory] = None
    return list(found)


def cpu_count(root: Path = _ROOT, affinity: int | None = None) -> int:
    """CPUs this process may use: its affinity, and no more than its cgroup's quota pays for.

    Args:
        root: the file system to read, for tests.
        affinity: CPUs in the affinity mask, for tests; asked from the system when ``None``.
    """
    if affinity is None:
        try:
            affinity = len(os.sched_getaffinity(0))
        except (AttributeError, OSError):  # not Linux
            affinity = os.cpu_count() or 1
    count = affinity
    for directory in cgroup_directories("cpu", root):
        words = (read_text(directory / "cpu.max") or "").split()  # v2: "max 100000"
        if len(words) != 2:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")  # v1: -1 is no quota
            words = [(read_text(directory / name) or "").strip() for name in names]
        if all(word.isdigit() and int(word) > 0 for word in words):
            count = min(count, math.ceil(int(words[0]) / int(words[1])))
    return max(1, count)


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
    def gather(cls, root: Path = _ROOT) -> GpuEvidence:
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
            nodes=tuple(name for name in _names(root / "dev") if name.startswith("nvidia")),
            driver_gpus=len(_names(root / "proc/driver/nvidia/gpus")),
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


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []
