"""Staging buffers: the HBM that host state streams through."""

from __future__ import annotations

import torch

from ghoffload.machine.protocol import Machine
from ghoffload.memory import ledger


class Staging:
    """A ring of ``slots`` HBM buffers of ``slot_bytes`` each, with the events that order their use.

    A buffer's life within a step: *reloaded* (its bucket's state has arrived), then the update on
    the compute stream, then *drained* (the new state is in host memory and the buffer is free).

    Attributes:
        buffers: uint8 tensors of ``slot_bytes``.
        reloaded, drained: one event a buffer. A new buffer is *drained* once the current stream has
            done what it had to do: the allocator may have taken the memory from it.
    """

    def __init__(self, machine: Machine, *, slots: int, slot_bytes: int, owner: str) -> None:
        self._machine, self._owner = machine, owner
        self.slot_bytes = slot_bytes
        self.buffers = [machine.empty((slot_bytes,), torch.uint8) for _ in range(slots)]
        self.reloaded = [machine.event(f"staging buffer {slot} reloaded") for slot in range(slots)]
        self.drained = [machine.event(f"staging buffer {slot} drained") for slot in range(slots)]
        for event in self.drained:
            machine.record(event, machine.current_stream())
        ledger.add("device", owner, self.nbytes)

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * len(self.buffers)

    def close(self) -> None:
        """Give the buffers back to the machine once queued work no longer needs them."""
        ledger.remove("device", self._owner, self.nbytes)
        while self.buffers:
            self._machine.free(self.buffers.pop())
