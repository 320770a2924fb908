"""The memory a virtual machine has seen: which bytes are one region, whose, and still alive?

Note [regions]
    A region is known by its addresses, because several storages can be views of the same bytes
    (``torch.frombuffer`` makes a new one each time). Registered host arenas are regions; every
    other storage becomes one at first sight and stops being one when it dies, so that memory which
    is handed out again starts with an empty history. A weak reference tells when it died; while
    that is held, the identity of the storage (``_cdata``) is not reused.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ghoffload.machine.clocks import History

SWEEP_EVERY = 256  # storages registered between two sweeps for those that died unnoticed


class Region:
    """A range of addresses [start, end) that lives and dies together.

    Attributes:
        home: the stream it was allocated on (or first seen on): who reuses the memory.
        arena: whether it is registered host memory.
        owned: whether it came from the machine's ``empty``.
        freed: whether it was given back with ``free`` (its storage may still be there).
        recorded: per stream the time up to which ``record_stream`` covers its use.
    """

    def __init__(self, start: int, end: int, home: int, *, arena: bool = False) -> None:
        self.start = start
        self.end = end
        self.home = home
        self.arena = arena
        self.owned = False
        self.freed = False
        self.counted = 0
        self.storages: dict[int, StorageWeakRef] = {}
        self.prune_at = SWEEP_EVERY
        self.history = History()
        self.recorded: dict[int, int] = {}

    def dead(self) -> bool:
        """Whether no storage looks at it any more; arenas end by ``unregister`` alone."""
        if self.arena:
            return False
        for ref in self.storages.values():  # noqa: SIM110 - asked at every operation, so no all()
            if not ref.expired():
                return False
        return True


class Memory:
    """All regions of a machine, with the two capacities."""

    def __init__(self, hbm_bytes: int | None, host_bytes: int | None) -> None:
        self.hbm_bytes = hbm_bytes
        self.host_bytes = host_bytes
        self.allocated = self.peak = 0
        self.host_allocated = 0
        self.watched: dict[Region, None] = {}
        self.on_death: Callable[[Region], None] = lambda region: None
        self._of_storage: dict[int, Region] = {}
        self._starts: list[int] = []
        self._regions: list[Region] = []
        self._until_sweep = SWEEP_EVERY

    def find(self, tensor: Tensor) -> Region | None:
        """The region of a tensor that was seen before and has not moved."""
        storage = tensor.untyped_storage()
        region = self._of_storage.get(storage._cdata)
        if region is not None:
            start = storage.data_ptr()
            if region.start <= start and start + storage.nbytes() <= region.end:
                return region
        return None

    def region(self, tensor: Tensor, home: int) -> Region | None:
        """The region of a tensor, new if it was not seen before.

        Returns:
            ``None`` for tensors without memory of this machine (meta, sparse, empty).
        """
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return None
        try:
            storage = tensor.untyped_storage()
            start, nbytes = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # subclasses without storage
            return None
        if start == 0 or nbytes == 0:
            return None
        region = self._of_storage.get(storage._cdata)
        if region is None or start < region.start or region.end < start + nbytes:
            region = self._see(storage, start, start + nbytes, home)
        return region

    def arena_at(self, address: int) -> Region | None:
        """The registered arena that holds ``address``."""
        at = bisect_right(self._starts, address) - 1
        region = self._regions[at] if at >= 0 else None
        return region if region is not None and region.arena and address < region.end else None

    def register(self, start: int, nbytes: int) -> None:
        """Make [start, start + nbytes) an arena."""
        for region in self._overlapping(start, start + nbytes):
            if region.arena:
                raise ValueError(
                    f"expected host memory that is not registered yet, got [{start:#x}, "
                    f"{start + nbytes:#x}), which overlaps [{region.start:#x}, {region.end:#x})"
                )
            self._remove(region)
        if self.host_bytes is not None and self.host_allocated + nbytes > self.host_bytes:
            raise out_of_memory("host", nbytes, self.host_bytes, self.host_allocated)
        self._insert(Region(start, start + nbytes, 0, arena=True))
        self.host_allocated += nbytes

    def unregister(self, arena: Region) -> None:
        self._remove(arena)
        self.host_allocated -= arena.end - arena.start

    def reserve(self, nbytes: int) -> None:
        """Raise ``torch.OutOfMemoryError`` unless ``nbytes`` more fit in HBM."""
        if self.hbm_bytes is None or self.allocated + nbytes <= self.hbm_bytes:
            return
        self.sweep()
        if self.allocated + nbytes > self.hbm_bytes:
            raise out_of_memory("HBM", nbytes, self.hbm_bytes, self.allocated)

    def release(self, region: Region) -> None:
        """``free`` was called: the bytes count no more, the region stays to catch late use."""
        region.freed = True
        self.allocated -= region.counted
        region.counted = 0

    def sweep(self) -> None:
        """Bury every region whose storages have died."""
        self._until_sweep = SWEEP_EVERY
        for region in [region for region in self._regions if region.dead()]:
            self._bury(region)

    def sweep_watched(self) -> None:
        """As ``sweep``, of the regions alone that a stream other than their home has used."""
        for region in [region for region in self.watched if region.dead()]:
            self._bury(region)

    def _see(self, storage: torch.UntypedStorage, start: int, end: int, home: int) -> Region:
        stale = self._of_storage.get(storage._cdata)
        if stale is not None:  # resized: its old addresses are not its own any more
            del stale.storages[storage._cdata], self._of_storage[storage._cdata]
            if stale.dead():
                self._bury(stale)
        self._until_sweep -= 1
        if self._until_sweep <= 0:
            self.sweep()
        aliases = []
        for region in self._overlapping(start, end):
            if region.arena:
                if start < region.start or region.end < end:
                    raise ValueError(
                        f"expected a storage inside one host arena, got [{start:#x}, {end:#x}) "
                        f"across the edge of [{region.start:#x}, {region.end:#x})"
                    )
                return self._own(region, storage)
            if not _still_there(region):
                self._bury(region)
            else:
                aliases.append(region)
        region = aliases[0] if len(aliases) == 1 else Region(start, end, home)
        if aliases and (len(aliases) > 1 or start < region.start or region.end < end):
            region = self._unite(aliases, start, end, home)
        elif not aliases:
            self.reserve(end - start)
            self._count(region)
            self._insert(region)
        return self._own(region, storage)

    def _unite(self, aliases: list[Region], start: int, end: int, home: int) -> Region:
        """One region for storages that share bytes."""
        low = min(start, *(region.start for region in aliases))
        high = max(end, *(region.end for region in aliases))
        united = Region(low, high, home)
        for region in aliases:
            watched = region in self.watched
            storages = region.storages
            self._remove(region)
            united.owned |= region.owned
            united.history.absorb(region.history)
            for cdata, ref in storages.items():
                united.storages[cdata] = ref
                self._of_storage[cdata] = united
            for thread, time in region.recorded.items():
                united.recorded[thread] = max(time, united.recorded.get(thread, 0))
            if watched:
                self.watched[united] = None
        self._count(united)
        self._insert(united)
        return united

    def _own(self, region: Region, storage: torch.UntypedStorage) -> Region:
        if len(region.storages) >= region.prune_at:
            for cdata in [c for c, ref in region.storages.items() if ref.expired()]:
                del region.storages[cdata], self._of_storage[cdata]
            region.prune_at = 2 * len(region.storages) + SWEEP_EVERY
        region.storages[storage._cdata] = StorageWeakRef(storage)
        self._of_storage[storage._cdata] = region
        return region

    def _count(self, region: Region) -> None:
        region.counted = region.end - region.start
        self.allocated += region.counted
        if self.allocated > self.peak:  # those that died unnoticed may be among it
            self.sweep()
            self.peak = max(self.peak, self.allocated)

    def _overlapping(self, start: int, end: int) -> Iterator[Region]:
        first = max(bisect_right(self._starts, start) - 1, 0)
        last = bisect_left(self._starts, end)
        for region in self._regions[first:last]:
            if start < region.end and region.start < end:
                yield region

    def _insert(self, region: Region) -> None:
        at = bisect_left(self._starts, region.start)
        insort(self._starts, region.start)
        self._regions.insert(at, region)

    def _remove(self, region: Region) -> None:
        at = bisect_left(self._starts, region.start)
        assert self._regions[at] is region, "regions are disjoint"
        del self._starts[at], self._regions[at]
        for cdata in region.storages:
            self._of_storage.pop(cdata, None)
        self.watched.pop(region, None)
        self.allocated -= region.counted
        region.counted = 0

    def _bury(self, region: Region) -> None:
        self._remove(region)
        self.on_death(region)


def _still_there(region: Region) -> bool:
    """Whether a living storage of the region still has its bytes (``resize_`` moves them)."""
    for ref in region.storages.values():
        storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
        if storage is not None and storage.nbytes() > 0:
            start = storage.data_ptr()
            if start < region.end and region.start < start + storage.nbytes():
                return True
    return False


def out_of_memory(where: str, tried: int, capacity: int, allocated: int) -> torch.OutOfMemoryError:
    """The error of a GPU that has no room, with the same figures."""
    return torch.OutOfMemoryError(
        f"virtual {where} out of memory. Tried to allocate {tried} bytes. The virtual {where} has "
        f"a total capacity of {capacity} bytes of which {max(capacity - allocated, 0)} bytes is "
        f"free. {allocated} bytes is allocated."
    )
