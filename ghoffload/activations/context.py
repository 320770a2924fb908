"""``offload_activations()``: autograd's hooks on what a forward saves.

Note [hooks]
    Autograd calls ``pack`` for each tensor that a node saves and keeps what it returns; ``unpack``
    gives the tensor when the node runs backward, from whatever thread and as often as it is asked.
    The innermost pair of hooks of a thread is used. What pack returns must not hold a tensor with
    its history: an output that its own node saves would be a cycle. While a graph is captured or a
    compiler traces, tensors pass through.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ghoffload.activations.blocks import BlockLog, Blocks, Mode, Stage
from ghoffload.activations.mover import Mover
from ghoffload.activations.passes import Candidate, Pass
from ghoffload.activations.policy import Decision, Options, Policy, Saved, decided, plan_for
from ghoffload.activations.recognise import Recogniser
from ghoffload.activations.spill import Kept, Moved, extent_of
from ghoffload.config import parse_bytes
from ghoffload.machine import machine_for
from ghoffload.machine.protocol import Machine

WINDOW_BYTES = 512 << 20
AHEAD_BYTES = 512 << 20
USABLE = 0.95
"""Of a GPU's memory: what a budget may be where none is given; the allocator needs some slack."""
_HALVES = (torch.bfloat16, torch.float16)


class offload_activations(contextlib.ContextDecorator):
    """Offload what a forward pass saves for backward, around the forward or as a decorator.

    Gradients have the bits they have without it (except with ``compress`` or ``"fp8"``). Backward
    may run inside or outside. Parameters, buffers, their views and casts are never moved, nor what
    is smaller than ``min_offload_bytes``; every storage is moved once, whatever looks at it.

    Out of reach: tensors that custom Functions keep on ``ctx`` or that something else holds (those
    are found and not moved again), what selective checkpointing saves itself, and forwards in other
    threads than the one that entered.

    Args:
        budget_bytes: bytes in HBM (an int, or text such as ``"40 GiB"``) that forward and backward
            should stay below; no more is moved than that needs. The first pass moves everything
            and, to learn what the model needs, resets torch's peak memory statistics.
        fraction: of the bytes to move, 0 to 1, evenly over the forward.
        policy: called with a ``Saved`` for each tensor; returns ``"keep"``, ``"offload"``,
            ``"fp8"`` or a bool. ``"auto"`` takes the memory of the GPU for the budget where none is
            given.
        blocks: modules (``model.layers``) each of which is kept, offloaded or recomputed as a
            whole, whatever makes the step shortest within the budget; with ``compress`` offloaded
            in fp8, too. It owns their checkpointing: do not checkpoint them yourself. Two passes
            are for learning, and reset torch's peak memory statistics: blocks.py has how.
        compress: ``"fp8"`` moves half-precision tensors in half their bytes (e4m3 with a scale for
            each 128 elements: ``kernels/coding.py`` has the error bounds), and is not exact.
        min_offload_bytes: of what stays in HBM for being small.
        model: whose parameters and buffers to know beforehand. Needed where frozen weights are cast
            by autocast: nothing else tells those casts from activations.
        window_bytes: that may be on their way to the host before the forward waits for them, in
            stream order.
        ahead_bytes: that are brought back before backward asks.
        machine: as for ``OffloadAdamW``; the device's own by default. On a CPU without one nothing
            is moved.

    Raises:
        ValueError, TypeError: a bad argument; at once.
        torch.OutOfMemoryError: the host has no room; in the forward, before the tensor is moved.
    """

    def __init__(
        self,
        *,
        budget_bytes: int | str | None = None,
        fraction: float = 1.0,
        policy: Policy | Literal["auto"] | None = None,
        blocks: Iterable[nn.Module] | None = None,
        compress: str | None = None,
        min_offload_bytes: int | str = 1 << 20,
        model: nn.Module | None = None,
        window_bytes: int | str = WINDOW_BYTES,
        ahead_bytes: int | str = AHEAD_BYTES,
        machine: Machine | str | None = None,
    ) -> None:
        if compress not in (None, "fp8"):
            raise ValueError(f"compress expects None or 'fp8', got {compress!r}")
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
            raise TypeError(f"fraction expects a number from 0 to 1, got {fraction!r}")
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction expects 0 to 1, got {fraction}")
        if policy not in (None, "auto") and not callable(policy):
            raise TypeError(f"policy expects a callable, 'auto' or None, got {policy!r}")
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model expects a torch.nn.Module, got {type(model).__name__}")
        bounded = budget_bytes is not None or policy == "auto" or blocks is not None
        if sum((bounded, fraction != 1.0, callable(policy))) > 1:
            raise ValueError(
                "expected a budget (budget_bytes, blocks, policy='auto'), a fraction or a callable "
                "policy, got several"
            )
        budget = None if budget_bytes is None else parse_bytes(budget_bytes, "budget_bytes")
        if budget == 0:
            raise ValueError("budget_bytes expects the HBM that may be in use, got 0")
        self._options = Options(
            budget_bytes=budget,
            auto=policy == "auto" or blocks is not None,
            fraction=float(fraction),
            policy=policy if callable(policy) else None,
            compress=compress,
            min_offload_bytes=parse_bytes(min_offload_bytes, "min_offload_bytes"),
            window_bytes=parse_bytes(window_bytes, "window_bytes"),
            ahead_bytes=parse_bytes(ahead_bytes, "ahead_bytes"),
        )
        self._blocks = None if blocks is None else Blocks(blocks)
        self._model, self._machine = model, machine
        self._recognisers: dict[Machine, Recogniser] = {}
        self._entered = threading.local()
        self._last: dict[torch.device, Pass] = {}

    def __enter__(self) -> offload_activations:
        forward = _Forward(self._options, self._blocks, self._machine, self._recogniser)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(forward.pack, unpack))
            if self._blocks is not None:
                stack.enter_context(self._blocks.wrapped(forward.block))
            self._stack().append((forward, stack.pop_all()))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        forward, stack = self._stack().pop()
        stack.close()
        self._last = forward.end(finished=kind is None)

    def _recogniser(self, machine: Machine) -> Recogniser:
        found = self._recognisers.get(machine)
        if found is None:
            found = Recogniser(
                machine, model=self._model, min_bytes=self._options.min_offload_bytes
            )
            self._recognisers[machine] = found
        return found

    def _stack(self) -> list[tuple[_Forward, contextlib.ExitStack]]:
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        return self._entered.stack  # type: ignore[no-any-return]

    def report(self) -> str:
        """What the last forward under this context moved and kept, for a person."""
        from ghoffload.activations.report import page

        return page(self._last)


def offload_module(module: nn.Module, **options: Any) -> torch.utils.hooks.RemovableHandle:
    """Offload what the forward of one module saves: ``offload_activations`` around each call.

    Args:
        module: any module; those inside it are covered, too.
        options: of ``offload_activations``.

    Returns:
        A handle; ``remove()`` ends it.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"offload_module expects a torch.nn.Module, got {type(module).__name__}")
    context = offload_activations(**options)

    def enter(module: nn.Module, args: Any) -> None:
        context.__enter__()

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        context.__exit__(None, None, None)

    before = module.register_forward_pre_hook(enter)
    after = module.register_forward_hook(leave, always_call=True)
    return _Both(before, after)


class _Both(torch.utils.hooks.RemovableHandle):
    """Two handles as one."""

    def __init__(self, first: Any, second: Any) -> None:
        self._handles = (first, second)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Forward:
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
        with torch.no_grad(), home.mover.exclusive(), home.hook():
            return self._packed(tensor, home, recogniser)

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
        index = home.number(Candidate(nbytes, f"{operator} {tensor.dtype} {tuple(tensor.shape)}"))
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
            if device.type in ("cpu", "cuda"):
                machine = machine_for(device, self._machine)
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
            learning = mover.learning(options, self._blocks)
            log = self._log = learning.begin()
            home = Pass(mover, options, budget=budget, log=log, learning=learning)
            if log.stage is Stage.CHOSEN and log.choice is not None:
                home.window_bytes = home.ahead_bytes = log.choice.under_way
            return home
        learned = mover.learned(options)
        plan = None if learned is None else plan_for(options, learned, budget)
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
        try:
            yield log.mode(number)
        finally:
            log.current = outer
            if begin is not None:
                log.times[number] = [begin, machine.stamp(machine.current_stream())]

    def end(self, *, finished: bool) -> dict[torch.device, Pass]:
        """The forward is over."""
        passes = {device: found[0] for device, found in self._passes.items() if found is not None}
        for home in passes.values():
            with home.mover.exclusive():
                home.end(finished=finished)
        return passes


def unpack(packed: Any) -> Tensor:
    """The saved tensor for what ``pack`` returned."""
    if isinstance(packed, Tensor):
        return packed
    assert isinstance(packed, (Kept, Moved))
    packed.check()
    home = packed.home
    with torch.no_grad(), home.mover.exclusive(), home.hook():
        home.in_backward()
        if isinstance(packed, Moved):
            return home.mover.serve(packed)
        if packed.index is not None:
            home.asked(packed.index)
        home.mover.reload_ahead(home)
        return packed.tensor


_movers: dict[Machine, Mover] = {}
_movers_lock = threading.Lock()


def mover_of(machine: Machine) -> Mover:
    """The mover of a machine, made at the first call."""
    with _movers_lock:
        if machine not in _movers:
            _movers[machine] = Mover(machine)
        return _movers[machine]


def release(machine: Machine) -> None:
    """Give back the host memory that activations on a machine were offloaded to.

    It is kept for the next forward otherwise. Nothing must be away.
    """
    with _movers_lock:
        mover = _movers.pop(machine, None)
    if mover is not None:
        mover.close()
