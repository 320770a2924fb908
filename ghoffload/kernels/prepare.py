"""``prepare``: step counters, and the scalars that one step's update reads of each parameter.

The formula is in ``adam_host``; csrc/prepare.cu computes the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ghoffload.kernels import pool
from ghoffload.machine.protocol import Launch

SCALARS = 16
"""Columns of ``scalars``; the first 12 are used."""

# Columns of a row of ``scalars``, also in csrc/adam.cuh.
SKIP, FACTOR, DECAY, KEEP, BETA1, NOT_BETA1, BETA2, NOT_BETA2, ROOT, EPS, STEP, KEY = range(12)

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
    clip: Tensor | None = None,
    seed: int = 0,
) -> Sequence[Launch]:
    """Advance step counters and compute what ``update`` needs, on the device that holds them.

    For each index i: unless ``found_inf`` is non-zero, ``steps[i] += 1`` and ``scalars[i]`` becomes
    everything ``update`` needs; otherwise ``scalars[i]`` says to skip. An index may occur once.

    Args:
        indices: the parameters, uint32.
        hyper: their hyperparameters. Tensors on ``steps``'s device are read when the launch runs,
            tensors on the CPU now; the same goes for the three below.
        steps: float32 ``[n_parameters]``.
        scalars: float32 ``[n_parameters, SCALARS]``.
        found_inf: float32, one element, or ``None`` for never.
        grad_scale: float32, one element; gradients are multiplied by 1 / ``grad_scale``.
        clip: float32, one element; gradients are multiplied by it as well, in the same rounding.
        seed: of the random keys for stochastic rounding. Parameter i of one seed and parameter 0 of
            ``seed + i`` have the same keys.

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
        ("clip", clip),
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
    seed %= 1 << 64

    def launch(part: npt.NDArray[np.uint32]) -> Launch:
        def host(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
            values = numbers | {name: t.item() for name, t in zip(names, reads, strict=True)}
            with pool.default_float_environment():
                _prepare_on_host(part, values, flags, seed, writes[0], writes[1])

        def device(stream: int) -> None:
            from ghoffload.kernels import prepare_cuda

            prepare_cuda.prepare(part, numbers, on_device, flags, seed, steps, scalars, stream)

        return Launch("adam_prepare", tuple(on_device.values()), (steps, scalars), device, host)

    return [launch(indices[i : i + MAX_INDICES]) for i in range(0, len(indices), MAX_INDICES)]


def _check_steps(steps: Tensor, scalars: Tensor) -> None:
    if steps.dtype != torch.float32 or steps.dim() != 1 or not steps.is_contiguous():
        raise ValueError(f"steps expects 1-D contiguous float32, got {describe(steps)}")
    check_scalars(scalars, steps.numel())
    if scalars.device != steps.device:
        raise ValueError(f"scalars expects {steps.device} as steps, got {scalars.device}")


def check_scalars(scalars: Tensor, rows: int) -> None:
    """Raise ValueError unless ``scalars`` is float32 with ``rows`` rows or more."""
    fits = scalars.dim() == 2 and scalars.shape[0] >= rows and scalars.shape[1] == SCALARS
    if scalars.dtype != torch.float32 or not fits or not scalars.is_contiguous():
        raise ValueError(
            f"scalars expects contiguous float32 [{rows} or more, {SCALARS}], "
            f"got {describe(scalars)}"
        )


def describe(tensor: Tensor) -> str:
    """Dtype and shape of a tensor, for messages."""
    layout = "" if tensor.is_contiguous() else "non-contiguous "
    return f"{layout}{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _prepare_on_host(
    indices: npt.NDArray[np.uint32],
    values: Mapping[str, float],
    flags: tuple[bool, bool],
    seed: int,
    steps: Tensor,
    scalars: Tensor,
) -> None:
    maximize, decoupled = flags
    counters, table = steps.detach().numpy(), scalars.detach().numpy()
    rows = np.zeros((len(indices), SCALARS), dtype=np.float64)
    keys = np.zeros(len(indices), dtype=np.uint32)
    if values.get("found_inf", 0.0) != 0.0:
        rows[:, SKIP] = 1.0
    else:
        counters[indices] += np.float32(1.0)
        with np.errstate(all="ignore"):
            lr, beta1, beta2 = (np.float64(values[name]) for name in ("lr", "beta1", "beta2"))
            decay = np.float64(values["weight_decay"])
            factor = np.float64(1.0)
            if "grad_scale" in values:
                factor = factor / np.float64(values["grad_scale"])
            if "clip" in values:
                factor = factor * np.float64(values["clip"])
            t = counters[indices].astype(np.int64)
            rows[:, FACTOR] = -factor if maximize else factor
            rows[:, DECAY] = 0.0 if decoupled else decay
            rows[:, KEEP] = 1.0 - lr * decay if decoupled else 1.0
            rows[:, BETA1] = beta1
            rows[:, NOT_BETA1] = 1.0 - beta1
            rows[:, BETA2] = beta2
            rows[:, NOT_BETA2] = 1.0 - beta2
            rows[:, ROOT] = np.sqrt(1.0 - _power(beta2, t))
            rows[:, EPS] = values["eps"]
            rows[:, STEP] = -(lr / (1.0 - _power(beta1, t)))
            keys = random_keys(seed, indices, t)
    with np.errstate(all="ignore"):
        single = rows.astype(np.float32)
    single.view(np.uint32)[np.isnan(single)] = 0x7FC00000
    single.view(np.uint32)[:, KEY] = keys
    table[indices] = single


def random_keys(
    seed: int, indices: npt.NDArray[np.uint32], steps: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """32 random bits for each parameter and step: splitmix64's finalizer on a word of both."""
    with np.errstate(over="ignore"):
        z = (np.uint64(seed) + indices.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        z += steps.astype(np.uint64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32)


def _power(base: np.float64, exponents: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Powers of ``base`` by binary powering; libm's pow is not the same on every machine."""
    result = np.ones(len(exponents), dtype=np.float64)
    left = exponents.copy()
    while (left > 0).any():
        result = np.where(left & 1, result * base, result)
        base = base * base
        left >>= 1
    return result
