"""Adam and AdamW on the CPU with int8 moments: ``adam_host``'s formula, a block at a time."""

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
    load8,
    load32,
    store8,
    store32,
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
from ghoffload.kernels.pieces import ITEM_SIZES
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


@lru_cache(None)
def update_rows(weight_code: int, grad_code: int, master: str) -> Any:
    """The kernel of one variant, as ``adam_host.update_rows``, with int8 moments.

    Two arguments more at the end: the addresses of ``exp_avg_scale`` and ``exp_avg_sq_scale``.
    Offsets and starts are multiples of ``BLOCK``.
    """
    kept = MASTERS[master]
    master_bytes = 2 if kept == SPLIT_MASTER else 4
    weight_size, grad_size = int(ITEM_SIZES[weight_code]), int(ITEM_SIZES[grad_code])

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
                    p = load_weight(weight_code, kept, weight, master_base, i)
                    g = load_number(grad_code, grad, i)
                    m = decode_exp_avg(load8(m_base, i), m_scale)
                    v = decode_exp_avg_sq(load8(v_base, i), v_scale)

                    p, m, v = new_moments(
                        p, g, m, v, factor, decay, keep, beta1, not_beta1, beta2, not_beta2
                    )
                    root_v = np.sqrt(v)
                    p = moved(p, m, root_v, root, eps, step)
                    store_weight(weight_code, kept, weight, master_base, i, p)

                    m, root_v = codable_exp_avg(m), codable_root(root_v)
                    m_new[i], root_new[i] = m, root_v
                    m_top, root_top = max(m_top, magnitude(m)), max(root_top, magnitude(root_v))
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
