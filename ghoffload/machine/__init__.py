"""The machine: streams, events, copies, launches and memory, real or virtual."""

from __future__ import annotations

from ghoffload.machine.protocol import Event, Launch, Machine, Stream
from ghoffload.machine.select import active_machine, machine_for, use_machine
from ghoffload.machine.traffic import Traffic
from ghoffload.machine.virtual import VirtualMachine

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
