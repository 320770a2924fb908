"""The numba loops behind ``formats``: the very arithmetic of the update kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ghoffload.kernels.floats import load8, load16, load32, store8, store16, store32
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
    inverse,
    magnitude,
)
from ghoffload.kernels.moments_host import decode_exp_avg as decode_m
from ghoffload.kernels.moments_host import decode_exp_avg_sq as decode_v
from ghoffload.kernels.moments_host import encode_exp_avg as encode_m
from ghoffload.kernels.moments_host import encode_exp_avg_sq as encode_v
from ghoffload.kernels.random_host import random_bits
from ghoffload.kernels.random_host import stochastic_bfloat16 as rounded
from ghoffload.kernels.split_host import join as joined
from ghoffload.kernels.split_host import lower_part, upper_part

_NEAREST = np.float32(0.5)


def _split(first, count, master, weight, rest):  # type: ignore[no-untyped-def]
    for i in range(count):
        x = load32(master, i)
        store16(weight, i, upper_part(x))
        store16(rest, i, lower_part(x))


def _join(first, count, weight, rest, master):  # type: ignore[no-untyped-def]
    for i in range(count):
        store32(master, i, joined(load16(weight, i), load16(rest, i)))


def _stochastic(first, count, values, out, key, start):  # type: ignore[no-untyped-def]
    for i in range(count):
        random = random_bits(key, start + first + i)
        store16(out, i, rounded(load32(values, i), random & np.uint32(0xFFFF)))


def _decode_exp_avg(first, count, codes, values, scales):  # type: ignore[no-untyped-def]
    for i in range(count):
        scale = load32(scales, (first + i) // BLOCK)
        store32(values, i, decode_m(load8(codes, i), scale))


def _decode_exp_avg_sq(first, count, codes, values, scales):  # type: ignore[no-untyped-def]
    for i in range(count):
        scale = load32(scales, (first + i) // BLOCK)
        store32(values, i, decode_v(load8(codes, i), scale))


def _encode_exp_avg(first, count, values, codes, scales):  # type: ignore[no-untyped-def]
    for b in range((count + BLOCK - 1) // BLOCK):
        at, last = b * BLOCK, min(count, (b + 1) * BLOCK)
        top = np.uint32(0)
        for i in range(at, last):
            top = max(top, magnitude(codable_exp_avg(load32(values, i))))
        scale = block_scale(top, TINY, EXP_AVG_TOP, LEAST_EXP_AVG_SCALE)
        store32(scales, first // BLOCK + b, scale)
        over = inverse(scale)
        for i in range(at, last):
            store8(codes, i, encode_m(codable_exp_avg(load32(values, i)), over))


def _encode_exp_avg_sq(first, count, values, codes, scales):  # type: ignore[no-untyped-def]
    for b in range((count + BLOCK - 1) // BLOCK):
        at, last = b * BLOCK, min(count, (b + 1) * BLOCK)
        top = np.uint32(0)
        for i in range(at, last):
            top = max(top, magnitude(codable_root(np.sqrt(load32(values, i)))))
        scale = block_scale(top, NOTHING, EXP_AVG_SQ_TOP, LEAST_EXP_AVG_SQ_SCALE)
        store32(scales, first // BLOCK + b, scale)
        over = inverse(scale)
        for i in range(at, last):
            root = codable_root(np.sqrt(load32(values, i)))
            store8(codes, i, encode_v(root, over, _NEAREST))


KERNELS: dict[str, Callable[..., None]] = {
    function.__name__.removeprefix("_"): compiled(function)
    for function in (
        _split,
        _join,
        _stochastic,
        _decode_exp_avg,
        _decode_exp_avg_sq,
        _encode_exp_avg,
        _encode_exp_avg_sq,
    )
}
