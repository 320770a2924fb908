"""Pinned host memory for activations, reused from step to step.

Note [readers]
    A block is given back while a copy may still read it. So it comes back with the event of its
    last reader, and whoever takes some of its bytes next gets the events of all who had them, to
    wait for in stream order. Nobody waits on the host.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ghoffload.machine.protocol import Event, Machine
from ghoffload.memory import HostArena
from ghoffload.memory.carving import ALIGNMENT, align
from ghoffload.memory.extents import Extents
from ghoffload.memory.limits import available_host_bytes

SLAB_BYTES = 256 << 20
_MOST_READERS = 64  # entries of a slab; beyond, the older half become one


@dataclass(eq=False)
class Block:
    """Some bytes of a slab.

    Attributes:
        memory: uint8, 1-D, in host memory that the machine knows.
        nbytes: of it.
        after: what may still read these bytes; a write has to wait for it.
        free_after: set by the owner before ``Slabs.give``: the last queued copy that reads them.
    """

    memory: Tensor
    nbytes: int
    after: tuple[Event, ...]
    slab: _Slab
    start: int
    free_after: Event | None = None


@dataclass(frozen=True, slots=True)
class _Readers:
    """Who may still read bytes [start, end) of a slab."""

    start: int
    end: int
    events: tuple[Event, ...]


class _Slab:
    def __init__(self, arena: HostArena) -> None:
        self.arena = arena
        self.extents = Extents(arena.nbytes, ALIGNMENT)
        self.readers: list[_Readers] = []

    def take(self, start: int, nbytes: int) -> Block:
        self.extents.take(start, nbytes)
        end = start + self.extents.rounded(nbytes)
        after: dict[Event, None] = {}
        left = []
        for reader in self.readers:
            if reader.start < end and start < reader.end:
                after.update(dict.fromkeys(reader.events))
            if not (start <= reader.start and reader.end <= end):
                left.append(reader)
        self.readers = left
        memory = self.arena.tensor(start, nbytes, torch.uint8)
        return Block(memory, nbytes, tuple(after), self, start)

    def give(self, block: Block) -> None:
        self.extents.give(block.start, block.nbytes)
        if block.free_after is None:
            return
        end = block.start + self.extents.rounded(block.nbytes)
        self.readers.append(_Readers(block.start, end, (block.free_after,)))
        if len(self.readers) > _MOST_READERS:
            older, self.readers = self.readers[:-32], self.readers[-32:]
            events = dict.fromkeys(event for reader in older for event in reader.events)
            first = min(reader.start for reader in older)
            last = max(reader.end for reader in older)
            self.readers.insert(0, _Readers(first, last, tuple(events)))


@dataclass(eq=False)
class Slabs:
    """Host memory in slabs; a block takes the tightest free range, of whatever size.

    Args:
        machine: that pins it and copies to and from it.
        owner: for the ledger and messages.
        slab_bytes: of a slab; a larger block gets one of its own size.
        limit_bytes: of all slabs; ``None``: what the host has.

    Attributes:
        used_bytes, peak_bytes: taken now, and at most.
        allocations: slabs ever made.
    """

    machine: Machine
    owner: str
    slab_bytes: int = SLAB_BYTES
    limit_bytes: int | None = None
    used_bytes: int = 0
    peak_bytes: int = 0
    allocations: int = 0
    _slabs: list[_Slab] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _process: int = field(default_factory=os.getpid)

    @property
    def reserved_bytes(self) -> int:
        """Of all slabs."""
        return sum(slab.arena.nbytes for slab in self._slabs)

    def take(self, nbytes: int) -> Block:
        """A block of so many bytes, 1 or more.

        Raises:
            torch.OutOfMemoryError: the host or the limit has no room; nothing was taken.
        """
        with self._lock:
            block = self._fit(nbytes)
            if block is None:
                self._grow(nbytes)
                block = self._fit(nbytes)
            assert block is not None, "a new slab has room"
            self.used_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            return block

    def give(self, block: Block) -> None:
        """Give a block back; see ``Block.free_after``."""
        with self._lock:
            block.slab.give(block)
            self.used_bytes -= block.nbytes

    def trim(self) -> None:
        """Give slabs back to the system of which nothing is taken. Waits for queued work."""
        with self._lock:
            whole = [slab for slab in self._slabs if slab.extents.whole]
            if whole:
                self.machine.synchronize_all()
            for slab in whole:
                self._slabs.remove(slab)
                slab.arena.close()

    def close(self) -> None:
        """Give everything back, once queued work has run; in a forked child this does nothing."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self.machine.synchronize_all()
            for slab in self._slabs:
                slab.arena.close()
            self._slabs.clear()

    def _fit(self, nbytes: int) -> Block | None:
        fits = [
            (*fit, number)
            for number, slab in enumerate(self._slabs)
            if (fit := slab.extents.fit(nbytes)) is not None
        ]
        if not fits:
            return None
        _, start, number = min(fits)
        return self._slabs[number].take(start, nbytes)

    def _grow(self, nbytes: int) -> None:
        need = align(nbytes, ALIGNMENT)
        reserved = self.reserved_bytes
        if self.limit_bytes is not None and reserved + need > self.limit_bytes:
            raise self._no_room(need, f"the limit is {self.limit_bytes:,}")
        size = max(need, self.slab_bytes)
        if self.limit_bytes is not None:
            size = min(size, (self.limit_bytes - reserved) // ALIGNMENT * ALIGNMENT)
        failure: torch.OutOfMemoryError | None = None
        for tried in dict.fromkeys((size, need)):  # less than a slab where that is all there is
            try:
                arena = HostArena(tried, machine=self.machine, owner=self.owner)
            except torch.OutOfMemoryError as error:
                failure = error
                continue
            self._slabs.append(_Slab(arena))
            self.allocations += 1
            return
        available = available_host_bytes()
        said = "an unknown number of bytes is" if available is None else f"{available:,} bytes are"
        raise self._no_room(need, f"{said} available ({failure})") from failure

    def _no_room(self, need: int, why: str) -> torch.OutOfMemoryError:
        return torch.OutOfMemoryError(
            f"{self.owner}: expected {need:,} more bytes of host memory for activations beside "
            f"{self.reserved_bytes:,} held, but {why}; offload less (budget_bytes, fraction, "
            "compress='fp8') or give the host more"
        )
