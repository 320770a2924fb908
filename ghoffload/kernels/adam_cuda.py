"""The kernel parameter of csrc/adamw.cu, laid out as its struct is, kept from launch to launch."""

from __future__ import annotations

from collections.abc import Mapping
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
    START,
    TENSOR,
    PieceTable,
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


class Operands:
    """Where the weights and gradients of a launch are, by tensor of its table."""

    __slots__ = ("grad_codes", "grads", "weight_codes", "weights")

    def __init__(
        self,
        weights: npt.NDArray[np.int64],
        grads: npt.NDArray[np.int64],
        weight_codes: npt.NDArray[np.int64],
        grad_codes: npt.NDArray[np.int64],
    ) -> None:
        self.weights, self.grads = weights, grads
        self.weight_codes, self.grad_codes = weight_codes, grad_codes


class Block:
    """The parameter of one table's update launches and their start: what both kernels share.

    All but addresses and dtypes is filled in once. ``bind`` writes what differs from the operands
    of the last time; an array that is the very same object counts as unchanged.
    """

    rows: npt.NDArray[np.int64]
    parameter: npt.NDArray[Any]

    def __init__(self, table: PieceTable) -> None:
        self.rows = table.rows[table.rows[:, COUNT] > 0]
        self._tensor = self.rows[:, TENSOR]
        self._bound = Operands(*(np.zeros(0, dtype=np.int64) for _ in range(4)))

    def _fill(self, parameter: npt.NDArray[Any], state: Mapping[str, Tensor]) -> None:
        """The state addresses and what both layouts say of a piece."""
        self.parameter = parameter
        for name, array in state.items():
            parameter["master" if name == "rest" else name] = array.data_ptr()
        parameter["pieces"] = len(self.rows)
        self._pieces = parameter[0]["piece"][: len(self.rows)]
        self._weight, self._grad = self._pieces["weight"], self._pieces["grad"]

    def bind(self, operands: Operands) -> None:
        """Point the parameter at these weights and gradients."""
        bound, tensor = self._bound, self._tensor
        coded = (
            operands.weight_codes is not bound.weight_codes
            or operands.grad_codes is not bound.grad_codes
        )
        if coded:
            self._weight_codes = operands.weight_codes[tensor]
            self._grad_codes = operands.grad_codes[tensor]
            start = self.rows[:, START]
            self._weight_start = start * ITEM_SIZES[self._weight_codes]
            self._grad_start = start * ITEM_SIZES[self._grad_codes]
            self._code()
        if coded or operands.weights is not bound.weights:
            self._weight[:] = self._weight_at = operands.weights[tensor] + self._weight_start
        if coded or operands.grads is not bound.grads:
            self._grad[:] = self._grad_at = operands.grads[tensor] + self._grad_start
        self._align()
        self._bound = operands

    def _code(self) -> None:
        """Write what follows from the dtypes."""
        raise NotImplementedError

    def _align(self) -> None:
        """Write what follows from the addresses."""
        raise NotImplementedError


class Update(Block):
    """Launches of csrc/adamw.cu for one table and state."""

    def __init__(self, table: PieceTable, state: Mapping[str, Tensor], scalars: Tensor) -> None:
        super().__init__(table)
        rows = self.rows
        if len(rows) == 0:
            return
        size = "small" if len(rows) <= _SMALL_PIECES else "large"
        form = StateForm.of(state)
        self._fill(np.zeros(1, dtype=_TABLES[size]), state)
        self.parameter["scalars"] = scalars.data_ptr()
        chunks = -(-rows[:, COUNT] // _CHUNK)
        pieces = self._pieces
        pieces["offset"], pieces["count"] = rows[:, OFFSET], rows[:, COUNT]
        pieces["scalars_row"] = rows[:, SCALARS_ROW]
        pieces["first_chunk"] = np.cumsum(chunks) - chunks
        pieces["start"], pieces["start_high"] = rows[:, FIRST] & 0xFFFFFFFF, rows[:, FIRST] >> 32
        self._vector = pieces["vector"]
        self._state_unaligned = rows[:, OFFSET] % 4
        self._state_unaligned += sum(array.data_ptr() % 16 for array in state.values())
        self._start = cuda.Start(
            "adamw" if form.moments == "fp32" else "adamw_coded",
            f"adam_update_{size}{variant(form)}",
            cuda.device_index(scalars),
            blocks=int(chunks.sum()),
            threads=_THREADS,
            parameters=(self.parameter,),
        )

    def start(self, operands: Operands, stream: int) -> None:
        """Queue adam_update for these operands."""
        if len(self.rows) == 0:
            return
        if operands is not self._bound:
            self.bind(operands)
        self._start(stream)

    def _code(self) -> None:
        self._pieces["weight_code"] = self._weight_codes
        self._pieces["grad_code"] = self._grad_codes
        # Groups of four elements: 16 bytes of fp32, 8 bytes of half precision, 4 of codes.
        self._weight_mask = 4 * ITEM_SIZES[self._weight_codes] - 1
        self._grad_mask = 4 * ITEM_SIZES[self._grad_codes] - 1

    def _align(self) -> None:
        unaligned = self._weight_at & self._weight_mask
        unaligned |= self._grad_at & self._grad_mask
        unaligned |= self._state_unaligned
        self._vector[:] = unaligned == 0
