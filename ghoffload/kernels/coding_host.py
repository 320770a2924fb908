"""Codes of a byte an element on the CPU, and what the codes are.

Note [codes]
    128 consecutive elements are a block: a code of one byte each and one fp32 scale. csrc/coding.cu
    computes the same bits. All is IEEE fp32, round to nearest even, subnormals kept. ``a`` is the
    largest magnitude among the finite elements of a block, 0 where there is none.

    fp8: e4m3 (one sign, four exponent and three mantissa bits, largest 448).
        scale  = the smallest power of two, 2^-126 or more, with a / scale <= 464
        code   = e4m3 nearest to x / scale (464 rounds to 448); 0x7F where x is not finite
        result = code * scale, exact in fp32; NaN where the code is 0x7F or 0xFF

    int8: two's complement, -127 to 127; -128 stands for "not finite".
        scale  = a * rn(1 / 127) rounded to 17 significant bits, so that code * scale is exact in
                 fp32; 2^-126 or more
        code   = rint(x * rn(1 / scale)); -128 where x is not finite
        result = code * scale; NaN where the code is -128

    The result is rounded to the destination's dtype and, where it would overflow to an infinity,
    is the largest finite value of that dtype (a near the top of the range rounds up). NaN is
    0x7FC00000, 0x7FC0 or 0x7E00.

    Encoding what was decoded (into the source's dtype) gives the same codes and scales again:
    scales are found from the decoded maximum because powers of two stay put on both sides of 464,
    and the 17 bits leave room for a product with 127 and for the error of 1 / 127.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ghoffload.kernels.coding import BLOCK
from ghoffload.kernels.floats import (
    bits,
    canonical,
    from_bfloat16,
    from_bits,
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
from ghoffload.kernels.jit import compiled
from ghoffload.kernels.pieces import BF16, FP32
from ghoffload.kernels.random_host import random_bits, stochastic_bfloat16

_u32 = np.uint32
_MAGNITUDE = _u32(0x7FFFFFFF)
_INFINITY = _u32(0x7F800000)
_NAN = _u32(0x7FC00000)
_ONE = _u32(1)
_LOW_HALF = _u32(0xFFFF)

# fp8. Adding this to the bits of a magnitude carries into the exponent above 464 = 1.8125 * 2^8.
_CARRY = _u32(0x7FFFFF - 0x680000)
_EXPONENT_SHIFT = _u32(23)
_CODE_SHIFT = _u32(20)  # fp32 has 20 mantissa bits more than e4m3
_REBIAS = _u32((127 - 7) << 3)
_SMALLEST_NORMAL = _u32((127 - 6) << 23)
_GRID = np.float32(2.0**14)  # fp32 numbers from here on are 2^-9 apart, as e4m3's smallest are
_GRID_BITS = _u32((127 + 14) << 23)
_UNBIAS = np.float32(2.0**120)

# int8
_PER_127 = np.float32(1) / np.float32(127)
_ROUND_SCALE = _u32(0x40)
_KEEP_SCALE = _u32(0xFFFFFF80)
_LEAST_SCALE = np.float32(2.0**-126)
_ROUND = np.float32(1.5 * 2.0**23)  # adding it leaves rint(x) in the lowest bits

# By dtype code: the largest finite value.
_LARGEST = tuple(
    np.uint32(b).view(np.float32) for b in (0x7F7FFFFF, 0x7F7F0000, 0x477FE000)
)  # 65504 is fp16's


@lru_cache(None)
def encode_blocks(fp8: bool, dtype_code: int) -> Any:
    """The kernel of one variant: ``(source, codes, scales, first block, end block, elements)``.

    The first three are addresses of whole arrays of ``elements`` elements.
    """
    is32, is_bf16 = dtype_code == FP32, dtype_code == BF16

    def kernel(source, codes, scales, begin, end, elements):  # type: ignore[no-untyped-def]
        for block in range(begin, end):
            first = block * BLOCK
            count = min(BLOCK, elements - first)
            from_ = source + first * (4 if is32 else 2)
            to = codes + first
            most = _u32(0)
            for i in range(count):
                if is32:
                    x = load32(from_, i)
                elif is_bf16:
                    x = from_bfloat16(load16(from_, i))
                else:
                    x = from_float16(load16(from_, i))
                magnitude = _u32(bits(x) & _MAGNITUDE)
                most = max(most, magnitude if magnitude < _INFINITY else _u32(0))
            if fp8:
                exponent = _u32(_u32(most + _CARRY) >> _EXPONENT_SHIFT)
                biased = exponent - _u32(8) if exponent > _u32(9) else _ONE
                scale = from_bits(_u32(_u32(biased) << _EXPONENT_SHIFT))
                inverse = from_bits(_u32(_u32(_u32(254) - biased) << _EXPONENT_SHIFT))
            else:
                scale = from_bits(most) * _PER_127
                scale = from_bits(_u32(_u32(bits(scale) + _ROUND_SCALE) & _KEEP_SCALE))
                scale = scale if scale > _LEAST_SCALE else _LEAST_SCALE
                inverse = np.float32(1) / scale
            store32(scales, block, scale)
            for i in range(count):
                if is32:
                    x = load32(from_, i)
                elif is_bf16:
                    x = from_bfloat16(load16(from_, i))
                else:
                    x = from_float16(load16(from_, i))
                y = x * inverse
                finite = bits(x) & _MAGNITUDE < _INFINITY
                if fp8:
                    magnitude = _u32(bits(y) & _MAGNITUDE)
                    odd = _u32(magnitude >> _CODE_SHIFT) & _ONE
                    normal = _u32(_u32(magnitude + _u32(0x7FFFF) + odd) >> _CODE_SHIFT)
                    small = _u32(bits(from_bits(magnitude) + _GRID) - _GRID_BITS)
                    code = small if magnitude < _SMALLEST_NORMAL else _u32(normal - _REBIAS)
                    code = code | (_u32(bits(y) >> _u32(24)) & _u32(0x80))
                    code = code if finite else _u32(0x7F)
                else:
                    code = bits(y + _ROUND) if finite else _u32(0x80)
                store8(to, i, np.uint8(code))

    return compiled(kernel)


@lru_cache(None)
def decode_blocks(fp8: bool, dtype_code: int) -> Any:
    """The kernel of one variant: ``(codes, scales, destination, first, end block, elements)``."""
    is32, is_bf16 = dtype_code == FP32, dtype_code == BF16
    largest = _LARGEST[dtype_code]

    def kernel(codes, scales, destination, begin, end, elements):  # type: ignore[no-untyped-def]
        for block in range(begin, end):
            first = block * BLOCK
            count = min(BLOCK, elements - first)
            from_ = codes + first
            to = destination + first * (4 if is32 else 2)
            scale = load32(scales, block)
            for i in range(count):
                code = _u32(load8(from_, i))
                if fp8:
                    x = from_bits(_u32(_u32(code & _u32(0x7F)) << _CODE_SHIFT)) * _UNBIAS * scale
                    x = from_bits(bits(x) ^ _u32(_u32(code & _u32(0x80)) << _u32(24)))
                    x = x if code & _u32(0x7F) != _u32(0x7F) else from_bits(_NAN)
                else:
                    x = np.float32(np.int8(np.uint8(code))) * scale
                    x = x if code != _u32(0x80) else from_bits(_NAN)
                x = largest if x > largest else -largest if x < -largest else x
                if is32:
                    store32(to, i, canonical(x))
                elif is_bf16:
                    store16(to, i, to_bfloat16(x))
                else:
                    store16(to, i, to_float16(x))

    return compiled(kernel)


@lru_cache(None)
def stochastic_elements() -> Any:
    """The kernel of ``stochastic_cast``: ``(source, destination, begin, end, offset, key)``."""

    def kernel(source, destination, begin, end, offset, key):  # type: ignore[no-untyped-def]
        from_, to = source + begin * 4, destination + begin * 2
        first = np.uint64(offset + begin)
        for i in range(end - begin):
            random = _u32(random_bits(key, first + np.uint64(i)) & _LOW_HALF)
            store16(to, i, stochastic_bfloat16(load32(from_, i), random))

    return compiled(kernel)
