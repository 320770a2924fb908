"""The norm of many gradients on the CPU, and the order of its operations.

Note [norm]
    One order, shared bit for bit with csrc/norm.cu and independent of threads and launches. A
    tensor is cut into chunks of ``norm.CHUNK`` elements, counted from its first. Within a chunk
    element i goes to lane ``i % lanes``, of which there are ``256 * 16 / element size``. Everything
    is in double, where the square of an element is exact:

        lane      0, then for its elements in order: lane = lane + x * x
        chunk     neighbours are added until one is left: lane[j] = lane[2 j] + lane[2 j + 1]
        sum       all chunks in order, tensor after tensor, as the elements of one chunk of 1,024
                  lanes and no end
        norm      sqrt(sum) / |grad_scale|
        clip      max_norm / (norm + 1e-6), or 1 where that is more: what
                  ``torch.nn.utils.clip_grad_norm_`` multiplies with
        found_inf whether the sum is infinite or NaN: no sum of squares of finite fp32 numbers is

    For the infinity norm the maximum of |x| takes the place of the sum (a NaN stays) and there is
    no root. The results are rounded to fp32 at the end, NaN as 0x7FC00000; NaN and infinite norms
    make the clip factor NaN and 0, as in torch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ghoffload.kernels.floats import from_bfloat16, from_float16, load16, load32
from ghoffload.kernels.jit import compiled

_LANES = (1024, 2048, 2048)  # by dtype code
_FINISH_LANES = 1024
_FP32, _BF16 = 0, 1


@lru_cache(None)
def chunk_kernel(code: int, maximum: bool) -> Any:
    """The kernel for a gradient dtype, compiled at its first call.

    Its arguments are rows ``(address, count, number of the partial)`` as int64 ``[n, 3]``, a chunk
    each, and the partials as float64.
    """
    lanes = _LANES[code]
    stretch = lanes * (4 if code == _FP32 else 2)
    fp32, bf16 = code == _FP32, code == _BF16

    def kernel(rows, partials):  # type: ignore[no-untyped-def]
        lane = np.empty(lanes, dtype=np.float64)
        for r in range(rows.shape[0]):
            base, count = rows[r, 0], rows[r, 1]
            lane[:] = 0.0
            while count > 0:
                for i in range(min(count, lanes)):
                    if fp32:
                        x = np.float64(load32(base, i))
                    elif bf16:
                        x = np.float64(from_bfloat16(load16(base, i)))
                    else:
                        x = np.float64(from_float16(load16(base, i)))
                    if maximum:
                        x = abs(x)
                        lane[i] = x if x > lane[i] or x != x else lane[i]
                    else:
                        lane[i] = lane[i] + x * x
                base += stretch
                count -= lanes
            left = lanes
            while left > 1:
                left //= 2
                for j in range(left):
                    a, b = lane[2 * j], lane[2 * j + 1]
                    if maximum:
                        lane[j] = b if b > a or b != b else a
                    else:
                        lane[j] = a + b
            partials[rows[r, 2]] = lane[0]

    return compiled(kernel)


def finish(
    partials: npt.NDArray[np.float64], maximum: bool, max_norm: float, grad_scale: float
) -> tuple[np.float32, np.float32, np.float32]:
    """Norm, non-finite flag and clip factor of all partials."""
    merge: Any = np.maximum if maximum else np.add
    with np.errstate(all="ignore"):
        lane = np.zeros(_FINISH_LANES, dtype=np.float64)
        for start in range(0, len(partials), _FINISH_LANES):
            part = partials[start : start + _FINISH_LANES]
            lane[: len(part)] = merge(lane[: len(part)], part)
        while len(lane) > 1:
            lane = merge(lane[0::2], lane[1::2])
        total = lane[0] if maximum else np.sqrt(lane[0])
        norm = total / np.abs(np.float64(grad_scale))
        clip = np.float64(max_norm) / (norm + np.float64(1e-6))
        clip = np.float64(1.0) if clip > 1.0 else clip
        found = np.float32(0.0 if np.isfinite(lane[0]) else 1.0)
        return _canonical(np.float32(norm)), found, _canonical(np.float32(clip))


def _canonical(x: np.float32) -> np.float32:
    return np.uint32(0x7FC00000).view(np.float32) if np.isnan(x) else x
