"""One run of the demo: a model from a seed, an optimizer, the steps, and what was seen of them."""

from __future__ import annotations

import contextlib
import gc
import math
import signal
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from ghoffload.demo.model import GPT
from ghoffload.demo.place import Place
from ghoffload.demo.presets import Preset
from ghoffload.demo.steppers import Held, InHbm, Offloaded
from ghoffload.demo.text import Batches, Bytes, Text

_VALIDATION_BATCHES = 8
_VALIDATIONS = 5
_VALIDATION_SEED = 1  # other batches than the training's, the same ones for every seed
_LAST = 10  # steps that a final loss is the mean of: one batch's alone is noise

OnStep = Callable[["Result"], None]


@dataclass
class Result:
    """What one run did. Lists have an entry a step.

    Attributes:
        validation: pairs of steps done and validation loss.
        held: where the bytes are at the end of a step, before gradients are dropped.
        peak_hbm_bytes: the highest the run came to, ``None`` before it was known.
        h2d_bytes, d2h_bytes: moved between HBM and host state in all steps together.
        stopped: why it ended before its last step, ``None`` where it did not.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    parameters: int = 0
    peak_hbm_bytes: int | None = None
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    stopped: str | None = None

    @property
    def final_loss(self) -> float:
        """Mean training loss of the last steps."""
        return statistics.fmean(self.losses[-_LAST:])

    @property
    def step_seconds(self) -> float:
        """Median; the first steps compile and warm up, and the median does not mind."""
        return statistics.median(self.seconds)

    def moved(self, direction: str) -> int:
        """Bytes a step, ``"h2d"`` or ``"d2h"``."""
        total: int = getattr(self, f"{direction}_bytes")
        return total // len(self.losses)


class Interrupt:
    """Ctrl-C while this is entered: the first is noted, a second raises ``KeyboardInterrupt``."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.noted = False
        self._on_first = on_first
        self._outer: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # where Python allows it
            self._outer = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._outer is not None:
            signal.signal(signal.SIGINT, self._outer)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.noted:
            raise KeyboardInterrupt
        self.noted = True
        self._on_first()


def train(
    kind: type[Offloaded] | type[InHbm],
    place: Place,
    preset: Preset,
    text: Text,
    *,
    seed: int,
    interrupt: Interrupt,
    on_step: OnStep,
) -> Result:
    """Train from ``seed`` with one optimizer, then free everything.

    Out of memory and Ctrl-C end the run early, with what it has: ``Result.stopped`` says so.
    """
    result = Result(kind.name)
    try:
        _train(kind, place, preset, text, result, seed, interrupt, on_step)
    except torch.OutOfMemoryError as error:
        result.stopped = f"out of memory: {str(error).splitlines()[0]}"
    if result.stopped is None and len(result.losses) < preset.steps:
        result.stopped = "interrupted"
    gc.collect()
    if not place.simulated:
        torch.cuda.empty_cache()
    return result


def _train(
    kind: type[Offloaded] | type[InHbm],
    place: Place,
    preset: Preset,
    text: Text,
    result: Result,
    seed: int,
    interrupt: Interrupt,
    on_step: OnStep,
) -> None:
    steps = preset.steps
    with place.enter(preset) as meter:
        model = build(place, preset, seed)
        result.parameters = sum(parameter.numel() for parameter in model.parameters())
        stepper = kind(model, preset.lr, preset.config)
        result.config = stepper.config
        schedule = LambdaLR(stepper.optimizer, lambda step: _warm_up_and_cosine(step, steps))

        def check() -> None:
            done = len(result.losses)
            if not result.validation or result.validation[-1][0] != done:
                result.validation.append((done, validate(model, place, preset, text.validation)))

        batches = Batches(text.train, batch=preset.batch, context=preset.context, seed=seed)
        while len(result.losses) < steps and not interrupt.noted:
            first = not result.losses
            before = time.perf_counter()
            tokens = _on(place, batches)
            # The first step finds no state yet, so peak memory is known from the second.
            watched = len(result.losses) == min(1, steps - 1)
            with meter.watch() if watched else contextlib.nullcontext():
                loss = model(tokens)
                loss.backward()
                stepper.step()
            result.losses.append(loss.item())
            result.seconds.append(time.perf_counter() - before)
            schedule.step()
            if first:
                result.held = stepper.held()
            stepper.zero_grad()
            traffic = meter.traffic()
            result.h2d_bytes, result.d2h_bytes = traffic.h2d_bytes, traffic.d2h_bytes
            result.peak_hbm_bytes = meter.peak() or None
            del loss
            if len(result.losses) % max(1, steps // _VALIDATIONS) == 0:
                check()
            on_step(result)
        if result.losses:
            check()


def build(place: Place, preset: Preset, seed: int) -> GPT:
    """The model with bf16 weights; its embeddings and layers depend on ``seed`` alone."""
    torch.manual_seed(seed)
    outer = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with place.device:
            return GPT(
                hidden=preset.hidden,
                layers=preset.layers,
                heads=preset.heads,
                context=preset.context,
                compute=place.compute,
            )
    finally:
        torch.set_default_dtype(outer)


@torch.no_grad()
def validate(model: GPT, place: Place, preset: Preset, data: Bytes) -> float:
    """Mean loss over the same few batches each time."""
    batches = Batches(data, batch=preset.batch, context=preset.context, seed=_VALIDATION_SEED)
    losses = [float(model(_on(place, batches))) for _ in range(_VALIDATION_BATCHES)]
    return statistics.fmean(losses)


def _on(place: Place, batches: Batches) -> Tensor:
    return torch.from_numpy(batches.draw()).to(place.device)


def _warm_up_and_cosine(step: int, steps: int) -> float:
    """Up over the first tenth, then down to a tenth of the highest rate."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))
