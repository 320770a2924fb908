"""One point of a sweep: a model with one setting, measured.

Note [figures]
    forward_backward_seconds   forward and backward alone, with the point's own checkpointing and
                               offload of activations
    optimizer_seconds          an optimizer's step alone, until the compute stream can go on; the
                               last state may still be on its way to the host
    step_seconds               forward, backward, the optimizer's step and zero_grad, from one
                               step's end on the compute stream to the next one's: what is still
                               being written back is hidden by the forward, as in training
    exposed_seconds            step_seconds less forward_backward_seconds
    peak_hbm_bytes             during those steps
    host_bytes                 that the runtime holds on the host
    h2d_bytes, d2h_bytes       that cross the link in one step; for an update in place, which
                               copies nothing, the state that the kernel reads and writes
    parameters                 trainable ones
    A GPU's are medians of several. On a clock that is simulated one of each is enough.

Note [garbage]
    Python's collector runs when as many objects were made as it likes, and tensors that hang in a
    cycle die with it. On a simulated machine it is called at fixed moments instead, so that the
    same point has the same peak; and it would take a third of the time. What was there before is
    frozen meanwhile, or each call would look at all of torch. A GPU's memory is emptied of what
    others left before a point, and of what the point left after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ghoffload.activations import offload_activations
from ghoffload.errors import KernelBuildError
from ghoffload.machine import use_machine
from ghoffload.machine.cuda import CudaMachine
from ghoffload.machine.protocol import Machine, Stamp
from ghoffload.machine.simulated import Profile, SimulatedMachine
from ghoffload.memory.ledger import ledger
from ghoffload.optim import OffloadAdamW
from ghoffload.optim.resolve import resolve
from ghoffload.sweeping.models import (
    Model,
    build,
    checkpoint_layers,
    loss_of,
    make_tokens,
    maker_of,
)
from ghoffload.sweeping.settings import Setting

FIGURES = (
    "step_seconds",
    "forward_backward_seconds",
    "exposed_seconds",
    "optimizer_seconds",
    "peak_hbm_bytes",
    "host_bytes",
    "h2d_bytes",
    "d2h_bytes",
    "parameters",
)
"""What a row has of a point: Note [figures]."""

_LEARNING = 4
"""Forward and backward passes after which offloaded activations have settled."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """What is measured.

    Attributes:
        model: a preset, ``module:function``, or a function.
        profile: of the machine that is simulated; ``None`` for the current GPU.
        tokens: batch and sequence length.
        setting: one combination of the axes.
        warmup, repeats: steps before those that count, and those; for a GPU.
    """

    model: Model
    profile: Profile | None
    tokens: tuple[int, int]
    setting: Setting
    warmup: int = 2
    repeats: int = 5


class _Refused(Exception):
    """The setting cannot be had here."""


def machine_of(profile: Profile | None) -> Machine:
    """A machine that is simulated, or that of the current GPU."""
    if profile is not None:
        return SimulatedMachine(profile)
    return CudaMachine.of(torch.cuda.current_device())


def refusal(machine: Machine, setting: Setting) -> str | None:
    """Why an optimizer with this setting is not to be had on a machine; ``None`` where it is."""
    try:
        resolve(machine, setting.config())
    except (ValueError, RuntimeError) as error:
        return _line(error)
    return None


def equivalent(machine: Machine, setting: Setting) -> Setting:
    """The setting that does the same, for one that is not refused.

    It has no ``auto``, nor what an update in place, which stages nothing, does not use.
    """
    found = resolve(machine, setting.config())
    fields: dict[str, Any] = {
        "memory_kind": found.memory_kind,
        "transfer": "kernel" if found.in_place else "copy_engine",
        "ctas": found.ctas,
        "step_device": "cpu" if found.on_host else "cuda",
    }
    if found.in_place:
        plain = Setting()
        fields |= {
            "bucket_bytes": plain.bucket_bytes,
            "staging_buffers": plain.staging_buffers,
        }
    return dataclasses.replace(setting, **fields)


def measure(point: Point) -> dict[str, Any]:
    """``FIGURES``, or ``skipped`` or ``error`` with a sentence.

    Raises:
        ModelError: the user's model is not one.
    """
    machine = machine_of(point.profile)
    try:
        with _fixed_garbage() if machine.imaginary else _no_garbage():
            return _figures(point, machine)
    except _Refused as error:
        return {"skipped": str(error)}
    except (torch.OutOfMemoryError, MemoryError) as error:
        return {"error": f"out of memory: {_line(error)}"}


def _figures(point: Point, machine: Machine) -> dict[str, Any]:
    setting = point.setting
    with use_machine(machine):
        module = build(maker_of(point.model, point.tokens[1]), machine.device)
        tokens = make_tokens(module, point.tokens, machine.device)
    parameters = [p for p in module.parameters() if p.requires_grad]
    with _as_refusal():
        if setting.checkpoint == "layers":
            checkpoint_layers(module)
        config = setting.config()
        in_place = resolve(machine, config).in_place
        # Not within use_machine: the views that it makes of its buffers would be looked at there,
        # one by one, and there may be a hundred thousand.
        optimizer = OffloadAdamW(parameters, lr=1e-3, config=config, machine=machine)
        offloading = _offloading(setting, machine, module)

    def forward_backward() -> None:
        with offloading:
            loss = loss_of(module, tokens)
        loss.backward()

    with use_machine(machine):
        bench = _Bench(machine, forward_backward, optimizer)
        found = bench.run(point, learning=0 if setting.activations == "none" else _LEARNING)
    if in_place:
        crossing = _host_state(optimizer)
        found["h2d_bytes"] += crossing
        found["d2h_bytes"] += crossing
    found["parameters"] = sum(p.numel() for p in parameters)
    return found


class _Bench:
    """Times steps by stamps on the compute stream."""

    def __init__(
        self, machine: Machine, forward_backward: Callable[[], None], optimizer: Any
    ) -> None:
        self._machine, self._optimizer = machine, optimizer
        self._forward_backward = forward_backward

    def run(self, point: Point, *, learning: int) -> dict[str, Any]:
        machine, traffic = self._machine, self._machine.traffic
        simulated = point.profile is not None
        warmup, repeats = (0, 1) if simulated else (point.warmup, point.repeats)
        for _ in range(learning):
            self._forward_backward()
            self._optimizer.zero_grad()
        for _ in range(warmup):
            self._step()
        alone, steps = [], []
        for _ in range(repeats):
            alone.append(self._idle(self._forward_backward))
            steps.append(self._idle(self._optimizer.step))
            self._optimizer.zero_grad()
        # From here on nothing waits: the last of these steps is written back during the next.
        machine.reset_peak()
        before = dataclasses.replace(traffic)
        stamps = [self._stamp()]
        for _ in range(repeats):
            self._step()
            stamps.append(self._stamp())
        moved = [
            (getattr(traffic, name) - getattr(before, name)) // repeats
            for name in ("h2d_bytes", "d2h_bytes")
        ]
        whole = [a.seconds_to(b) for a, b in itertools.pairwise(stamps)]
        machine.synchronize_all()
        passes, step = _median(alone), statistics.median(whole)
        host = machine.host_bytes if isinstance(machine, SimulatedMachine) else _held()
        return {
            "step_seconds": step,
            "forward_backward_seconds": passes,
            "exposed_seconds": step - passes,
            "optimizer_seconds": _median(steps),
            "peak_hbm_bytes": machine.memory_peak(),
            "host_bytes": host,
            "h2d_bytes": moved[0],
            "d2h_bytes": moved[1],
        }

    def _step(self) -> None:
        self._forward_backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _idle(self, work: Callable[[], Any]) -> tuple[Stamp, Stamp]:
        """Work that begins on an idle machine."""
        self._machine.synchronize_all()
        if isinstance(self._machine, SimulatedMachine):
            self._machine.fluid.finished.clear()  # a million tasks that nobody asks for
        begin = self._stamp()
        work()
        return begin, self._stamp()

    def _stamp(self) -> Stamp:
        return self._machine.stamp(self._machine.current_stream())


def _median(pairs: list[tuple[Stamp, Stamp]]) -> float:
    return statistics.median(begin.seconds_to(end) for begin, end in pairs)


def _offloading(setting: Setting, machine: Machine, module: nn.Module) -> Any:
    if setting.activations == "none":
        return contextlib.nullcontext()
    budget = None if setting.activations == "all" else setting.activations
    return offload_activations(budget_bytes=budget, model=module, machine=machine)


def _host_state(optimizer: Any) -> int:
    rows = optimizer.report().rows
    return sum(row.nbytes for row in rows if row.memory_kind in ("pinned", "managed", "system"))


def _held() -> int:
    return sum(row.nbytes for row in ledger.rows() if row.kind != "device")


@contextlib.contextmanager
def _as_refusal() -> Iterator[None]:
    """What the runtime refuses to build is a setting that is skipped."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, KernelBuildError):
        raise
    except (ValueError, RuntimeError) as error:
        raise _Refused(_line(error)) from error


@contextlib.contextmanager
def _fixed_garbage() -> Iterator[None]:
    """Note [garbage]."""
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """Note [garbage], on a GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    try:
        yield
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
