"""A pool: the segments of one memory kind, and the blocks in them.

Note [life of a block]
    used -> dead (its tensor's storage died) -> cooling (counted out) -> free. What was queued on
    the device may still use a dead block, and nobody says on which streams, so a cooling block
    becomes free only once ``synchronize_all`` has returned after its death. That happens only when
    no free range is large enough, before the system is asked for more.
    A death may be noticed in any thread at any time, also inside this code: it is only put in line
    (``Graveyard``), and the next call on the manager counts it out.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ghoffload.machine.protocol import Machine
from ghoffload.memory.arena import ALIGNMENT
from ghoffload.memory.backing import Backing, back
from ghoffload.memory.extents import Extents
from ghoffload.memory.limits import available_host_bytes
from ghoffload.memory.manager_figures import Counts
from ghoffload.memory.shares import Promise, available_bytes, taking

SEGMENT_BYTES = 32 << 20
"""Bytes asked of the system at least, so that small tensors share a segment."""


class Graveyard:
    """Blocks whose tensors died, in line to be counted out; after ``closed`` none is kept."""

    def __init__(self) -> None:
        self.closed = False
        self._line: deque[Block] = deque()

    def bury(self, block: Block) -> None:
        """Called at a tensor's death, in whatever thread that happens; takes no lock."""
        if not self.closed:
            self._line.append(block)

    def exhume(self) -> list[Block]:
        """Those in line, out of it."""
        return [self._line.popleft() for _ in range(len(self._line))]


@dataclass(eq=False)
class Segment:
    """One piece of memory from the system."""

    backing: Backing
    extents: Extents
    node: int | None


@dataclass(eq=False)
class Block:
    """What one tensor of the manager's lies on. ``segment`` is ``None`` for device memory."""

    kind: str
    address: int
    nbytes: int
    segment: Segment | None = None
    start: int = 0
    advised: bool = False


class _Holder:
    """Stands for a block in the buffer of a tensor: it dies with the tensor's storage."""

    def __init__(self, block: Block, keep: Any) -> None:
        self.keep = keep
        self.__array_interface__ = {
            "shape": (block.nbytes,),
            "typestr": "|u1",
            "data": (block.address, False),
            "version": 3,
        }


@dataclass
class Pool:
    """Host-side memory of one kind. Not thread-safe: the manager holds its lock around it."""

    kind: str
    machine: Machine | None
    owner: str
    budget: int | None
    follows_system: bool = False
    """Whether growth is also held to what the host has available at that moment."""
    promise: Promise | None = None
    """Of an explicit budget: Note [budgets add up] in shares.py."""
    segments: list[Segment] = field(default_factory=list)
    cooling: list[Block] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)

    @property
    def alignment(self) -> int:
        # Advice and discard act on whole pages, which no two tensors may share then.
        return max(mmap.PAGESIZE, ALIGNMENT) if self.kind == "managed" else ALIGNMENT

    @property
    def reserved(self) -> int:
        return sum(segment.backing.nbytes for segment in self.segments)

    @property
    def largest_free(self) -> int:
        return max((segment.extents.largest for segment in self.segments), default=0)

    def allocate(self, nbytes: int, node: int | None) -> Block:
        """A block of 1 or more bytes.

        Raises:
            torch.OutOfMemoryError: the budget or the system has no room for it.
        """
        block = self._reuse(nbytes, node)
        if block is None and self.cooling:
            self.cool()
            block = self._reuse(nbytes, node)
        if block is None:
            self._grow(nbytes, node)
            block = self._reuse(nbytes, node)
        assert block is not None, "a fresh segment has room"
        self.counts.add(nbytes)
        return block

    def cool(self) -> None:
        """Wait for all queued work, then free what has died."""
        if not self.cooling:
            return
        if self.machine is not None:
            self.machine.synchronize_all()
        blocks, self.cooling = self.cooling, []
        for block in blocks:
            assert block.segment is not None
            block.segment.extents.give(block.start, block.nbytes)

    def trim(self) -> int:
        """Give segments back that hold nothing; the bytes given back."""
        self.cool()
        idle = [segment for segment in self.segments if segment.extents.whole]
        self.segments = [segment for segment in self.segments if not segment.extents.whole]
        if idle:
            self._tell()
        for segment in idle:
            segment.backing.close()
        return sum(segment.extents.nbytes for segment in idle)

    def close(self) -> None:
        """Give everything back; living tensors keep their bytes: Note [life of a backing]."""
        segments, self.segments, self.cooling = self.segments, [], []
        for segment in segments:
            segment.backing.close()

    def _reuse(self, nbytes: int, node: int | None) -> Block | None:
        best: tuple[int, int, Segment] | None = None
        for segment in self.segments:
            fit = segment.extents.fit(nbytes) if node in (None, segment.node) else None
            if fit is not None and (best is None or fit < best[:2]):
                best = (*fit, segment)
        if best is None:
            return None
        _, start, segment = best
        segment.extents.take(start, nbytes)
        return Block(self.kind, segment.backing.address + start, nbytes, segment, start)

    def _grow(self, nbytes: int, node: int | None) -> None:
        align = self.alignment
        needed = -(-nbytes // align) * align
        if needed > self._room(needed):
            self.trim()
        room = self._room(needed)
        if needed > room:
            raise self._out_of_memory(nbytes)
        size = max(needed, min(SEGMENT_BYTES, room // align * align))
        try:
            backing = self._back(size, node)
        except torch.OutOfMemoryError:
            self.trim()
            backing = self._back(needed, node)
        self.segments.append(Segment(backing, Extents(backing.nbytes, align), node))
        self._tell()

    def _back(self, nbytes: int, node: int | None) -> Backing:
        if self.promise is not None:
            claimed = self.promise.taking()
        else:
            claimed = taking(nbytes, self.kind, self.owner, guess=self.follows_system)
        with claimed:
            return back(self.kind, nbytes, machine=self.machine, owner=self.owner, node=node)

    def _tell(self) -> None:
        if self.promise is not None:
            self.promise.hold(self.reserved)

    def _room(self, needed: int) -> int:
        """Bytes that may still be reserved; no more is looked for than matters."""
        most = max(needed, SEGMENT_BYTES)
        room = most if self.budget is None else min(most, self.budget - self.reserved)
        if self.follows_system:
            available = available_bytes()
            room = room if available is None else min(room, available)
        return max(room, 0)

    def _out_of_memory(self, nbytes: int) -> torch.OutOfMemoryError:
        available = available_host_bytes()
        budget = "none" if self.budget is None else f"{self.budget:,} bytes"
        return torch.OutOfMemoryError(
            f"{self.owner}: {nbytes:,} bytes of {self.kind} memory do not fit. Budget: {budget}; "
            f"reserved: {self.reserved:,}, of which in use: {self.counts.in_use:,}; largest free "
            f"range: {self.largest_free:,}; available on the host: "
            f"{'unknown' if available is None else f'{available:,}'}"
        )


def tensor_over(block: Block, dtype: torch.dtype, graveyard: Graveyard) -> Tensor:
    """A 1-D tensor over a block; when its storage dies, the block is buried."""
    assert block.segment is not None
    holder = _Holder(block, block.segment.backing.keep)
    tensor = torch.frombuffer(np.asarray(holder), dtype=dtype)
    death = weakref.finalize(holder, graveyard.bury, block)
    death.atexit = False  # at exit the tensor goes on to look at it
    return tensor
