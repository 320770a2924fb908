"""The kernel parameters of csrc/adamw.cu, laid out as its structs are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ghoffload.kernels import cuda
from ghoffload.kernels.pieces import (
    COUNT,
    FIRST,
    ITEM_SIZES,
    MAX_PIECES,
    OFFSET,
    SCALARS_ROW,
    TENSOR,
    PieceTable,
    pointers,
)
from ghoffload.kernels.state_form import SCALES, StateForm

_THREADS = 256
_CHUNK = 1024
_SMALL_PIECES = 64
_PIECE = np.dtype(
    [
        ("weight", "u8"),
        ("grad", "u8"),
        ("offset", "i8"),
        ("count", "i8"),
        ("scalars_row", "u4"),
        ("first_chunk", "u4"),
        ("start", "u4"),
        ("start_high", "u1"),
        ("weight_code", "u1"),
        ("grad_code", "u1"),
        ("vector", "u1"),
    ]
)
_ARRAYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master", *SCALES)


def _table(size: int) -> np.dtype[Any]:
    header = [(name, "u8") for name in (*_ARRAYS, "scalars")]
    return np.dtype([*header, ("pieces", "u4"), ("unused", "u4"), ("piece", _PIECE, (size,))])


_TABLES = {"small": _table(_SMALL_PIECES), "large": _table(MAX_PIECES)}


def variant(form: StateForm) -> str:
    """The end of the names of the kernels for a format."""
    master = {"none": "", "fp32": "_master", "split": "_split"}[form.master]
    moments = "" if form.moments == "fp32" else f"_{form.moments}"
    return master + moments + "_amsgrad" * form.amsgrad


def update(
    table: PieceTable,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    weight_codes: npt.NDArray[np.int64],
    grad_codes: npt.NDArray[np.int64],
    state: Mapping[str, Tensor],
    scalars: Tensor,
    stream: int,
) -> None:
    """Queue adam_update for a table."""
    rows = table.rows[table.rows[:, COUNT] > 0]
    if len(rows) == 0:
        return
    size = "small" if len(rows) <= _SMALL_PIECES else "large"
    parameter = np.zeros(1, dtype=_TABLES[size])
    form = StateForm.of(state)
    for name, array in state.items():
        parameter["master" if name == "rest" else name] = array.data_ptr()
    parameter["scalars"], parameter["pieces"] = scalars.data_ptr(), len(rows)
    pieces = parameter[0]["piece"][: len(rows)]
    tensor = rows[:, TENSOR]
    weight_code, grad_code = weight_codes[tensor], grad_codes[tensor]
    weight = table.addresses(pointers(weights), ITEM_SIZES[weight_codes], rows)
    grad = table.addresses(pointers(grads), ITEM_SIZES[grad_codes], rows)
    # Groups of four elements: 16 bytes of fp32, 8 bytes of half precision, 4 of codes.
    unaligned = weight % (4 * ITEM_SIZES[weight_code]) + grad % (4 * ITEM_SIZES[grad_code])
    unaligned += rows[:, OFFSET] % 4 + sum(array.data_ptr() % 16 for array in state.values())
    chunks = -(-rows[:, COUNT] // _CHUNK)
    pieces["weight"], pieces["grad"] = weight, grad
    pieces["offset"], pieces["count"] = rows[:, OFFSET], rows[:, COUNT]
    pieces["scalars_row"] = rows[:, SCALARS_ROW]
    pieces["first_chunk"] = np.cumsum(chunks) - chunks
    pieces["start"], pieces["start_high"] = rows[:, FIRST] & 0xFFFFFFFF, rows[:, FIRST] >> 32
    pieces["weight_code"], pieces["grad_code"] = weight_code, grad_code
    pieces["vector"] = unaligned == 0
    cuda.launch(
        "adamw" if form.moments == "fp32" else "adamw_coded",
        f"adam_update_{size}{variant(form)}",
        cuda.device_index(scalars),
        blocks=int(chunks.sum()),
        threads=_THREADS,
        parameters=(parameter,),
        stream=stream,
    )
