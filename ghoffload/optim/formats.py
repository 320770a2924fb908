"""Which arrays a parameter's host state has, in which format.

Note [formats]
    ``master``: ``"fp32"``, an array of its own; ``"split"``, the signed 16-bit ``rest`` that makes
    an fp32 master of a bf16 weight (bits(master) = (bits(weight) << 16) + rest); or none.
    ``moments``: ``"fp32"``; ``"bf16"``, stochastically rounded; ``"int8"``, codes with one fp32
    scale for each ``BLOCK`` elements of the parameter. kernels/formats.py has the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ghoffload.kernels.formats import BLOCK

MASTER, REST = "master", "rest"
EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ = "exp_avg", "exp_avg_sq", "max_exp_avg_sq"
SCALES = {EXP_AVG: "exp_avg_scale", EXP_AVG_SQ: "exp_avg_sq_scale"}


@dataclass(frozen=True, slots=True)
class Array:
    """One array of a space.

    Attributes:
        name: of the array.
        dtype: of its items.
        block: elements of the parameter that share an item.
    """

    name: str
    dtype: torch.dtype
    block: int = 1

    def items(self, elements: int) -> int:
        """Items for so many elements."""
        return -(-elements // self.block)

    def nbytes(self, elements: int) -> int:
        """Bytes for so many elements."""
        return self.items(elements) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Format:
    """The format of a parameter's state; parameters of one format share a space.

    Attributes:
        master: ``"fp32"``, ``"split"`` or ``"none"``.
        moments: ``"fp32"``, ``"bf16"`` or ``"int8"``.
        amsgrad: whether there is a ``max_exp_avg_sq``; with fp32 moments alone.
    """

    master: str = "none"
    moments: str = "fp32"
    amsgrad: bool = False

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays, the master first."""
        found = []
        if self.master == "fp32":
            found.append(Array(MASTER, torch.float32))
        elif self.master == "split":
            found.append(Array(REST, torch.int16))
        if self.moments == "int8":
            found += [Array(EXP_AVG, torch.int8), Array(EXP_AVG_SQ, torch.uint8)]
            found += [Array(scale, torch.float32, BLOCK) for scale in SCALES.values()]
        else:
            dtype = torch.bfloat16 if self.moments == "bf16" else torch.float32
            found += [Array(EXP_AVG, dtype), Array(EXP_AVG_SQ, dtype)]
        if self.amsgrad:
            found.append(Array(MAX_EXP_AVG_SQ, torch.float32))
        return tuple(found)

    @property
    def block(self) -> int:
        """Elements that cannot be separated."""
        return max(array.block for array in self.arrays)

    @property
    def entries(self) -> tuple[str, ...]:
        """Names of the state entries, as torch has them, the master last."""
        master = () if self.master == "none" else (MASTER,)
        return (EXP_AVG, EXP_AVG_SQ, *((MAX_EXP_AVG_SQ,) if self.amsgrad else ()), *master)

    def nbytes(self, elements: int) -> int:
        """State bytes of so many elements."""
        return sum(array.nbytes(elements) for array in self.arrays)


def format_of(
    dtype: torch.dtype,
    count: int,
    *,
    master: str,
    moments: str,
    moments_fp32_below: int,
    amsgrad: bool,
) -> Format:
    """The format a parameter gets.

    Args:
        dtype: of the parameter.
        count: its elements.
        master, moments, moments_fp32_below: as in ``OffloadConfig``.
        amsgrad: of its group.

    Raises:
        ValueError: amsgrad beside coded moments.
    """
    if dtype == torch.float32 or master == "none":
        kept = "none"
    elif master == "fp32" or dtype != torch.bfloat16:
        kept = "fp32"
    else:
        kept = "split"
    if count < moments_fp32_below:
        moments = "fp32"
    if amsgrad and moments != "fp32":
        raise ValueError(
            f"amsgrad expects moments='fp32', got moments={moments!r}: a running maximum of "
            "rounded values would only grow"
        )
    return Format(kept, moments, amsgrad)
