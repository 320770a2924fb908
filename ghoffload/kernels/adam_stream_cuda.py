"""The kernel parameters of csrc/adamw_stream.cu, laid out as its structs are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ghoffload.errors import KernelBuildError
from ghoffload.kernels import cuda
from ghoffload.kernels.adam_cuda import variant
from ghoffload.kernels.formats import BLOCK
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

SOURCES = ("adamw_stream", "adamw_stream_coded")
LINE = 128
"""Elements that a warp updates at once; a chunk is a multiple of it."""
MOST_STAGES = 16
MOST_WARPS = 23  # and the producer: 768 threads
STATIC_SHARED_BYTES = 3840
"""Shared memory of a block beside its stages."""
ALIGNMENT = 16
"""Bytes; what bulk copies need of addresses and sizes."""

_SMALL_PIECES = 64
_STATE_ALIGNED, _WEIGHT_ALIGNED, _GRAD_ALIGNED = 0x10, 0x20, 0x40
_ARRAYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master", *SCALES)
_PIECE = np.dtype(
    [
        ("weight", "u8"),
        ("grad", "u8"),
        ("offset", "i8"),
        ("start", "i8"),
        ("count_and_codes", "i8"),
        ("scalars_row", "u4"),
        ("first_chunk", "u4"),
    ]
)


def _table(size: int) -> np.dtype[Any]:
    numbers = ("pieces", "chunks", "chunk", "stages", "weight_bytes", "grad_bytes")
    header = [(name, "u8") for name in (*_ARRAYS, "scalars")] + [(name, "u4") for name in numbers]
    return np.dtype([*header, ("piece", _PIECE, (size,))])


_TABLES = {"small": _table(_SMALL_PIECES), "large": _table(MAX_PIECES)}


@dataclass(frozen=True)
class Shape:
    """What a block of the streaming kernel is made of.

    Attributes:
        chunk: elements of a stage.
        stages: the most there are; fewer where shared memory is short.
        warps: warps that compute; one more moves the bytes.
    """

    chunk: int = 2048
    stages: int = MOST_STAGES
    warps: int = 16

    def __post_init__(self) -> None:
        if self.chunk < LINE or self.chunk % LINE:
            raise ValueError(f"chunk expects a multiple of {LINE}, got {self.chunk}")
        if not 2 <= self.stages <= MOST_STAGES:
            raise ValueError(f"stages expects 2 to {MOST_STAGES}, got {self.stages}")
        if not 1 <= self.warps <= MOST_WARPS:
            raise ValueError(f"warps expects 1 to {MOST_WARPS}, got {self.warps}")

    def fit(self, stage: int, shared_bytes: int) -> int:
        """Stages of so many bytes that fit into a block's shared memory.

        Raises:
            KernelBuildError: fewer than two.
        """
        stages = min(self.stages, (shared_bytes - STATIC_SHARED_BYTES) // stage)
        if stages < 2:
            raise KernelBuildError(
                f"the streaming update expects {2 * stage + STATIC_SHARED_BYTES:,} bytes of shared "
                f"memory or more for a block, the device has {shared_bytes:,}"
            )
        return stages


SHAPE = Shape()
"""The shape that ``update`` takes by default."""


def update(
    table: PieceTable,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    weight_codes: npt.NDArray[np.int64],
    grad_codes: npt.NDArray[np.int64],
    state: Mapping[str, Tensor],
    scalars: Tensor,
    stream: int,
    *,
    ctas: int,
    shape: Shape | None = None,
) -> None:
    """Queue adam_stream for a table, on at most ``ctas`` blocks.

    Raises:
        KernelBuildError: the device has no bulk copies, or the kernel could not be built.
        RuntimeError: the driver refused the launch.
    """
    rows = table.rows[table.rows[:, COUNT] > 0]
    if len(rows) == 0:
        return
    shape = SHAPE if shape is None else shape
    form = StateForm.of(state)
    device = cuda.device_index(scalars)
    capability, shared_bytes = cuda.capability(device), cuda.shared_memory(device)
    if capability < (9, 0):
        raise KernelBuildError(
            "the streaming update expects compute capability 9.0 or later, "
            f"cuda:{device} has {capability[0]}.{capability[1]}"
        )
    parameter = pack_parameter(table, rows, weights, grads, weight_codes, grad_codes, state, shape)
    parameter["scalars"] = scalars.data_ptr()
    head = parameter[0]
    element_bytes = int(head["weight_bytes"]) + int(head["grad_bytes"])
    element_bytes += sum(
        array.element_size() for name, array in state.items() if name not in SCALES
    )
    stage_bytes = shape.chunk * element_bytes
    if form.moments == "int8":
        stage_bytes += len(SCALES) * ((shape.chunk // BLOCK * 4 + 31) // 16 * 16)
    parameter["stages"] = shape.fit(stage_bytes, shared_bytes)
    size = "small" if len(rows) <= _SMALL_PIECES else "large"
    cuda.launch(
        SOURCES[form.moments != "fp32"],
        f"adam_stream_{size}{variant(form)}",
        device,
        blocks=min(ctas, int(head["chunks"])),
        threads=32 * (shape.warps + 1),
        parameters=(parameter,),
        stream=stream,
        shared_bytes=int(head["stages"]) * stage_bytes,
    )


def pack_parameter(
    table: PieceTable,
    rows: npt.NDArray[np.int64],
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    weight_codes: npt.NDArray[np.int64],
    grad_codes: npt.NDArray[np.int64],
    state: Mapping[str, Tensor],
    shape: Shape,
) -> npt.NDArray[Any]:
    """The kernel parameter without ``scalars`` and ``stages``; ``rows`` are those not empty."""
    size = "small" if len(rows) <= _SMALL_PIECES else "large"
    parameter = np.zeros(1, dtype=_TABLES[size])
    for name, array in state.items():
        parameter["master" if name == "rest" else name] = array.data_ptr()
    tensor = rows[:, TENSOR]
    weight_code, grad_code = weight_codes[tensor], grad_codes[tensor]
    weight = table.addresses(pointers(weights), ITEM_SIZES[weight_codes], rows)
    grad = table.addresses(pointers(grads), ITEM_SIZES[grad_codes], rows)
    state_aligned = np.ones(len(rows), dtype=bool)
    for name, array in state.items():
        if name in SCALES:
            continue
        first = array.data_ptr() + rows[:, OFFSET] * array.element_size()
        state_aligned &= first % ALIGNMENT == 0
    codes = weight_code + (grad_code << 2) + _STATE_ALIGNED * state_aligned
    codes += _WEIGHT_ALIGNED * (weight % ALIGNMENT == 0) + _GRAD_ALIGNED * (grad % ALIGNMENT == 0)
    chunks = -(-rows[:, COUNT] // shape.chunk)
    pieces = parameter[0]["piece"][: len(rows)]
    pieces["weight"], pieces["grad"] = weight, grad
    pieces["offset"], pieces["start"] = rows[:, OFFSET], rows[:, FIRST]
    pieces["count_and_codes"] = (rows[:, COUNT] << 8) + codes
    pieces["scalars_row"] = rows[:, SCALARS_ROW]
    pieces["first_chunk"] = np.cumsum(chunks) - chunks
    parameter["pieces"], parameter["chunks"] = len(rows), chunks.sum()
    parameter["chunk"] = shape.chunk
    parameter["weight_bytes"] = ITEM_SIZES[weight_code].max()
    parameter["grad_bytes"] = ITEM_SIZES[grad_code].max()
    return parameter
