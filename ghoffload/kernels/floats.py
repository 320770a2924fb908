"""What numba lacks for bit-exact fp32 work: fma, raw loads and stores, half-precision conversions.

The conversions use integers only, so they need no hardware support and vectorise everywhere; they
round to nearest even, keep subnormals and store one NaN (0x7FC0 in bfloat16, 0x7E00 in float16).
Arguments named ``base`` are addresses and ``index`` counts elements.

numba computes uint32 + uint32 in 64 bits; ``_u32`` brings it back, and LLVM then drops the detour.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_intrinsic: Any = intrinsic  # numba's annotation counts the typing context as an argument
_u32 = np.uint32
_MAGNITUDE = _u32(0x7FFFFFFF)
_QUIET_NAN = _u32(0x7FC00000)
_ONE = _u32(1)
_HALF_SHIFT = _u32(13)  # float16 has 13 mantissa bits fewer than float32, bfloat16 16
_TOP = _u32(16)


def _operation(result: Any, arguments: tuple[Any, ...], emit: Any) -> Any:
    return result(*arguments), lambda context, builder, signature, args: emit(builder, *args)


@_intrinsic
def fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """The sum x * y + z, rounded once."""
    f32 = types.float32
    return _operation(f32, (f32, f32, f32), lambda builder, x, y, z: builder.fma(x, y, z))


@_intrinsic
def bits(typing: Any, x: Any) -> Any:
    """The bits of a float32 as a uint32."""
    return _operation(
        types.uint32, (types.float32,), lambda builder, x: builder.bitcast(x, ir.IntType(32))
    )


@_intrinsic
def from_bits(typing: Any, x: Any) -> Any:
    """The float32 that has these bits."""
    return _operation(
        types.float32, (types.uint32,), lambda builder, x: builder.bitcast(x, ir.FloatType())
    )


def _element(builder: Any, base: Any, index: Any, kind: Any) -> Any:
    return builder.gep(builder.inttoptr(base, kind.as_pointer()), [index])


def _accessors(value: Any, kind: Any) -> tuple[Any, Any]:
    @_intrinsic
    def load(typing: Any, base: Any, index: Any) -> Any:
        return _operation(
            value,
            (types.int64, types.int64),
            lambda builder, base, index: builder.load(_element(builder, base, index, kind)),
        )

    @_intrinsic
    def store(typing: Any, base: Any, index: Any, x: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[2], _element(builder, args[0], args[1], kind))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, value), emit

    return load, store


load32, store32 = _accessors(types.float32, ir.FloatType())
load16, store16 = _accessors(types.uint16, ir.IntType(16))
load8, store8 = _accessors(types.uint8, ir.IntType(8))


@njit(error_model="numpy")
def canonical(x):  # type: ignore[no-untyped-def]
    """x, with every NaN as 0x7FC00000 (x86 and PTX make different ones)."""
    return x if x == x else from_bits(_QUIET_NAN)


@njit(error_model="numpy")
def from_bfloat16(half):  # type: ignore[no-untyped-def]
    """The float32 of a bfloat16's bits."""
    return from_bits(_u32(_u32(half) << _TOP))


@njit(error_model="numpy")
def to_bfloat16(x):  # type: ignore[no-untyped-def]
    """The bits of the bfloat16 nearest to x."""
    b = bits(x)
    rounded = _u32(b + _u32(0x7FFF) + ((b >> _TOP) & _ONE)) >> _TOP
    return np.uint16(rounded) if x == x else np.uint16(0x7FC0)


@njit(error_model="numpy")
def from_float16(half):  # type: ignore[no-untyped-def]
    """The float32 of a float16's bits."""
    b = _u32(half)
    sign = _u32((b & _u32(0x8000)) << _TOP)
    exponent = b & _u32(0x7C00)
    shifted = _u32((b & _u32(0x7FFF)) << _HALF_SHIFT)
    # Rebias the exponent by 127 - 15, twice for infinities and NaNs.
    rebias = _u32(0x70000000) if exponent == _u32(0x7C00) else _u32(0x38000000)
    subnormal = bits(np.float32(np.int32(b & _u32(0x3FF))) * np.float32(2.0**-24))
    magnitude = subnormal if exponent == _u32(0) else _u32(shifted + rebias)
    return from_bits(_u32(sign | magnitude))


@njit(error_model="numpy")
def to_float16(x):  # type: ignore[no-untyped-def]
    """The bits of the float16 nearest to x."""
    magnitude = bits(x) & _MAGNITUDE
    # Below 2^-14: adding 0.5 leaves the result's 2^-24 steps in the lowest bits, rounded.
    small = _u32(bits(from_bits(_u32(magnitude)) + np.float32(0.5)) - _u32(0x3F000000))
    normal = _u32(magnitude - _u32(0x38000000) + _u32(0xFFF) + ((magnitude >> _HALF_SHIFT) & _ONE))
    result = small if magnitude < _u32(0x38800000) else _u32(normal >> _HALF_SHIFT)
    result = result if magnitude < _u32(0x477FF000) else _u32(0x7C00)  # rounds to infinity
    result = result if magnitude <= _u32(0x7F800000) else _u32(0x7E00)
    sign = _u32((bits(x) >> _TOP) & _u32(0x8000))
    # The one NaN that is stored has no sign.
    return np.uint16(result | sign) if x == x else np.uint16(0x7E00)
