"""Checks of the host's side. Each is a function of the topology alone, so made-up ones test it."""

from __future__ import annotations

from ghoffload.doctor.findings import Finding, Severity
from ghoffload.doctor.units import gb, size
from ghoffload.machine.topology import Gpu, Topology
from ghoffload.machine.topology.files import number_list


def numa_balancing(topology: Topology) -> Finding | None:
    """The kernel moves pages to where they were touched last, and unmaps them to find out."""
    host = topology.host
    coherent = any(gpu.coherent for gpu in topology.gpus)
    nodes = [node for node in host.nodes if node.total_bytes]
    if not host.numa_balancing or (len(nodes) < 2 and not coherent):
        return None
    return Finding(
        check="numa_balancing",
        severity=Severity.HURTS if coherent else Severity.NOTE,
        what=(
            f"automatic NUMA balancing is on (kernel.numa_balancing = {host.numa_balancing}): the "
            f"kernel unmaps pages to see who uses them, on {len(nodes)} nodes with memory"
        ),
        mend=(
            "turn it off: 'sudo sysctl kernel.numa_balancing=0', and the same line in "
            "/etc/sysctl.d to keep it so"
        ),
    )


def process_far_from_gpu(topology: Topology) -> Finding | None:
    """This process may not run on, or not take memory from, the node nearest to its GPU."""
    host = topology.host
    allowed = None if host.memory_nodes is None else number_list(host.memory_nodes)
    own = host.own_nodes()
    far: list[Gpu] = []
    for gpu in topology.gpus:
        node = host.node(gpu.near_node)
        if node is None or not node.cpus:
            continue
        if node.index not in own or (allowed is not None and node.index not in allowed):
            far.append(gpu)
    if not far:
        return None
    where = ", ".join(f"{gpu.label} is nearest to node {gpu.near_node}" for gpu in far)
    memory = "any node" if host.memory_nodes is None else f"nodes {host.memory_nodes}"
    near = far[0].near_node
    return Finding(
        check="process_far_from_gpu",
        severity=Severity.HURTS,
        what=(
            f"{where}; this process runs on the CPUs of node {_listed(own)} and takes memory from "
            f"{memory}, so copies cross the link between the nodes"
        ),
        mend=f"start it with 'numactl --cpunodebind={near} --membind={near}', or choose a GPU "
        "near to it by CUDA_VISIBLE_DEVICES",
    )


def process_spread_over_nodes(topology: Topology) -> Finding | None:
    """This process may run anywhere, so chance decides where its memory lies."""
    host = topology.host
    own = host.own_nodes()
    near = {gpu.near_node for gpu in topology.gpus} & own
    if len(own) < 2 or not near:
        return None
    placed = ", ".join(
        f"{gpu.label} node {gpu.near_node}" for gpu in topology.gpus if gpu.near_node in own
    )
    return Finding(
        check="process_spread_over_nodes",
        severity=Severity.NOTE,
        what=(
            f"this process may run on the CPUs of nodes {_listed(own)}, and host state lies where "
            "the threads that touch it first happen to run"
        ),
        mend="bind each process to the node of its GPU, 'numactl --cpunodebind=N --membind=N': "
        f"{placed}",
    )


def small_cgroup(topology: Topology) -> Finding | None:
    """A container's limit is below the machine's memory; beyond it the process is killed."""
    limits = topology.host.limits
    if limits.cgroup_bytes is None or limits.cgroup_available_bytes is None:
        return None
    if limits.total_bytes is not None and limits.cgroup_bytes >= limits.total_bytes:
        return None
    total = "" if limits.total_bytes is None else f" of the machine's {gb(limits.total_bytes)}"
    return Finding(
        check="small_cgroup",
        severity=Severity.NOTE,
        what=(
            f"this process's cgroup may use {gb(limits.cgroup_bytes)}{total}; "
            f"{gb(limits.cgroup_available_bytes)} are left for host state"
        ),
        mend="start the container or job with more memory ('docker run --memory', Slurm's --mem), "
        "or plan with this figure",
    )


def large_pages(topology: Topology) -> Finding | None:
    """Pages of 64 KiB and more come with huge pages of 512 MiB."""
    host = topology.host
    if host.page_bytes < 64 << 10:
        return None
    huge = "" if host.huge_page_bytes is None else f", huge pages {size(host.huge_page_bytes)}"
    return Finding(
        check="large_pages",
        severity=Severity.NOTE,
        what=(
            f"pages are {size(host.page_bytes)}{huge}: host memory that is smaller than a huge "
            "page is pinned page by page, and small allocations take more than they ask for"
        ),
        mend="nothing has to be done; where small models matter, boot the kernel with 4 KiB pages",
    )


def huge_pages_off(topology: Topology) -> Finding | None:
    """Without huge pages, touching and pinning host memory takes longer."""
    host = topology.host
    if host.huge_pages != "never":
        return None
    return Finding(
        check="huge_pages_off",
        severity=Severity.NOTE,
        what="transparent huge pages are off, so host state is touched and pinned more slowly "
        "when an optimizer is made (half as fast, measured on an H200's host)",
        mend="'echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled'",
    )


def _listed(nodes: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(nodes))) or "(none)"
