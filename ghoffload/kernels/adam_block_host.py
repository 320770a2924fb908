"""Adam and AdamW on the CPU with int8 moments: ``adam_host``'s formula, a block at a time."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ghoffload.kernels.adam_host import BF16, FP32
from ghoffload.kernels.floats import (
    bits,
    canonical,
    fma,
    from_bfloat16,
    from_float16,
    load8,
    load16,
    load32,
    store8,
    store16,
    store32,
    to_bfloat16,
    to_float16,
)
from ghoffload.kernels.formats import BLOCK
from ghoffload.kernels.jit import compiled
from ghoffload.kernels.moments_host import (
    EXP_AVG_SQ_TOP,
    EXP_AVG_TOP,
    LEAST_EXP_AVG_SCALE,
    LEAST_EXP_AVG_SQ_SCALE,
    NOTHING,
    TINY,
    block_scale,
    codable_exp_avg,
    codable_root,
    decode_exp_avg,
    decode_exp_avg_sq,
    encode_exp_avg,
    encode_exp_avg_sq,
    inverse,
    magnitude,
    random_of,
)
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
from ghoffload.kernels.random_host import random_bits
from ghoffload.kernels.split_host import join, lower_part, upper_part


@lru_cache(None)
def update_rows(weight_code: int, grad_code: int, master: str) -> Any:
    """The kernel of one variant, as ``adam_host.update_rows``, with int8 moments.

    Two arguments more at the end: the addresses of ``exp_avg_scale`` and ``exp_avg_sq_scale``.
    Offsets and starts are multiples of ``BLOCK``.
    """
    weight32 = weight_code == FP32
    weight_bf16 = weight_code == BF16
    grad32 = grad_code == FP32
    grad_bf16 = grad_code == BF16
    has_master = master == "fp32"
    split = master == "split"
    master_bytes = 2 if split else 4

    def kernel(  # type: ignore[no-untyped-def]
        rows, scalars, exp_avg, exp_avg_sq, max_exp_avg_sq, master, exp_avg_scale, exp_avg_sq_scale
    ):
        m_new = np.empty(BLOCK, dtype=np.float32)
        root_new = np.empty(BLOCK, dtype=np.float32)
        for r in range(rows.shape[0]):
            s = scalars[rows[r, 4]]
            if s[SKIP] != 0:
                continue
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
            weight_size, grad_size = 4 if weight32 else 2, 4 if grad32 else 2
            blocks = (rows[r, 2] + BLOCK - 1) // BLOCK
            for b in range(blocks):
                first = b * BLOCK
                count = min(BLOCK, rows[r, 2] - first)
                weight, grad = rows[r, 0] + weight_size * first, rows[r, 1] + grad_size * first
                offset, start = rows[r, 3] + first, rows[r, 5] + first
                m_base, v_base = exp_avg + offset, exp_avg_sq + offset
                master_base = master + master_bytes * offset
                block = offset // BLOCK
                m_scale, v_scale = load32(exp_avg_scale, block), load32(exp_avg_sq_scale, block)
                m_top, root_top = np.uint32(0), np.uint32(0)
                for i in range(count):
                    if weight32:
                        p = load32(weight, i)
                    else:
                        weight_bits = load16(weight, i)
                        if split:
                            p = join(weight_bits, load16(master_base, i))
                        elif weight_bf16:
                            p = from_bfloat16(weight_bits)
                        else:
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
                    m = decode_exp_avg(load8(m_base, i), m_scale)
                    v = decode_exp_avg_sq(load8(v_base, i), v_scale)

                    g = g * factor
                    g = fma(decay, p, g) if decay != 0 else g
                    p = p * keep
                    m = fma(not_beta1, g, beta1 * m)
                    v = fma(not_beta2 * g, g, beta2 * v)
                    root_v = np.sqrt(v)
                    p = fma(step, m / (root_v / root + eps), p)

                    m, root_v = codable_exp_avg(m), codable_root(root_v)
                    m_new[i], root_new[i] = m, root_v
                    m_top, root_top = max(m_top, magnitude(m)), max(root_top, magnitude(root_v))
                    if has_master:
                        store32(master_base, i, canonical(p))
                    if weight32:
                        store32(weight, i, canonical(p))
                    elif split:
                        store16(weight, i, upper_part(p))
                        store16(master_base, i, lower_part(p))
                    elif weight_bf16:
                        store16(weight, i, to_bfloat16(p))
                    else:
                        store16(weight, i, to_float16(p))
                m_scale = block_scale(m_top, TINY, EXP_AVG_TOP, LEAST_EXP_AVG_SCALE)
                v_scale = block_scale(root_top, NOTHING, EXP_AVG_SQ_TOP, LEAST_EXP_AVG_SQ_SCALE)
                store32(exp_avg_scale, block, m_scale)
                store32(exp_avg_sq_scale, block, v_scale)
                m_inverse, v_inverse = inverse(m_scale), inverse(v_scale)
                for i in range(count):
                    random = random_bits(key, (start + i) >> 1)
                    store8(m_base, i, encode_exp_avg(m_new[i], m_inverse))
                    code = encode_exp_avg_sq(root_new[i], v_inverse, random_of(random, i & 1))
                    store8(v_base, i, code)

    return compiled(kernel)
