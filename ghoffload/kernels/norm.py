"""Launches of the gradient norm: one read of every gradient, the results left on the device.

The order of operations is in ``norm_host``; csrc/norm.cu computes the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ghoffload.kernels import pool
from ghoffload.kernels.pieces import ITEM_SIZES, common_device, dtype_codes, pointers
from ghoffload.machine.protocol import Launch

__all__ = ["CHUNK", "MAX_TENSORS", "norm", "partials_needed"]

CHUNK = 1 << 15
"""Elements that make one partial result; part of what the bits are. csrc has the same number."""

MAX_TENSORS = 1280
"""Most tensors of one launch: their addresses travel as a kernel parameter."""

_TASK_ELEMENTS = 1 << 19


def partials_needed(grads: Sequence[Tensor]) -> int:
    """Elements of the ``partials`` that ``norm`` needs for these gradients."""
    return sum(-(-grad.numel() // CHUNK) for grad in grads)


def norm(
    grads: Sequence[Tensor],
    *,
    partials: Tensor,
    total_norm: Tensor,
    found_inf: Tensor,
    clip: Tensor,
    max_norm: float = math.inf,
    grad_scale: Tensor | None = None,
    norm_type: float = 2.0,
) -> Sequence[Launch]:
    """The norm of all gradients as one vector, and the factor that clips it to ``max_norm``.

    The launches, on one stream in this order, read each gradient once and change none.

    Args:
        grads: float32, bfloat16 or float16, mixed at will; their memory is taken as dense from
            ``data_ptr``.
        partials: float64 scratch of ``partials_needed(grads)`` elements or more, the caller's until
            the launches have run.
        total_norm: float32, one element, written: the norm of the gradients / ``grad_scale``.
        found_inf: float32, one element, written: 1 where an element is infinite or NaN, else 0.
        clip: float32, one element, written: ``min(1, max_norm / (total_norm + 1e-6))``; NaN for a
            NaN norm.
        max_norm: 0 or more.
        grad_scale: float32, one element; read when the launch runs, on the CPU now.
        norm_type: 2 or infinity.

    Raises:
        ValueError: a tensor of another dtype, size or device; another number.
    """
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"norm_type expects 2 or inf, got {norm_type}")
    if not max_norm >= 0.0:
        raise ValueError(f"max_norm expects a number of 0 or more, got {max_norm}")
    results = {"total_norm": total_norm, "found_inf": found_inf, "clip": clip}
    scale_on_device = _check(grads, partials, results, grad_scale)
    scale = 1.0 if grad_scale is None or scale_on_device else grad_scale.item()
    codes = dtype_codes("grads", grads)
    counts = np.array([grad.numel() for grad in grads], dtype=np.int64)
    chunks = -(-counts // CHUNK)
    ends = np.cumsum(chunks)
    maximum = norm_type != 2.0

    def partial(first: int, last: int) -> Launch:
        chosen = slice(first, last)
        begin, end = int(ends[first] - chunks[first]), int(ends[last - 1])
        its_grads, out = tuple(grads[chosen]), partials[begin:end]

        def host(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
            _partials_on_host(reads, codes[chosen], counts[chosen], writes[0], maximum)

        def device(stream: int) -> None:
            from ghoffload.kernels import norm_cuda

            norm_cuda.partials(its_grads, codes[chosen], counts[chosen], out, maximum, stream)

        return Launch("norm_partials", its_grads, (out,), device, host)

    total_chunks = int(chunks.sum())

    def finish_on_host(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        from ghoffload.kernels.norm_host import finish

        value = reads[1].item() if scale_on_device else scale
        with pool.default_float_environment():
            numbers = finish(reads[0].numpy()[:total_chunks], maximum, max_norm, value)
        for tensor, number in zip(writes, numbers, strict=True):
            tensor.detach().numpy()[...] = number

    def finish_on_device(stream: int) -> None:
        from ghoffload.kernels import norm_cuda

        where = grad_scale if scale_on_device else None
        norm_cuda.finish(partials, total_chunks, max_norm, scale, where, results, maximum, stream)

    reads = (partials, grad_scale) if scale_on_device else (partials,)
    return [
        *(
            partial(first, min(first + MAX_TENSORS, len(grads)))
            for first in range(0, len(grads), MAX_TENSORS)
        ),
        Launch("norm_finish", reads, tuple(results.values()), finish_on_device, finish_on_host),  # type: ignore[arg-type]
    ]


def _check(
    grads: Sequence[Tensor], partials: Tensor, results: dict[str, Tensor], scale: Tensor | None
) -> bool:
    """Whether ``grad_scale`` is for the launch to read."""
    device = common_device(partials=[partials], grads=grads)
    needed = partials_needed(grads)
    if partials.dtype != torch.float64 or partials.dim() != 1 or not partials.is_contiguous():
        raise ValueError(f"partials expects 1-D contiguous float64, got {partials.dtype}")
    if partials.numel() < needed:
        raise ValueError(f"partials expects {needed} elements or more, got {partials.numel()}")
    for name, tensor in results.items():
        if tensor.numel() != 1 or tensor.dtype != torch.float32 or tensor.device != device:
            raise ValueError(
                f"{name} expects one element of torch.float32 on {device}, got {tensor.numel()} "
                f"of {tensor.dtype} on {tensor.device}"
            )
    if scale is None:
        return False
    if scale.numel() != 1 or scale.dtype != torch.float32:
        raise ValueError(
            f"grad_scale expects one element of torch.float32, got {scale.numel()} of {scale.dtype}"
        )
    if scale.device not in (device, torch.device("cpu")):
        raise ValueError(f"grad_scale expects {device} or cpu, got {scale.device}")
    return scale.device == device


def _partials_on_host(
    grads: Sequence[Tensor],
    codes: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    out: Tensor,
    maximum: bool,
) -> None:
    from ghoffload.kernels.norm_host import chunk_kernel

    chunks = -(-counts // CHUNK)
    total = int(chunks.sum())
    if total == 0:
        return
    owner = np.repeat(np.arange(len(grads)), chunks)
    done = (np.arange(total) - np.repeat(np.cumsum(chunks) - chunks, chunks)) * CHUNK
    rows = np.empty((total, 3), dtype=np.int64)
    rows[:, 0] = pointers(grads)[owner] + done * ITEM_SIZES[codes][owner]
    rows[:, 1] = np.minimum(counts[owner] - done, CHUNK)
    rows[:, 2] = np.arange(total)
    numbers = out.numpy()
    tasks: list[tuple[Any, npt.NDArray[np.int64]]] = []
    for code in np.unique(codes[owner]):
        kernel, chosen = chunk_kernel(int(code), maximum), rows[codes[owner] == code]
        filled = np.cumsum(chosen[:, 1]) - chosen[:, 1]
        begins = np.flatnonzero(np.diff(filled // _TASK_ELEMENTS, prepend=-1))
        tasks += [(kernel, part) for part in np.split(chosen, begins[1:])]

    def task(item: tuple[Any, npt.NDArray[np.int64]]) -> None:
        kernel, part = item
        kernel(part, numbers)

    pool.run(task, tasks)
