"""The host's side of a probe."""

from __future__ import annotations

import re
from pathlib import Path

from ghoffload.machine.topology.facts import Host, Limits, Node
from ghoffload.machine.topology.files import (
    cgroup_memory,
    cpu_count,
    fields,
    huge_page_size,
    integer,
    names,
    number_list,
    read_text,
)
from ghoffload.machine.topology.reader import Reader


def gather_host(reader: Reader) -> Host:
    """Read the host's facts."""
    root = reader.root
    status = _lines(root / "proc/self/status")
    affinity = status.get("Cpus_allowed_list")
    mode = re.search(
        r"\[(\w+)\]", read_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    )
    return Host(
        architecture=reader.evidence.architecture,
        page_bytes=reader.page_bytes,
        huge_page_bytes=huge_page_size(root),
        huge_pages=mode[1] if mode else None,
        numa_balancing=integer(root / "proc/sys/kernel/numa_balancing"),
        nodes=_nodes(root / "sys/devices/system/node"),
        cpus=cpu_count(root, len(number_list(affinity)) if affinity else None),
        affinity=affinity,
        memory_nodes=status.get("Mems_allowed_list"),
        limits=_limits(root),
    )


def _nodes(directory: Path) -> tuple[Node, ...]:
    indices = [int(name[4:]) for name in names(directory) if re.fullmatch(r"node\d+", name)]
    nodes = []
    for index in sorted(indices):
        folder = directory / f"node{index}"
        # Lines read "Node 0 MemTotal:  502000000 kB".
        rows = (line.split() for line in (read_text(folder / "meminfo") or "").splitlines())
        memory = {
            row[2].rstrip(":"): int(row[3]) * 1024
            for row in rows
            if len(row) >= 4 and row[3].isdigit()
        }
        nodes.append(
            Node(
                index=index,
                cpus=(read_text(folder / "cpulist") or "").strip(),
                total_bytes=memory.get("MemTotal", 0),
                free_bytes=memory.get("MemFree", 0),
                file_bytes=memory.get("FilePages", 0),
            )
        )
    return tuple(nodes)


def _limits(root: Path) -> Limits:
    memory = fields(root / "proc/meminfo")
    total, available = memory.get("MemTotal"), memory.get("MemAvailable")
    limit, room = cgroup_memory(root)
    locked = re.search(
        r"^Max locked memory\s+(\d+)\s", read_text(root / "proc/self/limits") or "", re.MULTILINE
    )
    return Limits(
        total_bytes=None if total is None else total * 1024,
        available_bytes=None if available is None else available * 1024,
        cgroup_bytes=limit,
        cgroup_available_bytes=room,
        memlock_bytes=int(locked[1]) if locked else None,
    )


def _lines(path: Path) -> dict[str, str]:
    pairs = (line.partition(":") for line in (read_text(path) or "").splitlines())
    return {name: value.strip() for name, _, value in pairs}
