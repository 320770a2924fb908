"""One forward under the context, and what a later one like it can expect.

Note [learning]
    A pass numbers what could be moved in the order in which it is saved. What was learned of the
    pass before with the same options holds while sizes and dtypes are the same; at the first that
    is not, the rest of the pass goes without, and leaves its order to the next. That one reads what
    is in use, too, unless it is another again: where every batch has its own length, readings would
    cost time and tell nothing.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ghoffload.activations.blocks import BlockLog, Learning, Stage
from ghoffload.activations.choose import Peaks
from ghoffload.activations.spill import Extent, Spill, State
from ghoffload.activations.usage import usage_of
from ghoffload.machine.protocol import Stamp

if TYPE_CHECKING:
    from ghoffload.activations.mover import Mover
    from ghoffload.activations.policy import Options, Plan


CODE_RATIO = 0.5 + 4 / 256
"""Bytes of a half-precision tensor in fp8, with its scales, of those it has."""


class Candidate(NamedTuple):
    """Something that could be moved; passes are told apart by these.

    Attributes:
        nbytes: of the extent.
        operator: as of ``policy.Saved``.
        dtype, shape: of the tensor.
    """

    nbytes: int
    operator: str
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True)
class Learned:
    """What a finished pass tells the next.

    Attributes:
        candidates: what could be moved, by number.
        order: numbers in the order in which backward asked for them first.
        in_vain: numbers whose storage outlived the forward: moving them freed nothing.
        moved: numbers that were moved.
        base: bytes in use when it began.
        saved, served: bytes that were needed from when each was saved, and from when it was asked
            for, beside what was on its way: usage.py.
        measured: whether these were read.
    """

    candidates: Sequence[Candidate]
    order: Sequence[int]
    in_vain: frozenset[int]
    moved: frozenset[int]
    base: int
    saved: Mapping[int, int]
    served: Mapping[int, int]
    measured: bool


class Pass:
    """One forward under the context, until its backward is done.

    Attributes:
        mover: who moves its spills.
        options: as given to the context.
        expected: what the pass before found, while this one is like it.
        plan: decisions for the numbers that are expected.
        candidates: what could be moved so far.
        kept: bytes that stay, by reason.
        moved_bytes, link_bytes: of its spills, in HBM and on the way to the host.
        reloaded_bytes: on the way back.
        window_bytes, ahead_bytes: what is not more, where there is no budget.
        usage: told when a hook begins and ends; a learning pass reads between them what is in use.
        room_back: bytes that may be on their way now, in backward; ``None``: not known.
        in_vain: as of ``Learned``, so far.
    """

    def __init__(
        self,
        mover: Mover,
        options: Options,
        *,
        budget: int | None = None,
        expected: Learned | None = None,
        plan: Plan | None = None,
        log: BlockLog | None = None,
        learning: Learning | None = None,
    ) -> None:
        self.mover, self.options, self.budget = mover, options, budget
        self.expected, self.plan = expected, plan
        self.log, self._learning = log, learning
        self.handles = 0
        self.candidates: list[Candidate] = []
        self.kept: dict[str, int] = {}
        self.moved_bytes = self.link_bytes = self.reloaded_bytes = 0
        self.window_bytes, self.ahead_bytes = options.window_bytes, options.ahead_bytes
        self.room_back: int | None = None
        self.in_vain: set[int] = set()
        self._order: dict[int, None] = {}
        self._staying: dict[int, tuple[StorageWeakRef, Extent]] = {}
        self._spills: dict[int, weakref.ref[Spill]] = {}
        self._ended = self._finished = self._over = self._in_backward = False
        self._ahead: deque[int] | None = None
        learns = log is None and (expected is None or not expected.measured)
        self.usage = usage_of(mover) if learns else None
        self._times = log if log is not None and log.stage is Stage.TIMES else None
        self._peaks: list[int] = []
        if self._times is not None:
            mover.machine.reset_peak()
            self._stamp(self._times.forward)

    def number(self, candidate: Candidate) -> int:
        """Give a candidate its number."""
        index = len(self.candidates)
        expected = self.expected
        if expected is not None and (
            index >= len(expected.candidates) or expected.candidates[index] != candidate
        ):
            self.expected = self.plan = self.usage = None
        self.candidates.append(candidate)
        if self.plan is not None:
            self.room_back = self.plan.room.get(index)  # until backward asks for a number
        if self.usage is not None:
            self.usage.save(index)
        return index

    def room(self, index: int) -> int:
        """Bytes that may be leaving once a number has been saved."""
        window = self.window_bytes
        return window if self.plan is None else self.plan.room.get(index, window)

    def keep(self, reason: str, nbytes: int) -> None:
        """Note bytes that stay."""
        self.kept[reason] = self.kept.get(reason, 0) + nbytes

    def let_stay(self, tensor: Tensor, extent: Extent) -> None:
        """A storage is kept, and so whatever else of it will be saved."""
        storage = tensor.untyped_storage()
        self._staying[storage._cdata] = (StorageWeakRef(storage), extent)

    def stays(self, tensor: Tensor, extent: Extent) -> bool:
        """Whether these bytes are kept already."""
        found = self._staying.get(tensor.untyped_storage()._cdata)
        return found is not None and not found[0].expired() and found[1].covers(extent)

    def add(self, spill: Spill) -> None:
        """A spill of this pass has begun to leave."""
        self._spills[spill.index] = weakref.ref(spill)
        self.moved_bytes += spill.nbytes
        self.link_bytes += spill.moved_bytes

    def asked(self, index: int) -> None:
        """Backward asks for a number."""
        if index not in self._order:
            self._order[index] = None
            if self.plan is not None:
                self.room_back = self.plan.room_back.get(index, self.room_back)
            if self.usage is not None:
                self.usage.serve(index)
            if self._times is not None and len(self._peaks) == 1 and self._times.within[index] >= 0:
                self._peak()

    def in_backward(self) -> None:
        """Something is asked for: by a backward, or by someone who looks at a node's tensors."""
        if self._in_backward:
            return
        try:
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
        except RuntimeError:  # it was no backward
            return
        self._in_backward = True
        if self._times is not None and not self._times.backward:
            self._stamp(self._times.backward)
            self._peak()

    def _after_backward(self) -> None:
        self._in_backward = False
        if self._times is not None and not self._over:
            del self._times.backward[1:]
            self._stamp(self._times.backward)
        with self.mover.exclusive():
            if self.usage is not None:
                self.usage.pause()
            if not self.handles or len(self._order) == len(self.candidates):
                self._learn()

    def end(self, *, finished: bool) -> None:
        """The forward is over; ``finished``: not by an exception."""
        self._ended, self._finished = True, finished
        if self._times is not None:
            self._stamp(self._times.forward)
        if not self.handles:
            self._learn()

    def gone(self) -> None:
        """A handle is gone; with the last one the pass is over."""
        self.handles -= 1
        if not self.handles and not self._in_backward:
            self._learn()

    def _peak(self) -> None:
        """Note the peak since this was last done."""
        self._peaks.append(self.mover.machine.memory_peak())
        self.mover.machine.reset_peak()

    def _stamp(self, into: list[Stamp]) -> None:
        machine = self.mover.machine
        into.append(machine.stamp(machine.current_stream()))

    def _learn(self) -> None:
        """Leave what was found to the next pass: everything was asked for, or is gone."""
        if not (self._ended and self._finished) or self._over:
            return
        self._over = True
        if self.log is not None:
            self._learn_blocks(self.log)
        # A pass by plan has nothing to tell: of what it kept it knows nothing new.
        elif self._spills.keys() <= self._order.keys() and self.plan is None:
            usage = self.usage
            self.mover.learn(
                self.options,
                Learned(
                    candidates=self.candidates,
                    order=list(self._order),
                    in_vain=frozenset(self.in_vain),
                    moved=frozenset(self._spills),
                    base=0 if usage is None else usage.base,
                    saved={} if usage is None else usage.saved,
                    served={} if usage is None else usage.served,
                    measured=usage is not None,
                ),
            )

    def _learn_blocks(self, log: BlockLog) -> None:
        assert self._learning is not None
        last = self.mover.machine.memory_peak()
        forward, loss = [*self._peaks, last, last][:2]
        self._learning.end(
            log,
            peaks=Peaks(forward, loss, last),
            budget=self.budget,
            rates=self.mover.rates(),
            code_ratio=CODE_RATIO if self.options.compress else 0.0,
            under_way=min(self.options.window_bytes, self.options.ahead_bytes),
        )

    def coming_next(self) -> Spill | None:
        """What is away and will be asked for next, by what is expected."""
        if self._ahead is None:
            self._ahead = deque(self._expected_order())
        while self._ahead:
            index = self._ahead[0]
            ref = self._spills.get(index)
            spill = ref() if ref is not None else None
            if spill is not None and spill.state is State.AWAY and index not in self._order:
                return spill
            self._ahead.popleft()
        return None

    def skip(self) -> None:
        """What ``coming_next`` gave needs not come."""
        assert self._ahead is not None
        self._ahead.popleft()

    def _expected_order(self) -> list[int]:
        expected = self.expected
        backwards = list(reversed(range(len(self.candidates))))
        if expected is None or len(expected.candidates) != len(self.candidates):
            return backwards
        known = set(expected.order)
        return [*expected.order, *(index for index in backwards if index not in known)]
