"""Launches of Adam and AdamW: ``prepare`` once per group and step, ``update`` once per bucket.

The formula is in ``adam_host``; csrc/adam.cuh computes the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ghoffload.kernels import adam_cuda, adam_stream_cuda, pool
from ghoffload.kernels.adam_cuda import Operands
from ghoffload.kernels.pieces import (
    COUNT,
    FIRST,
    ITEM_SIZES,
    MAX_PIECES,
    OFFSET,
    SCALARS_ROW,
    TENSOR,
    PieceTable,
    common_device,
    dtype_codes,
    pointers,
)
from ghoffload.kernels.prepare import (
    MAX_INDICES,
    SCALARS,
    Hyper,
    check_scalars,
    prepare,
)
from ghoffload.kernels.state_form import MOMENTS, SCALES, StateForm
from ghoffload.machine.protocol import Launch, Vetted

__all__ = [
    "MAX_INDICES",
    "MAX_PIECES",
    "SCALARS",
    "Hyper",
    "PieceTable",
    "Update",
    "prepare",
    "update",
]


class Update:
    """Update launches of one table with one state, at each step with the tensors of that step.

    The kernel's parameter stays between launches. A launch looks at dtypes, sizes and devices of
    the tensors whose address, dtype or size is not that of the last time, and rewrites what has
    changed. No weight and no gradient is kept alive.

    Args:
        table: which elements of which weights, where their state is, which row of ``scalars``.
        state: 1-D arrays by name, in one of the formats that ``formats`` describes: ``exp_avg`` and
            ``exp_avg_sq``, float32, bfloat16, or int8 and uint8 with float32 ``exp_avg_scale`` and
            ``exp_avg_sq_scale``; with float32 ones perhaps ``max_exp_avg_sq``, float32, for
            amsgrad; where all weights are half precision perhaps ``master``, float32; where all
            are bfloat16 perhaps ``rest``, int16, instead. With int8 moments pieces begin at
            multiples of ``BLOCK`` in their tensor and in the state, and end at one in their tensor
            or at its end.
        scalars: float32 ``[n_parameters, SCALARS]`` as ``prepare`` fills it.
        ctas: blocks of the streaming kernel, which reads and writes state in place by bulk copies
            (compute capability 9.0 or later); ``None`` takes the kernel of ordinary loads and
            stores. The bits are the same.

    Raises:
        ValueError: a tensor of another dtype, size or device than that, or ``ctas`` below 1.
    """

    def __init__(
        self,
        table: PieceTable,
        *,
        state: Mapping[str, Tensor],
        scalars: Tensor,
        ctas: int | None = None,
    ) -> None:
        self._form = StateForm.of(state)
        check_scalars(scalars, table.scalar_rows)
        device = scalars.device
        for name, array in state.items():
            if array.device not in (device, torch.device("cpu")):  # a GPU reaches pinned memory
                raise ValueError(f"{name} expects {device} or host memory, got {array.device}")
        if ctas is not None and ctas < 1:
            raise ValueError(f"ctas expects 1 or more, got {ctas}")
        self._form.check_arrays(table, state)
        self._table, self._scalars, self._ctas = table, scalars, ctas
        self._state = dict(state)
        self._arrays = tuple(state[name] for name in self._form.arrays)
        self._vetted = Vetted((scalars, *self._arrays))
        self._addresses: list[int] = []
        self._dtypes: list[torch.dtype] | None = None
        self._sizes: list[int] = []
        self._kernel: Any = None

    def launch(self, weights: Sequence[Tensor], grads: Sequence[Tensor]) -> Launch:
        """One step of the elements of the table.

        Args:
            weights: float32, bfloat16 or float16; their memory is taken as dense from ``data_ptr``.
            grads: one for each weight, of its size and memory order, dtypes free.

        Raises:
            ValueError: a tensor of another dtype, size or device than the table and state expect.
        """
        if len(grads) != len(weights):
            raise ValueError(f"grads expects {len(weights)} tensors as weights, got {len(grads)}")
        tensors = (*weights, *grads)
        addresses = [tensor.data_ptr() for tensor in tensors]
        dtypes = [tensor.dtype for tensor in tensors]
        sizes = [tensor.numel() for tensor in tensors]
        if dtypes != self._dtypes or sizes != self._sizes:
            self._look(weights, grads, addresses, dtypes, sizes)
        elif addresses != self._addresses:
            self._move(weights, grads, addresses)
        return Launch(
            "adam_update",
            (self._scalars, *grads),
            (*weights, *self._arrays),
            # With the operands it is made with, whatever is launched before it runs. Not kept: self
            # would refer to itself, and state would outlive its optimizer.
            partial(self._start, self._operands),
            self._host,
            self._vetted,
            self._table.elements,
        )

    def _look(
        self,
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        addresses: list[int],
        dtypes: list[torch.dtype],
        sizes: list[int],
    ) -> None:
        """Check tensors of other dtypes or sizes than before, and take them."""
        table, form = self._table, self._form
        table.check_tensors("weights", weights)
        table.check_tensors("grads", grads)
        common_device(scalars=[self._scalars], weights=weights, grads=grads)
        codes = dtype_codes("weights", weights), dtype_codes("grads", grads)
        form.check_weights(table, weights)
        self._codes = codes
        # Not the state: the host form gets it with the tensors of the launch.
        self._host = partial(_update_on_host, table, *self._codes, form)
        now, count = np.array(addresses, dtype=np.int64), len(weights)
        self._take(addresses, now[:count], now[count:])
        self._dtypes, self._sizes = dtypes, sizes

    def _move(
        self, weights: Sequence[Tensor], grads: Sequence[Tensor], addresses: list[int]
    ) -> None:
        """Take tensors that differ from those before in their addresses."""
        count, device, before = len(weights), self._scalars.device, self._addresses
        halves = []
        for tensors, old, now, then in (
            (weights, self._operands.weights, addresses[:count], before[:count]),
            (grads, self._operands.grads, addresses[count:], before[count:]),
        ):
            if now != then:
                if any(tensor.device != device for tensor in tensors):
                    common_device(scalars=[self._scalars], weights=weights, grads=grads)
                old = np.array(now, dtype=np.int64)
            halves.append(old)
        self._take(addresses, *halves)

    def _take(
        self,
        addresses: list[int],
        weights: npt.NDArray[np.int64],
        grads: npt.NDArray[np.int64],
    ) -> None:
        self._operands = Operands(weights, grads, *self._codes)
        self._addresses = addresses

    def _start(self, operands: Operands, stream: int) -> None:
        if self._kernel is None:
            if self._ctas is None:
                self._kernel = adam_cuda.Update(self._table, self._state, self._scalars)
            else:
                self._kernel = adam_stream_cuda.Update(
                    self._table, self._state, self._scalars, ctas=self._ctas
                )
        self._kernel.start(operands, stream)


def update(
    table: PieceTable,
    *,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    state: Mapping[str, Tensor],
    scalars: Tensor,
    ctas: int | None = None,
) -> Launch:
    """One step of the elements of ``table``, once: as ``Update``, and with its errors."""
    return Update(table, state=state, scalars=scalars, ctas=ctas).launch(weights, grads)


def _update_on_host(
    table: PieceTable,
    weight_codes: npt.NDArray[np.int64],
    grad_codes: npt.NDArray[np.int64],
    form: StateForm,
    reads: Sequence[Tensor],
    writes: Sequence[Tensor],
) -> None:
    from ghoffload.kernels import adam_block_host, adam_host

    count = len(weight_codes)
    scalars, grads, weights = reads[0], reads[1:], writes[:count]
    state = dict(zip(form.arrays, writes[count:], strict=True))
    most = table.task_elements(pool.get_threads())
    rows = table.host_rows(most)
    if len(rows) == 0:
        return
    tensor = rows[:, TENSOR]
    arguments = np.empty((len(rows), 6), dtype=np.int64)
    arguments[:, 0] = table.addresses(pointers(weights), ITEM_SIZES[weight_codes], rows)
    arguments[:, 1] = table.addresses(pointers(grads), ITEM_SIZES[grad_codes], rows)
    arguments[:, 2] = rows[:, COUNT]
    arguments[:, 3] = rows[:, OFFSET]
    arguments[:, 4] = rows[:, SCALARS_ROW]
    arguments[:, 5] = rows[:, FIRST]
    numbers = scalars.detach().numpy()
    addresses = [
        state[name].data_ptr() if name in state else 0
        for name in (*MOMENTS, "max_exp_avg_sq", "rest" if form.master == "split" else "master")
    ]
    if form.moments == "int8":
        addresses += [state[name].data_ptr() for name in SCALES]
    variants = weight_codes[tensor] * 3 + grad_codes[tensor]
    tasks: list[tuple[Any, npt.NDArray[np.int64]]] = []
    for variant in np.unique(variants):
        codes = int(variant) // 3, int(variant) % 3
        if form.moments == "int8":
            kernel = adam_block_host.update_rows(*codes, form.master)
        else:
            kernel = adam_host.update_rows(*codes, form.master, form.moments, form.amsgrad)
        chosen = arguments[variants == variant]
        # Small pieces share a task: a new one begins where the running total passes ``most``.
        filled = np.cumsum(chosen[:, 2]) - chosen[:, 2]
        begins = np.flatnonzero(np.diff(filled // most, prepend=-1))
        tasks += [(kernel, part) for part in np.split(chosen, begins[1:])]

    def task(item: tuple[Any, npt.NDArray[np.int64]]) -> None:
        kernel, part = item
        kernel(part, numbers, *addresses)

    pool.run(task, tasks)
