"""Where a tensor is, for operations that must not keep it alive."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

POISON = 0xFF
"""What every byte of memory that must not be used any more is set to: NaN, or -1."""


def extent(tensor: Tensor) -> tuple[int, int]:
    """The address range [start, end) that bounds the elements of a strided tensor."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    span = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (span + 1) * tensor.element_size()


class TensorRef:
    """What a queued operation knows of a tensor: where it is, not that it will still be there."""

    __slots__ = ("_dtype", "_geometry", "_storage", "_tensor", "end", "start")

    def __init__(self, tensor: Tensor, *, strong: bool) -> None:
        self.start, self.end = extent(tensor)
        self._tensor = tensor if strong else None
        self._storage = None if strong else StorageWeakRef(tensor.untyped_storage())
        self._geometry = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        self._dtype = tensor.dtype

    def resolve(self) -> Tensor | None:
        """The tensor, or ``None`` if its memory was given back before the operation ran."""
        if self._storage is None:
            return self._tensor
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._geometry)

    def poisoned(self) -> Tensor:
        """A tensor of the same form full of 0xFF, for an operation that came too late."""
        _, shape, stride = self._geometry
        tensor = torch.empty_strided(shape, stride, dtype=self._dtype)
        ctypes.memset(tensor.data_ptr(), POISON, tensor.untyped_storage().nbytes())
        return tensor
