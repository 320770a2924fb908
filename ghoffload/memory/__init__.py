"""Host memory: arenas by memory kind, the limits they live within, and the ledger."""

from __future__ import annotations

from ghoffload.memory.arena import HostArena, carved_bytes
from ghoffload.memory.ledger import Ledger, LedgerRow, ledger
from ghoffload.memory.limits import available_host_bytes, cgroup_available_bytes

__all__ = [
    "HostArena",
    "Ledger",
    "LedgerRow",
    "available_host_bytes",
    "carved_bytes",
    "cgroup_available_bytes",
    "ledger",
]
