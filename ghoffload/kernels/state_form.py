"""Which format the state of an update launch has, and what it asks of its arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ghoffload.kernels.formats import BLOCK
from ghoffload.kernels.pieces import COUNT, FIRST, OFFSET, START, TENSOR, PieceTable
from ghoffload.kernels.prepare import describe

MOMENTS = ("exp_avg", "exp_avg_sq")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")

_DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.int8, torch.uint8),
}


@dataclass(frozen=True)
class StateForm:
    """The format of a launch's state.

    Attributes:
        master: "none", "fp32" or "split".
        moments: "fp32", "bf16" or "int8".
        amsgrad: whether there is a ``max_exp_avg_sq``.
    """

    master: str
    moments: str
    amsgrad: bool

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> StateForm:
        """The format that has these arrays.

        Raises:
            ValueError: no format has them, or not of these dtypes.
        """
        if not set(MOMENTS) <= set(state):
            raise ValueError(f"state expects exp_avg, exp_avg_sq, got {sorted(state)}")
        first = state["exp_avg"].dtype
        moments = next((name for name, dtypes in _DTYPES.items() if dtypes[0] == first), None)
        if moments is None:
            raise ValueError(
                f"exp_avg expects 1-D contiguous float32, bfloat16 or int8, "
                f"got {describe(state['exp_avg'])}"
            )
        form = cls(
            "fp32" if "master" in state else "split" if "rest" in state else "none",
            moments,
            "max_exp_avg_sq" in state,
        )
        if set(form.arrays) != set(state):
            raise ValueError(
                f"state with {moments} moments expects {', '.join(MOMENTS)} and perhaps "
                f"master or rest{', max_exp_avg_sq' * (moments == 'fp32')}"
                f"{', with exp_avg_scale and exp_avg_sq_scale' * (moments == 'int8')}, "
                f"got {sorted(state)}"
            )
        return form

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays."""
        maximum = ("max_exp_avg_sq",) if self.amsgrad and self.moments == "fp32" else ()
        master = {"none": (), "fp32": ("master",), "split": ("rest",)}[self.master]
        return (*MOMENTS, *maximum, *master, *(SCALES if self.moments == "int8" else ()))

    def dtype(self, name: str) -> torch.dtype:
        """What the array has."""
        if name in MOMENTS:
            return _DTYPES[self.moments][MOMENTS.index(name)]
        return torch.int16 if name == "rest" else torch.float32

    def check_arrays(self, table: PieceTable, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless the arrays are what the format asks for."""
        for name in self.arrays:
            array, dtype = state[name], self.dtype(name)
            if array.dtype != dtype or array.dim() != 1 or not array.is_contiguous():
                kind = str(dtype).removeprefix("torch.")
                raise ValueError(f"{name} expects 1-D contiguous {kind}, got {describe(array)}")
            items, unit = table.end, "elements"
            if name in SCALES:
                items, unit = -(-table.end // BLOCK), "scales"
            if array.numel() < items:
                raise ValueError(f"{name} expects {items} {unit} or more, got {array.numel()}")

    def check_weights(self, table: PieceTable, weights: Sequence[Tensor]) -> None:
        """Raise ValueError unless weights and pieces are what the format asks for."""
        allowed = {
            "none": (torch.float32, torch.bfloat16, torch.float16),
            "fp32": (torch.bfloat16, torch.float16),
            "split": (torch.bfloat16,),
        }[self.master]
        for weight in weights:
            if weight.dtype not in allowed:
                names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
                what = "a master" if self.master == "fp32" else "a split master"
                raise ValueError(
                    f"weights with {what} expect {names}, "
                    f"got {str(weight.dtype).removeprefix('torch.')}"
                )
        if self.moments == "int8":
            _check_blocks(table, weights)


def _check_blocks(table: PieceTable, weights: Sequence[Tensor]) -> None:
    rows = table.rows[table.rows[:, COUNT] > 0]
    numels = np.array([weight.numel() for weight in weights], dtype=np.int64)
    at_end = rows[:, START] + rows[:, COUNT] == numels[rows[:, TENSOR]]
    torn = ((rows[:, FIRST] + rows[:, COUNT]) % BLOCK != 0) & ~at_end
    bad = np.flatnonzero((rows[:, FIRST] % BLOCK != 0) | (rows[:, OFFSET] % BLOCK != 0) | torn)
    if len(bad):
        start, count, offset = rows[bad[0], [FIRST, COUNT, OFFSET]].tolist()
        raise ValueError(
            f"pieces with int8 moments expect whole blocks of {BLOCK}, got elements {start} to "
            f"{start + count} with state from {offset}"
        )
