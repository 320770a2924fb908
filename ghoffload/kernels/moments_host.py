"""The codes of int8 moments, one element at a time; ``formats`` says what they are and why."""

from __future__ import annotations

import numpy as np
from numba import njit

from ghoffload.kernels.floats import bits, fma, from_bits

_u32, _f32 = np.uint32, np.float32
_ONE, _TWO, _QUARTER, _ZERO = _f32(1), _f32(2), _f32(0.25), _f32(0)
_INTEGER = _f32(2**23)  # x + 2^23 - 2^23 is x rounded to an integer, ties to even

EXP_AVG_TOP = _f32(1) / _f32(127 * 127)
EXP_AVG_SQ_TOP = _f32(1) / _f32(255 * 255)
LEAST_EXP_AVG_SCALE = _f32(2.0**-126)
LEAST_EXP_AVG_SQ_SCALE = _f32(2.0**-63)
# What has a code: the greatest is its own code's number.
_EXP_AVG_LIMIT, _ROOT_LIMIT = _f32(127**2 * 2.0**113), _f32(255**2 * 2.0**48)
TINY, NOTHING = _u32(0x00200000), _u32(0)  # first moments up to 2^-128 have code 0
_MAGNITUDE = _u32(0x7FFFFFFF)
_SCALE_HALF, _SCALE_MASK = _u32(8), _u32(0xFFFFFFF0)
_RANDOM_BASE, _RANDOM_MASK, _RANDOM_UP, _RANDOM_DOWN = (
    _u32(0x3F800800),
    _u32(0x7FF000),
    _u32(7),
    _u32(9),
)


@njit(error_model="numpy")
def decode_exp_avg(code, scale):  # type: ignore[no-untyped-def]
    """The number of a signed code."""
    c = _f32(np.int32(np.int8(code)))
    return scale * (c * abs(c))


@njit(error_model="numpy")
def decode_exp_avg_sq(code, scale):  # type: ignore[no-untyped-def]
    """The number of an unsigned code."""
    c = _f32(np.int32(code))
    root = scale * (c * c)
    return root * root


@njit(error_model="numpy")
def codable_exp_avg(m):  # type: ignore[no-untyped-def]
    """m, or 0 where it has no code."""
    return m if abs(m) <= _EXP_AVG_LIMIT else _ZERO


@njit(error_model="numpy")
def codable_root(root):  # type: ignore[no-untyped-def]
    """The second moment's root, or 0 where it has no code."""
    return root if root <= _ROOT_LIMIT else _ZERO


@njit(error_model="numpy")
def magnitude(x):  # type: ignore[no-untyped-def]
    """Bits that order as the magnitudes do."""
    return _u32(bits(x) & _MAGNITUDE)


@njit(error_model="numpy")
def block_scale(greatest, nothing, top, least):  # type: ignore[no-untyped-def]
    """The scale for a block's greatest magnitude (as bits); 0 up to ``nothing``."""
    b = _u32(bits(from_bits(greatest) * top) + _SCALE_HALF)
    scale = from_bits(_u32(b & _SCALE_MASK))
    scale = scale if scale > least else least
    return _ZERO if greatest <= nothing else scale


@njit(error_model="numpy")
def inverse(scale):  # type: ignore[no-untyped-def]
    """1 / scale; 0 for 0."""
    return _ZERO if scale == _ZERO else _ONE / scale


@njit(error_model="numpy")
def _root_down(x):  # type: ignore[no-untyped-def]
    c = (np.sqrt(x) + _INTEGER) - _INTEGER
    return c - _ONE if c * c > x else c


@njit(error_model="numpy")
def encode_exp_avg(m, inverse_scale):  # type: ignore[no-untyped-def]
    """The bits of the code c for which c * c is nearest to |m| / scale by its root."""
    x = abs(m) * inverse_scale
    c = _root_down(x)
    c = c + _ONE if x > fma(c, c, c) + _QUARTER else c
    signed = -c if m < _ZERO else c
    return np.uint8(np.int32(signed) & np.int32(0xFF))


@njit(error_model="numpy")
def encode_exp_avg_sq(root, inverse_scale, random):  # type: ignore[no-untyped-def]
    """The code below or above the second moment, at random so that its mean is kept."""
    x = root * inverse_scale
    c = _root_down(x)
    square, twice = c * c, c + c
    part = (x - square) * (x + square)
    whole = (twice + _ONE) * (fma(_TWO, square, twice) + _ONE)
    c = c + _ONE if random * whole < part else c
    c = _ONE if x > _ZERO and c < _ONE else c
    return np.uint8(np.int32(c))


@njit(error_model="numpy")
def random_of(random, odd):  # type: ignore[no-untyped-def]
    """One of 2,048 numbers from 2^-12 to 1 - 2^-12: two elements share 32 random bits."""
    mantissa = _u32(random >> _RANDOM_DOWN) if odd else _u32(random << _RANDOM_UP)
    return from_bits(_u32(_RANDOM_BASE | _u32(mantissa & _RANDOM_MASK))) - _ONE
