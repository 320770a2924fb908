"""The split master of one element: an fp32 number as a bfloat16 and a signed 16-bit rest."""

from __future__ import annotations

import numpy as np
from numba import njit

from ghoffload.kernels.floats import bits, canonical, from_bits

_u32 = np.uint32
_TOP, _LOW, _HALF = _u32(16), _u32(0xFFFF), _u32(0x8000)
_MAGNITUDE, _INFINITE = _u32(0x7FFF), _u32(0x7F80)


@njit(error_model="numpy")
def join(weight, rest):  # type: ignore[no-untyped-def]
    """The fp32 number of a weight's and a rest's bits."""
    signed = np.int32(np.int16(rest))
    magnitude = _u32(weight) & _MAGNITUDE
    stale = (magnitude == 0 and signed < 0) or (magnitude == _INFINITE and signed > 0)
    kept = _u32(0) if stale else _u32(signed)
    return from_bits(_u32(_u32(_u32(weight) << _TOP) + kept))


@njit(error_model="numpy")
def upper_part(x):  # type: ignore[no-untyped-def]
    """The bits of the weight: half up, in the bits."""
    return np.uint16(_u32(bits(canonical(x)) + _HALF) >> _TOP)


@njit(error_model="numpy")
def lower_part(x):  # type: ignore[no-untyped-def]
    """The bits of the rest."""
    return np.uint16(bits(canonical(x)) & _LOW)
