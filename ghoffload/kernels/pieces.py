"""PieceTable: which elements of which tensors one launch works on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MAX_PIECES = 640
"""Most pieces of one launch. The table travels as a kernel parameter: 48 bytes each, of 32,764 that
there are. csrc has the same number."""

_LEAST_ROW, _MOST_ROW = 1 << 15, 1 << 20

# Columns of a table.
TENSOR, START, COUNT, OFFSET, SCALARS_ROW, FIRST = range(6)

FP32, BF16, FP16 = range(3)
"""dtype codes shared with csrc."""
DTYPE_CODES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
ITEM_SIZES = np.array([4, 2, 2], dtype=np.int64)


class PieceTable:
    """The static part of a launch, built once per bucket.

    Args:
        pieces: ``(tensor_index, start, count, offset, scalar_index)`` each: ``count`` elements from
            element ``start`` (in dense memory order) of the launch's ``tensor_index``-th tensor;
            ``offset`` is their first element in the packed or state arrays and ``scalar_index``
            the row of ``scalars`` they use. A sixth number is the index of their first element in
            the parameter, where the tensor begins elsewhere in it. Where ``start`` and ``offset``
            are multiples of 4 and the memory is aligned to 16 bytes the CUDA kernels take the
            vector path.

    Raises:
        ValueError: more than ``MAX_PIECES`` pieces, or a negative number.
    """

    def __init__(self, pieces: Sequence[tuple[int, ...]]) -> None:
        if len(pieces) > MAX_PIECES:
            raise ValueError(f"a launch expects at most {MAX_PIECES} pieces, got {len(pieces)}")
        rows = [piece if len(piece) == 6 else (*piece, piece[START]) for piece in pieces]
        self.rows: npt.NDArray[np.int64] = np.array(rows, dtype=np.int64).reshape(-1, 6)
        if (self.rows < 0).any():
            raise ValueError("a piece expects numbers of 0 or more, got a negative one")
        self.rows.flags.writeable = False
        self._host_rows: dict[int, npt.NDArray[np.int64]] = {}
        self.elements = int(self.rows[:, COUNT].sum())
        self.tensors = int(self.rows[:, TENSOR].max(initial=-1)) + 1
        self.end = int((self.rows[:, OFFSET] + self.rows[:, COUNT]).max(initial=0))
        self.scalar_rows = int(self.rows[:, SCALARS_ROW].max(initial=-1)) + 1

    def __len__(self) -> int:
        return len(self.rows)

    def task_elements(self, threads: int) -> int:
        """Elements of one CPU task: long runs are fastest, but every thread should get a few."""
        share = max(1, self.elements // (4 * threads))
        return min(max(_LEAST_ROW, 1 << (share - 1).bit_length()), _MOST_ROW)

    def host_rows(self, most: int) -> npt.NDArray[np.int64]:
        """The pieces without empty ones, cut into rows of at most ``most`` elements."""
        if most not in self._host_rows:
            rows = self.rows[self.rows[:, COUNT] > 0]
            cuts = -(-rows[:, COUNT] // most)
            out = np.repeat(rows, cuts, axis=0)
            done = (np.arange(len(out)) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * most
            out[:, START] += done
            out[:, FIRST] += done
            out[:, OFFSET] += done
            out[:, COUNT] = np.minimum(out[:, COUNT] - done, most)
            self._host_rows[most] = out
        return self._host_rows[most]

    def check_tensors(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Raise ValueError unless every piece lies within its tensor."""
        if len(tensors) < self.tensors:
            raise ValueError(f"{name} expects {self.tensors} tensors or more, got {len(tensors)}")
        if len(self.rows):
            numels = np.array([tensor.numel() for tensor in tensors], dtype=np.int64)
            ends = self.rows[:, START] + self.rows[:, COUNT]
            bad = np.flatnonzero(ends > numels[self.rows[:, TENSOR]])
            if len(bad):
                index = int(self.rows[bad[0], TENSOR])
                raise ValueError(
                    f"{name}[{index}] expects {int(ends[bad[0]])} elements or more, "
                    f"got {int(numels[index])}"
                )

    def addresses(
        self,
        pointers: npt.NDArray[np.int64],
        item_sizes: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64] | None = None,
    ) -> npt.NDArray[np.int64]:
        """The first byte of each piece (or of each of ``rows``), from each tensor's."""
        rows = self.rows if rows is None else rows
        tensor = rows[:, TENSOR]
        return pointers[tensor] + rows[:, START] * item_sizes[tensor]


def pointers(tensors: Sequence[Tensor]) -> npt.NDArray[np.int64]:
    """``data_ptr`` of each tensor."""
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)


def dtype_codes(name: str, tensors: Sequence[Tensor]) -> npt.NDArray[np.int64]:
    """The code csrc has for the dtype of each tensor.

    Raises:
        ValueError: a dtype other than float32, bfloat16 or float16.
    """
    try:
        return np.array([DTYPE_CODES[tensor.dtype] for tensor in tensors], dtype=np.int64)
    except KeyError as error:
        raise ValueError(
            f"{name} expects float32, bfloat16 or float16, got {error.args[0]}"
        ) from None


def common_device(**tensors: Sequence[Tensor]) -> torch.device:
    """The one device all tensors are on.

    Raises:
        ValueError: they are on several, or there is no tensor.
    """
    device: torch.device | None = None
    for name, group in tensors.items():
        for index, tensor in enumerate(group):
            if device is None:
                device = tensor.device
            elif tensor.device != device:
                raise ValueError(
                    f"{name}[{index}] expects to be on {device} as the other tensors of its "
                    f"launch, got {tensor.device}"
                )
    if device is None:
        raise ValueError("a launch expects at least one tensor, got none")
    return device
