"""One element of an update on the CPU: the formula of ``adam_host``, and what it works on.

Arguments named ``code`` and ``master`` are constants of the kernel that calls these, so nothing is
decided at run time: calls are inlined and their branches fall away.
"""

from __future__ import annotations

from numba import njit

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
from ghoffload.kernels.pieces import BF16, FP32
from ghoffload.kernels.split_host import join, lower_part, upper_part

NO_MASTER, FULL_MASTER, SPLIT_MASTER = range(3)
MASTERS = {"none": NO_MASTER, "fp32": FULL_MASTER, "split": SPLIT_MASTER}


@njit(error_model="numpy")
def load_number(code, base, i):  # type: ignore[no-untyped-def]
    """Element i of an array of a dtype, as fp32."""
    if code == FP32:
        return load32(base, i)
    if code == BF16:
        return from_bfloat16(load16(base, i))
    return from_float16(load16(base, i))


@njit(error_model="numpy")
def load_weight(code, master, weight, kept, i):  # type: ignore[no-untyped-def]
    """The weight as fp32: its master, unless that does not round to it. ``kept`` is the master."""
    if master == SPLIT_MASTER:
        return join(load16(weight, i), load16(kept, i))
    p = load_number(code, weight, i)
    if master == FULL_MASTER:
        candidate = load32(kept, i)
        if code == BF16:
            rounded = to_bfloat16(candidate)
        else:
            rounded = to_float16(candidate)
        p = candidate if rounded == load16(weight, i) else p
    return p


@njit(error_model="numpy")
def store_weight(code, master, weight, kept, i, p):  # type: ignore[no-untyped-def]
    """Set the weight, and its master where it has one."""
    if master == SPLIT_MASTER:
        store16(weight, i, upper_part(p))
        store16(kept, i, lower_part(p))
        return
    if master == FULL_MASTER:
        store32(kept, i, canonical(p))
    if code == FP32:
        store32(weight, i, canonical(p))
    elif code == BF16:
        store16(weight, i, to_bfloat16(p))
    else:
        store16(weight, i, to_float16(p))


@njit(error_model="numpy")
def new_moments(p, g, m, v, factor, decay, keep, beta1, not_beta1, beta2, not_beta2):  # type: ignore[no-untyped-def]
    """The decayed weight and the new moments."""
    g = g * factor
    g = fma(decay, p, g) if decay != 0 else g
    m = fma(not_beta1, g, beta1 * m)
    v = fma(not_beta2 * g, g, beta2 * v)
    return p * keep, m, v


@njit(error_model="numpy")
def moved(p, m, root_v, root, eps, step):  # type: ignore[no-untyped-def]
    """The updated weight, from the root of the second moment."""
    return fma(step, m / (root_v / root + eps), p)
