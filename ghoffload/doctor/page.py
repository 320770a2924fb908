"""The doctor's page for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ghoffload.doctor.choices import Choice
from ghoffload.doctor.findings import Readings, Severity
from ghoffload.doctor.report import Report
from ghoffload.doctor.units import age, gb, rate, size, version
from ghoffload.machine.topology import Gpu, Host, Topology

_MARKS = {Severity.HURTS: ("hurts", "bold red"), Severity.NOTE: ("note", "yellow")}


def show(report: Report, console: Console) -> None:
    """Print the page."""
    _heading(console, "This machine")
    console.print(_table([(name, text) for name, text in _machine(report.topology)]))
    measured = list(_measured(report.readings))
    if measured:
        _heading(console, "What its link gives")
        console.print(_table(measured))
    _heading(console, "What ghoffload will use")
    console.print(_table([(choice.what, _chosen(choice)) for choice in report.choices]))
    if report.findings:
        _heading(console, "What is wrong")
    for finding in report.findings:
        mark, style = _MARKS[finding.severity]
        console.print(Text.assemble((f"{mark}: ", style), f"{finding.what}."))
        if finding.mend:
            console.print(Padding(Text.assemble(("mend: ", "green"), finding.mend), (0, 0, 1, 4)))
    console.print()
    console.print(Text(verdict(report), style="bold"))


def verdict(report: Report) -> str:
    """The page's last sentence."""
    hurts = sum(finding.severity is Severity.HURTS for finding in report.findings)
    if hurts:
        return f"{hurts} thing{'s' if hurts > 1 else ''} here will hurt."
    if not report.topology.gpus:
        return "No GPU was found: ghoffload steps on the CPU here, and nothing is wrong with that."
    return "Nothing here will hurt."


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold underline"))


def _table(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    return table


def _chosen(choice: Choice) -> str:
    return f"{choice.value}: {choice.why}" if choice.why else choice.value


def _machine(topology: Topology) -> Iterator[tuple[str, str]]:
    for gpu in topology.gpus:
        yield gpu.label, _gpu(gpu)
        yield "  link", _link(gpu)
        yield "  memory", _memory(gpu)
    if not topology.gpus:
        yield "GPU", "none found"
    elif topology.driver or topology.driver_cuda:
        yield "driver", f"{topology.driver or 'unknown'}, CUDA {version(topology.driver_cuda)}"
    evidence = topology.evidence
    cuda = f"CUDA {evidence.torch_cuda}" if evidence.torch_cuda else "built without CUDA"
    yield "torch", f"{evidence.torch_version or 'unknown'}, {cuda}"
    yield from _host(topology.host)
    if topology.unasked:
        yield "not asked", "; ".join(topology.unasked)


def _measured(readings: Readings) -> Iterator[tuple[str, str]]:
    rates = readings.rates
    if rates is None:
        return
    engine = [
        f"{rate(value)} {direction}"
        for value, direction in (
            (rates.h2d, "to the GPU"),
            (rates.d2h, "from it"),
            (rates.both, "both ways at once"),
        )
        if value is not None
    ]
    if engine:
        yield "copy engine", ", ".join(engine)
    kernel = [
        f"{kind} {rate(found.rate)} with {found.ctas} CTA{'s' if found.ctas > 1 else ''}"
        for kind in ("pinned", "managed", "system")
        if (found := rates.by_kernel(kind)) is not None
    ]
    if kernel:
        yield "kernel, both ways", ", ".join(kernel)
    if rates.hbm is not None:
        yield "HBM", f"{rates.hbm / 1e9:,.0f} GB/s, read and written"
    for note in rates.notes:
        yield "not counted", note
    yield "measured", f"{age(readings.age or 0)}; --fresh measures again"


def _gpu(gpu: Gpu) -> str:
    parts = [gpu.name or "unnamed"]
    if gpu.hbm_bytes:
        parts.append(f"{gb(gpu.hbm_bytes)} HBM")
    if gpu.compute_capability:
        parts.append(f"compute capability {version(gpu.compute_capability)}")
    if gpu.sm_count:
        parts.append(f"{gpu.sm_count} SMs")
    if gpu.copy_engines is not None:
        parts.append(f"{gpu.copy_engines} copy engines")
    if gpu.mig:
        parts.append("MIG on")
    if gpu.near_node is not None:
        parts.append(f"near node {gpu.near_node}")
    return ", ".join(parts)


def _link(gpu: Gpu) -> str:
    link = gpu.link
    if link.kind == "c2c":
        parts = ["C2C"]
        if link.c2c_links is not None:
            up = link.c2c_links if link.c2c_links_up is None else link.c2c_links_up
            parts.append(f"{up} of {link.c2c_links} links up")
        if link.c2c_bytes_per_second:
            parts.append(f"{gb(link.c2c_bytes_per_second)}/s by NVML")
        return ", ".join(parts)
    if link.generation is None:
        return "PCIe" if link.kind else "unknown"
    return (
        f"PCIe {link.generation} x{link.width or '?'} "
        f"(best: {link.max_generation or '?'} x{link.max_width or '?'})"
    )


def _memory(gpu: Gpu) -> str:
    if gpu.coherent_memory == "numa":
        return f"coherent, NUMA mode: HBM is node {gpu.numa_id}"
    if gpu.coherent_memory == "cdmm":
        return "coherent, CDMM: HBM is the driver's and no node"
    if gpu.coherent:
        return "coherent; whether HBM is a node is unknown"
    if gpu.capabilities.pageable_memory_access:
        return "HMM: kernels can read ordinary memory by page faults"
    if gpu.capabilities.pageable_memory_access is False:
        return "kernels cannot read ordinary memory (no HMM)"
    return "unknown"


def _host(host: Host) -> Iterator[tuple[str, str]]:
    limits = host.limits
    yield "CPUs", f"{host.cpus} for this process ({host.affinity or 'any'}), {host.architecture}"
    if limits.room_bytes is not None:
        total = "" if limits.total_bytes is None else f" of {gb(limits.total_bytes)}"
        bound = "" if limits.cgroup_bytes is None else f", cgroup limit {gb(limits.cgroup_bytes)}"
        yield (
            "host memory",
            f"{gb(limits.room_bytes)} available{total}{bound} (some hosts grow it as it is used)",
        )
    if len(host.nodes) > 1:
        with_cpus = [f"{node.index} ({gb(node.total_bytes)})" for node in host.cpu_nodes]
        without = [str(node.index) for node in host.nodes if not node.cpus]
        text = f"with CPUs: {', '.join(with_cpus) or 'none'}"
        if without:
            text += f"; without: {without[0]} to {without[-1]}, {len(without)} of them"
        yield "NUMA nodes", text
    huge = host.huge_pages or "unknown"
    if host.huge_page_bytes is not None:
        huge += f" ({size(host.huge_page_bytes)})"
    locked = "no limit" if limits.memlock_bytes is None else size(limits.memlock_bytes)
    yield "pages", f"{size(host.page_bytes)}; huge pages: {huge}; lockable: {locked}"
