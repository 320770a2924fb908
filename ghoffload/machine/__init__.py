"""The machine: streams, events, copies, launches and memory, real or virtual."""

from __future__ import annotations

from .protocol import Event, Launch, Machine, Stream
from .select import active_machine, machine_for, use_machine
from .traffic import Traffic
from .virtual import VirtualMachine

__all__ = [
    "Event",
    "Launch",
    "Machine",
    "Stream",
    "Traffic",
    "VirtualMachine",
    "active_machine",
    "machine_for",
    "use_machine",
]
