"""Launches of Adam and AdamW: ``prepare`` once per group and step, ``update`` once per bucket.

The formula is in ``adam_host``; csrc/adam.cuh computes the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ghoffload.kernels import pool
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
from ghoffload.machine.protocol import Launch

__all__ = ["MAX_INDICES", "MAX_PIECES", "SCALARS", "Hyper", "PieceTable", "prepare", "update"]


def update(
    table: PieceTable,
    *,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    state: Mapping[str, Tensor],
    scalars: Tensor,
    ctas: int | None = None,
) -> Launch:
    """One step of the elements of ``table``.

    Args:
        table: which elements of which weights, where their state is, which row of ``scalars``.
        weights: float32, bfloat16 or float16; their memory is taken as dense from ``data_ptr``.
        grads: one for each weight, of its size and memory order, dtypes free.
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
    form = StateForm.of(state)
    _check_update(table, weights, grads, state, scalars)
    if ctas is not None and ctas < 1:
        raise ValueError(f"ctas expects 1 or more, got {ctas}")
    weight_codes = dtype_codes("weights", weights)
    grad_codes = dtype_codes("grads", grads)
    form.check(table, weights, state)
    names = form.arrays
    n_weights = len(weights)
    reads = (scalars, *grads)
    writes = (*weights, *(state[name] for name in names))

    def host(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        arrays = dict(zip(names, writes[n_weights:], strict=True))
        _update_on_host(
            table, writes[:n_weights], reads[1:], weight_codes, grad_codes, form, arrays, reads[0]
        )

    def device(stream: int) -> None:
        from ghoffload.kernels import adam_cuda, adam_stream_cuda

        operands = (table, weights, grads, weight_codes, grad_codes, state, scalars, stream)
        if ctas is None:
            adam_cuda.update(*operands)
        else:
            adam_stream_cuda.update(*operands, ctas=ctas)

    return Launch("adam_update", reads, writes, device, host)


def _check_update(
    table: PieceTable,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    state: Mapping[str, Tensor],
    scalars: Tensor,
) -> None:
    if len(grads) != len(weights):
        raise ValueError(f"grads expects {len(weights)} tensors as weights, got {len(grads)}")
    check_scalars(scalars, table.scalar_rows)
    table.check_tensors("weights", weights)
    table.check_tensors("grads", grads)
    device = common_device(scalars=[scalars], weights=weights, grads=grads)
    for name, array in state.items():
        if array.device not in (device, torch.device("cpu")):  # a GPU reaches pinned host memory
            raise ValueError(f"{name} expects {device} or host memory, got {array.device}")


def _update_on_host(
    table: PieceTable,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    weight_codes: npt.NDArray[np.int64],
    grad_codes: npt.NDArray[np.int64],
    form: StateForm,
    state: Mapping[str, Tensor],
    scalars: Tensor,
) -> None:
    from ghoffload.kernels import adam_block_host, adam_host

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
