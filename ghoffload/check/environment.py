"""What a report says about the machine it comes from. Nothing here is needed to run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

from ghoffload._version import __version__
from ghoffload.machine.topology import probe

_PACKAGES = ("torch", "numpy", "numba", "cuda-bindings", "cuda-python", "nvidia-ml-py", "triton")


def describe() -> dict[str, Any]:
    """Versions, settings, and the machine as ``probe`` sees it."""
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
        "machine": probe().to_dict(),
        "settings": {k: v for k, v in os.environ.items() if k.startswith("GHOFFLOAD_")},
    }
