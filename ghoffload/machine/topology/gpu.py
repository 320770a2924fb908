"""The GPUs' side of a probe: CUDA's attributes, NVML's telemetry, the PCI bus.

Note [numbers of NVML]
    NVML's constants are part of its stable interface and written down here, so that a made-up NVML
    needs functions only and an old ``nvidia-ml-py`` is not asked for names it lacks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from ghoffload.machine.topology.facts import Capabilities, Gpu, Host, Link
from ghoffload.machine.topology.files import integer, read_text
from ghoffload.machine.topology.reader import Reader

_C2C_LINK_COUNT, _C2C_LINK_STATUS, _C2C_LINK_MEGABYTES = 170, 171, 172  # NVML_FI_DEV_C2C_...
_CORRECTED, _UNCORRECTED = 0, 1  # NVML_MEMORY_ERROR_TYPE_...
_SINCE_LOAD = 0  # NVML_VOLATILE_ECC
_ADDRESSING: dict[int, Literal["none", "hmm", "ats"]] = {0: "none", 1: "hmm", 2: "ats"}
_CLOCK_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
_CAPABILITIES = {
    "concurrent_managed_access": "ConcurrentManagedAccess",
    "pageable_memory_access": "PageableMemoryAccess",
    "pageable_memory_access_uses_host_page_tables": "PageableMemoryAccessUsesHostPageTables",
    "direct_managed_mem_access_from_host": "DirectManagedMemAccessFromHost",
    "host_native_atomic_supported": "HostNativeAtomicSupported",
}


def quiet(function: Callable[..., Any] | None, *arguments: Any) -> Any:
    """What ``function`` answers; ``None`` where it is missing or fails: not every GPU knows all."""
    if function is None:
        return None
    try:
        return function(*arguments)
    except Exception:
        return None


class Nvml:
    """A module ``pynvml`` whose functions answer ``None`` instead of raising."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, name: str, *arguments: Any) -> Any:
        return quiet(getattr(self._module, f"nvml{name}", None), *arguments)

    def field(self, handle: Any, number: int, scope: int = 0) -> int | None:
        """An unsigned field value of a device."""
        values = self("DeviceGetFieldValues", handle, [(number, scope)])
        if not values or values[0].nvmlReturn != 0:
            return None
        kind, value = values[0].valueType, values[0].value
        name = {1: "uiVal", 2: "ulVal", 3: "ullVal"}.get(kind)  # NVML_VALUE_TYPE_...
        return None if name is None else int(getattr(value, name))


def gather_gpus(reader: Reader, nvml: Nvml, host: Host) -> tuple[Gpu, ...]:
    """The GPUs that CUDA gives this process; where it gives none, those that NVML sees."""
    cuda = reader.cuda
    count = quiet(cuda.count) if cuda is not None else None
    gpus = []
    if cuda is not None and count:
        for index in range(count):
            bus_id = bus_id_of(quiet(cuda.bus_id, index))
            handle = nvml("DeviceGetHandleByPciBusId", bus_id) if bus_id else None
            gpus.append(_gpu(reader, nvml, host, index, bus_id, handle))
    else:
        for index in range(nvml("DeviceGetCount") or 0):
            handle = nvml("DeviceGetHandleByIndex", index)
            bus_id = bus_id_of(getattr(nvml("DeviceGetPciInfo", handle), "busId", None))
            gpus.append(_gpu(reader, nvml, host, None, bus_id, handle))
    return tuple(gpus)


def _gpu(
    reader: Reader, nvml: Nvml, host: Host, index: int | None, bus_id: str, handle: Any
) -> Gpu:
    cuda = reader.cuda if index is not None else None

    def attribute(name: str) -> int | None:
        return None if cuda is None else quiet(cuda.attribute, name, index)

    def about(name: str, *arguments: Any) -> Any:
        return None if handle is None else nvml(name, handle, *arguments)

    capabilities = Capabilities(
        **{name: _flag(attribute(asked)) for name, asked in _CAPABILITIES.items()}
    )
    capability = (attribute("ComputeCapabilityMajor"), attribute("ComputeCapabilityMinor"))
    if None in capability:
        capability = tuple(about("DeviceGetCudaComputeCapability") or (None, None))
    name = quiet(cuda.name, index) if cuda is not None else about("DeviceGetName")
    name = name.decode(errors="replace") if isinstance(name, bytes) else name
    memory = quiet(cuda.memory_bytes, index) if cuda is not None else None
    if memory is None:
        memory = getattr(about("DeviceGetMemoryInfo"), "total", None)
    numa_id = attribute("NumaId")
    if numa_id is None:
        numa_id = about("DeviceGetNumaNodeId")
    host_numa_id = attribute("HostNumaId")
    addressing = _ADDRESSING.get(about("DeviceGetAddressingMode"))
    link = _link(nvml, handle, about, capabilities, addressing)
    reasons = about("DeviceGetCurrentClocksEventReasons")
    if reasons is None:  # its name before driver 535
        reasons = about("DeviceGetCurrentClocksThrottleReasons")
    state = about("DeviceGetPerformanceState")
    return Gpu(
        index=index,
        name=name or "",
        bus_id=bus_id,
        compute_capability=None if None in capability else capability,  # type: ignore[arg-type]
        sm_count=attribute("MultiProcessorCount"),
        hbm_bytes=memory,
        copy_engines=attribute("AsyncEngineCount"),
        capabilities=capabilities,
        host_numa_id=host_numa_id,
        numa_id=numa_id,
        near_node=_near_node(reader.root, host, bus_id, host_numa_id),
        link=link,
        mig=_flag((about("DeviceGetMigMode") or [None])[0]),
        addressing=addressing,
        coherent_memory=_manager(reader.root, link, attribute("NumaConfig"), numa_id),
        ecc=_flag((about("DeviceGetEccMode") or [None])[0]),
        ecc_corrected=about("DeviceGetTotalEccErrors", _CORRECTED, _SINCE_LOAD),
        ecc_uncorrected=about("DeviceGetTotalEccErrors", _UNCORRECTED, _SINCE_LOAD),
        clock_reasons=tuple(n for bit, n in _CLOCK_REASONS.items() if (reasons or 0) & bit),
        performance_state=state if state is not None and 0 <= state <= 15 else None,
    )


def _link(
    nvml: Nvml,
    handle: Any,
    about: Callable[..., Any],
    capabilities: Capabilities,
    addressing: str | None,
) -> Link:
    links = nvml.field(handle, _C2C_LINK_COUNT) if handle is not None else None
    up = speed = None
    if links:
        # The link is the scope; a driver that does not answer for a link says nothing of it.
        states = [nvml.field(handle, _C2C_LINK_STATUS, scope) for scope in range(links)]
        speeds = [nvml.field(handle, _C2C_LINK_MEGABYTES, scope) for scope in range(links)]
        up = None if None in states else sum(state == 1 for state in states)
        speed = None if None in speeds else 1e6 * sum(s for s in speeds if s is not None)
    generation = about("DeviceGetCurrPcieLinkGeneration")
    kind: Literal["c2c", "pcie"] | None = "pcie" if generation is not None else None
    # ATS exists over C2C alone on the machines that CUDA serves with it.
    if links or capabilities.pageable_memory_access_uses_host_page_tables or addressing == "ats":
        kind = "c2c"
    elif capabilities.pageable_memory_access_uses_host_page_tables is False:
        kind = "pcie"
    return Link(
        kind=kind,
        generation=generation,
        max_generation=about("DeviceGetMaxPcieLinkGeneration"),
        gpu_max_generation=about("DeviceGetGpuMaxPcieLinkGeneration"),
        width=about("DeviceGetCurrPcieLinkWidth"),
        max_width=about("DeviceGetMaxPcieLinkWidth"),
        c2c_links=links,
        c2c_links_up=up,
        c2c_bytes_per_second=speed,
        replays=about("DeviceGetPcieReplayCounter"),
    )


def _near_node(root: Path, host: Host, bus_id: str, host_numa_id: int | None) -> int | None:
    on_bus = integer(root / "sys/bus/pci/devices" / bus_id / "numa_node") if bus_id else None
    for candidate in (host_numa_id, on_bus):  # -1 is "unknown" from either
        if candidate is not None and candidate >= 0:
            return candidate
    nodes = host.cpu_nodes
    return nodes[0].index if len(nodes) == 1 else None


def _manager(
    root: Path, link: Link, numa_config: int | None, numa_id: int | None
) -> Literal["numa", "cdmm"] | None:
    """Who manages the HBM of a coherent GPU."""
    if link.kind != "c2c":
        return None
    if numa_config is not None:  # cudaDevAttrNumaConfig: 1 is "the GPU is a NUMA node"
        return "numa" if numa_config == 1 else "cdmm"
    setting = re.search(
        r"^CoherentGPUMemoryMode:\s*\"?(\w*)",
        read_text(root / "proc/driver/nvidia/params") or "",
        re.MULTILINE,
    )
    if setting and setting[1]:
        return "cdmm" if setting[1] == "driver" else "numa"
    if numa_id is None:
        return None
    return "numa" if numa_id >= 0 else "cdmm"


def bus_id_of(text: Any) -> str:
    """``0000:1b:00.0`` from any of the forms CUDA and NVML write it in."""
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    match = re.fullmatch(r"([0-9a-f]+):([0-9a-f]+):([0-9a-f.]+)", (text or "").strip("\0 ").lower())
    return f"{int(match[1], 16):04x}:{match[2]}:{match[3]}" if match else ""


def _flag(value: Any) -> bool | None:
    return None if value is None else bool(value)
