"""Driver calls by address: past torch's allocator and past the machine's own counts.

A measurement leaves no trace: what it takes of HBM shows in none of torch's statistics, what it
copies is not the optimizer's traffic.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from ghoffload.machine.cuda import CudaMachine
from ghoffload.machine.topology import read_text

_OUT_OF_MEMORY = 2
_PROC_VERSION = Path("/proc/driver/nvidia/version")


class Raw:
    """The calls, for one machine's device, from any thread."""

    def __init__(self, machine: CudaMachine) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._context = machine.context
        self._index = int(machine.device.index)

    def allocate(self, nbytes: int) -> int:
        """The address of fresh device memory.

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """
        what = f"allocating {nbytes:,} bytes of HBM"
        return int(self._call(what, self._driver.cuMemAlloc, nbytes))

    def free(self, address: int) -> None:
        """Give it back; waits for what the device is doing."""
        self._call("freeing HBM", self._driver.cuMemFree, address)

    def copy(self, destination: int, source: int, nbytes: int, *, stream: int) -> None:
        """Queue a copy between any two addresses on a raw stream handle."""
        what = f"copy of {nbytes:,} bytes"
        self._call(what, self._driver.cuMemcpyAsync, destination, source, nbytes, stream)

    def uuid(self) -> str:
        """The device's own name, in hexadecimal digits; under MIG that of the slice."""
        ask = getattr(self._driver, "cuDeviceGetUuid_v2", None) or self._driver.cuDeviceGetUuid
        device = self._call("finding the device", self._driver.cuDeviceGet, self._index)
        return bytes(self._call("asking for the device's UUID", ask, device).bytes).hex()

    def driver_version(self) -> str:
        """The driver's release where the system tells it, else the CUDA version it serves."""
        found = re.search(r"\s(\d{3,}\.[\d.]+)\s", read_text(_PROC_VERSION) or "")
        if found is not None:
            return found[1]
        asked = self._call("asking for the driver's version", self._driver.cuDriverGetVersion)
        return f"CUDA {int(asked) // 1000}.{int(asked) % 1000 // 10}"

    def _call(self, what: str, function: Any, *arguments: Any) -> Any:
        with self._context:
            result = function(*arguments)
        if int(result[0]) != 0:
            message = f"{what} failed: {getattr(result[0], 'name', result[0])}"
            if int(result[0]) == _OUT_OF_MEMORY:
                raise torch.OutOfMemoryError(message)
            raise RuntimeError(message)
        return result[1] if len(result) > 1 else None
