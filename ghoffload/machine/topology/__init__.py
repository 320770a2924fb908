"""Topology: what this machine offers, read from the system. Never from a device's name.

``probe()`` reads it all, once, into a frozen ``Topology``. Everything comes through a ``Reader``,
so that tests can make machines up, and nothing raises: a probe that fails knows less, no more.
"""

from __future__ import annotations

from ghoffload.machine.topology.evidence import GpuEvidence, unusable_gpu
from ghoffload.machine.topology.facts import (
    Capabilities,
    Gpu,
    Host,
    Limits,
    Link,
    Node,
    Topology,
)
from ghoffload.machine.topology.files import (
    cgroup_directories,
    cpu_count,
    huge_page_size,
    page_size,
    read_text,
)
from ghoffload.machine.topology.probing import probe
from ghoffload.machine.topology.reader import Cuda, Reader

__all__ = [
    "Capabilities",
    "Cuda",
    "Gpu",
    "GpuEvidence",
    "Host",
    "Limits",
    "Link",
    "Node",
    "Reader",
    "Topology",
    "cgroup_directories",
    "cpu_count",
    "huge_page_size",
    "page_size",
    "probe",
    "read_text",
    "unusable_gpu",
]
