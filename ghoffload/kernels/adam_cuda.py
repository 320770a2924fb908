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
    ITEM_SIZES,
    MAX_PIECES,
    OFFSET,
    SCALARS_ROW,
    TENSOR,
    PieceTable,
    pointers,
)

_THREADS = 256
_CHUNK = 4096
_SMALL_PIECES = 64
_SMALL_INDICES, _LARGE_INDICES = 64, 7680
_VECTOR = 0x100
_MAXIMIZE, _DECOUPLED, _HAS_GRAD_SCALE = 1, 2, 32
_IS_DOUBLE = {"lr": 4, "beta1": 8, "beta2": 16}

_NUMBERS = ("lr", "beta1", "beta2", "eps", "weight_decay", "found_inf", "grad_scale")
_HYPER = np.dtype(
    [(name, "f8") for name in _NUMBERS]
    + [(f"{name}_at", "u8") for name in ("lr", "beta1", "beta2", "found_inf", "grad_scale")]
    + [("steps", "u8"), ("scalars", "u8"), ("count", "u4"), ("flags", "u4")]
)
_PIECE = np.dtype(
    [
        ("weight", "u8"),
        ("grad", "u8"),
        ("offset", "i8"),
        ("count", "i8"),
        ("scalars_row", "u4"),
        ("first_chunk", "u4"),
        ("weight_code", "u4"),
        ("grad_code_and_vector", "u4"),
    ]
)
_ARRAYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")


def _table(size: int) -> np.dtype[Any]:
    header = [(name, "u8") for name in (*_ARRAYS, "scalars")]
    return np.dtype([*header, ("pieces", "u4"), ("unused", "u4"), ("piece", _PIECE, (size,))])


_TABLES = {"small": _table(_SMALL_PIECES), "large": _table(MAX_PIECES)}


def prepare(
    indices: npt.NDArray[np.uint32],
    numbers: Mapping[str, float],
    on_device: Mapping[str, Tensor],
    flags: tuple[bool, bool],
    steps: Tensor,
    scalars: Tensor,
    stream: int,
) -> None:
    """Queue adam_prepare for at most 7,680 parameters."""
    if len(indices) == 0:
        return
    maximize, decoupled = flags
    hyper = np.zeros(1, dtype=_HYPER)
    bits = _MAXIMIZE * maximize + _DECOUPLED * decoupled
    for name, value in numbers.items():
        hyper[name] = value
    for name, tensor in on_device.items():
        hyper[f"{name}_at"] = tensor.data_ptr()
        if tensor.element_size() == 8:
            bits |= _IS_DOUBLE[name]
    if "grad_scale" in numbers or "grad_scale" in on_device:
        bits |= _HAS_GRAD_SCALE
    hyper["steps"], hyper["scalars"] = steps.data_ptr(), scalars.data_ptr()
    hyper["count"], hyper["flags"] = len(indices), bits
    size = "small" if len(indices) <= _SMALL_INDICES else "large"
    padded = np.zeros(_SMALL_INDICES if size == "small" else _LARGE_INDICES, dtype=np.uint32)
    padded[: len(indices)] = indices
    cuda.launch(
        "adamw",
        f"adam_prepare_{size}",
        cuda.device_index(steps),
        blocks=-(-len(indices) // _THREADS),
        threads=_THREADS,
        parameters=(hyper, padded),
        stream=stream,
    )


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
    for name, array in state.items():
        parameter[name] = array.data_ptr()
    parameter["scalars"], parameter["pieces"] = scalars.data_ptr(), len(rows)
    pieces = parameter[0]["piece"][: len(rows)]
    tensor = rows[:, TENSOR]
    weight_code, grad_code = weight_codes[tensor], grad_codes[tensor]
    weight = table.addresses(pointers(weights), ITEM_SIZES[weight_codes], rows)
    grad = table.addresses(pointers(grads), ITEM_SIZES[grad_codes], rows)
    # Groups of four elements: 16 bytes of fp32, 8 bytes of half precision.
    unaligned = weight % (4 * ITEM_SIZES[weight_code]) + grad % (4 * ITEM_SIZES[grad_code])
    unaligned += rows[:, OFFSET] % 4 + sum(array.data_ptr() % 16 for array in state.values())
    chunks = -(-rows[:, COUNT] // _CHUNK)
    pieces["weight"], pieces["grad"] = weight, grad
    pieces["offset"], pieces["count"] = rows[:, OFFSET], rows[:, COUNT]
    pieces["scalars_row"] = rows[:, SCALARS_ROW]
    pieces["first_chunk"] = np.cumsum(chunks) - chunks
    pieces["weight_code"] = weight_code
    pieces["grad_code_and_vector"] = grad_code + _VECTOR * (unaligned == 0)
    variant = "_master" * ("master" in state) + "_amsgrad" * ("max_exp_avg_sq" in state)
    cuda.launch(
        "adamw",
        f"adam_update_{size}{variant}",
        cuda.device_index(scalars),
        blocks=int(chunks.sum()),
        threads=_THREADS,
        parameters=(parameter,),
        stream=stream,
    )
