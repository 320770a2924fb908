"""Autograd's hooks on what a forward saves.

Note [hooks]
    Autograd calls ``pack`` for each tensor that a node saves and keeps what it returns; ``unpack``
    gives the tensor when the node runs backward, from whatever thread and as often as it is asked.
    The innermost pair of hooks of a thread is used. What pack returns must not hold a tensor with
    its history: an output that its own node saves would be a cycle. While a graph is captured or a
    compiler traces, tensors pass through.

Note [kept blocks]
    What a kept block saves is autograd's own business: around its forward our hooks are taken off,
    unless other hooks are below or above them. Its backward sends for what is away as it begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ghoffload.activations.blocks import BlockLog, Blocks, Stage
from ghoffload.activations.choose import Mode
from ghoffload.activations.mover import mover_of
from ghoffload.activations.passes import Candidate, Pass
from ghoffload.activations.policy import Decision, Options, Saved, decided
from ghoffload.activations.recognise import Recogniser
from ghoffload.activations.spill import Kept, Moved, extent_of
from ghoffload.machine import machine_for
from ghoffload.machine.protocol import Machine
from ghoffload.machine.select import WrongDeviceError

USABLE = 0.95
"""Of a GPU's memory: what a budget may be where none is given; the allocator needs some slack."""
_HALVES = (torch.bfloat16, torch.float16)


class Forward:
    """The hooks of one entry; a pass for each device whose tensors are moved."""

    def __init__(
        self,
        options: Options,
        blocks: Blocks | None,
        machine: Machine | str | None,
        recogniser: Callable[[Machine], Recogniser],
    ) -> None:
        self._options, self._blocks = options, blocks
        self._machine, self._recogniser = machine, recogniser
        self._log: BlockLog | None = None
        self._passes: dict[torch.device, tuple[Pass, Recogniser] | None] = {}
        self._moved = self._met = 0

    def pack(self, tensor: Tensor) -> Any:
        if torch.compiler.is_compiling() or not isinstance(tensor, Tensor):
            return tensor
        found = self._pass(tensor.device)
        if found is None or found[0].mover.machine.capturing:
            return tensor
        home, recogniser = found
        usage = home.usage
        with home.mover.exclusive():
            if usage is None:
                return self._packed(tensor, home, recogniser)
            usage.pause()
            packed = self._packed(tensor, home, recogniser)
            usage.resume()
            return packed

    def _packed(self, tensor: Tensor, home: Pass, recogniser: Recogniser) -> Any:
        mover = home.mover
        reason = recogniser.kept(tensor)
        if reason is not None and reason != "small":
            home.keep(reason, tensor.numel() * tensor.element_size())
            return Kept(tensor, home)
        extent = extent_of(tensor)
        spill = mover.find(tensor, extent)
        if spill is not None:
            return Moved(tensor, home, spill)
        if reason is not None:
            home.keep(reason, tensor.numel() * tensor.element_size())
            return Kept(tensor, home)
        if home.stays(tensor, extent):
            return Kept(tensor, home)
        operator = tensor.grad_fn.name() if tensor.grad_fn is not None else "leaf"
        nbytes = extent.end - extent.start
        index = home.number(Candidate(nbytes, operator, tensor.dtype, tensor.shape))
        if home.log is not None:
            home.log.add(nbytes)
        decision, why = self._decide(tensor, home, index, nbytes, operator)
        handle: Kept | Moved
        if decision is Decision.KEEP:
            home.keep(why, nbytes)
            home.let_stay(tensor, extent)
            handle = Kept(tensor, home, index)
        else:
            spill = mover.leave(tensor, extent, home, index, code=decision is Decision.FP8)
            handle = Moved(tensor, home, spill)
        mover.retire(home.room(index))
        return handle

    def _decide(
        self, tensor: Tensor, home: Pass, index: int, nbytes: int, operator: str
    ) -> tuple[Decision, str]:
        options = self._options
        if home.log is not None:
            mode = home.log.what()
            if mode is Mode.FP8 and tensor.dtype in _HALVES:
                return Decision.FP8, ""
            return (Decision.KEEP if mode is Mode.KEEP else Decision.OFFLOAD), "chosen"
        if home.plan is not None and (why := home.plan.kept.get(index)) is not None:
            return Decision.KEEP, why
        codes = options.compress == "fp8" and tensor.dtype in _HALVES
        decision = Decision.FP8 if codes else Decision.OFFLOAD
        why = "as asked"
        if options.policy is not None:
            dtype = str(tensor.dtype).removeprefix("torch.")
            saved = Saved(index, tuple(tensor.shape), dtype, nbytes, operator)
            answer = decided(options.policy(saved), saved)
            if answer is Decision.FP8 and not tensor.is_floating_point():
                raise ValueError(f"policy expects 'fp8' for floating point alone, got {dtype}")
            decision = decision if answer is Decision.OFFLOAD else answer
        elif options.fraction < 1:
            self._met += nbytes
            if self._moved + nbytes / 2 > options.fraction * self._met:
                decision = Decision.KEEP
            else:
                self._moved += nbytes
        return decision, why

    def _pass(self, device: torch.device) -> tuple[Pass, Recogniser] | None:
        if device not in self._passes:
            machine = None
            if device.type in ("cpu", "cuda", "meta"):
                try:
                    machine = machine_for(device, self._machine)
                except WrongDeviceError:
                    if device.type != "cpu":
                        raise
                    # Where a GPU's tensors are moved these stay; checkpointing saves some.
            if machine is None:
                self._passes[device] = None
            else:
                self._passes[device] = (self._begin(machine), self._recogniser(machine))
        return self._passes[device]

    def _begin(self, machine: Machine) -> Pass:
        mover, options = mover_of(machine), self._options
        budget = options.budget_bytes
        if budget is None and options.auto:
            limit = machine.memory_limit()
            budget = None if limit is None else round(limit * USABLE)
        if self._blocks is not None and self._log is None:
            with mover.exclusive():
                learning = mover.learning(options, self._blocks)
                log = self._log = learning.begin(budget, mover.in_use())
                home = Pass(mover, options, budget=budget, log=log, learning=learning)
            if log.stage is Stage.CHOSEN and log.choice is not None:
                home.window_bytes = home.ahead_bytes = log.choice.under_way
            return home
        with mover.exclusive():
            learned, plan = mover.expected(options, budget)
            return Pass(mover, options, budget=budget, expected=learned, plan=plan)

    @contextlib.contextmanager
    def block(self, number: int) -> Iterator[Mode]:
        """Around the forward of one block; what is to be done with it."""
        assert self._blocks is not None
        found = self._pass(self._blocks.device()) if torch.is_grad_enabled() else None
        log = found[0].log if found is not None else None
        if found is None or log is None:
            yield Mode.KEEP
            return
        machine = found[0].mover.machine
        outer, log.current = log.current, number
        begin = machine.stamp(machine.current_stream()) if log.stage is Stage.TIMES else None
        mode = log.mode(number)
        try:
            with self._unhooked() if mode is Mode.KEEP else contextlib.nullcontext():
                yield mode
        finally:
            log.current = outer
            if begin is not None:
                log.times[number] = [begin, machine.stamp(machine.current_stream())]

    @contextlib.contextmanager
    def _unhooked(self) -> Iterator[None]:
        """Note [kept blocks]."""
        ours = _top_hooks()
        if ours is None or ours[0] != self.pack:
            yield
            return
        torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            if _top_hooks() is None:
                yield
                return
        finally:
            torch._C._autograd._push_saved_tensors_default_hooks(*ours)
        yield

    def block_ends(self, output: Any) -> None:
        """A kept block has returned its output."""
        assert self._blocks is not None
        found = self._passes.get(self._blocks.device())
        if found is None or found[0].log is None:
            return
        home = found[0]

        def begins(gradients: Any) -> None:
            with home.mover.exclusive():
                home.in_backward()
                home.mover.reload_ahead(home)

        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(begins)
                return

    def end(self, *, finished: bool) -> dict[torch.device, Pass]:
        """The forward is over."""
        passes = {device: found[0] for device, found in self._passes.items() if found is not None}
        for home in passes.values():
            with home.mover.exclusive():
                home.end(finished=finished)
        return passes


def _top_hooks() -> tuple[Any, Any] | None:
    """The hooks of this thread that would be used, if there are any."""
    found: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return found


def unpack(packed: Any) -> Tensor:
    """The saved tensor for what ``pack`` returned."""
    if isinstance(packed, Tensor):
        return packed
    assert isinstance(packed, (Kept, Moved))
    packed.check()
    home = packed.home
    mover, usage = home.mover, home.usage
    with mover.exclusive():
        if usage is not None:
            usage.pause()
        home.in_backward()
        if isinstance(packed, Moved):
            tensor = mover.serve(packed)
        else:
            if packed.index is not None:
                home.asked(packed.index)
            mover.reload_ahead(home)
            tensor = packed.tensor
        if usage is not None:
            usage.resume()
        return tensor
