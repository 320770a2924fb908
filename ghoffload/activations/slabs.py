"""Pinned host memory for activations, reused from step to step.

Note [readers]
    A block is given back while a copy may still read it. So it comes back with the event of its
    last reader, and whoever takes some of its bytes next gets the events of all who had them, to
    wait for in stream order. Nobody waits on the host.
    What a taker of free bytes is told of, its slab forgets for those bytes: they are the taker's
    until it gives them back. So free bytes have one entry each, and there are no more entries than
    ranges.

Note [idle]
    A step takes the sizes of the step before. So a block that is given back waits for the next of
    exactly its size, and goes back to its slab where one of a size that none has is asked for.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ghoffload.machine.protocol import Event, Machine
from ghoffload.memory import HostArena
from ghoffload.memory.carving import ALIGNMENT, align
from ghoffload.memory.extents import Extents
from ghoffload.memory.limits import available_host_bytes

SLAB_BYTES = 256 << 20


@dataclass(eq=False)
class Block:
    """Some bytes of a slab.

    Attributes:
        memory: uint8, 1-D, in host memory that the machine knows.
        nbytes: of it.
        after: what may still read these bytes; a write has to wait for it.
        free_after: set by the owner before ``Slabs.give``: the last queued copy that reads them.
            ``None`` where it queued none, and then ``after`` still holds for the next.
        given: whether it was given back.
    """

    memory: Tensor
    nbytes: int
    after: tuple[Event, ...]
    slab: _Slab
    start: int
    free_after: Event | None = None
    given: bool = False

    @property
    def readers(self) -> tuple[Event, ...]:
        """What may read them still once it is given back."""
        return self.after if self.free_after is None else (self.free_after,)


@dataclass(frozen=True, slots=True)
class _Readers:
    """Who may still read bytes [start, end) of a slab, which are free."""

    start: int
    end: int
    events: tuple[Event, ...]


class _Slab:
    def __init__(self, arena: HostArena) -> None:
        self.arena = arena
        self.extents = Extents(arena.nbytes, ALIGNMENT)
        self.readers: list[_Readers] = []  # disjoint, in order: Note [readers]

    def take(self, start: int, nbytes: int) -> Block:
        memory = self.arena.tensor(start, nbytes, torch.uint8)
        self.extents.take(start, nbytes)
        end = start + self.extents.rounded(nbytes)
        first = bisect_right(self.readers, start, key=lambda reader: reader.end)
        last = bisect_left(self.readers, end, lo=first, key=lambda reader: reader.start)
        overlapping = self.readers[first:last]
        self.readers[first:last] = [
            _Readers(a, b, reader.events)
            for reader in overlapping
            for a, b in ((reader.start, start), (end, reader.end))
            if a < b
        ]
        after = dict.fromkeys(event for reader in overlapping for event in reader.events)
        return Block(memory, nbytes, tuple(after), self, start)

    def give(self, block: Block) -> None:
        self.extents.give(block.start, block.nbytes)
        if block.readers:
            end = block.start + self.extents.rounded(block.nbytes)
            at = bisect_left(self.readers, block.start, key=lambda reader: reader.start)
            self.readers.insert(at, _Readers(block.start, end, block.readers))


@dataclass(eq=False)
class Slabs:
    """Host memory in slabs; a new block takes the tightest free range, of whatever size.

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
    _idle: dict[int, deque[Block]] = field(default_factory=dict)
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
            same = self._idle.get(nbytes)
            if same:
                idle = same.popleft()
                block = Block(idle.memory, nbytes, idle.readers, idle.slab, idle.start)
            else:
                block = self._carved(nbytes)
            self.used_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            return block

    def give(self, block: Block) -> None:
        """Give a block back; see ``Block.free_after``."""
        with self._lock:
            if block.given:
                raise AssertionError(
                    f"internal error: {block.nbytes:,} bytes at {block.start:,} are given back "
                    "twice"
                )
            block.given = True
            self._idle.setdefault(block.nbytes, deque()).append(block)
            self.used_bytes -= block.nbytes

    def trim(self) -> None:
        """Give slabs back to the system of which nothing is taken. Waits for queued work."""
        with self._lock:
            self._trim()

    def close(self) -> None:
        """Give everything back, once queued work has run; in a forked child this does nothing."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self.machine.synchronize_all()
            for slab in self._slabs:
                slab.arena.close()
            self._slabs.clear()
            self._idle.clear()

    def _carved(self, nbytes: int) -> Block:
        self._settle()
        block = self._fit(nbytes)
        if block is None:
            self._grow(nbytes)
            block = self._fit(nbytes)
        assert block is not None, "a new slab has room"
        return block

    def _settle(self) -> None:
        """No block is idle: all free bytes are their slabs'."""
        for same in self._idle.values():
            for block in same:
                block.slab.give(block)
        self._idle.clear()

    def _trim(self) -> None:
        self._settle()
        whole = [slab for slab in self._slabs if slab.extents.whole]
        if whole:
            self.machine.synchronize_all()
        for slab in whole:
            self._slabs.remove(slab)
            slab.arena.close()

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
        if not self._bounded(need):
            self._trim()  # what is free, but in slabs that are too small for this one
            if not self._bounded(need):
                raise self._no_room(need, f"the limit is {self.limit_bytes:,}")
        size = max(need, align(self.slab_bytes, ALIGNMENT))
        if self.limit_bytes is not None:
            size = min(size, (self.limit_bytes - self.reserved_bytes) // ALIGNMENT * ALIGNMENT)
        try:
            return self._add(size)
        except torch.OutOfMemoryError:
            self._trim()
        try:
            return self._add(need)  # less than a slab where that is all there is
        except torch.OutOfMemoryError as error:
            available = available_host_bytes()
            said = "an unknown number" if available is None else f"{available:,}"
            raise self._no_room(need, f"{said} bytes are available ({error})") from error

    def _bounded(self, need: int) -> bool:
        return self.limit_bytes is None or self.reserved_bytes + need <= self.limit_bytes

    def _add(self, nbytes: int) -> None:
        arena = HostArena(nbytes, machine=self.machine, owner=self.owner)
        self._slabs.append(_Slab(arena))
        self.allocations += 1

    def _no_room(self, need: int, why: str) -> torch.OutOfMemoryError:
        return torch.OutOfMemoryError(
            f"{self.owner}: expected {need:,} more bytes of host memory for activations beside "
            f"{self.reserved_bytes:,} held, but {why}; offload less (budget_bytes, fraction, "
            "compress='fp8') or give the host more"
        )
