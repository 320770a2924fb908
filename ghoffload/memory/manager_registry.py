"""Registry: what a tensor manager knows of its tensors, and how it ends.

Note [fork]
    A manager belongs to the process that made it; a forked child gets a ``RuntimeError`` from it.
    There, pinned tensors of the parent's read as zeros (Note [fork] in pages.py), pageable ones are
    copied on write, and managed ones must not be touched: CUDA does not survive a fork.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from ghoffload.machine.managed import Driver
from ghoffload.machine.protocol import Machine
from ghoffload.memory.ledger import ledger
from ghoffload.memory.manager_figures import Counts, KindStatistics
from ghoffload.memory.manager_pool import Block, Graveyard, Pool
from ghoffload.memory.shares import Promise

_Own = TypeVar("_Own", bound="Registry")

KINDS = ("device", "pinned", "managed", "system")


class Registry:
    """The blocks under living tensors, by address and by kind.

    Args:
        machine: the machine, ``None`` for none.
        budgets: most bytes by kind.
        debug: whether ``check`` looks at what it is given.
        owner: who holds the memory.
    """

    def __init__(
        self, machine: Machine | None, budgets: Mapping[str, int], *, debug: bool, owner: str
    ) -> None:
        self.machine = machine
        self.debug = debug
        self.owner = owner
        self._budgets = dict(budgets)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._pools: dict[str, Pool] = {}
        self._promises: dict[str, Promise] = {}
        self._blocks: dict[int, Block] = {}  # by the address of the storage
        self._graveyard = Graveyard()
        self._device = Counts()
        self._finalizer = weakref.finalize(
            self,
            _close,
            self._pools,
            self._promises,
            self._graveyard,
            self._blocks,
            owner,
            self._process,
        )
        try:
            for kind, nbytes in self._budgets.items():
                if kind != "device":  # torch's to hold to, and of this process alone
                    self._promises[kind] = Promise(kind, owner, nbytes)
        except BaseException:
            self._finalizer()
            raise
        managers.add(self)

    def kind_of(self, tensor: Tensor) -> str:
        """The memory kind of a tensor from this manager, or of a view of one.

        Raises:
            ValueError: it is not from this manager, or has no memory.
        """
        with self._entered():
            return self._require_block(tensor).kind

    def check(
        self,
        tensor: Tensor,
        *,
        kinds: str | Iterable[str] = KINDS,
        device: torch.device | str | None = None,
        numa: int | None = None,
    ) -> None:
        """With ``debug``, refuse a tensor that a kernel or a copy must not get.

        Asks this manager's own registry and never the driver. Without ``debug`` it does nothing.

        Args:
            tensor: what is about to be handed over.
            kinds: kinds it may be of.
            device: of the machine it must belong to.
            numa: the node its memory must have been asked for on.

        Raises:
            ValueError: it is not from this manager, dead, or not as expected.
        """
        if not self.debug:
            return
        allowed = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        with self._entered():
            block = self._require_block(tensor)
        if block.kind not in allowed:
            raise ValueError(
                f"expected memory of kind {' or '.join(allowed)}, got {block.kind} memory of shape "
                f"{tuple(tensor.shape)}"
            )
        own = torch.device("cpu") if self.machine is None else self.machine.device
        if device is not None and torch.device(device) != own:
            raise ValueError(f"expected memory of the machine of {device}, got that of {own}")
        node = None if block.segment is None else block.segment.node
        if numa is not None and node != numa:
            raise ValueError(f"expected memory bound to NUMA node {numa}, got node {node}")

    def statistics(self) -> dict[str, KindStatistics]:
        """Figures by kind, those kinds alone that were used.

        Raises:
            RuntimeError: a forked child asks its parent's manager.
        """
        self._require_own()
        with self._lock:
            if not self.closed:
                self._bury()
            found = {}
            counts = self._device
            if counts.total_allocations:
                found["device"] = counts.figures(counts.in_use, 0, self._budgets.get("device"))
            for kind, pool in self._pools.items():
                found[kind] = pool.counts.figures(pool.reserved, pool.largest_free, pool.budget)
            return found

    def trim(self) -> int:
        """Give the system back what holds no tensor; waits for queued work. The bytes given back.

        Device memory is torch's to give back (``torch.cuda.empty_cache``).
        """
        with self._entered():
            return sum(pool.trim() for pool in self._pools.values())

    @property
    def inherited(self) -> bool:
        """Whether this process was forked from the one that made it: Note [fork]."""
        return os.getpid() != self._process

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Give everything back, after queued work. A second call does nothing.

        Living tensors stay usable on the host: pinned ones are pageable from then on, managed
        memory is freed with its last tensor.
        """
        if self.inherited:
            return  # it is the parent's to give back
        with self._lock:
            if not self.closed:
                self._bury()
                if self.machine is not None:
                    self.machine.synchronize_all()
                self._finalizer()

    def __enter__(self: _Own) -> _Own:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- inner workings

    def _entered(self) -> _Entered:
        return _Entered(self)

    def _bury(self) -> None:
        """Count out what has died: Note [life of a block] in manager_pool.py."""
        for block in self._graveyard.exhume():
            if self._blocks.get(block.address) is block:
                del self._blocks[block.address]
            if block.segment is None:
                self._device.remove(block.nbytes)
                ledger.remove("device", self.owner, block.nbytes)
                continue
            self._count_out(block)
            driver = self._driver() if block.advised else None
            if driver is not None and block.kind == "managed":
                # A lost context refuses it, and shows itself elsewhere.
                with contextlib.suppress(RuntimeError):
                    for advice in ("unset_read_mostly", "unset_preferred_location"):
                        driver.advise(block.address, block.nbytes, advice, to_device=True)
                    driver.stay_on_host(block.address, block.nbytes, block.segment.node)

    def _require_own(self) -> None:
        if self.inherited:
            raise RuntimeError(
                f"{self.owner!r} belongs to process {self._process}; a forked child makes a "
                "TensorManager of its own"
            )

    def _count_out(self, block: Block) -> None:
        pool = self._pools[block.kind]
        pool.counts.remove(block.nbytes)
        pool.cooling.append(block)

    def _driver(self) -> Driver | None:
        """``None`` on the virtual machine, where pages do not move."""
        machine = self.machine
        return Driver.of(machine) if machine is not None and machine.kind == "cuda" else None  # type: ignore[arg-type]

    def _block(self, tensor: Tensor) -> Block | None:
        if tensor.layout is not torch.strided or tensor.is_meta:
            return None
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage.data_ptr()) if storage.nbytes() else None
        return block if block is not None and storage.nbytes() <= block.nbytes else None

    def _require_block(self, tensor: Tensor) -> Block:
        block = self._block(tensor)
        if block is None:
            raise ValueError(
                f"expected a tensor of this manager ({self.owner!r}), got another of shape "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
        return block


class _Entered:
    """The manager's lock, with the dead counted out and closed or forked managers refused."""

    def __init__(self, manager: Registry) -> None:
        self._manager = manager

    def __enter__(self) -> None:
        manager = self._manager
        manager._require_own()
        manager._lock.acquire()
        try:
            if manager.closed:
                raise RuntimeError(f"the TensorManager {manager.owner!r} is closed")
            manager._bury()
        except BaseException:
            manager._lock.release()
            raise

    def __exit__(self, *error: object) -> None:
        self._manager._lock.release()


managers: weakref.WeakSet[Registry] = weakref.WeakSet()
"""Those alive, for ``memory_summary``."""


def _close(
    pools: dict[str, Pool],
    promises: dict[str, Promise],
    graveyard: Graveyard,
    blocks: dict[int, Block],
    owner: str,
    process: int,
) -> None:
    graveyard.closed = True
    held = {*graveyard.exhume(), *blocks.values()}
    if os.getpid() != process:
        return
    for promise in promises.values():
        promise.drop()
    for pool in pools.values():
        pool.close()
    # Device tensors are torch's from here on; the ledger holds what a manager answers for.
    for block in held:
        if block.segment is None:
            ledger.remove("device", owner, block.nbytes)
    blocks.clear()
