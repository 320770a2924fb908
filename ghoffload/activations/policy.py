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
    if not learned.order:  # nothing was moved, or nothing was asked for
        return Plan({}, {}, {})
    count = len(learned.candidates)
    needed = np.array(
        [learned.saved.get(index, 0) for index in range(count)]
        + [learned.served.get(index, 0) for index in learned.order],
        dtype=np.int64,
    )
    peak = int(needed.max(initial=0))
    if budget is None:
        most, ahead = options.window_bytes, options.ahead_bytes
        beside = min(most, ahead)
        kept, in_use = _kept(learned, needed, peak, "no peak")
        if beside and _narrow(learned, kept, peak - in_use, beside):
            budget = peak + beside
            kept, in_use = _kept(learned, needed, budget, "no peak")
        else:
            budget = peak
    else:
        most = ahead = max(budget, 0)
        if peak > budget:
            warnings.warn(
                f"budget_bytes expects {peak:,} or more for this model: so much is in HBM with "
                f"everything moved that can be; got {budget:,}",
                RuntimeWarning,
                stacklevel=2,
            )
        # What is on its way needs room: as much as hides the link, where the budget has it.
        beside = min(max(options.window_bytes, options.ahead_bytes), (budget - peak) // 2)
        kept, in_use = _kept(learned, needed, budget - max(beside, 0), "within the budget")
    room = np.clip(budget - in_use, 0, [most] * count + [ahead] * len(learned.order)).tolist()
    # What is on its way stays until it is asked for: there has to be room then, too.
    back: dict[int, int] = {}
    least = budget
    for at, index in reversed([*enumerate(learned.order, count)]):
        back[index] = least = min(room[at], least)
        if index in learned.moved and index not in kept:
            least += learned.candidates[index].nbytes
    # What still leaves at the end of the forward is there when the backward begins.
    room[count - 1] = min(room[count - 1], back.get(learned.order[0], most))
    return Plan(kept, dict(enumerate(room[:count])), back)


def _kept(
    learned: Learned, needed: NDArray[np.int64], budget: int, why: str
) -> tuple[dict[int, str], NDArray[np.int64]]:
    """What is kept within a budget, and what is then in use: Note [budget]."""
    kept = dict.fromkeys(learned.in_vain, "in vain")
    in_use = needed.copy()
    count = len(learned.candidates)
    position = {index: count + at for at, index in enumerate(learned.order)}
    for index in reversed(range(count)):
        if index in kept or index not in learned.moved:
            continue
        between = in_use[index + 1 : position.get(index, len(in_use))]
        nbytes = learned.candidates[index].nbytes
        if int(between.max(initial=0)) + nbytes <= budget:
            between += nbytes
            kept[index] = why
    return kept, in_use


def _narrow(
    learned: Learned, kept: Mapping[int, str], room: NDArray[np.int64], beside: int
) -> bool:
    """Whether much of what moves would do so without room for it, one way or the other."""
    size = {index: learned.candidates[index].nbytes for index in learned.moved if index not in kept}
    enough = min(beside, max(size.values(), default=0))
    count = len(learned.candidates)
    for order, at in ((range(count), room[:count]), (learned.order, room[count:])):
        rooms = zip(order, at.tolist(), strict=True)
        narrow = sum(size.get(index, 0) for index, here in rooms if here < enough)
        if narrow > NARROW * sum(size.values()):
            return True
    return False


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
