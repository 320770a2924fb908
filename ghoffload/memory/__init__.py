"""Memory by kind: arenas, the tensor manager, the limits they live within, and the ledger."""

from __future__ import annotations

from ghoffload.memory.arena import HostArena, carved_bytes
from ghoffload.memory.carving import Carved
from ghoffload.memory.ledger import Ledger, LedgerRow, ledger
from ghoffload.memory.limits import available_host_bytes, cgroup_available_bytes
from ghoffload.memory.managed_arena import ManagedArena, require_reached, state_arena
from ghoffload.memory.manager import TensorManager
from ghoffload.memory.manager_figures import KindStatistics
from ghoffload.memory.summary import memory_summary

__all__ = [
    "Carved",
    "HostArena",
    "KindStatistics",
    "Ledger",
    "LedgerRow",
    "ManagedArena",
    "TensorManager",
    "available_host_bytes",
    "carved_bytes",
    "cgroup_available_bytes",
    "ledger",
    "memory_summary",
    "require_reached",
    "state_arena",
]
