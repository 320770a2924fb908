"""What ``ghoffload.offload_activations()`` saves and costs, and that it changes no bit.

    python examples/offload_activations.py
    python examples/offload_activations.py --picture hbm.png        # or .svg

Trains a small GPT on the source files of Python's standard library, three times from the same seed:
without the context, with all that the forward saves offloaded, and with a budget half way between
the peaks of those two. Loss and gradients of every step (a hash of all of their bytes) have to be
the same in all three; the exit code is 1 where they are not. Optimizer state is on the host in all
of them. With ``--picture`` one more step is taken, in which the bytes in HBM are read between
modules in the forward and at each gradient in the backward.

On a GPU the forward saves about 5 GB, and the host needs 15 GB of room; take other sizes where that
is too much. Without a GPU a virtual machine stands in: its bytes are simulated, and its times are
this CPU's.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import ghoffload
from ghoffload.demo.model import GPT
from ghoffload.demo.page import size
from ghoffload.demo.place import Place
from ghoffload.demo.presets import Preset
from ghoffload.demo.text import Batches, Text, read_text
from ghoffload.demo.train import build
from ghoffload.machine.protocol import Machine

ON_GPU = Preset(hidden=3072, layers=6, heads=24, context=2048, batch=4, steps=5, lr=3e-4)
ON_CPU = Preset(
    hidden=128,
    layers=6,
    heads=4,
    context=128,
    batch=16,
    steps=4,
    lr=1e-3,
    config={"bucket_bytes": 1 << 20},
    hbm_bytes=4_000_000_000,
    host_bytes=4_000_000_000,
)
SHAPE = ("hidden", "layers", "heads", "context", "batch", "steps")
TO_LEARN = 2  # steps: the first moves everything, the second has a plan and memory to take anew
COLOURS = ("#7f8c8d", "#1b6ca8", "#c0392b")


@dataclass
class Run:
    """What one training was like. Lists have an entry a step, ``seconds`` only the timed ones.

    Attributes:
        peak: bytes in HBM in the forward and the backward, once they were learned.
        out, back: bytes that one step moved to the host and back.
        curve: most bytes in HBM between one point of a step and the next.
        forward: of those, points in the forward.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    out: int = 0
    back: int = 0
    report: str = ""
    curve: list[int] = field(default_factory=list)
    forward: int = 0


class Curve:
    """Reads the memory at points of a step that are the same with and without the context."""

    def __init__(self, machine: Machine, model: nn.Module) -> None:
        self.bytes: list[int] = []
        self._machine = machine
        machine.reset_peak()
        self._handles: list[Any] = []
        for module in model.modules():
            self._handles.append(module.register_forward_pre_hook(self._read))
            self._handles.append(module.register_forward_hook(self._after))
        for parameter in model.parameters():
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._read))

    def _read(self, *_: object) -> None:
        self.bytes.append(self._machine.memory_peak())
        self._machine.reset_peak()

    def _after(self, module: nn.Module, args: object, output: Tensor) -> None:
        self._read()
        output.register_hook(self._read)  # its gradient is there: the module's backward begins

    def end(self) -> list[int]:
        """The curve, all hooks removed."""
        self._read()
        for handle in self._handles:
            handle.remove()
        return self.bytes


def hash_of(tensors: Sequence[Tensor]) -> str:
    """SHA-256 of all bytes."""
    on_host = [tensor.detach().flatten().view(torch.uint8).cpu().numpy() for tensor in tensors]
    with ThreadPoolExecutor() as pool:
        parts = pool.map(lambda array: hashlib.sha256(array).digest(), on_host)
        return hashlib.sha256(b"".join(parts)).hexdigest()


def train(
    name: str,
    place: Place,
    machine: Machine,
    preset: Preset,
    text: Text,
    context: contextlib.AbstractContextManager[Any],
    *,
    draw: bool,
) -> Run:
    run = Run(name)
    model = build(place, preset, seed=0)
    optimizer = ghoffload.OffloadAdamW(model.parameters(), lr=preset.lr, config=preset.config)
    batches = Batches(text.train, batch=preset.batch, context=preset.context, seed=0)
    for step in range(preset.steps):
        one_step(run, model, place, machine, batches, context, timed=step >= TO_LEARN)
        optimizer.step()
        optimizer.zero_grad()
    if draw:
        # One step more, and not timed: the readings cost something.
        curve = Curve(machine, model)
        one_step(run, model, place, machine, batches, context, curve=curve)
        run.curve = curve.end()
    if isinstance(context, ghoffload.offload_activations):
        run.report = context.report()
    return run


def one_step(
    run: Run,
    model: GPT,
    place: Place,
    machine: Machine,
    batches: Batches,
    context: contextlib.AbstractContextManager[Any],
    *,
    timed: bool = False,
    curve: Curve | None = None,
) -> None:
    """Forward and backward."""
    tokens = torch.from_numpy(batches.draw()).to(place.device)
    machine.synchronize_all()  # nothing of the step before, so that its end is not timed here
    if curve is None:
        machine.reset_peak()
    before, begin = replace(machine.traffic), machine.stamp(machine.current_stream())
    with context:
        loss = model(tokens)
    if curve is not None:
        run.forward = len(curve.bytes)
    loss.backward()
    end = machine.stamp(machine.current_stream())
    if timed:
        run.seconds.append(begin.seconds_to(end))
        run.peak = max(run.peak, machine.memory_peak())
        run.out = machine.traffic.d2h_bytes - before.d2h_bytes
        run.back = machine.traffic.h2d_bytes - before.h2d_bytes
    run.losses.append(loss.item())
    run.hashes.append(hash_of([p.grad for p in model.parameters() if p.grad is not None]))


def show(console: Console, place: Place, preset: Preset, runs: Sequence[Run], budget: int) -> bool:
    """Print everything; whether all runs had the same bits."""
    same = True
    for step in range(len(runs[0].losses)):
        bits = {(run.losses[step], run.hashes[step]) for run in runs}
        same = same and len(bits) == 1
        console.print(
            f"step {step + 1}  loss {runs[0].losses[step]:.4f}  gradients "
            f"{runs[0].hashes[step][:12]}  "
            + ("the same in all three" if len(bits) == 1 else "NOT the same in all three"),
            highlight=False,
        )
    console.print(
        f"\n{preset.parameters:,} parameters, {preset.tokens:,} tokens a step\n{place.name}",
        highlight=False,
    )
    page = Table()
    page.add_column("forward and backward")
    for run in runs:
        page.add_column(run.name, justify="right")
    page.add_row(f"peak {place.hbm}", *(size(run.peak) for run in runs))
    page.add_row("budget", "-", "-", size(budget))
    page.add_row("moved to the host a step", *(size(run.out) for run in runs))
    page.add_row("and back", *(size(run.back) for run in runs))
    on = " (this CPU)" if place.simulated else ""
    page.add_row(
        f"time a step{on}", *(f"{1e3 * statistics.median(run.seconds):,.1f} ms" for run in runs)
    )
    console.print(page)
    for run in runs[1:]:
        console.print(f"{run.name}\n{run.report}\n", highlight=False, markup=False)
    console.print(
        "losses and gradients: bit for bit the same" if same else "losses and gradients: DIFFERENT"
    )
    return same


def draw(path: Path, place: Place, preset: Preset, runs: Sequence[Run], budget: int) -> None:
    """Write the picture, PNG or SVG."""
    from matplotlib.figure import Figure  # only here: the figures do without it

    scale, unit = (1e9, "GB") if max(runs[0].curve) >= 1e9 else (1e6, "MB")
    page = Figure(figsize=(9, 4.5), dpi=150, layout="constrained")
    axes = page.subplots()
    for run, colour in zip(runs, COLOURS, strict=True):
        curve = [nbytes / scale for nbytes in run.curve]
        label = f"{run.name}: peak {size(max(run.curve))}"
        axes.plot(curve, label=label, color=colour, linewidth=1.4, drawstyle="steps-pre")
    axes.axhline(
        budget / scale,
        label=f"the budget: {size(budget)}",
        color=COLOURS[2],
        linestyle="--",
        linewidth=1,
    )
    points, forward = len(runs[0].curve), runs[0].forward
    axes.axvline(forward - 0.5, color="black", linewidth=0.8)
    axes.set_xticks([forward / 2, (forward + points) / 2], ["forward", "backward"])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(0, points - 1)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"{place.hbm} in use, {unit}")
    axes.set_title(
        f"One step, {preset.parameters / 1e6:,.1f} M parameters, {preset.tokens:,} tokens\n"
        f"{place.name}",
        loc="left",
        fontsize=10,
    )
    axes.grid(axis="y", color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.1), fontsize=9)
    page.savefig(path)


def picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"expected a name that ends in .png or .svg, got {text!r}")
    return path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in SHAPE:
        default = f"{getattr(ON_GPU, name)} on a GPU, else {getattr(ON_CPU, name)}"
        parser.add_argument(f"--{name}", type=int, help=f"default: {default}")
    parser.add_argument("--picture", type=picture, help="HBM over one step: a .png or .svg")
    words = parser.parse_args()
    if words.steps is not None and words.steps <= TO_LEARN:
        parser.error(f"--steps expects {TO_LEARN + 1} or more, got {words.steps}")
    return words


def options_for(preset: Preset, place: Place) -> dict[str, Any]:
    """The defaults for gigabytes; what is small there is all there is of a small model."""
    one = preset.tokens * preset.hidden * place.compute.itemsize  # the input of each block
    if one >= 32 << 20:
        return {}
    return {"min_offload_bytes": one // 2, "window_bytes": 4 * one, "ahead_bytes": 4 * one}


def main() -> int:
    words = arguments()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else its sums may change order
    place = Place.find()
    if not place.simulated:
        # Attention's backward on a GPU else adds in any order: two runs of anything would differ.
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    given = {name: getattr(words, name) for name in SHAPE if getattr(words, name) is not None}
    preset = replace(ON_CPU if place.simulated else ON_GPU, **given)
    options = options_for(preset, place)
    text = read_text(context=preset.context)
    runs: list[Run] = []

    with place.enter(preset) as meter:

        def add(name: str, context: contextlib.AbstractContextManager[Any]) -> Run:
            drawn = words.picture is not None
            run = train(name, place, meter.machine, preset, text, context, draw=drawn)
            runs.append(run)
            gc.collect()
            return run

        without = add("without", contextlib.nullcontext())
        offloaded = add("offload_activations()", ghoffload.offload_activations(**options))
        budget = (without.peak + offloaded.peak) // 2
        add("with a budget", ghoffload.offload_activations(budget_bytes=budget, **options))

    console = Console(width=None if sys.stdout.isatty() else 100)
    same = show(console, place, preset, runs, budget)
    if words.picture is not None:
        draw(words.picture, place, preset, runs, budget)
        console.print(f"written: {words.picture}", highlight=False, soft_wrap=True)
    return 0 if same else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except torch.OutOfMemoryError as error:
        raise SystemExit(f"out of memory: {str(error).splitlines()[0]}") from None
