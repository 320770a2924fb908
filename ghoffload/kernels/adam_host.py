"""Adam and AdamW on the CPU, and the formula itself.

Note [formula]
    One arithmetic, shared bit for bit with csrc/adamw.cu. Everything is IEEE fp32, round to nearest
    even, subnormals kept, in exactly this order; fma(x, y, z) rounds once; "rn" is rounding to the
    weight's dtype. Per parameter and step, in double, each result then rounded once to fp32
    (``prepare``):

        t            the step counter after adding 1
        pow(b, t)    by binary powering: result = 1; while t: if t odd: result *= b; b *= b; t //= 2
        factor       1 / grad_scale rounded to fp32, or 1; negated for maximize
        decay        weight_decay for Adam, 0 for AdamW
        keep         1 for Adam, 1 - lr * weight_decay for AdamW
        beta1, 1 - beta1, beta2, 1 - beta2, eps
        root         sqrt(1 - pow(beta2, t))
        step         -(lr / (1 - pow(beta1, t)))

    Per element (``update``):

        master       if rn(master) != weight bitwise: master = weight   (an edited weight wins)
        p            = master; without a master, the weight
        g            = gradient * factor
        g            = fma(decay, p, g)                 only if decay != 0
        p            = p * keep
        m            = fma(1 - beta1, g, beta1 * m)
        v            = fma((1 - beta2) * g, g, beta2 * v)
        vmax         = v if v > vmax or v is NaN else vmax          amsgrad only; a NaN vmax stays
        denominator  = sqrt(amsgrad ? vmax : v) / root + eps
        p            = fma(step, m / denominator, p)
        master = p, weight = rn(p)

    Stored NaNs are 0x7FC00000, 0x7FC0 or 0x7E00. Where ``skip`` is set (a non-finite scaled
    gradient was found) nothing is written, and the step counter did not advance.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ghoffload.kernels.floats import (
    canonical,
    fma,
    from_bfloat16,
    from_float16,
    load16,
    load32,
    store16,
    store32,
    to_bfloat16,
    to_float16,
)
from ghoffload.kernels.jit import compiled

# Columns of a row of ``scalars``, also in csrc/adamw.cu.
SKIP, FACTOR, DECAY, KEEP, BETA1, NOT_BETA1, BETA2, NOT_BETA2, ROOT, EPS, STEP = range(11)

FP32, BF16, FP16 = range(3)


@lru_cache(None)
def update_rows(weight_code: int, grad_code: int, has_master: bool, amsgrad: bool) -> Any:
    """The kernel of one variant, compiled at its first call.

    Its arguments are rows ``(weight address, gradient address, count, offset, scalars row)`` as
    int64 ``[n, 5]``, ``scalars`` as fp32 ``[n_parameters, 16]``, and the addresses of ``exp_avg``,
    ``exp_avg_sq``, ``max_exp_avg_sq`` and ``master`` (0 where there is none).
    """
    weight32 = weight_code == FP32
    weight_bf16 = weight_code == BF16
    grad32 = grad_code == FP32
    grad_bf16 = grad_code == BF16

    def kernel(rows, scalars, exp_avg, exp_avg_sq, max_exp_avg_sq, master):  # type: ignore[no-untyped-def]
        for r in range(rows.shape[0]):
            weight, grad, count = rows[r, 0], rows[r, 1], rows[r, 2]
            start = rows[r, 3] * 4
            s = scalars[rows[r, 4]]
            if s[SKIP] != 0:
                continue
            m_base, v_base = exp_avg + start, exp_avg_sq + start
            vmax_base, master_base = max_exp_avg_sq + start, master + start
            factor, decay, keep, root, eps, step = (
                s[FACTOR],
                s[DECAY],
                s[KEEP],
                s[ROOT],
                s[EPS],
                s[STEP],
            )
            beta1, not_beta1, beta2, not_beta2 = s[BETA1], s[NOT_BETA1], s[BETA2], s[NOT_BETA2]
            for i in range(count):
                if weight32:
                    p = load32(weight, i)
                elif weight_bf16:
                    weight_bits = load16(weight, i)
                    p = from_bfloat16(weight_bits)
                else:
                    weight_bits = load16(weight, i)
                    p = from_float16(weight_bits)
                if has_master:
                    kept = load32(master_base, i)
                    if weight_bf16:
                        p = kept if to_bfloat16(kept) == weight_bits else p
                    else:
                        p = kept if to_float16(kept) == weight_bits else p
                if grad32:
                    g = load32(grad, i)
                elif grad_bf16:
                    g = from_bfloat16(load16(grad, i))
                else:
                    g = from_float16(load16(grad, i))

                g = g * factor
                g = fma(decay, p, g) if decay != 0 else g
                p = p * keep
                m = fma(not_beta1, g, beta1 * load32(m_base, i))
                v = fma(not_beta2 * g, g, beta2 * load32(v_base, i))
                store32(m_base, i, canonical(m))
                store32(v_base, i, canonical(v))
                if amsgrad:
                    vmax = load32(vmax_base, i)
                    v = v if v > vmax or v != v else vmax
                    store32(vmax_base, i, canonical(v))
                p = fma(step, m / (np.sqrt(v) / root + eps), p)

                if has_master:
                    store32(master_base, i, canonical(p))
                if weight32:
                    store32(weight, i, canonical(p))
                elif weight_bf16:
                    store16(weight, i, to_bfloat16(p))
                else:
                    store16(weight, i, to_float16(p))

    return compiled(kernel)
