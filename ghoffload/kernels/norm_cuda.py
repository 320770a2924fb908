"""The kernel parameters of csrc/norm.cu, laid out as its structs are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ghoffload.kernels import cuda
from ghoffload.kernels.norm import CHUNK, MAX_TENSORS
from ghoffload.kernels.pieces import pointers

_THREADS, _FINISH_THREADS = 256, 1024
_SMALL_TENSORS = 64
_VECTOR = 0x100

_GRADIENT = np.dtype(
    [("at", "u8"), ("count", "i8"), ("first_chunk", "u4"), ("code_and_vector", "u4")]
)
_FINISH = np.dtype(
    [
        ("partials", "u8"),
        ("count", "i8"),
        ("max_norm", "f8"),
        ("grad_scale", "f8"),
        ("grad_scale_at", "u8"),
        ("total_norm", "u8"),
        ("found_inf", "u8"),
        ("clip", "u8"),
    ]
)


def _table(size: int) -> np.dtype[Any]:
    return np.dtype(
        [("partials", "u8"), ("pieces", "u4"), ("unused", "u4"), ("piece", _GRADIENT, (size,))]
    )


_TABLES = {"small": _table(_SMALL_TENSORS), "large": _table(MAX_TENSORS)}


def partials(
    grads: Sequence[Tensor],
    codes: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    out: Tensor,
    maximum: bool,
    stream: int,
) -> None:
    """Queue norm_partials for at most ``MAX_TENSORS`` gradients."""
    some = counts > 0
    addresses, codes, counts = pointers(grads)[some], codes[some], counts[some]
    number = len(counts)
    if number == 0:
        return
    size = "small" if number <= _SMALL_TENSORS else "large"
    parameter = np.zeros(1, dtype=_TABLES[size])
    parameter["partials"], parameter["pieces"] = out.data_ptr(), number
    pieces = parameter[0]["piece"][:number]
    chunks = -(-counts // CHUNK)
    pieces["at"], pieces["count"] = addresses, counts
    pieces["first_chunk"] = np.cumsum(chunks) - chunks
    pieces["code_and_vector"] = codes + _VECTOR * (addresses % 16 == 0)
    cuda.launch(
        "norm",
        f"norm_partials_{size}_{_name(maximum)}",
        cuda.device_index(out),
        blocks=int(chunks.sum()),
        threads=_THREADS,
        parameters=(parameter,),
        stream=stream,
    )


def finish(
    partials: Tensor,
    count: int,
    max_norm: float,
    grad_scale: float,
    grad_scale_at: Tensor | None,
    results: Mapping[str, Tensor],
    maximum: bool,
    stream: int,
) -> None:
    """Queue norm_finish over the first ``count`` partials."""
    parameter = np.zeros(1, dtype=_FINISH)
    parameter["partials"], parameter["count"] = partials.data_ptr(), count
    parameter["max_norm"], parameter["grad_scale"] = max_norm, grad_scale
    parameter["grad_scale_at"] = 0 if grad_scale_at is None else grad_scale_at.data_ptr()
    for name, tensor in results.items():
        parameter[name] = tensor.data_ptr()
    cuda.launch(
        "norm",
        f"norm_finish_{_name(maximum)}",
        cuda.device_index(partials),
        blocks=1,
        threads=_FINISH_THREADS,
        parameters=(parameter,),
        stream=stream,
    )


def _name(maximum: bool) -> str:
    return "inf" if maximum else "2"
