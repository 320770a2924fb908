"""The kernel parameters of csrc/pack.cu, laid out as its structs are."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ghoffload.kernels import cuda
from ghoffload.kernels.pieces import MAX_PIECES

_THREADS = 256
_CHUNK = 16384
_SMALL_PIECES = 64

_PIECE = np.dtype(
    [
        ("destination", "u8"),
        ("source", "u8"),
        ("bytes", "i8"),
        ("first_chunk", "u4"),
        ("width", "u4"),
    ]
)


def _table(size: int) -> np.dtype[Any]:
    return np.dtype([("pieces", "u4"), ("unused", "u4"), ("piece", _PIECE, (size,))])


_TABLES = {"small": _table(_SMALL_PIECES), "large": _table(MAX_PIECES)}


def copy(
    starts: npt.NDArray[np.int64],
    packed: Tensor,
    offsets: npt.NDArray[np.int64],
    nbytes: npt.NDArray[np.int64],
    to_packed: bool,
    on: Tensor,
    stream: int,
) -> None:
    """Queue the copies between ``starts`` and ``packed`` at ``offsets``, all in bytes.

    ``on`` is a tensor of the device that does it.
    """
    some = nbytes > 0
    theirs, ours, nbytes = starts[some], packed.data_ptr() + offsets[some], nbytes[some]
    count = len(nbytes)
    if count == 0:
        return
    size = "small" if count <= _SMALL_PIECES else "large"
    parameter = np.zeros(1, dtype=_TABLES[size])
    parameter["pieces"] = count
    pieces = parameter[0]["piece"][:count]
    chunks = -(-nbytes // _CHUNK)
    pieces["destination"], pieces["source"] = (ours, theirs) if to_packed else (theirs, ours)
    pieces["bytes"] = nbytes
    pieces["first_chunk"] = np.cumsum(chunks) - chunks
    both = theirs | ours
    pieces["width"] = np.select([both % 16 == 0, both % 4 == 0, both % 2 == 0], [16, 4, 2], 1)
    cuda.launch(
        "pack",
        f"copy_pieces_{size}",
        cuda.device_index(on),
        blocks=int(chunks.sum()),
        threads=_THREADS,
        parameters=(parameter,),
        stream=stream,
    )
