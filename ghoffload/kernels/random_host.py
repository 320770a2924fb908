"""Random bits without a state, and stochastic rounding, bit for bit as csrc/round.cuh has them."""

from __future__ import annotations

import numpy as np
from numba import njit

from ghoffload.kernels.floats import bits

_u32 = np.uint32
_HIGH_FACTOR = _u32(0x9E3779B9)
_FACTOR_1, _FACTOR_2 = _u32(0x7FEB352D), _u32(0x846CA68B)
_SHIFT_1, _SHIFT_2 = _u32(16), _u32(15)
_HALF = np.uint64(32)
_MAGNITUDE, _LARGEST, _TOP = _u32(0x7FFFFFFF), _u32(0x7F7F0000), _u32(16)
_ZERO = _u32(0)


@njit(error_model="numpy")
def random_bits(key, index):  # type: ignore[no-untyped-def]
    """32 random bits of an element (or whatever ``index`` counts), from its number alone.

    The same wherever, whenever and in whatever order they are computed. ``key`` must be well mixed:
    indices that differ from each other as two keys do change places. Chris Wellons' lowbias32
    (nullprogram.com/blog/2018/07/31) of ``index ^ key``.
    """
    whole = np.uint64(index)
    x = _u32(_u32(whole) ^ key ^ _u32(_u32(whole >> _HALF) * _HIGH_FACTOR))
    x = _u32(_u32(x ^ (x >> _SHIFT_1)) * _FACTOR_1)
    x = _u32(_u32(x ^ (x >> _SHIFT_2)) * _FACTOR_2)
    return _u32(x ^ (x >> _SHIFT_1))


@njit(error_model="numpy")
def stochastic_bfloat16(x, random16):  # type: ignore[no-untyped-def]
    """The bits of one of the two bfloat16 beside x, the nearer one more often.

    The mean over all 16-bit random numbers is x. A bfloat16 stays what it is, infinities too, and
    nothing finite becomes infinite: beyond the largest bfloat16 x becomes that. NaN is 0x7FC0.
    """
    b = bits(x)
    step = _ZERO if (b & _MAGNITUDE) >= _LARGEST else _u32(random16)
    return np.uint16(_u32(b + step) >> _TOP) if x == x else np.uint16(0x7FC0)
