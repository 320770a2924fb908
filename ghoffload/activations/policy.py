"""What is kept, offloaded, or offloaded in fewer bytes.

Note [budget]
    The first pass moves everything and notes how many bytes are needed from each save and each use
    to the next. A tensor that is kept adds its bytes to all of these between its save and its use.
    From the last saved to the first, as they are needed soonest, tensors are kept as long as no sum
    is beyond the budget; so no more is moved than that needs. What may be leaving at once is the
    room that is left at that moment: a lot early in forward, little at its end.

    Without a budget it is the peak with everything moved: at that moment nothing may be on its way,
    and the streams wait for each other. Where much of what moves would do so at such a moment, as
    in a model whose layers are all alike, the window is added to it.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ghoffload.activations.passes import Learned

NARROW = 0.05
"""Of the bytes that move: what may do so without room beside it."""


class Decision(enum.Enum):
    """For one saved tensor."""

    KEEP = "keep"
    OFFLOAD = "offload"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True)
class Saved:
    """What a callable policy is told of a tensor that could be moved.

    Attributes:
        index: its number in this forward, from 0.
        shape: of the tensor.
        dtype: such as ``"bfloat16"``.
        nbytes: that moving it moves.
        operator: that made it, such as ``"GeluBackward0"``; ``"leaf"`` for inputs.
    """

    index: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    operator: str


Policy = Callable[[Saved], "str | bool"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of one context; those with the same options share what they learn.

    Attributes:
        budget_bytes: HBM in use that the forward and backward should not exceed; ``None``: move
            everything.
        auto: without a budget, that the machine's memory is one.
        fraction: of the bytes that could be moved, evenly over the forward.
        policy: decides for each tensor; ``None``: what the others say.
        compress: ``"fp8"`` codes half-precision tensors on their way; ``None`` moves bits.
        min_offload_bytes: smaller tensors stay.
        window_bytes: that may be leaving at once, where there is no budget: at most.
        ahead_bytes: that are reloaded before backward asks for them.
    """

    budget_bytes: int | None
    auto: bool
    fraction: float
    policy: Policy | None
    compress: str | None
    min_offload_bytes: int
    window_bytes: int
    ahead_bytes: int


@dataclass(frozen=True)
class Plan:
    """Decisions for a pass like the one before.

    Attributes:
        kept: numbers that stay, with the reason.
        room: bytes that may be leaving when a number has been saved; what is not here is left to
            the window.
        room_back: bytes that may be on their way either way when it is asked for.
    """

    kept: Mapping[int, str]
    room: Mapping[int, int]
    room_back: Mapping[int, int]


def plan_for(options: Options, learned: Learned, budget: int | None) -> Plan:
    """What to do in a pass like the learned one; ``budget``: ``None`` for the least."""
    kept = dict.fromkeys(learned.in_vain, "in vain")
    if not learned.saved:  # the machine has no statistics
        return Plan(kept, {}, {})
    count = len(learned.candidates)
    in_use = np.array(
        [learned.saved[index] for index in range(count)]
        + [learned.served[index] for index in learned.order],
        dtype=np.int64,
    )
    # What is on its way needs room: as much as hides the link, where the budget has it.
    if budget is None:
        budget = _least(options, learned, in_use)
        most, under_way, why = options.window_bytes, 0, "no peak"
    else:
        spare = budget - int(in_use.max(initial=0))
        if spare < 0:
            warnings.warn(
                f"budget_bytes expects {budget - spare:,} or more for this model: so much is in "
                f"HBM with everything moved that can be; got {budget:,}",
                RuntimeWarning,
                stacklevel=2,
            )
        most, why = budget, "within the budget"
        under_way = max(min(max(options.window_bytes, options.ahead_bytes), spare // 2), 0)
    position = {index: count + at for at, index in enumerate(learned.order)}
    for index in reversed(range(count)):
        if index in kept or index not in learned.moved:
            continue
        between = in_use[index + 1 : position.get(index, len(in_use))]
        nbytes = learned.candidates[index].nbytes
        if int(between.max(initial=0)) + nbytes + under_way <= budget:
            between += nbytes
            kept[index] = why
    room = np.clip(budget - in_use, 0, most).tolist()
    # What still leaves at the end of the forward is there when the backward begins.
    room[count - 1] = min(room[count - 1 : count + 1])
    back = {index: room[at] for index, at in position.items()}
    return Plan(kept, dict(enumerate(room[:count])), back)


def _least(options: Options, learned: Learned, in_use: NDArray[np.int64]) -> int:
    """The lowest peak that leaves the link room to be hidden: Note [budget]."""
    peak = int(in_use.max(initial=0))
    size = {index: learned.candidates[index].nbytes for index in learned.moved}
    beside = min(options.window_bytes, options.ahead_bytes)
    enough = min(beside, max(size.values(), default=0))
    orders = (list(range(len(learned.candidates))), learned.order)
    needs = np.split(in_use, [len(learned.candidates)])
    for order, need in zip(orders, needs, strict=True):
        narrow = np.flatnonzero(need > peak - enough).tolist()
        if sum(size.get(order[at], 0) for at in narrow) > NARROW * sum(size.values()):
            return peak + beside
    return peak


def decided(answer: object, saved: Saved) -> Decision:
    """A callable's answer: a name of ``Decision``, or whether to offload.

    Raises:
        ValueError: something else.
    """
    if isinstance(answer, bool):
        return Decision.OFFLOAD if answer else Decision.KEEP
    try:
        return Decision(answer)
    except ValueError:
        raise ValueError(
            f"policy expects 'keep', 'offload', 'fp8', True or False for each tensor, got "
            f"{answer!r} for number {saved.index} ({saved.operator}, {saved.shape})"
        ) from None
