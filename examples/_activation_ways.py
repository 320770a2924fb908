"""Ways to keep what a forward saves: in HBM, on the host, or not at all. For the benchmark."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from _bench_model import Llama
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ghoffload
from ghoffload.machine.protocol import Machine

GROUPS = ("plain", "everything", "budgets", "blocks", "checkpointed", "peers")
QUARTERS = (0.25, 0.5, 0.75)
FIFTHS = (0.0, 0.2, 0.4, 0.6, 0.8)

NOTHING = "no offload"
SAVE_ON_CPU = "save_on_cpu"
CHECKPOINTING = "checkpointing"
EVERYTHING = "ghoffload"
FP8 = "ghoffload fp8"
INPUTS = "ghoffload, checkpointed"
HALF = "ghoffload half"
PEERS = {
    "TRL": "trl.models.activation_offloading",
    "torchtune": "torchtune.training._activation_offloading",
}

Moved = tuple[int, int]
"""Bytes that a step moves to the host, and back."""


class LeftOut(Exception):
    """A way that cannot be taken here, with the reason."""


class Way(Protocol):
    """How a step's forward is run, and what that moved."""

    def context(self) -> AbstractContextManager[Any]:
        """Entered around each forward."""

    def forward_is_over(self) -> None:
        """Called between forward and backward."""

    def moved(self) -> Moved:
        """In the last step."""

    def report(self) -> str:
        """What the last step says of itself, if anything."""


@dataclass(frozen=True)
class Setting:
    """A row of the benchmark.

    Attributes:
        group: of ``GROUPS``.
        name: of the way.
        fraction: for budgets, where between the two peaks that it is in.
        checkpointed: whether every layer is recomputed.
    """

    group: str
    name: str
    fraction: float | None = None
    checkpointed: bool = False

    @property
    def words(self) -> str:
        return self.name if self.fraction is None else f"{self.name} {self.fraction:.2f}"


def settings(groups: list[str]) -> list[Setting]:
    """Rows of the groups; no offload first, as all are held against it."""
    rows = [
        Setting("plain", NOTHING),
        Setting("plain", CHECKPOINTING, checkpointed=True),
        Setting("plain", SAVE_ON_CPU),
        Setting("everything", EVERYTHING),
        Setting("everything", FP8),
        Setting("everything", HALF),
        *(Setting("budgets", "budget", fraction) for fraction in QUARTERS),
        *(Setting("blocks", "blocks, budget", fraction) for fraction in FIFTHS),
        Setting("checkpointed", INPUTS, checkpointed=True),
        *(Setting("peers", name) for name in PEERS),
    ]
    needed = {NOTHING}
    if "budgets" in groups:
        needed.add(EVERYTHING)
    if {"blocks", "checkpointed"} & set(groups):
        needed.add(CHECKPOINTING)
    return [row for row in rows if row.group in groups or row.name in needed]


def budget_of(setting: Setting, peaks: dict[str, int]) -> int:
    """Bytes at the setting's fraction between the lowest peak of its kind and no offload's."""
    floor = EVERYTHING if setting.group == "budgets" else CHECKPOINTING
    if missing := [name for name in (NOTHING, floor) if name not in peaks]:
        raise LeftOut(f"needs the peak of {missing[0]}, which was not measured")
    assert setting.fraction is not None
    return round(peaks[floor] + setting.fraction * (peaks[NOTHING] - peaks[floor]))


@contextlib.contextmanager
def way_of(
    setting: Setting, model: Llama, machine: Machine, peaks: dict[str, int]
) -> Iterator[Way]:
    """The way of a setting; the model is as before in the end.

    Raises:
        LeftOut: it cannot be taken here.
    """
    options: dict[str, Any] | None = {
        EVERYTHING: {},
        FP8: {"compress": "fp8"},
        HALF: {"fraction": 0.5},
        INPUTS: {},
    }.get(setting.name)
    if setting.fraction is not None:
        options = {"budget_bytes": budget_of(setting, peaks)}
        if setting.group == "blocks":
            options["blocks"] = model.blocks
    with contextlib.ExitStack() as stack:
        if setting.checkpointed:
            stack.enter_context(checkpointing(model))
        if options is not None:
            context = ghoffload.offload_activations(model=model, machine=machine, **options)
            yield _Ours(context, machine)
        elif setting.name == SAVE_ON_CPU:
            yield _SaveOnCpu(pin=model.output.weight.is_cuda)
        elif setting.name in PEERS:
            stack.enter_context(_no_hooks_left(model))
            yield _Peer(_peer(setting.name, model))
        else:
            yield _Plain()


@contextlib.contextmanager
def checkpointing(model: Llama) -> Iterator[None]:
    """Within it, every layer is recomputed in backward."""
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in model.blocks:
            del block.forward


class _Plain:
    def context(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def forward_is_over(self) -> None:
        pass

    def moved(self) -> Moved:
        return 0, 0

    def report(self) -> str:
        return ""


class _Ours(_Plain):
    def __init__(self, context: ghoffload.offload_activations, machine: Machine) -> None:
        self._context, self._traffic = context, machine.traffic

    def context(self) -> AbstractContextManager[Any]:
        self._before = self._traffic.d2h_bytes, self._traffic.h2d_bytes
        return self._context

    def moved(self) -> Moved:
        out, back = self._before
        return self._traffic.d2h_bytes - out, self._traffic.h2d_bytes - back

    def report(self) -> str:
        return self._context.report()


class _SaveOnCpu(_Plain):
    """torch's own, which moves all that is saved; it is counted by listening to its hooks."""

    def __init__(self, *, pin: bool) -> None:
        self._hooks = torch.autograd.graph.save_on_cpu(pin_memory=pin)
        self._pack: Callable[[Tensor], Any] = self._hooks.pack_hook
        self._hooks.pack_hook = self._counted
        self._bytes = 0

    def _counted(self, tensor: Tensor) -> Any:
        self._bytes += tensor.numel() * tensor.element_size()
        return self._pack(tensor)

    def context(self) -> AbstractContextManager[Any]:
        self._bytes = 0
        return self._hooks

    def moved(self) -> Moved:
        return self._bytes, self._bytes


class _Peer(_Plain):
    """An ``OffloadActivations``; what it moved is read from its ``tracker`` after the forward.

    What it stashed, the last few, is served from HBM and does not come back.
    """

    def __init__(self, hooks: Any) -> None:
        self._hooks = hooks
        self._moved: Moved = 0, 0

    def context(self) -> AbstractContextManager[Any]:
        return self._hooks

    def forward_is_over(self) -> None:
        tracked = {number: entry[0] for number, entry in self._hooks.tracker.items() if entry[1]}
        out = sum(tensor.nbytes for tensor in tracked.values())
        stash = getattr(self._hooks, "fwd_stash", {})
        self._moved = out, out - sum(tracked[n].nbytes for n in stash if n in tracked)

    def moved(self) -> Moved:
        return self._moved


def pinned_by_torch(model: Llama, tokens: Tensor) -> int:
    """Host memory that torch pins for all that a forward saves: each in a power of two.

    Nothing of it is held meanwhile.
    """
    total = 0

    def pack(tensor: Tensor) -> None:
        nonlocal total
        nbytes = tensor.numel() * tensor.element_size()
        total += 1 << max(nbytes - 1, 0).bit_length()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        model(tokens)
    return total


def _peer(name: str, model: Llama) -> Any:
    try:
        module = importlib.import_module(PEERS[name])
    except ImportError as error:
        raise LeftOut(f"{name} cannot be imported: {error}") from None
    more = () if name == "TRL" else (True,)
    return module.get_act_offloading_ctx_manager(model, *more)


@contextlib.contextmanager
def _no_hooks_left(model: Llama) -> Iterator[None]:
    """Peers leave hooks on the output layer and give no handle of them."""
    hooks = [
        (held, dict(held))
        for held in (
            model.output._forward_pre_hooks,
            model.output._forward_hooks,
            model.output._forward_hooks_always_called,
        )
    ]
    try:
        yield
    finally:
        for held, before in hooks:
            held.clear()
            held.update(before)
