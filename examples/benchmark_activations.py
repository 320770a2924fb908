"""Forward + backward of a Llama of 1.1 billion parameters, by what becomes of what forward saves.

    python examples/benchmark_activations.py --out activations.json     # under 3 minutes on an H200
    python examples/benchmark_activations.py --only everything,budgets  # some of the groups
    python examples/benchmark_activations.py --tokens 8k,32k            # one sequence of so many

On one CUDA GPU, bf16, attention by ``scaled_dot_product_attention``, no optimizer. Each setting is
warmed up (the first steps of offload_activations learn), then timed: medians of the time between
events around forward + backward, and of the host's time until the device is idle. Peak HBM is the
most that was allocated in the timed steps, and ``over w+g`` what of it is neither weights nor
gradients.

The link's floor of a setting is ``out / d2h + back / h2d``: bytes that left in a step over the
link's rate to the host, and bytes that came back over its rate from there. Nothing comes back
before the forward has ended, so no step that moves these bytes, and computes meanwhile, is shorter
if the link is what it waits for; where the link keeps up with the compute, ``x none`` is the figure
to look at. Rates are measured before and after, with ghoffload.measure, and the better are used.

Whether gradients are bit for bit those without offloading is seen by a digest of all of them after
one more step, under torch's deterministic algorithms (backward of attention adds up in any order
otherwise). Without offloading that step runs twice: where the two differ, nothing can be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _activation_device import Gpu, deterministic, digest
from _activation_tables import (
    Row,
    bits,
    chosen,
    derive,
    left_out,
    table,
    verdict_table,
    verdicts,
)
from _activation_ways import (
    GROUPS,
    NOTHING,
    PEERS,
    SAVE_ON_CPU,
    LeftOut,
    Setting,
    Way,
    budget_of,
    pinned_by_torch,
    settings,
    way_of,
)
from _bench_model import SHAPES, Llama
from rich.console import Console
from torch import Tensor

from ghoffload.memory import available_host_bytes

WARM_UP = 4  # steps: offload_activations learns in one, with blocks in three
HOST_SHARE = 0.8  # of what is available on the host: beyond it other programs may be killed


def step_of(model: Llama, tokens: Tensor, way: Way) -> Callable[[], None]:
    """A step of a way, to be run again and again."""

    def step() -> None:
        with way.context():
            loss = model(tokens)
        way.forward_is_over()
        loss.backward()

    return step


def measured(
    gpu: Gpu, model: Llama, tokens: Tensor, setting: Setting, peaks: dict[str, int], repeats: int
) -> Row:
    """Figures of one setting.

    Raises:
        LeftOut: the way cannot be taken here.
    """
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    if setting.name == SAVE_ON_CPU or setting.name in PEERS:
        need, room = pinned_by_torch(model, tokens), available_host_bytes()
        if room is not None and need > HOST_SHARE * room:
            raise LeftOut(
                f"might pin {need / 1e9:.0f} GB of host memory, and {room / 1e9:.0f} are available"
            )
    with way_of(setting, model, gpu.machine, peaks) as way:
        step, times = step_of(model, tokens, way), []
        for turn in range(-WARM_UP, repeats):
            model.zero_grad(set_to_none=True)
            if turn == 0:
                gpu.machine.reset_peak()
            found = gpu.timed(step)
            if turn >= 0:
                times.append(found)
        peak, moved, report = gpu.machine.memory_peak(), way.moved(), way.report()
        digests: list[str] = []
        # Without an algorithm of one order, or room for it, nothing can be compared.
        with deterministic(), contextlib.suppress(RuntimeError):
            for _ in range(2 if setting.name == NOTHING else 1):
                model.zero_grad(set_to_none=True)
                step()
                digests.append(digest([p.grad for p in model.parameters()]))
        ms, wall = zip(*times, strict=True)
        return {
            "ms": statistics.median(ms),
            "wall_ms": statistics.median(wall),
            "all_ms": list(ms),
            "peak": peak,
            "over": peak - 2 * weights,
            "moved": moved,
            "report": report,
            "digests": digests,
        }


def run(
    gpu: Gpu,
    options: argparse.Namespace,
    batch: int,
    length: int,
    keep: Callable[[list[Row]], None],
) -> list[Row]:
    """All settings at one length of sequence; one without figures has the reason.

    ``keep`` gets the rows so far, after each.
    """
    shape = SHAPES[options.shape]
    if options.layers is not None:
        shape = dataclasses.replace(shape, layers=options.layers)
    torch.manual_seed(0)
    model = Llama(shape, device=gpu.device, dtype=torch.bfloat16)
    tokens = torch.randint(shape.vocabulary, (batch, length + 1), device=gpu.device)
    rows: list[Row] = []
    peaks: dict[str, int] = {}
    for setting in settings(options.only):
        print(f"{batch} x {length}: {setting.words} ...", file=sys.stderr, flush=True)
        row: Row = {"tokens": [batch, length], "group": setting.group, "name": setting.name}
        row |= {"words": setting.words, "fraction": setting.fraction}
        begun = time.perf_counter()
        try:
            row |= measured(gpu, model, tokens, setting, peaks, options.repeats)
            peaks[setting.name] = row["peak"]
        except (LeftOut, RuntimeError, ValueError) as error:
            row["error"] = str(error) or type(error).__name__
        if setting.fraction is not None:
            with contextlib.suppress(LeftOut):
                row["budget"] = budget_of(setting, peaks)
        model.zero_grad(set_to_none=True)
        gpu.clear()
        row["seconds"] = time.perf_counter() - begun
        said = row.get("error") or f"{row['ms']:.1f} ms, {row['peak'] / 1e9:.2f} GB"
        print(f"  {said}; {row['seconds']:.0f} s", file=sys.stderr, flush=True)
        rows.append(row)
        keep(rows)
    return rows


def groups(text: str) -> list[str]:
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    if not chosen or set(chosen) - set(GROUPS):
        unknown = ", ".join(repr(name) for name in chosen if name not in GROUPS) or "nothing"
        raise argparse.ArgumentTypeError(f"expects any of {', '.join(GROUPS)}, got {unknown}")
    return [name for name in GROUPS if name in chosen]


def lengths(text: str) -> list[tuple[int, int]]:
    """Batch and length of each: ``4x2048``, ``8192`` or ``8k`` (one sequence), with commas."""
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)(k?)", word.strip().lower())
        if match is None:
            raise argparse.ArgumentTypeError(
                f"expects lengths such as 4x2048, 8192 or 8k, got {word.strip()!r}"
            )
        batch, length, kilo = match.groups()
        found.append((int(batch or 1), int(length) * (1024 if kilo else 1)))
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", type=groups, default=list(GROUPS), help=f"any of {', '.join(GROUPS)}"
    )
    parser.add_argument(
        "--tokens",
        type=lengths,
        default=[(4, 2048)],
        help="batch and length, or the length of one sequence: 4x2048,8k,32k",
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="1.1b")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps a setting")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None, gpu: Gpu | None = None) -> int:
    options = parse(arguments)
    if gpu is None:
        if not torch.cuda.is_available():
            print("benchmark_activations needs a CUDA GPU that torch can use; there is none here.")
            return 2
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else its sums change order
        gpu = Gpu()
    begun = time.perf_counter()
    before = gpu.rates()
    document: dict[str, Any] = {"before": before, "rows": []}
    found: dict[tuple[int, int], list[Row]] = {}

    def keep(rows: list[Row]) -> None:
        """A run that is cut short leaves what it has found."""
        _write(options.out, document | {"rows": [*document["rows"], *rows]})

    for tokens in options.tokens:
        found[tokens] = run(gpu, options, *tokens, keep)
        document["rows"] += found[tokens]
    after = gpu.rates()
    rates = {way: max(before[way], after[way]) for way in before}
    console = Console(width=150)
    document |= {"after": after, "judged": []}
    for (batch, length), rows in found.items():
        derive(rows, rates)
        bits(rows)
        title = f"{batch} x {length} tokens, medians of {options.repeats}; ms and GB"
        console.print(table(rows, title))
        for line in [*chosen(rows), *left_out(rows)]:
            console.print(line, highlight=False)
        judged = verdicts(rows)
        console.print(verdict_table(judged))
        document["judged"] += [[f"{batch} x {length}", *line] for line in judged]
    spoken = ", ".join(
        f"{way} {before[way] / 1e9:.1f} and {after[way] / 1e9:.1f}" for way in before
    )
    seconds = time.perf_counter() - begun
    console.print(f"link before and after, GB/s: {spoken}; {seconds:.0f} s in all")
    _write(options.out, document | {"seconds": seconds})
    return 0


def _write(out: Path | None, document: dict[str, Any]) -> None:
    if out is not None:
        out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
