"""Carved: memory reserved in one piece, from which tensors are cut."""

from __future__ import annotations

import abc
import mmap
import os
import threading
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes; enough for bulk copies and vector loads, and what torch's CUDA allocator never misses."""


class Carved(abc.ABC):
    """One piece of host memory; ``HostArena`` and ``ManagedArena`` get it from the system.

    Attributes:
        nbytes: size in bytes.
        owner: who holds it, for the ledger and messages.
        address: of the first byte; 0 when ``nbytes`` is 0.
    """

    def __init__(self, nbytes: int, owner: str) -> None:
        if nbytes < 0:
            raise ValueError(f"nbytes expects 0 or more, got {nbytes}")
        self.nbytes = nbytes
        self.owner = owner
        self.address = 0
        self._lock = threading.Lock()
        self._used = 0
        self._process = os.getpid()
        self._buffer: Any = None  # what tensors look at and keep alive

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """The memory kind."""

    @property
    @abc.abstractmethod
    def closed(self) -> bool:
        """Whether the memory was given back."""

    @property
    def _survives_fork(self) -> bool:
        return False

    @property
    def remaining(self) -> int:
        """Bytes not carved yet; an aligned piece may have a few less."""
        return self.nbytes - self._used

    def carve(self, count: int, dtype: torch.dtype, alignment: int = ALIGNMENT) -> Tensor:
        """The next ``count`` elements as a zero-filled 1-D tensor with a storage of its own.

        Args:
            count: elements, 0 or more.
            dtype: of the tensor.
            alignment: of its first byte, a power of two up to a page.

        Raises:
            ValueError: a bad argument, or the arena has no room left for it.
        """
        if alignment < dtype.itemsize or alignment & (alignment - 1) or alignment > mmap.PAGESIZE:
            raise ValueError(
                f"alignment expects a power of two from {dtype.itemsize} to {mmap.PAGESIZE}, "
                f"got {alignment}"
            )
        with self._lock:
            offset = align(self._used, alignment)
            tensor = self.tensor(offset if count else 0, count, dtype)
            if count:
                self._used = offset + count * dtype.itemsize
        return tensor

    def tensor(self, offset_bytes: int, count: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor over ``count`` elements at ``offset_bytes``, whatever was carved there.

        It has a storage of its own, so ``torch.save`` writes its bytes alone.

        Raises:
            ValueError: it does not lie within the arena or is not aligned to its elements.
            RuntimeError: the arena was closed, or belongs to the process this one was forked from.
        """
        if self.closed:
            raise RuntimeError(f"the host arena of {self.owner!r} is closed")
        if not self._survives_fork and self._process != os.getpid():
            raise RuntimeError(
                f"the {self.kind} host arena of {self.owner!r} belongs to process {self._process}; "
                "a forked child does not inherit its contents"
            )
        end = offset_bytes + count * dtype.itemsize
        if offset_bytes < 0 or count < 0 or end > self.nbytes:
            raise ValueError(
                f"expected a range within the {self.nbytes:,} bytes of the host arena of "
                f"{self.owner!r}, got {count:,} elements of {dtype} at byte {offset_bytes:,}"
            )
        if offset_bytes % dtype.itemsize:
            raise ValueError(f"expected an offset aligned for {dtype}, got byte {offset_bytes:,}")
        if count == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        assert self._buffer is not None, "there is memory"
        return torch.frombuffer(self._buffer, dtype=dtype, count=count, offset=offset_bytes)

    @abc.abstractmethod
    def close(self) -> None:
        """Give the memory back; tensors carved from it stay valid. A second call does nothing."""


def align(offset: int, alignment: int) -> int:
    """``offset`` rounded up to a multiple of ``alignment``."""
    return -(-offset // alignment) * alignment
