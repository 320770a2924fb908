"""``offload_activations()`` and ``offload_module()``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from ghoffload.activations.blocks import Blocks
from ghoffload.activations.hooks import Forward, unpack
from ghoffload.activations.passes import Pass
from ghoffload.activations.policy import Options, Policy
from ghoffload.activations.recognise import Recogniser
from ghoffload.activations.report import page
from ghoffload.config import parse_bytes
from ghoffload.machine.protocol import Machine

WINDOW_BYTES = 512 << 20
AHEAD_BYTES = 512 << 20


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
            in fp8, too. It owns their checkpointing: do not checkpoint them yourself. Three passes
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
        forward = Forward(self._options, self._blocks, self._machine, self._recogniser)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(forward.pack, unpack))
            if self._blocks is not None:
                stack.enter_context(self._blocks.wrapped(forward.block, forward.block_ends))
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

    def _stack(self) -> list[tuple[Forward, contextlib.ExitStack]]:
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        return self._entered.stack  # type: ignore[no-any-return]

    def report(self) -> str:
        """What the last forward under this context moved and kept, for a person."""
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
