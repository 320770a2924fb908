"""ManagedArena, and the arena of whichever memory kind host state is to be in.

Note [managed state]
    Managed memory whose preferred location is the host and which the device has mapped
    (accessed-by) never moves: a kernel reads and writes it over the link, at the rate of pinned
    memory (measured on an H200: 84.8 against 84.7 GB/s both ways). Copy engines are slow on it
    (7 GB/s), so nothing copies it: the update runs in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ghoffload.machine.protocol import Machine
from ghoffload.memory.arena import HostArena
from ghoffload.memory.backing import Backing, back
from ghoffload.memory.carving import Carved


class ManagedArena(Carved):
    """Managed memory in one piece, staying on the host: Note [managed state].

    Args:
        nbytes: size in bytes; 0 is allowed.
        machine: whose device reaches it.
        owner: who holds it, for the ledger and messages.

    Raises:
        ValueError: a bad size, or the machine has no managed memory.
        torch.OutOfMemoryError: it does not fit.
    """

    def __init__(self, nbytes: int, *, machine: Machine, owner: str) -> None:
        super().__init__(nbytes, owner)
        require_reached("managed", machine)
        self._backing: Backing | None = None
        if nbytes > 0:
            self._backing = back("managed", nbytes, machine=machine, owner=owner, node=None)
            self.address = self._backing.address
            self._buffer = np.asarray(_Bytes(self.address, nbytes, self._backing.keep))
            torch.frombuffer(self._buffer, dtype=torch.uint8).zero_()  # CUDA promises no zeros
        self._closed = False

    @property
    def kind(self) -> str:
        return "managed"

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._buffer = None
        if self._backing is not None:
            self._backing.close()
            self._backing = None


class _Bytes:
    """Memory at an address as numpy sees it; holds ``keep`` as long as an array looks at it."""

    def __init__(self, address: int, nbytes: int, keep: Any) -> None:
        self.keep = keep
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def state_arena(kind: str, nbytes: int, *, machine: Machine | None, owner: str) -> Carved:
    """Memory for host state.

    Args:
        kind: ``"pinned"`` (pageable where a pin is refused, with a warning), ``"managed"``, or
            anything else for pageable memory.
        nbytes: size in bytes.
        machine: whose device it is for; ``None`` for a step on the CPU.
        owner: who holds it.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    if kind == "managed":
        assert machine is not None, "refused before"
        return ManagedArena(nbytes, machine=machine, owner=owner)
    pin = kind == "pinned" and machine is not None
    return HostArena(nbytes, machine=machine, owner=owner, pin=pin)


def require_reached(kind: str, machine: Machine) -> None:
    """Refuse a memory kind that kernels of the machine do not reach.

    Raises:
        ValueError: with the capability that is missing.
    """
    if kind not in machine.memory_kinds:
        capability = {"managed": "ConcurrentManagedAccess", "system": "PageableMemoryAccess"}
        raise ValueError(
            f"memory kind {kind!r} expects a device with {capability[kind]}, which "
            f"{machine.device if machine.kind == 'cuda' else 'this virtual machine'} does not "
            f"have; it reaches {', '.join(sorted(machine.memory_kinds))}"
        )
