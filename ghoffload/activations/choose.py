"""Which blocks of a model to keep, to offload and to recompute, so that a step is shortest.

Note [what a step takes]
    The forward takes as long as the compute, or as the link takes for what leaves, whichever is
    longer; the backward as long as its compute and what is recomputed, or as the link takes back.
    A kept block costs its bytes at the end of the forward, and saves them where it would be brought
    back or recomputed, which for one block at a time takes as many. The last blocks are kept, as
    they are needed soonest; of the others those that are offloaded are spread evenly, as the link
    is.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

AT_LEAST = 0.02
"""Of a step's time: what another choice must gain to move more bytes for it."""


class Mode(enum.Enum):
    """What becomes of a block's saved tensors."""

    KEEP = "keep"
    OFFLOAD = "offload"
    FP8 = "offload in fp8"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class BlockCost:
    """What a block costs.

    Attributes:
        nbytes: that it saves.
        input_bytes: that are saved of it where it is recomputed.
        seconds: of its forward.
    """

    nbytes: int
    input_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Costs:
    """What there is to choose from.

    Attributes:
        blocks: in the order of the forward.
        forward, backward: seconds of both with every block recomputed, without the recomputation.
        forward_peak, backward_peak: bytes in HBM then, the blocks' inputs kept; the first up to
            where backward begins.
        d2h, h2d: bytes a second of the link.
        code_ratio: bytes of a tensor that is coded, of those of one that is not; 0 where none is.
        under_way: bytes that should be on their way at once for the link to be full.
    """

    blocks: Sequence[BlockCost]
    forward: float
    backward: float
    forward_peak: int
    backward_peak: int
    d2h: float
    h2d: float
    code_ratio: float
    under_way: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Modes for all blocks and what they should come to.

    Attributes:
        modes: of each block.
        move_inputs: whether the inputs of recomputed blocks are offloaded.
        seconds: forward and backward.
        peak: bytes in HBM.
        moved: bytes that leave.
        under_way: of them, at once.
        fits: whether the peak is within the budget.
    """

    modes: tuple[Mode, ...]
    move_inputs: bool
    seconds: float
    peak: int
    moved: int
    under_way: int
    fits: bool


def choose(costs: Costs, budget: int | None) -> Choice:
    """The modes that make the step shortest within a budget; with none, in any memory.

    Where nothing fits, what needs least.
    """
    best: Choice | None = None
    count = len(costs.blocks)
    moving = [Mode.OFFLOAD] + ([Mode.FP8] if costs.code_ratio else [])
    for kept, move_inputs, mode in itertools.product(range(count + 1), (False, True), moving):
        for moved in range(count - kept + 1):
            if mode is Mode.FP8 and moved == 0:
                continue
            found = _predicted(costs, budget, kept, moved, mode, move_inputs=move_inputs)
            if best is None or _better(found, best):
                best = found
    assert best is not None
    return best


def _better(one: Choice, other: Choice) -> bool:
    if one.fits != other.fits:
        return one.fits
    if not one.fits:
        return (one.peak, one.seconds) < (other.peak, other.seconds)
    gain = other.seconds - one.seconds
    if abs(gain) > AT_LEAST * other.seconds:
        return gain > 0
    # As good as equal: fewer bytes over the link, then the shorter.
    return (one.moved, one.seconds) < (other.moved, other.seconds)


def _predicted(
    costs: Costs, budget: int | None, kept: int, moved: int, mode: Mode, *, move_inputs: bool
) -> Choice:
    """Note [what a step takes]."""
    count = len(costs.blocks)
    rest = count - kept
    modes = [Mode.KEEP] * count
    for index in range(rest):
        spread = (index + 1) * moved // rest > index * moved // rest
        modes[index] = mode if spread else Mode.RECOMPUTE
    out, again, held, largest = 0.0, 0.0, 0, 0
    for block, chosen in zip(costs.blocks, modes, strict=True):
        if chosen is Mode.KEEP:
            held += block.nbytes - block.input_bytes
        elif chosen is Mode.RECOMPUTE:
            again += block.seconds
            if move_inputs:
                out += block.input_bytes
                held -= block.input_bytes
                largest = max(largest, block.input_bytes)
        else:
            out += block.nbytes * (costs.code_ratio if chosen is Mode.FP8 else 1)
            held -= block.input_bytes
            largest = max(largest, block.nbytes // 4)
    under_way = max(costs.under_way, largest) if out else 0
    one_less = costs.blocks[-1].nbytes if kept else 0
    at_most = max(
        costs.forward_peak + held,
        costs.backward_peak + held - one_less,
        costs.backward_peak + min(held, 0),  # when those that were kept are done
    )
    peak = at_most + under_way
    return Choice(
        modes=tuple(modes),
        move_inputs=move_inputs,
        seconds=max(costs.forward, out / costs.d2h) + max(costs.backward + again, out / costs.h2d),
        peak=peak,
        moved=round(out),
        under_way=under_way,
        fits=budget is None or peak <= budget,
    )
