"""What the GPUs do now, by NVML."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from ghoffload.machine.topology.gpu import Nvml, bus_id_of, quiet

_TO_HOST, _FROM_HOST = 0, 1  # NVML_PCIE_UTIL_TX_BYTES, ..._RX_BYTES: the GPU sends, receives
_CORE = 0  # NVML_TEMPERATURE_GPU


@dataclass(frozen=True, kw_only=True)
class GpuNow:
    """A GPU at one moment; ``None`` for what it does not say.

    Attributes:
        index: NVML's.
        name: for people.
        bus_id: as ``0000:1b:00.0``.
        busy: share of the last moment in which a kernel ran, 0 to 1.
        hbm_used, hbm_total: bytes.
        watts: power drawn.
        celsius: temperature.
        pcie_h2d, pcie_d2h: bytes a second by the GPU's own count; only of PCIe, not of C2C.
        processes: HBM in bytes by process number, of those that NVML sees.
    """

    index: int
    name: str = ""
    bus_id: str = ""
    busy: float | None = None
    hbm_used: int | None = None
    hbm_total: int | None = None
    watts: float | None = None
    celsius: int | None = None
    pcie_h2d: float | None = None
    pcie_d2h: float | None = None
    processes: dict[int, int] = field(default_factory=dict)


class Gpus:
    """NVML from the first look to the last. Enter it around all of them.

    Args:
        module: ``pynvml`` or what stands in for it; ``None`` where there is none.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._nvml = Nvml(None)

    def __enter__(self) -> Gpus:
        if self._module is not None and quiet(self._start) is True:
            self._nvml = Nvml(self._module)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._nvml("Shutdown")
        self._nvml = Nvml(None)

    def now(self, bus_ids: Collection[str]) -> list[GpuNow]:
        """The GPUs; only those at ``bus_ids`` if any of these is there.

        A GPU's PCIe counts take 40 ms, so GPUs that nobody asks about are left out.
        """
        handles = {}
        for index in range(self._nvml("DeviceGetCount") or 0):
            handle = self._nvml("DeviceGetHandleByIndex", index)
            bus_id = bus_id_of(getattr(self._nvml("DeviceGetPciInfo", handle), "busId", None))
            handles[index, bus_id] = handle
        asked = {key: handle for key, handle in handles.items() if key[1] and key[1] in bus_ids}
        return [self._gpu(*key, handle) for key, handle in (asked or handles).items()]

    def _start(self) -> bool:
        self._module.nvmlInit()
        return True

    def _gpu(self, index: int, bus_id: str, handle: Any) -> GpuNow:
        nvml = self._nvml
        name = nvml("DeviceGetName", handle)
        memory = nvml("DeviceGetMemoryInfo", handle)
        busy = getattr(nvml("DeviceGetUtilizationRates", handle), "gpu", None)
        milliwatts = nvml("DeviceGetPowerUsage", handle)
        running = nvml("DeviceGetComputeRunningProcesses", handle) or []
        return GpuNow(
            index=index,
            name=name.decode(errors="replace") if isinstance(name, bytes) else name or "",
            bus_id=bus_id,
            busy=None if busy is None else busy / 100,
            hbm_used=getattr(memory, "used", None),
            hbm_total=getattr(memory, "total", None),
            watts=None if milliwatts is None else milliwatts / 1000,
            celsius=nvml("DeviceGetTemperature", handle, _CORE),
            pcie_h2d=_bytes(nvml("DeviceGetPcieThroughput", handle, _FROM_HOST)),
            pcie_d2h=_bytes(nvml("DeviceGetPcieThroughput", handle, _TO_HOST)),
            processes={
                process.pid: process.usedGpuMemory
                for process in running
                if process.usedGpuMemory is not None
            },
        )


def _bytes(kilobytes: int | None) -> float | None:
    return None if kilobytes is None else 1e3 * kilobytes
