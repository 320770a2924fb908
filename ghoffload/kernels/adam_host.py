"""Adam and AdamW on the CPU, and the formula itself.

Note [formula]
    One arithmetic, shared bit for bit with csrc/adam.cuh. Everything is IEEE fp32, round to nearest
    even, subnormals kept, in exactly this order; fma(x, y, z) rounds once; "rn" is rounding to the
    weight's dtype. Per parameter and step, in double, each result then rounded once to fp32
    (``prepare``):

        t            the step counter after adding 1
        pow(b, t)    by binary powering: result = 1; while t: if t odd: result *= b; b *= b; t //= 2
        factor       (1 / grad_scale) * clip; each is 1 where there is none; negated for maximize
        decay        weight_decay for Adam, 0 for AdamW
        keep         1 for Adam, 1 - lr * weight_decay for AdamW
        beta1, 1 - beta1, beta2, 1 - beta2, eps
        root         sqrt(1 - pow(beta2, t))
        step         -(lr / (1 - pow(beta1, t)))
        key          32 random bits (column 11, raw) from seed + the parameter's index and t:
                     z = (seed + index) * 0x9E3779B97F4A7C15 + t, in 64 bits; the upper half of
                     splitmix64's finalizer of z (Steele, Lea and Flood, OOPSLA 2014)

    Per element (``update``; ``formats`` says how the formats of state are decoded and encoded):

        master       if rn(master) != weight bitwise: master = weight   (an edited weight wins)
        p            = master; without one, the weight; of a split one, join(weight, rest)
        g            = gradient * factor
        g            = fma(decay, p, g)                 only if decay != 0
        p            = p * keep
        m            = fma(1 - beta1, g, beta1 * m)
        v            = fma((1 - beta2) * g, g, beta2 * v)
        vmax         = v if v > vmax or v is NaN else vmax          amsgrad only; a NaN vmax stays
        denominator  = sqrt(amsgrad ? vmax : v) / root + eps
        p            = fma(step, m / denominator, p)
        master = p, weight = rn(p); of a split one, (weight, rest) = split(p)

    Stored NaNs are 0x7FC00000, 0x7FC0 or 0x7E00. Where ``skip`` is set (a non-finite scaled
    gradient was found) nothing is written, and the step counter did not advance.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ghoffload.kernels.elements_host import (
    MASTERS,
    SPLIT_MASTER,
    load_number,
    load_weight,
    moved,
    new_moments,
    store_weight,
)
from ghoffload.kernels.floats import (
    bits,
    canonical,
    from_bfloat16,
    load16,
    load32,
    store16,
    store32,
)
from ghoffload.kernels.jit import compiled
from ghoffload.kernels.prepare import (
    BETA1,
    BETA2,
    DECAY,
    EPS,
    FACTOR,
    KEEP,
    KEY,
    NOT_BETA1,
    NOT_BETA2,
    ROOT,
    SKIP,
    STEP,
)
from ghoffload.kernels.random_host import random_bits, stochastic_bfloat16

LOWER_HALF, UPPER_HALF = np.uint32(0xFFFF), np.uint32(16)


@lru_cache(None)
def update_rows(weight_code: int, grad_code: int, master: str, moments: str, amsgrad: bool) -> Any:
    """The kernel of one variant, compiled at its first call.

    Its arguments are rows ``(weight address, gradient address, count, offset, scalars row, start)``
    as int64 ``[n, 6]``, ``scalars`` as fp32 ``[n_parameters, 16]``, and the addresses of
    ``exp_avg``, ``exp_avg_sq``, ``max_exp_avg_sq`` and ``master`` or ``rest`` (0 where there is
    none). ``master`` is "none", "fp32" or "split", ``moments`` "fp32" or "bf16".
    """
    kept = MASTERS[master]
    moments32 = moments == "fp32"
    moment_bytes = 4 if moments32 else 2
    master_bytes = 2 if kept == SPLIT_MASTER else 4

    def kernel(rows, scalars, exp_avg, exp_avg_sq, max_exp_avg_sq, master):  # type: ignore[no-untyped-def]
        for r in range(rows.shape[0]):
            weight, grad, count, start = rows[r, 0], rows[r, 1], rows[r, 2], rows[r, 5]
            offset = rows[r, 3]
            s = scalars[rows[r, 4]]
            if s[SKIP] != 0:
                continue
            m_base, v_base = exp_avg + moment_bytes * offset, exp_avg_sq + moment_bytes * offset
            vmax_base, master_base = max_exp_avg_sq + 4 * offset, master + master_bytes * offset
            factor, decay, keep, root, eps, step = (
                s[FACTOR],
                s[DECAY],
                s[KEEP],
                s[ROOT],
                s[EPS],
                s[STEP],
            )
            beta1, not_beta1, beta2, not_beta2 = s[BETA1], s[NOT_BETA1], s[BETA2], s[NOT_BETA2]
            key = bits(s[KEY])
            for i in range(count):
                p = load_weight(weight_code, kept, weight, master_base, i)
                g = load_number(grad_code, grad, i)
                if moments32:
                    m, v = load32(m_base, i), load32(v_base, i)
                else:
                    m, v = from_bfloat16(load16(m_base, i)), from_bfloat16(load16(v_base, i))

                p, m, v = new_moments(
                    p, g, m, v, factor, decay, keep, beta1, not_beta1, beta2, not_beta2
                )
                if moments32:
                    store32(m_base, i, canonical(m))
                    store32(v_base, i, canonical(v))
                else:
                    random = random_bits(key, start + i)
                    store16(m_base, i, stochastic_bfloat16(m, random & LOWER_HALF))
                    store16(v_base, i, stochastic_bfloat16(v, random >> UPPER_HALF))
                if amsgrad:
                    vmax = load32(vmax_base, i)
                    v = v if v > vmax or v != v else vmax
                    store32(vmax_base, i, canonical(v))
                p = moved(p, m, np.sqrt(v), root, eps, step)
                store_weight(weight_code, kept, weight, master_base, i, p)

    return compiled(kernel)
