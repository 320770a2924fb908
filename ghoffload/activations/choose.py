"""Which blocks of a model to keep, to offload and to recompute, so that a step is shortest.

Note [what a step takes]
    Block after block: its compute; or the link, where what is to leave is more than may be under
    way, or what is to come back has not come. Nothing comes back before backward begins, and then
    as much as may be under way ahead of the block that needs it.
    Blocks that are offloaded are spread evenly over the forward, so that the link always has
    something to do; the last of the others are kept, as they are needed soonest.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

AT_LEAST = 0.02
"""Of a step's time: what another choice must gain to move more bytes for it."""
ROUNDING = 1 / 256
"""Of a budget: by as much do the peaks of equal passes differ, as allocators round."""


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


class Peaks(NamedTuple):
    """Bytes in HBM with every block recomputed and the blocks' inputs kept.

    Attributes:
        forward: of the forward.
        loss: of the backward until it comes to a block.
        blocks: of the rest of it.
    """

    forward: int
    loss: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Costs:
    """What there is to choose from.

    Attributes:
        blocks: in the order of the forward.
        forward, backward: seconds of both with every block recomputed.
        peaks: in HBM, then.
        d2h, h2d: bytes a second of the link.
        code_ratio: bytes of a tensor that is coded, of those of one that is not; 0 where none is.
        under_way: bytes that should be on their way at once for the link to be full.
    """

    blocks: Sequence[BlockCost]
    forward: float
    backward: float
    peaks: Peaks
    d2h: float
    h2d: float
    code_ratio: float
    under_way: int

    @property
    def own_backward(self) -> float:
        """Seconds of the backward without recomputation: not less than the forward's."""
        return max(self.backward - sum(block.seconds for block in self.blocks), self.forward)

    def least(self, other: Costs) -> Costs:
        """The shorter times and the higher peaks of two passes; the rest is the other's."""
        blocks = [
            replace(b, seconds=min(a.seconds, b.seconds))
            for a, b in zip(self.blocks, other.blocks, strict=True)
        ]
        return replace(
            other,
            blocks=blocks,
            forward=min(self.forward, other.forward),
            backward=min(self.backward, other.backward),
            peaks=Peaks(*map(max, self.peaks, other.peaks)),
        )


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

    Of those that are as short as that within ``AT_LEAST`` it is what moves the fewest bytes. Where
    nothing fits, what needs least.
    """
    count = len(costs.blocks)
    moving = [Mode.OFFLOAD] + ([Mode.FP8] if costs.code_ratio else [])
    found = [
        _predicted(costs, budget, kept, moved, mode, move_inputs=move_inputs)
        for kept, move_inputs, mode in itertools.product(range(count + 1), (False, True), moving)
        for moved in range(count - kept + 1)
        if moved or mode is Mode.OFFLOAD
    ]
    fitting = [choice for choice in found if choice.fits]
    if not fitting:
        return min(found, key=lambda choice: (choice.peak, choice.seconds))
    enough = min(choice.seconds for choice in fitting) * (1 + AT_LEAST)
    return min(
        (choice for choice in fitting if choice.seconds <= enough),
        key=lambda choice: (choice.moved, choice.seconds),
    )


def _predicted(
    costs: Costs, budget: int | None, kept: int, moved: int, mode: Mode, *, move_inputs: bool
) -> Choice:
    modes = _spread(len(costs.blocks), kept, moved, mode)
    held, largest, out = 0, 0, []
    for block, chosen in zip(costs.blocks, modes, strict=True):
        leaves = 0.0
        if chosen is Mode.KEEP:
            held += block.nbytes - block.input_bytes
        elif chosen is Mode.RECOMPUTE:
            if move_inputs:
                leaves = block.input_bytes
                held -= block.input_bytes
                largest = max(largest, block.input_bytes)
        else:
            leaves = block.nbytes * (costs.code_ratio if chosen is Mode.FP8 else 1)
            held -= block.input_bytes
            largest = max(largest, block.nbytes // 4)
        out.append(leaves)
    under_way = max(costs.under_way, largest) if any(out) else 0
    # A kept block's backward makes nothing anew.
    one_less = costs.blocks[-1].nbytes if modes[-1] is Mode.KEEP else 0
    peaks = costs.peaks
    peak = under_way + max(
        peaks.forward + held,
        peaks.loss + held,
        peaks.blocks + held - one_less,
        peaks.blocks + min(held, 0),  # when those that were kept are done
    )
    # Every block recomputed is what was measured, and the budget may be what another measured.
    rounding = ROUNDING * peak if not (kept or any(out)) else 0
    return Choice(
        modes=tuple(modes),
        move_inputs=move_inputs,
        seconds=_seconds(costs, modes, out, under_way),
        peak=peak,
        moved=round(sum(out)),
        under_way=under_way,
        fits=budget is None or peak <= budget + rounding,
    )


def _spread(count: int, kept: int, moved: int, mode: Mode) -> list[Mode]:
    modes = [Mode.RECOMPUTE] * count
    # What the last block saves is needed at once.
    among = count - 1 if kept and moved < count else count
    for number in range(moved):
        modes[number * among // moved] = mode
    others = [index for index in range(count) if modes[index] is Mode.RECOMPUTE]
    for index in others[len(others) - kept :]:
        modes[index] = Mode.KEEP
    return modes


def _seconds(costs: Costs, modes: Sequence[Mode], out: Sequence[float], under_way: int) -> float:
    """Note [what a step takes]."""
    now = free = 0.0
    for block, leaves in zip(costs.blocks, out, strict=True):
        if leaves:
            free = max(free, now) + leaves / costs.d2h
        now = max(now + block.seconds, free - under_way / costs.d2h)
    in_blocks = sum(block.seconds for block in costs.blocks)
    loss = max(costs.forward - in_blocks, 0.0)
    forward = now + loss
    ratio = costs.own_backward / costs.forward if costs.forward else 1.0
    begun = 0.0  # from when on what is needed next may come
    now = loss * ratio
    for block, mode, comes in zip(
        reversed(costs.blocks), reversed(modes), reversed(out), strict=True
    ):
        begin = now
        again = block.seconds if mode is Mode.RECOMPUTE else 0.0
        now += block.seconds * ratio + again
        if comes:
            ahead = min(under_way, (begin - begun) * costs.h2d)
            now = max(now, begin + (comes - ahead) / costs.h2d)
            begun = now
    return forward + now
