"""Launches of Adam and AdamW: ``prepare`` once per group and step, ``update`` once per bucket.

The formula is in ``adam_host``; csrc/adamw.cu computes the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ghoffload.kernels import pool
from ghoffload.kernels.pieces import (
    COUNT,
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
from ghoffload.machine.protocol import Launch

__all__ = ["MAX_PIECES", "SCALARS", "Hyper", "PieceTable", "prepare", "update"]

SCALARS = 16
"""Columns of ``scalars``; the first 11 are used."""

MAX_INDICES = 7680
"""Most parameters of one prepare launch: their indices travel as a kernel parameter."""


@dataclass(frozen=True)
class Hyper:
    """One parameter group's hyperparameters for one step, as ``torch.optim.Adam`` names them.

    ``lr``, ``beta1`` and ``beta2`` may be tensors of one float32 or float64 element.
    ``decoupled`` is AdamW's weight decay.
    """

    lr: float | Tensor
    beta1: float | Tensor
    beta2: float | Tensor
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool
    decoupled: bool


def prepare(
    indices: npt.NDArray[np.uint32],
    hyper: Hyper,
    *,
    steps: Tensor,
    scalars: Tensor,
    found_inf: Tensor | None = None,
    grad_scale: Tensor | None = None,
) -> Sequence[Launch]:
    """Advance step counters and compute what ``update`` needs, on the device that holds them.

    For each index i: unless ``found_inf`` is non-zero, ``steps[i] += 1`` and ``scalars[i]`` becomes
    everything ``update`` needs; otherwise ``scalars[i]`` says to skip. An index may occur once.

    Args:
        indices: the parameters, uint32.
        hyper: their hyperparameters. Tensors on ``steps``'s device are read when the launch runs,
            tensors on the CPU now.
        steps: float32 ``[n_parameters]``.
        scalars: float32 ``[n_parameters, SCALARS]``.
        found_inf: float32, one element, or ``None`` for never.
        grad_scale: float32, one element; gradients are multiplied by 1 / ``grad_scale``.

    Raises:
        ValueError: a tensor of another dtype, shape or device.
    """
    _check_steps(steps, scalars)
    indices = np.ascontiguousarray(indices, dtype=np.uint32)
    if len(indices) and int(indices.max()) >= steps.numel():
        raise ValueError(f"indices expect to be below {steps.numel()}, got {int(indices.max())}")
    numbers = {"weight_decay": float(hyper.weight_decay), "eps": float(hyper.eps)}
    on_device: dict[str, Tensor] = {}
    for name, value in (
        ("lr", hyper.lr),
        ("beta1", hyper.beta1),
        ("beta2", hyper.beta2),
        ("found_inf", found_inf),
        ("grad_scale", grad_scale),
    ):
        if value is None:
            continue
        if not isinstance(value, Tensor):
            numbers[name] = float(value)
            continue
        allowed = [torch.float32, torch.float64] if name[0] in "lb" else [torch.float32]
        if value.numel() != 1 or value.dtype not in allowed:
            raise ValueError(
                f"{name} expects one element of {' or '.join(map(str, allowed))}, "
                f"got {value.numel()} of {value.dtype}"
            )
        if value.device == steps.device:
            on_device[name] = value
        elif value.device.type == "cpu":
            numbers[name] = value.item()
        else:
            raise ValueError(f"{name} expects {steps.device} or cpu, got {value.device}")
    names = tuple(on_device)
    flags = bool(hyper.maximize), bool(hyper.decoupled)

    def launch(part: npt.NDArray[np.uint32]) -> Launch:
        def host(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
            values = numbers | {name: t.item() for name, t in zip(names, reads, strict=True)}
            with pool.default_float_environment():
                _prepare_on_host(part, values, flags, writes[0], writes[1])

        def device(stream: int) -> None:
            from ghoffload.kernels import adam_cuda

            adam_cuda.prepare(part, numbers, on_device, flags, steps, scalars, stream)

        return Launch("adam_prepare", tuple(on_device.values()), (steps, scalars), device, host)

    return [launch(indices[i : i + MAX_INDICES]) for i in range(0, len(indices), MAX_INDICES)]


def _check_steps(steps: Tensor, scalars: Tensor) -> None:
    if steps.dtype != torch.float32 or steps.dim() != 1 or not steps.is_contiguous():
        raise ValueError(f"steps expects 1-D contiguous float32, got {_describe(steps)}")
    _check_scalars(scalars, steps.numel())
    if scalars.device != steps.device:
        raise ValueError(f"scalars expects {steps.device} as steps, got {scalars.device}")


def _check_scalars(scalars: Tensor, rows: int) -> None:
    fits = scalars.dim() == 2 and scalars.shape[0] >= rows and scalars.shape[1] == SCALARS
    if scalars.dtype != torch.float32 or not fits or not scalars.is_contiguous():
        raise ValueError(
            f"scalars expects contiguous float32 [{rows} or more, {SCALARS}], "
            f"got {_describe(scalars)}"
        )


def _describe(tensor: Tensor) -> str:
    layout = "" if tensor.is_contiguous() else "non-contiguous "
    return f"{layout}{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _prepare_on_host(
    indices: npt.NDArray[np.uint32],
    values: Mapping[str, float],
    flags: tuple[bool, bool],
    steps: Tensor,
    scalars: Tensor,
) -> None:
    from ghoffload.kernels import adam_host as columns

    maximize, decoupled = flags
    counters, table = steps.detach().numpy(), scalars.detach().numpy()
    rows = np.zeros((len(indices), SCALARS), dtype=np.float64)
    if values.get("found_inf", 0.0) != 0.0:
        rows[:, columns.SKIP] = 1.0
    else:
        counters[indices] += np.float32(1.0)
        with np.errstate(all="ignore"):
            lr, beta1, beta2 = (np.float64(values[name]) for name in ("lr", "beta1", "beta2"))
            decay = np.float64(values["weight_decay"])
            factor = np.float32(1.0)
            if "grad_scale" in values:
                factor = np.float32(np.float64(1.0) / np.float64(values["grad_scale"]))
            t = counters[indices].astype(np.int64)
            rows[:, columns.FACTOR] = -factor if maximize else factor
            rows[:, columns.DECAY] = 0.0 if decoupled else decay
            rows[:, columns.KEEP] = 1.0 - lr * decay if decoupled else 1.0
            rows[:, columns.BETA1] = beta1
            rows[:, columns.NOT_BETA1] = 1.0 - beta1
            rows[:, columns.BETA2] = beta2
            rows[:, columns.NOT_BETA2] = 1.0 - beta2
            rows[:, columns.ROOT] = np.sqrt(1.0 - _power(beta2, t))
            rows[:, columns.EPS] = values["eps"]
            rows[:, columns.STEP] = -(lr / (1.0 - _power(beta1, t)))
    with np.errstate(all="ignore"):
        single = rows.astype(np.float32)
    single.view(np.uint32)[np.isnan(single)] = 0x7FC00000
    table[indices] = single


def _power(base: np.float64, exponents: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Powers of ``base`` by binary powering; libm's pow is not the same on every machine."""
    result = np.ones(len(exponents), dtype=np.float64)
    left = exponents.copy()
    while (left > 0).any():
        result = np.where(left & 1, result * base, result)
        base = base * base
        left >>= 1
    return result


def update(
    table: PieceTable,
    *,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    state: Mapping[str, Tensor],
    scalars: Tensor,
) -> Launch:
    """One step of the elements of ``table``.

    Args:
        table: which elements of which weights, where their state is, which row of ``scalars``.
        weights: float32, bfloat16 or float16; their memory is taken as dense from ``data_ptr``.
        grads: one for each weight, of its size and memory order, dtypes free.
        state: 1-D float32 ``exp_avg`` and ``exp_avg_sq``; ``max_exp_avg_sq`` for amsgrad;
            ``master`` where all weights of the launch are half precision and have one.
        scalars: float32 ``[n_parameters, SCALARS]`` as ``prepare`` fills it.

    Raises:
        ValueError: a tensor of another dtype, size or device than that.
    """
    names = [n for n in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master") if n in state]
    _check_update(table, weights, grads, state, scalars)
    weight_codes = dtype_codes("weights", weights)
    grad_codes = dtype_codes("grads", grads)
    has_master = "master" in state
    if has_master and (weight_codes == 0).any():
        raise ValueError("weights with a master expect bfloat16 or float16, got float32")
    n_weights = len(weights)
    reads = (scalars, *grads)
    writes = (*weights, *(state[name] for name in names))

    def host(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        arrays = dict(zip(names, writes[n_weights:], strict=True))
        _update_on_host(
            table, writes[:n_weights], reads[1:], weight_codes, grad_codes, arrays, reads[0]
        )

    def device(stream: int) -> None:
        from ghoffload.kernels import adam_cuda

        adam_cuda.update(table, weights, grads, weight_codes, grad_codes, state, scalars, stream)

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
    unknown = set(state) - {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master"}
    if unknown or not {"exp_avg", "exp_avg_sq"} <= set(state):
        raise ValueError(
            "state expects exp_avg, exp_avg_sq and perhaps max_exp_avg_sq and master, "
            f"got {sorted(state)}"
        )
    for name, array in state.items():
        if array.dtype != torch.float32 or array.dim() != 1 or not array.is_contiguous():
            raise ValueError(f"{name} expects 1-D contiguous float32, got {_describe(array)}")
        if array.numel() < table.end:
            raise ValueError(f"{name} expects {table.end} elements or more, got {array.numel()}")
    _check_scalars(scalars, table.scalar_rows)
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
    state: Mapping[str, Tensor],
    scalars: Tensor,
) -> None:
    from ghoffload.kernels.adam_host import update_rows

    most = table.task_elements(pool.get_threads())
    rows = table.host_rows(most)
    if len(rows) == 0:
        return
    tensor = rows[:, TENSOR]
    arguments = np.empty((len(rows), 5), dtype=np.int64)
    arguments[:, 0] = table.addresses(pointers(weights), ITEM_SIZES[weight_codes], rows)
    arguments[:, 1] = table.addresses(pointers(grads), ITEM_SIZES[grad_codes], rows)
    arguments[:, 2] = rows[:, COUNT]
    arguments[:, 3] = rows[:, OFFSET]
    arguments[:, 4] = rows[:, SCALARS_ROW]
    numbers = scalars.detach().numpy()
    addresses = [
        state[name].data_ptr() if name in state else 0
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")
    ]
    variants = weight_codes[tensor] * 3 + grad_codes[tensor]
    tasks: list[tuple[Any, npt.NDArray[np.int64]]] = []
    for variant in np.unique(variants):
        kernel = update_rows(
            int(variant) // 3, int(variant) % 3, "master" in state, "max_exp_avg_sq" in state
        )
        chosen = arguments[variants == variant]
        # Small pieces share a task: a new one begins where the running total passes ``most``.
        filled = np.cumsum(chosen[:, 2]) - chosen[:, 2]
        begins = np.flatnonzero(np.diff(filled // most, prepend=-1))
        tasks += [(kernel, part) for part in np.split(chosen, begins[1:])]

    def task(item: tuple[Any, npt.NDArray[np.int64]]) -> None:
        kernel, part = item
        kernel(part, numbers, *addresses)

    pool.run(task, tasks)
