"""What is kept, offloaded, or offloaded in fewer bytes.

Note [budget]
    The first pass moves everything and notes how many bytes are needed from each save and each use
    to the next. A tensor that is kept adds its bytes to all of these between its save and its use.
    From the last saved to the first, as they are needed soonest, tensors are kept as long as no sum
    is beyond the budget; so no more is moved than that needs. What may be leaving at once is the
    room that is left at that moment: a lot early in forward, little at its end.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ghoffload.activations.passes import Learned


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
        window_bytes: that may be leaving at once, where there is no budget.
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
    """What to do in a pass like the learned one."""
    kept = dict.fromkeys(learned.in_vain, "in vain")
    if budget is None:
        at_end = 0
        for index in learned.order:
            nbytes = learned.candidates[index].nbytes
            if index not in learned.at_once or at_end + nbytes > options.window_bytes // 2:
                continue
            at_end += nbytes
            kept.setdefault(index, "needed at once")
        return Plan(kept, _window_less(kept, learned, options.window_bytes), {})
    return _within(options, learned, budget, kept)


def _window_less(kept: Mapping[int, str], learned: Learned, window: int) -> dict[int, int]:
    """The window, less what stays at the end of the forward: the peak is the same."""
    room = {}
    for index, candidate in enumerate(learned.candidates):
        window -= candidate.nbytes if kept.get(index) == "needed at once" else 0
        room[index] = window
    return room


def _within(options: Options, learned: Learned, budget: int, kept: dict[int, str]) -> Plan:
    """Note [budget]."""
    count = len(learned.candidates)
    sizes = [candidate.nbytes for candidate in learned.candidates]
    position = {index: count + at for at, index in enumerate(learned.order)}
    in_use = np.array(
        [learned.saved[index] for index in range(count)]
        + [learned.served[index] for index in learned.order],
        dtype=np.int64,
    )
    spare = budget - int(in_use.max(initial=0))
    if spare < 0:
        warnings.warn(
            f"budget_bytes expects {budget - spare:,} or more for this model: so much is in HBM "
            f"with everything moved that can be; got {budget:,}",
            RuntimeWarning,
            stacklevel=2,
        )
    # What is on its way needs room: as much as hides the link, where the budget has it.
    under_way = max(min(max(options.window_bytes, options.ahead_bytes), spare // 2), 0)
    for index in reversed(range(count)):
        if index in kept:
            continue
        between = in_use[index + 1 : position.get(index, len(in_use))]
        if int(between.max(initial=0)) + sizes[index] + under_way <= budget:
            between += sizes[index]
            kept[index] = "within the budget"
    room = np.maximum(budget - in_use, 0).tolist()
    # What still leaves at the end of the forward is there when the backward begins.
    room[count - 1] = min(room[count - 1 : count + 1])
    back = {index: room[at] for index, at in position.items()}
    return Plan(kept, dict(enumerate(room[:count])), back)


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
