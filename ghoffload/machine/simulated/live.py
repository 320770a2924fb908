"""Which tensors are alive on a simulated machine: meta tensors, counted as their storages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_EVERY = 64
"""Tensors that are seen before those that died unnoticed are looked for."""


class Live:
    """Bytes of the storages that are alive.

    Args:
        limit: bytes that they may come to.
        now: the time, in seconds, for ``changes``.

    Attributes:
        allocated, peak: bytes now, and at most.
        changes: (seconds, bytes allocated) at each change that was noticed.
    """

    def __init__(self, limit: int, now: Callable[[], float]) -> None:
        self.limit, self._now = limit, now
        self.allocated = self.peak = 0
        self.changes: list[tuple[float, int]] = []
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._seen = 0

    def see(self, tensor: Tensor) -> None:
        """Count a tensor's storage, if that is a new one.

        Raises:
            torch.OutOfMemoryError: it does not fit. It is not counted then.
        """
        if not tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        at, nbytes = storage._cdata, storage.nbytes()
        found = self._storages.get(at)
        if found is not None:
            if found[1] == nbytes:
                return
            self._change(found[1] and -found[1])  # resized
            del self._storages[at]
        self._seen += 1
        if self._seen >= _EVERY or self.allocated + nbytes > self.peak:
            self.sweep()
        if self.allocated + nbytes > self.limit:
            raise torch.OutOfMemoryError(
                f"{nbytes:,} more bytes do not fit into the {self.limit:,} of the simulated HBM: "
                f"{self.allocated:,} are in use"
            )
        self._storages[at] = (StorageWeakRef(storage), nbytes)
        self._change(nbytes)
        self.peak = max(self.peak, self.allocated)

    def drop(self, tensor: Tensor) -> None:
        """A tensor's memory is given back, whoever still looks at it."""
        found = self._storages.get(tensor.untyped_storage()._cdata)
        if found is not None and found[1]:
            self._storages[tensor.untyped_storage()._cdata] = (found[0], 0)
            self._change(-found[1])

    def sweep(self) -> None:
        """Notice what died."""
        self._seen = 0
        dead = [at for at, (reference, _) in self._storages.items() if reference.expired()]
        for at in dead:
            self._change(-self._storages.pop(at)[1])

    def _change(self, nbytes: int) -> None:
        if nbytes:
            self.allocated += nbytes
            self.changes.append((self._now(), self.allocated))
