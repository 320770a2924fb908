"""Forward + backward with activations offloaded, recomputed or kept, in one run.

    python examples/benchmark_activations.py --out activations.json        # about 2 minutes
    python examples/benchmark_activations.py --tokens 8192 --batch 1       # one long sequence

A Llama shape of 1.1 billion bf16 parameters, 4 x 2048 tokens; no optimizer. Each setting runs until
it has learned what it can, then a few times: the median by the device's clock, peak HBM by torch's
allocator, bytes over the link by the machine's counters, and a hash of all gradients against those
of the plain forward and backward (which is run twice: where its own hashes differ, the model's
backward is not deterministic and nothing can be said).

The link's floor is what the bytes take that leave in forward and come back in backward, at the
rates measured in this run: out / d2h + back / h2d. Forward + backward cannot be faster than the
longer of that floor and its own compute.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _bench_model import SHAPES, Llama
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ghoffload
from ghoffload.activations.context import release
from ghoffload.machine.cuda import CudaMachine
from ghoffload.measure.measuring import measure
from ghoffload.measure.rates import Rates

Context = Callable[[], contextlib.AbstractContextManager[Any]]
Row = dict[str, Any]

WARM = 4  # passes: with blocks the third is the first by plan


@contextlib.contextmanager
def recomputed(blocks: torch.nn.ModuleList) -> Iterator[None]:
    """Each block under ``torch.utils.checkpoint``."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def recomputed_and_offloaded(blocks: torch.nn.ModuleList) -> contextlib.AbstractContextManager[Any]:
    stack = contextlib.ExitStack()
    stack.enter_context(ghoffload.offload_activations())
    stack.enter_context(recomputed(blocks))
    return stack


def fingerprint(model: torch.nn.Module) -> str:
    """Of all gradients' bits."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        assert parameter.grad is not None
        bits = parameter.grad.view(torch.int16).flatten()
        # A sum that every bit and place enters, so that little has to leave the device.
        places = torch.arange(bits.numel(), device=bits.device)
        digest.update(str(((places % 65521 + 1) * bits.long()).sum().item()).encode())
    return digest.hexdigest()[:16]


def measured(model: Llama, tokens: Tensor, context: Context, repeats: int) -> Row:
    machine = CudaMachine.of("cuda")
    times, peaks = [], []
    before = (machine.traffic.d2h_bytes, machine.traffic.h2d_bytes)
    for repeat in range(-WARM, repeats):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if repeat >= 0:
            torch.cuda.reset_peak_memory_stats()
            before = (machine.traffic.d2h_bytes, machine.traffic.h2d_bytes)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        with (entered := context()):
            loss = model(tokens)
        loss.backward()
        end.record()
        torch.cuda.synchronize()
        if repeat >= 0:
            times.append(start.elapsed_time(end))
            peaks.append(torch.cuda.max_memory_allocated())
        del loss
    report = entered.report() if isinstance(entered, ghoffload.offload_activations) else ""
    return {
        "ms": statistics.median(times),
        "peak": max(peaks),
        "out": machine.traffic.d2h_bytes - before[0],
        "back": machine.traffic.h2d_bytes - before[1],
        "gradients": fingerprint(model),
        "report": report,
    }


def clean() -> None:
    gc.collect()
    torch.cuda.synchronize()
    release(CudaMachine.of("cuda"))
    torch.cuda.empty_cache()


def settings(model: Llama) -> dict[str, Context]:
    """What needs no budget."""
    return {
        "nothing": contextlib.nullcontext,
        "nothing, again": contextlib.nullcontext,
        "torch save_on_cpu, pinned": partial(torch.autograd.graph.save_on_cpu, pin_memory=True),
        "torch checkpoint": partial(recomputed, model.blocks),
        "everything": ghoffload.offload_activations,
        "everything, fp8": partial(ghoffload.offload_activations, compress="fp8"),
        "half": partial(ghoffload.offload_activations, fraction=0.5),
        "checkpoint's inputs": partial(recomputed_and_offloaded, model.blocks),
    }


def budgets(model: Llama, rows: dict[str, Row]) -> dict[str, Context]:
    """``blocks=`` at checkpointing's own peak, and at three more up to that of no offload."""
    least, most = rows["torch checkpoint"]["peak"], rows["nothing"]["peak"]
    found: dict[str, Context] = {}
    for quarter in range(4):
        budget = least + (most - least) * quarter // 4
        name = f"blocks within {budget / 1e9:.1f} GB"
        found[name] = partial(
            ghoffload.offload_activations, blocks=model.blocks, budget_bytes=budget
        )
    middle = (least + most) // 2
    found[f"budget of {middle / 1e9:.1f} GB"] = partial(
        ghoffload.offload_activations, budget_bytes=middle
    )
    return found


def floor_ms(row: Row, rates: Rates) -> float | None:
    """What the link takes; ``None`` where nothing crosses it."""
    if not row["out"] or not rates.d2h or not rates.h2d:
        return None
    return 1e3 * float(row["out"] / rates.d2h + row["back"] / rates.h2d)


def table(rows: dict[str, Row], rates: Rates, title: str) -> Table:
    found = Table(title=title)
    columns = ("ms", "of nothing", "peak GB", "out GB", "back GB", "of the floor", "gradients")
    for column in ("setting", *columns):
        found.add_column(column, justify="left" if column == "setting" else "right")
    plain = rows["nothing"]
    steady = rows["nothing, again"].get("gradients") == plain.get("gradients")
    for name, row in rows.items():
        if "error" in row:
            found.add_row(name, row["error"].splitlines()[0][:60])
            continue
        floor = floor_ms(row, rates)
        same = "same bits" if row["gradients"] == plain["gradients"] else "differ"
        found.add_row(
            name,
            f"{row['ms']:.1f}",
            f"{row['ms'] / plain['ms']:.3f}",
            f"{row['peak'] / 1e9:.2f}",
            f"{row['out'] / 1e9:.2f}",
            f"{row['back'] / 1e9:.2f}",
            "-" if floor is None else f"{row['ms'] / floor:.3f}",
            same if steady else "cannot tell",
        )
    return found


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expects 1 or more, got {text}")
    return value


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="1.1b")
    parser.add_argument("--batch", type=positive, default=4)
    parser.add_argument("--tokens", type=positive, default=2048, help="of a sequence")
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmark_activations needs a CUDA GPU that torch can use; there is none here.")
        return 2
    rates = measure(CudaMachine.of("cuda"))
    torch.manual_seed(0)
    shape = SHAPES[options.shape]
    model = Llama(shape, device="cuda", dtype=torch.bfloat16)
    tokens = torch.randint(shape.vocabulary, (options.batch, options.tokens + 1), device="cuda")
    rows: dict[str, Row] = {}

    def run(named: dict[str, Context]) -> None:
        for name, context in named.items():
            print(f"{name} ...", file=sys.stderr, flush=True)
            try:
                rows[name] = measured(model, tokens, context, options.repeats)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                rows[name] = {"error": str(error) or type(error).__name__}
            model.zero_grad(set_to_none=True)
            clean()

    run(settings(model))
    if not any("error" in rows[name] for name in ("nothing", "torch checkpoint")):
        run(budgets(model, rows))
    count = sum(parameter.numel() for parameter in model.parameters())
    title = (
        f"{count:,} bf16 parameters, {options.batch} x {options.tokens} tokens, "
        f"forward + backward; medians of {options.repeats}"
    )
    console = Console(width=120)
    console.print(table(rows, rates, title))
    console.print(
        f"link, GB/s: {(rates.d2h or 0) / 1e9:.1f} out, {(rates.h2d or 0) / 1e9:.1f} back"
    )
    for name, row in rows.items():
        if row.get("report") and "blocks" in name:
            console.print(f"{name}: {row['report'].splitlines()[2].strip()}")
    if options.out:
        document = {"parameters": count, "rates": rates.to_dict(), "rows": rows}
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if any("error" in row for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
