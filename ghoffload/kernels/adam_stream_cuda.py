"""The kernel parameter of csrc/adamw_stream.cu, laid out as its struct is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ghoffload.errors import KernelBuildError
from ghoffload.kernels import cuda
from ghoffload.kernels.adam_cuda import Block, Operands, variant
from ghoffload.kernels.formats import BLOCK
from ghoffload.kernels.pieces import (
    COUNT,
    FIRST,
    ITEM_SIZES,
    MAX_PIECES,
    OFFSET,
    SCALARS_ROW,
    PieceTable,
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


class Update(Block):
    """Launches of csrc/adamw_stream.cu for one table and state, on at most ``ctas`` blocks.

    Raises:
        KernelBuildError: the device has no bulk copies, or the kernel could not be built.
    """

    def __init__(
        self,
        table: PieceTable,
        state: Mapping[str, Tensor],
        scalars: Tensor,
        *,
        ctas: int,
        shape: Shape | None = None,
    ) -> None:
        super().__init__(table)
        if len(self.rows) == 0:
            return
        self.shape = SHAPE if shape is None else shape
        self._form = StateForm.of(state)
        self._device, self._ctas = cuda.device_index(scalars), ctas
        capability, self._shared = cuda.capability(self._device), cuda.shared_memory(self._device)
        if capability < (9, 0):
            raise KernelBuildError(
                "the streaming update expects compute capability 9.0 or later, "
                f"cuda:{self._device} has {capability[0]}.{capability[1]}"
            )
        self.lay_out(state)
        self.parameter["scalars"] = scalars.data_ptr()
        self._state_bytes = sum(
            array.element_size() for name, array in state.items() if name not in SCALES
        )
        self._started_for = -1

    def lay_out(self, state: Mapping[str, Tensor]) -> None:
        """Fill in all but ``scalars``, ``stages``, addresses and dtypes of operands."""
        rows = self.rows
        self._size = "small" if len(rows) <= _SMALL_PIECES else "large"
        self._fill(np.zeros(1, dtype=_TABLES[self._size]), state)
        aligned = np.ones(len(rows), dtype=bool)
        for name, array in state.items():
            if name not in SCALES:
                first = array.data_ptr() + rows[:, OFFSET] * array.element_size()
                aligned &= first % ALIGNMENT == 0
        self._count_and_state = (rows[:, COUNT] << 8) + _STATE_ALIGNED * aligned
        chunks = -(-rows[:, COUNT] // self.shape.chunk)
        pieces, parameter = self._pieces, self.parameter
        pieces["offset"], pieces["start"] = rows[:, OFFSET], rows[:, FIRST]
        pieces["scalars_row"] = rows[:, SCALARS_ROW]
        pieces["first_chunk"] = np.cumsum(chunks) - chunks
        parameter["chunks"], parameter["chunk"] = chunks.sum(), self.shape.chunk

    def start(self, operands: Operands, stream: int) -> None:
        """Queue adam_stream for these operands.

        Raises:
            KernelBuildError: the kernel could not be built, or a stage does not fit.
            RuntimeError: the driver refused the launch.
        """
        if len(self.rows) == 0:
            return
        if operands is not self._bound:
            self.bind(operands)
        self._start(stream)

    def _plan(self) -> None:
        """A start with as many stages as fit elements of these sizes."""
        head = self.parameter[0]
        element_bytes = int(head["weight_bytes"]) + int(head["grad_bytes"]) + self._state_bytes
        if element_bytes == self._started_for:
            return
        stage_bytes = self.shape.chunk * element_bytes
        if self._form.moments == "int8":
            stage_bytes += len(SCALES) * ((self.shape.chunk // BLOCK * 4 + 31) // 16 * 16)
        stages = self.shape.fit(stage_bytes, self._shared)
        self.parameter["stages"] = stages
        self._start = cuda.Start(
            SOURCES[self._form.moments != "fp32"],
            f"adam_stream_{self._size}{variant(self._form)}",
            self._device,
            blocks=min(self._ctas, int(head["chunks"])),
            threads=32 * (self.shape.warps + 1),
            parameters=(self.parameter,),
            shared_bytes=stages * stage_bytes,
        )
        self._started_for = element_bytes

    def _code(self) -> None:
        self.parameter["weight_bytes"] = ITEM_SIZES[self._weight_codes].max()
        self.parameter["grad_bytes"] = ITEM_SIZES[self._grad_codes].max()
        self._codes = self._count_and_state + self._weight_codes + (self._grad_codes << 2)
        self._plan()

    def _align(self) -> None:
        codes = self._codes + _WEIGHT_ALIGNED * (self._weight_at % ALIGNMENT == 0)
        codes += _GRAD_ALIGNED * (self._grad_at % ALIGNMENT == 0)
        self._pieces["count_and_codes"] = codes
