"""The formats of host state, as functions of whole tensors: for state dicts, and for reading.

Note [split master]
    The bf16 weight is the upper half of its fp32 master, so only the rest is state, a signed 16-bit
    number: bits(master) = (bits(weight) << 16) + rest. The weight is the master rounded half up in
    the bits (a tie goes away from zero; ``master="fp32"`` rounds ties to even). Any fp32 number
    survives ``split`` and ``join``; every NaN is 0x7FC00000 with rest 0. Masters within half a unit
    of overflow have an infinite weight and a negative rest, and come back finite.
    A weight edited from outside keeps its old rest: at most half a bfloat16 unit beside the edit.
    Where such a rest would leave the numbers, it counts as 0: beside +-0 a negative one, beside
    +-inf a positive one. State of zeros makes every weight its own master.

Note [bf16 moments]
    Rounded to one of the two bfloat16 beside, the nearer one more often, so that the mean is kept:
    with beta2 = 0.999 a step changes ``exp_avg_sq`` by less than half a unit, and rounding to
    nearest would hold it where it is. Random bits are a hash of a key (of the parameter and the
    step) and the element's index in its parameter: a run repeats, whatever the buckets. Infinities
    and NaN are kept.

Note [int8 moments]
    ``BLOCK`` consecutive elements of a parameter, counted from its first, share one fp32 scale for
    each moment. Both codes are companded by powers, so that one code serves several decades:

        exp_avg       scale * c * |c|       c = -127 ... 127, rounded to nearest by the root
        exp_avg_sq    (scale * c * c)^2     c = 0 ... 255, rounded at random so that the mean of
                                            exp_avg_sq is kept (2,048 random numbers)

    So sqrt(exp_avg_sq), which the update divides by, spans 1 : 65,025 in a block, and a number
    above zero never gets code 0: an update cannot explode because its denominator was rounded away.
    The scale is the greatest magnitude / 127^2, or the greatest root / 255^2, rounded to 20 bits
    (which makes decoding and encoding again the identity), at least 2^-126 or 2^-63; a block of
    zeros has scale 0. Numbers without a code (NaN, infinities, first moments above 1.6e38 and
    second ones above 3.3e38) begin again at zero, alone: the others of their block keep theirs, and
    what they did to the weight is done.

    Block-wise 8-bit state with a non-linear code is from Dettmers et al., "8-bit Optimizers via
    Block-wise Quantization" (arXiv:2110.02861). Companding the moments before a linear code is from
    Gonzalez Ortiz et al., "FlashOptim" (arXiv:2602.23349): softsign for the first, a square root
    for the second. Powers need no division, and the fourth root and random rounding here are for
    what BENCHMARKS.md has the figures of: codes that are rounded to nearest stand still where a
    step moves them by less than half their distance.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ghoffload.kernels import pool

BLOCK = 128
"""Consecutive elements of a parameter that share the scales of their int8 moments."""

_CODES = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
_TASK = 1 << 18  # elements, a multiple of BLOCK


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 weight and the int16 rest of an fp32 master (see Note [split master]).

    Args:
        master: float32 on the CPU, of any shape.

    Returns:
        Contiguous tensors of its shape.
    """
    master = _source("master", master, torch.float32)
    weight, rest = _like(master, torch.bfloat16), _like(master, torch.int16)
    _run("split", master.numel(), (master, weight, rest))
    return weight, rest


def join(weight: Tensor, rest: Tensor) -> Tensor:
    """The fp32 master of a bfloat16 weight and its int16 rest (see Note [split master])."""
    weight = _source("weight", weight, torch.bfloat16)
    rest = _source("rest", rest, torch.int16)
    if rest.numel() != weight.numel():
        raise ValueError(f"rest expects {weight.numel()} elements as weight, got {rest.numel()}")
    master = _like(weight, torch.float32)
    _run("join", weight.numel(), (weight, rest, master))
    return master


def stochastic_bfloat16(values: Tensor, key: int, start: int = 0) -> Tensor:
    """``values`` as bfloat16, rounded at random so that the mean is kept (see Note [bf16 moments]).

    Args:
        values: float32 on the CPU.
        key: 32 well mixed bits.
        start: index of the first element.
    """
    values = _source("values", values, torch.float32)
    out = _like(values, torch.bfloat16)
    _run("stochastic", values.numel(), (values, out), np.uint32(key), np.int64(start))
    return out


def encode(name: str, values: Tensor) -> tuple[Tensor, Tensor]:
    """int8 moments of fp32 ones, rounded to nearest (see Note [int8 moments]).

    Args:
        name: "exp_avg" or "exp_avg_sq".
        values: float32 on the CPU, in the order of the parameter's memory.

    Returns:
        Codes of ``values``' shape, int8 or uint8, and one fp32 scale for each block.
    """
    values = _source(name, values, torch.float32)
    codes = _like(values, _CODES[name])
    scales = torch.empty(-(-values.numel() // BLOCK))
    _run(f"encode_{name}", values.numel(), (values, codes), scales.data_ptr())
    return codes, scales


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The fp32 moments of codes: first ones of int8, second ones of uint8."""
    name = next((name for name, dtype in _CODES.items() if codes.dtype == dtype), None)
    if name is None:
        raise ValueError(f"codes expect torch.int8 or torch.uint8, got {codes.dtype}")
    codes = _source(name, codes, _CODES[name])
    scales = _source(f"{name}_scale", scales, torch.float32)
    blocks = -(-codes.numel() // BLOCK)
    if scales.numel() != blocks:
        raise ValueError(
            f"{name}_scale expects {blocks} scales for {codes.numel()} codes, got {scales.numel()}"
        )
    values = _like(codes, torch.float32)
    _run(f"decode_{name}", codes.numel(), (codes, values), scales.data_ptr())
    return values


def _source(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype != dtype or tensor.device.type != "cpu":
        raise ValueError(f"{name} expects {dtype} on cpu, got {tensor.dtype} on {tensor.device}")
    return tensor.detach().contiguous()


def _like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


def _run(name: str, elements: int, tensors: tuple[Tensor, ...], *extra: Any) -> None:
    kernel = _kernels()[name]

    def task(first: int) -> None:
        addresses = [t.data_ptr() + first * t.element_size() for t in tensors]
        kernel(first, min(_TASK, elements - first), *addresses, *extra)

    pool.run(task, range(0, elements, _TASK))


@lru_cache(None)
def _kernels() -> dict[str, Callable[..., None]]:
    from ghoffload.kernels import formats_host  # numba is slow to import

    return formats_host.KERNELS
