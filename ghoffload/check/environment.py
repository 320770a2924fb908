"""What a report says about the machine it comes from. Nothing here is needed to run."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
from typing import Any

import torch

_PACKAGES = ("torch", "numpy", "numba", "cuda-bindings", "cuda-python", "nvidia-ml-py", "triton")
# facts that decide which memory kinds a machine offers; names of cudaDeviceAttr
_ATTRIBUTES = (
    "ConcurrentManagedAccess",
    "PageableMemoryAccess",
    "PageableMemoryAccessUsesHostPageTables",
    "DirectManagedMemAccessFromHost",
    "HostNativeAtomicSupported",
    "HostNumaId",
    "NumaId",
    "AsyncEngineCount",
    "MultiProcessorCount",
    "ComputeCapabilityMajor",
    "ComputeCapabilityMinor",
)


def describe() -> dict[str, Any]:
    """Versions, the host, and each GPU with the attributes that matter."""
    from ghoffload._version import __version__
    from ghoffload.machine.topology import cpu_count

    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "not installed"
    return {
        "ghoffload": __version__,
        "python": platform.python_version(),
        "packages": packages,
        "system": platform.platform(),
        "processor": platform.machine(),
        "cpus": cpu_count(),
        "page_bytes": mmap.PAGESIZE,
        "cuda_of_torch": torch.version.cuda,
        "gpus": _gpus(),
        "settings": {k: v for k, v in os.environ.items() if k.startswith("GHOFFLOAD_")},
    }


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    from cuda.bindings import runtime

    _, driver = runtime.cudaDriverGetVersion()
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        attributes = {}
        for name in _ATTRIBUTES:
            attribute = getattr(runtime.cudaDeviceAttr, f"cudaDevAttr{name}", None)
            if attribute is not None:
                code, value = runtime.cudaDeviceGetAttribute(attribute, index)
                attributes[name] = int(value) if int(code) == 0 else None
        gpus.append(
            {
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "driver_cuda": int(driver),
                "attributes": attributes,
            }
        )
    return gpus
