"""Blocks of a model that are kept, offloaded or recomputed as a whole, and what is learned of them.

Note [three passes]
    The first forward offloads everything and notes what each block saves. Two more recompute every
    block (``torch.utils.checkpoint``) and note how long each block's forward takes, how long the
    backward, and the peaks: of the forward, of the backward before it comes to the blocks, and
    after that. The shorter times count, as the first time that something runs it takes longer.
    From then on each block has the mode that makes the step shortest within the budget: choose.py.
    A forward that saves more than was expected begins anew; one that saves less keeps the modes.
"""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ghoffload.activations.choose import BlockCost, Choice, Costs, Mode, Peaks, choose
from ghoffload.activations.usage import budget_left
from ghoffload.machine.protocol import Stamp

RATE = 50e9
"""Bytes a second each way where the link was not measured: PCIe 5 x16."""
GROWTH = 1.02
"""Of a forward's bytes: what is more is another program."""

Around = Callable[[int], AbstractContextManager[Mode]]


class Stage(enum.Enum):
    """Where the learning is: Note [three passes]."""

    SAVED = "what is saved"
    TIMES = "how long it takes"
    CHOSEN = "chosen"


@dataclass
class BlockLog:
    """What one pass finds of its blocks.

    Attributes:
        stage: of the pass.
        choice: in force.
        current: the block whose forward runs; -1 outside of them.
        saved: bytes by block.
        within: the block of each number, -1 for none.
        times: begin and end of each block's forward.
        forward, backward: begin and end of both.
    """

    stage: Stage
    choice: Choice | None
    current: int = -1
    saved: dict[int, int] = field(default_factory=dict)
    within: list[int] = field(default_factory=list)
    times: dict[int, list[Stamp]] = field(default_factory=dict)
    forward: list[Stamp] = field(default_factory=list)
    backward: list[Stamp] = field(default_factory=list)

    def mode(self, block: int) -> Mode:
        """What to do with a block, or with what is outside of them."""
        if self.stage is Stage.SAVED:
            return Mode.OFFLOAD
        if self.stage is Stage.TIMES or self.choice is None:
            return Mode.KEEP if block < 0 else Mode.RECOMPUTE
        if block < 0:
            return Mode.KEEP if self.choice.fits else Mode.OFFLOAD
        return self.choice.modes[block]

    def what(self) -> Mode:
        """What to do with something that is saved now; a recomputed block saves its inputs."""
        mode = self.mode(self.current)
        if mode is not Mode.RECOMPUTE:
            return mode
        moves = self.choice is not None and self.choice.move_inputs
        return Mode.OFFLOAD if moves and self.stage is Stage.CHOSEN else Mode.KEEP

    def add(self, nbytes: int) -> None:
        """Something was saved."""
        self.within.append(self.current)
        self.saved[self.current] = self.saved.get(self.current, 0) + nbytes


class Learning:
    """What is known of the blocks of one model; shared by contexts with the same blocks.

    Attributes:
        stage: of the next pass.
        choice: once there is one.
    """

    def __init__(self, blocks: Blocks) -> None:
        self.stage = Stage.SAVED
        self.choice: Choice | None = None
        self._costs: Costs | None = None
        self._left: int | None = None
        self._base = 0
        self._blocks = [weakref.ref(module) for module in blocks.modules]
        self._saved: dict[int, int] = {}
        self._inputs: dict[int, int] = {}

    def of(self, blocks: Blocks) -> bool:
        """Whether these are the blocks, and no others in their place."""
        return [ref() for ref in self._blocks] == list(blocks.modules)

    def begin(self, budget: int | None, in_use: int) -> BlockLog:
        """For a pass that begins with so many bytes in use."""
        if self.stage is Stage.TIMES:
            self._base = in_use
        elif self._costs is not None and budget is not None:
            left = budget_left(budget, in_use - self._base, self._left)
            if left != self._left:
                self.choice, self._left = choose(self._costs, left), left
        return BlockLog(self.stage, self.choice)

    def end(
        self,
        log: BlockLog,
        *,
        peaks: Peaks,
        budget: int | None,
        rates: tuple[float, float],
        code_ratio: float,
        under_way: int,
    ) -> None:
        """A pass is over: go on to the next stage, or begin anew where it was another program."""
        if log.stage is not self.stage:
            return
        if self.stage is Stage.SAVED:
            self._saved, self.stage = log.saved, Stage.TIMES
            return
        if self.stage is Stage.TIMES:
            found = self._costs_of(log, peaks, rates, code_ratio, under_way)
            if found is None:
                return
            if self._costs is None:
                self._costs = found
                return
            self._costs = self._costs.least(found)
            self._inputs, self._left = log.saved, budget
            self.choice, self.stage = choose(self._costs, budget), Stage.CHOSEN
            return
        for block, nbytes in log.saved.items():
            inputs = block >= 0 and log.mode(block) is Mode.RECOMPUTE
            expected = (self._inputs if inputs else self._saved).get(block, 0)
            if nbytes > GROWTH * expected:
                self.stage, self.choice, self._costs = Stage.SAVED, None, None
                return

    def _costs_of(
        self,
        log: BlockLog,
        peaks: Peaks,
        rates: tuple[float, float],
        code_ratio: float,
        under_way: int,
    ) -> Costs | None:
        count = len(self._blocks)
        if len(log.times) < count or len(log.forward) != 2 or len(log.backward) != 2:
            return None  # not every block ran, or there was no backward: another time
        blocks = [
            BlockCost(
                nbytes=self._saved.get(block, 0),
                input_bytes=log.saved.get(block, 0),
                seconds=log.times[block][0].seconds_to(log.times[block][1]),
            )
            for block in range(count)
        ]
        total = sum(block.nbytes for block in blocks)
        return Costs(
            blocks=blocks,
            forward=log.forward[0].seconds_to(log.forward[1]),
            backward=log.backward[0].seconds_to(log.backward[1]),
            peaks=peaks,
            d2h=rates[0],
            h2d=rates[1],
            code_ratio=code_ratio,
            under_way=min(under_way, total // 16),
        )


class Blocks:
    """Modules whose forwards a context wraps while it is entered.

    Args:
        modules: in any order; each once.

    Raises:
        TypeError, ValueError: no modules, or one within another.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = tuple(modules)
        if not self.modules:
            raise ValueError("blocks expects modules, got none")
        for module in self.modules:
            if not isinstance(module, nn.Module):
                raise TypeError(f"blocks expects modules, got {type(module).__name__}")
        inner = [id(m) for module in self.modules for m in module.modules()]
        if len(set(inner)) != len(inner):
            raise ValueError("blocks expects modules that share none, got one twice or in another")

    def device(self) -> torch.device:
        """Where they are: that of their first parameter or buffer; the CPU without any."""
        for module in self.modules:
            for tensor in itertools.chain(module.parameters(), module.buffers()):
                return tensor.device
        return torch.device("cpu")

    @contextmanager
    def wrapped(self, around: Around, kept: Callable[[Any], None]) -> Iterator[None]:
        """Within it, each block's forward runs within ``around(number)``, recomputed if it says.

        ``kept`` gets the outputs of those that are kept.
        """
        before = [module.__dict__.get("forward") for module in self.modules]
        for number, module in enumerate(self.modules):
            module.forward = _wrapped(module.forward, number, around, kept)
        try:
            yield
        finally:
            for module, own in zip(self.modules, before, strict=True):
                if own is None:
                    del module.forward
                else:
                    module.forward = own


def _wrapped(
    forward: Callable[..., Any], number: int, around: Around, kept: Callable[[Any], None]
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with around(number) as mode:
            if mode is Mode.RECOMPUTE:
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)
            output = forward(*args, **kwargs)
        if mode is Mode.KEEP:
            kept(output)
        return output

    return run
