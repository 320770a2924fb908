"""Copies between many tensors and one packed buffer, as one launch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ghoffload.kernels import pool
from ghoffload.kernels.pieces import (
    COUNT,
    MAX_PIECES,
    OFFSET,
    TENSOR,
    PieceTable,
    common_device,
    pointers,
)
from ghoffload.machine.protocol import Launch

__all__ = ["ALIGNMENT", "pack", "pack_whole", "packed_bytes", "unpack", "unpack_whole"]

ALIGNMENT = 16
"""Bytes; where each tensor of a packed sequence begins: the widest copies need it on both ends."""


def pack(table: PieceTable, *, sources: Sequence[Tensor], packed: Tensor) -> Launch:
    """Copy ``sources[k].flat[start:start + count]`` to ``packed[offset:]`` for every piece.

    Bytes are copied as they are. ``start`` and ``count`` are in elements of the source (its memory
    is taken as dense from ``data_ptr``), ``offset`` is in elements of ``packed``, which is
    contiguous; the two may differ in dtype.

    ``packed`` may also be in host memory that the sources' GPU reaches, such as pinned memory.

    Raises:
        ValueError: a piece outside its tensor, or tensors on several devices.
    """
    return _copies(table, sources, packed, to_packed=True)


def unpack(table: PieceTable, *, packed: Tensor, destinations: Sequence[Tensor]) -> Launch:
    """The reverse of ``pack``: copy ``packed[offset:]`` to each piece of ``destinations``."""
    return _copies(table, destinations, packed, to_packed=False)


def packed_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes that ``pack_whole`` needs for these tensors."""
    return int(_begins(tensors)[-1])


def pack_whole(sources: Sequence[Tensor], packed: Tensor) -> list[Launch]:
    """Copy any number of whole tensors to ``packed``, each from a multiple of 16 bytes.

    Args:
        sources: of any dtypes; their memory is taken as dense from ``data_ptr``.
        packed: uint8, contiguous, of ``packed_bytes(sources)`` bytes or more.

    Returns:
        A launch for each 640 tensors.
    """
    return [
        pack(table, sources=part, packed=packed) for table, part in _whole_tables(sources, packed)
    ]


def unpack_whole(packed: Tensor, destinations: Sequence[Tensor]) -> list[Launch]:
    """The reverse of ``pack_whole``, for tensors of the same sizes in the same order."""
    return [
        unpack(table, packed=packed, destinations=part)
        for table, part in _whole_tables(destinations, packed)
    ]


def _begins(tensors: Sequence[Tensor]) -> npt.NDArray[np.int64]:
    """The first byte of each tensor, and the end."""
    nbytes = np.array([t.numel() * t.element_size() for t in tensors], dtype=np.int64)
    return np.concatenate([[0], np.cumsum(-(-nbytes // ALIGNMENT) * ALIGNMENT)])


def _whole_tables(
    tensors: Sequence[Tensor], packed: Tensor
) -> Iterator[tuple[PieceTable, Sequence[Tensor]]]:
    if packed.element_size() != 1:
        raise ValueError(f"packed expects elements of one byte, got {packed.dtype}")
    begins = _begins(tensors).tolist()
    for first in range(0, len(tensors), MAX_PIECES):
        part = tensors[first : first + MAX_PIECES]
        rows = [(k, 0, t.numel(), begins[first + k], 0) for k, t in enumerate(part)]
        yield PieceTable(rows), part


def _copies(
    table: PieceTable, tensors: Sequence[Tensor], packed: Tensor, *, to_packed: bool
) -> Launch:
    side = "sources" if to_packed else "destinations"
    table.check_tensors(side, tensors)
    if not (packed.is_cpu and tensors and tensors[0].is_cuda):
        common_device(packed=[packed], **{side: tensors})
    common_device(**{side: tensors or [packed]})
    if not packed.is_contiguous():
        raise ValueError("packed expects a contiguous tensor, got a non-contiguous one")
    item_sizes = np.array([tensor.element_size() for tensor in tensors], dtype=np.int64)
    offsets = table.rows[:, OFFSET] * packed.element_size()
    nbytes = table.rows[:, COUNT] * item_sizes[table.rows[:, TENSOR]] if len(table) else offsets
    end = int((offsets + nbytes).max(initial=0))
    if end > packed.numel() * packed.element_size():
        raise ValueError(
            f"packed expects {end} bytes or more, got {packed.numel() * packed.element_size()}"
        )

    def host(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        if to_packed:
            _copy_on_host(table, reads, item_sizes, writes[0], offsets, nbytes, True)
        else:
            _copy_on_host(table, writes, item_sizes, reads[0], offsets, nbytes, False)

    def device(stream: int) -> None:
        from ghoffload.kernels import pack_cuda

        starts = table.addresses(pointers(tensors), item_sizes)
        on = packed if packed.is_cuda or not tensors else tensors[0]
        pack_cuda.copy(starts, packed, offsets, nbytes, to_packed, on, stream)

    most = max(table.elements, int(nbytes.sum()) // packed.element_size())
    if to_packed:
        return Launch("pack", tuple(tensors), (packed,), device, host, elements=most)
    return Launch("unpack", (packed,), tuple(tensors), device, host, elements=most)


_TASK_BYTES = 1 << 20


def _copy_on_host(
    table: PieceTable,
    tensors: Sequence[Tensor],
    item_sizes: npt.NDArray[np.int64],
    packed: Tensor,
    offsets: npt.NDArray[np.int64],
    nbytes: npt.NDArray[np.int64],
    to_packed: bool,
) -> None:
    theirs = table.addresses(pointers(tensors), item_sizes) if len(table) else offsets
    ours = packed.data_ptr() + offsets
    ends = (ours, theirs) if to_packed else (theirs, ours)
    # Pieces are cut and gathered into tasks of about a megabyte; memmove releases the GIL.
    tasks: list[list[tuple[int, int, int]]] = [[]]
    filled = 0
    for destination, source, left in zip(*(a.tolist() for a in (*ends, nbytes)), strict=True):
        while left:
            part = min(left, _TASK_BYTES - filled)
            tasks[-1].append((destination, source, part))
            destination, source, left = destination + part, source + part, left - part
            filled += part
            if filled == _TASK_BYTES:
                tasks.append([])
                filled = 0

    def task(copies: list[tuple[int, int, int]]) -> None:
        for copy in copies:
            ctypes.memmove(*copy)

    pool.run(task, tasks)
