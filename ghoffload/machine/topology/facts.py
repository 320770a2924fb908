"""What a probe finds out, as frozen values. ``None`` always means "could not be asked"."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from ghoffload.machine.topology.evidence import GpuEvidence
from ghoffload.machine.topology.files import number_list

# Bytes a second and lane that each PCIe generation carries: the signalling rate times its line
# code (8b/10b, 128b/130b, and 242 of 256 bytes in the frames of generation 6).
_LANE_BYTES_PER_SECOND = {
    1: 2.5e9 * 8 / 10 / 8,
    2: 5e9 * 8 / 10 / 8,
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
    6: 64e9 * 242 / 256 / 8,
}


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What the GPU and the host can do with each other's memory: CUDA's device attributes.

    Attributes:
        concurrent_managed_access: both may use managed memory at once.
        pageable_memory_access: kernels may read ordinary memory (ATS or HMM).
        pageable_memory_access_uses_host_page_tables: by the host's own page tables (ATS).
        direct_managed_mem_access_from_host: the CPU reads HBM in place.
        host_native_atomic_supported: atomics work across the link.
    """

    concurrent_managed_access: bool | None = None
    pageable_memory_access: bool | None = None
    pageable_memory_access_uses_host_page_tables: bool | None = None
    direct_managed_mem_access_from_host: bool | None = None
    host_native_atomic_supported: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link between a GPU and its host.

    Attributes:
        kind: ``"c2c"`` where NVML counts C2C links or the GPU walks the host's page tables.
        generation: of PCIe, now. A GPU that idles may have lowered it.
        max_generation: that the GPU and its slot both can.
        gpu_max_generation: that the GPU can.
        width: lanes now.
        max_width: lanes that the GPU and its slot both have.
        c2c_links: C2C links there are.
        c2c_links_up: C2C links that are up.
        c2c_bytes_per_second: what NVML says the links that are up carry together, a direction.
        replays: PCIe packets sent again since the driver was loaded.
    """

    kind: Literal["c2c", "pcie"] | None = None
    generation: int | None = None
    max_generation: int | None = None
    gpu_max_generation: int | None = None
    width: int | None = None
    max_width: int | None = None
    c2c_links: int | None = None
    c2c_links_up: int | None = None
    c2c_bytes_per_second: float | None = None
    replays: int | None = None

    def pcie_bytes_per_second(self) -> float | None:
        """The raw rate of one direction at the best generation and width; ``None`` if unknown."""
        lane = _LANE_BYTES_PER_SECOND.get(self.max_generation or 0)
        return lane * self.max_width if lane is not None and self.max_width else None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, as CUDA and NVML describe it.

    Attributes:
        index: CUDA's in this process; ``None`` for a GPU that only NVML sees.
        name: for people; nothing is concluded from it.
        bus_id: ``0000:1b:00.0``, what CUDA, NVML and the kernel agree on.
        compute_capability: major and minor.
        sm_count: streaming multiprocessors, those of the slice under MIG.
        hbm_bytes: memory of the GPU, or of the slice under MIG.
        copy_engines: copies that may run beside kernels; with 2 the directions overlap.
        capabilities: see there.
        host_numa_id: the host's node nearest to it, by CUDA.
        numa_id: the node that its HBM is; -1 if it is none.
        near_node: the host's node nearest to it, from ``host_numa_id`` or the PCI bus.
        link: see there.
        mig: whether it is cut into slices.
        addressing: how kernels may read ordinary memory, by NVML.
        coherent_memory: on a coherent machine, who manages HBM: ``"numa"``, the kernel, as a node
            of its own; ``"cdmm"``, the driver.
        ecc: whether error correction is on.
        ecc_corrected: errors corrected since the driver was loaded.
        ecc_uncorrected: errors that were not.
        clock_reasons: what holds its clocks down now, named as NVML does.
        performance_state: 0 is the fastest.
    """

    index: int | None = None
    name: str = ""
    bus_id: str = ""
    compute_capability: tuple[int, int] | None = None
    sm_count: int | None = None
    hbm_bytes: int | None = None
    copy_engines: int | None = None
    capabilities: Capabilities = Capabilities()
    host_numa_id: int | None = None
    numa_id: int | None = None
    near_node: int | None = None
    link: Link = Link()
    mig: bool | None = None
    addressing: Literal["none", "hmm", "ats"] | None = None
    coherent_memory: Literal["numa", "cdmm"] | None = None
    ecc: bool | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    clock_reasons: tuple[str, ...] = ()
    performance_state: int | None = None

    @property
    def coherent(self) -> bool:
        """Whether the GPU and the host see each other's memory in hardware."""
        return (
            self.link.kind == "c2c"
            or self.capabilities.pageable_memory_access_uses_host_page_tables is True
        )

    @property
    def label(self) -> str:
        """How a message names it."""
        return f"GPU {self.index}" if self.index is not None else f"GPU {self.bus_id}"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A NUMA node.

    Attributes:
        index: the kernel's.
        cpus: its CPUs as the kernel lists them, ``"0-71"``; empty where it has none.
        total_bytes: its memory; 0 where it has none.
        free_bytes: of it, unused.
        file_bytes: of it, page cache.
    """

    index: int
    cpus: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    file_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds host memory. ``None``: no such limit, or it cannot be asked.

    Attributes:
        total_bytes: ``MemTotal``. Some hosts grow it as memory is used.
        available_bytes: ``MemAvailable``, as things look now; it grows with ``total_bytes``.
        cgroup_bytes: the tightest memory limit of this process's cgroups. It is firm.
        cgroup_available_bytes: the least room below any of these limits.
        memlock_bytes: the soft ``RLIMIT_MEMLOCK``.
    """

    total_bytes: int | None = None
    available_bytes: int | None = None
    cgroup_bytes: int | None = None
    cgroup_available_bytes: int | None = None
    memlock_bytes: int | None = None

    @property
    def room_bytes(self) -> int | None:
        """Bytes this process can take as things look now."""
        figures = (self.available_bytes, self.cgroup_available_bytes)
        return min((figure for figure in figures if figure is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class Host:
    """The host's side.

    Attributes:
        architecture: ``platform.machine()``.
        page_bytes: of an ordinary page.
        huge_page_bytes: of a transparent huge page; ``None`` also where they are off.
        huge_pages: their mode: ``"always"``, ``"madvise"`` or ``"never"``.
        numa_balancing: ``/proc/sys/kernel/numa_balancing``; 0 is off.
        nodes: NUMA nodes, those without CPUs or memory, too.
        cpus: how many CPUs this process may use, its cgroup's quota counted in.
        affinity: which CPUs it may run on, as the kernel lists them.
        memory_nodes: which nodes it may take memory from.
        limits: see there.
    """

    architecture: str = ""
    page_bytes: int = 4096
    huge_page_bytes: int | None = None
    huge_pages: str | None = None
    numa_balancing: int | None = None
    nodes: tuple[Node, ...] = ()
    cpus: int = 1
    affinity: str | None = None
    memory_nodes: str | None = None
    limits: Limits = Limits()

    @property
    def cpu_nodes(self) -> tuple[Node, ...]:
        """Nodes that have CPUs."""
        return tuple(node for node in self.nodes if node.cpus)

    def node(self, index: int | None) -> Node | None:
        """The node of that number, ``None`` if there is none."""
        return next((node for node in self.nodes if node.index == index), None)

    def own_nodes(self) -> frozenset[int]:
        """Nodes whose CPUs this process may run on; those of all CPUs if that is unknown."""
        if self.affinity is None:
            return frozenset(node.index for node in self.cpu_nodes)
        own = number_list(self.affinity)
        return frozenset(n.index for n in self.cpu_nodes if own & number_list(n.cpus))


@dataclass(frozen=True, kw_only=True)
class Topology:
    """What this machine is, at one moment.

    Attributes:
        driver: the NVIDIA driver's version, ``"580.95.05"``.
        driver_cuda: the newest CUDA version that the driver serves.
        gpus: those CUDA sees in this process, in its order; where it sees none, NVML's.
        host: see there.
        evidence: what speaks for a GPU, and what torch can do with it.
        unasked: what could not be asked, for the reader of a short page.
    """

    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    host: Host = Host()
    evidence: GpuEvidence = field(default_factory=GpuEvidence)
    unasked: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values for JSON."""
        return dataclasses.asdict(self)
