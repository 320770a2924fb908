"""OffloadAdamW's step by state format, memory kind and transfer, beside the rates of the machine.

    python examples/benchmark_formats.py --out formats.json      # about 4 minutes on an H200
    python examples/benchmark_formats.py --only staged,streamed  # some of the groups
    python examples/benchmark_formats.py --only model            # what it costs compute: 1 minute

For each setting the state of 1.1 billion bf16 parameters is made, and ``step()`` is timed until
everything is drained: medians, warmed up, in one process. Rates of copy engines, kernels and HBM
are measured before and after it in the same run; each step is held against the rate of its way.

The groups "beside" (8192 x 8192 bf16 products) and "model" (forward + backward of a Llama of 1.1
billion parameters, 4 x 2048 tokens) time work on the GPU alone and with steps running throughout.
The steps are those of other parameters of the same shapes: nothing waits for the other's data.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _bench_beside import Clock, CudaClock, Work, beside
from _bench_model import SHAPES, Llama
from rich.console import Console
from rich.table import Table

import ghoffload
from ghoffload.machine.cuda import CudaMachine
from ghoffload.measure import Rates
from ghoffload.measure.measuring import measure
from ghoffload.memory import HostArena
from ghoffload.transfer import Reload, WriteBack, chunked

Setting = dict[str, Any]
Row = dict[str, Any]

SPLIT, FP32 = {"master": "split"}, {"master": "fp32"}
BF16, INT8 = {"master": "split", "moments": "bf16"}, {"master": "split", "moments": "int8"}
ENGINE, KERNEL, HBM = (
    {"transfer": "copy_engine"},
    {"transfer": "kernel"},
    {"memory_kind": "device"},
)
COPIES = {"copies": "alone"}  # those of a step by copy engines with an fp32 master, no updates
ALONE: dict[str, list[Setting]] = {
    "staged": [FP32 | ENGINE, SPLIT | ENGINE, BF16 | ENGINE, INT8 | ENGINE],
    "streamed": [
        *(FP32 | KERNEL | {"ctas": n} for n in (2, 4, 8, 16)),
        *(form | KERNEL | {"ctas": n} for form in (SPLIT, INT8) for n in (4, 8)),
    ],
    "managed": [FP32 | {"memory_kind": "managed", "ctas": n} for n in (4, 8)],
    "hbm": [form | HBM for form in (FP32, SPLIT, BF16, INT8)],
}
BESIDE: dict[str, list[Setting]] = {
    group: [COPIES, FP32 | ENGINE, INT8 | ENGINE, *(FP32 | KERNEL | {"ctas": n} for n in ctas)]
    for group, ctas in (("beside", (2, 4, 8)), ("model", (1, 2, 4, 8)))
}
GROUPS = [*ALONE, *BESIDE]
PRODUCTS = 60  # about 100 ms on an H200, as long as a forward + backward
BATCH, SEQUENCE = 4, 2048
COPIED = 96 << 20  # bytes at once, each way


def parameters(layers: int) -> list[torch.nn.Parameter]:
    """bf16 weights with gradients, in the shapes of a Llama of 22 layers and 1.1 B parameters."""
    shapes = [(32000, 2048)] * 2
    for _ in range(layers):
        shapes += [(2048, 2048)] * 2 + [(256, 2048)] * 2 + [(5632, 2048)] * 3 + [(2048,)] * 2
    made = []
    for shape in shapes:
        weight = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
        made.append(torch.nn.Parameter(weight))
        made[-1].grad = torch.empty_like(weight).normal_(0, 1e-3)
    return made


def bytes_moved(setting: Setting) -> float:
    """Bytes of state that a step moves for each parameter, read and written."""
    master = {"fp32": 4, "split": 2}[setting["master"]]
    moments = {"fp32": 8, "bf16": 4, "int8": 2 + 8 / 128}[setting.get("moments", "fp32")]
    return 2 * (master + moments)


def timed_step(params: list[torch.nn.Parameter], setting: Setting, repeats: int) -> Row:
    optimizer = ghoffload.OffloadAdamW(params, lr=1e-4, weight_decay=0.1, config=setting)
    times, returned = [], []
    for repeat in range(-2, repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        back = time.perf_counter()
        torch.cuda.synchronize()
        end = time.perf_counter()
        if repeat >= 0:
            times.append(end - start)
            returned.append(back - start)
    del optimizer
    return {"seconds": statistics.median(times), "returned": statistics.median(returned)}


class Copies:
    """The copies of a step both ways, and nothing else: what the link costs what runs beside it."""

    def __init__(self, nbytes: int) -> None:
        machine = CudaMachine.of(torch.cuda.current_device())
        self._machine, self._times = machine, max(1, nbytes // COPIED)
        self._arena = HostArena(2 * COPIED, machine=machine, owner="copies alone")
        host = [self._arena.carve(COPIED, torch.uint8) for _ in range(2)]
        hbm = [torch.zeros(COPIED, dtype=torch.uint8, device=machine.device) for _ in range(2)]
        self._in, self._out = [(hbm[0], host[0])], chunked([(host[1], hbm[1])])
        self._reload, self._write_back = Reload(machine), WriteBack(machine)
        self._begin = machine.event("copies begin")
        self._done = [machine.event("copied in"), machine.event("copied out")]

    def step(self) -> None:
        stream = self._machine.current_stream()
        self._machine.record(self._begin, stream)
        for _ in range(self._times):
            self._reload.copy(self._in, after=self._begin, done=self._done[0])
            self._write_back.copy(self._out, after=stream, done=self._done[1])
        for event in self._done:
            self._machine.wait(stream, event, label="copies are done")


def work_of(group: str, layers: int) -> Work:
    """What the steps of a group run beside."""
    if group == "beside":
        a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")

        def products() -> None:
            for _ in range(PRODUCTS):
                a @ a

        return Work("8192 x 8192 bf16 product", products, PRODUCTS)
    shape = dataclasses.replace(SHAPES["1.1b"], layers=layers)
    model = Llama(shape, device="cuda", dtype=torch.bfloat16)
    tokens = torch.randint(shape.vocabulary, (BATCH, SEQUENCE + 1), device="cuda")

    def forward_backward() -> None:
        model.zero_grad(set_to_none=True)
        model(tokens).backward()

    name = f"forward + backward of {sum(p.numel() for p in model.parameters()):,} bf16 parameters"
    return Work(f"{name}, {BATCH} x {SEQUENCE} tokens", forward_backward)


def timed_beside(
    params: list[torch.nn.Parameter], setting: Setting, work: Work, clock: Clock, repeats: int
) -> Row:
    steps: Copies | ghoffload.OffloadAdamW
    if setting == COPIES:
        steps = Copies(12 * sum(p.numel() for p in params))
    else:
        steps = ghoffload.OffloadAdamW(params, lr=1e-4, config=setting)
    torch.cuda.reset_peak_memory_stats()
    found = beside(work, steps.step, clock, repeats=repeats)
    del steps
    return found | {"work": work.name, "peak_hbm": torch.cuda.max_memory_allocated()}


def words(setting: Setting) -> str:
    named = {"ctas": "{} CTAs", "copies": "copies {}"}
    return " ".join(named.get(k, "{}").format(v) for k, v in setting.items())


def rate(row: Row, count: int) -> float:
    """Bytes of state a second; in HBM with the weight, read and written, and the gradient."""
    moved = bytes_moved(row["setting"]) + (6 if row["group"] == "hbm" else 0)
    return count * moved / row["seconds"]


def steps_table(rows: list[Row], count: int, rates: Rates, repeats: int) -> Table:
    ways = {
        "staged": rates.both,
        "streamed": rates.pinned and rates.pinned.rate,
        "managed": rates.managed and rates.managed.rate,
        "hbm": rates.hbm,
    }
    table = Table(title=f"{count:,} bf16 parameters, medians of {repeats}")
    for column in ("way", "setting", "ms", "returns, ms", "Gparam/s", "GB/s", "of the way's rate"):
        table.add_column(column, justify="left" if column in ("way", "setting") else "right")
    for row in rows:
        cells = [row["group"], words(row["setting"])]
        if "error" in row:
            table.add_row(*cells, row["error"].splitlines()[0][:60])
            continue
        found, way = rate(row, count), ways[row["group"]]
        cells += [f"{1e3 * row[key]:.1f}" for key in ("seconds", "returned")]
        cells += [f"{count / row['seconds'] / 1e9:.2f}", f"{found / 1e9:.1f}"]
        table.add_row(*cells, "" if way is None else f"{found / way:.3f}")
    return table


def beside_table(rows: list[Row], repeats: int) -> Table:
    """One group's: the work alone and beside steps, and a step alone and beside the work."""
    work = next((row["work"] for row in rows if "work" in row), "work")
    table = Table(title=f"{work}: alone, and with steps running beside it; medians of {repeats}")
    columns = ("alone, ms", "beside, ms", "slowdown", "covered", "step alone, ms", "beside, ms")
    for column in ("steps", *columns):
        table.add_column(column, justify="left" if column == "steps" else "right")
    for row in rows:
        if "error" in row:
            table.add_row(words(row["setting"]), row["error"].splitlines()[0][:60])
            continue
        step = row["step_beside_ms"]
        table.add_row(
            words(row["setting"]),
            f"{row['alone_ms']:.3f}",
            f"{row['beside_ms']:.3f}",
            f"{100 * row['slowdown']:+.1f} %",
            # Cut and not rounded: 100 % is said of all of it alone.
            f"{int(1000 * row['covered']) / 10:.1f} %",
            f"{row['step_alone_ms']:.1f}",
            "-" if step is None else f"{step:.1f}",
        )
    return table


def rates_line(name: str, rates: Rates) -> str:
    kernel = {k: r for k in ("pinned", "managed") if (r := rates.by_kernel(k)) is not None}
    kinds = ", ".join(f"{k} {r.rate / 1e9:.1f} ({r.ctas} CTAs)" for k, r in kernel.items())
    engines, hbm = (rates.both or 0) / 1e9, (rates.hbm or 0) / 1e9
    return (
        f"rates {name}, GB/s: copy engines both ways {engines:.1f}; kernel both ways {kinds}; "
        f"HBM {hbm:,.0f}"
    )


def collect() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def groups(text: str) -> list[str]:
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    if not chosen or set(chosen) - set(GROUPS):
        unknown = ", ".join(repr(name) for name in chosen if name not in GROUPS) or "nothing"
        raise argparse.ArgumentTypeError(f"expects any of {', '.join(GROUPS)}, got {unknown}")
    return [name for name in GROUPS if name in chosen]


def measured(
    group: str, options: argparse.Namespace, params: list[torch.nn.Parameter]
) -> list[Row]:
    """The rows of one group; one that failed has the reason."""
    rows: list[Row] = []
    work = work_of(group, options.layers) if group in BESIDE else None
    clock = CudaClock()
    for setting in (ALONE | BESIDE)[group]:
        row: Row = {"group": group, "setting": setting}
        rows.append(row)
        print(f"{group}: {words(setting)} ...", file=sys.stderr, flush=True)
        try:
            if work is None:
                row |= timed_step(params, setting, options.repeats)
            else:
                row |= timed_beside(params, setting, work, clock, beside_repeats(options))
        except (RuntimeError, ValueError, torch.OutOfMemoryError) as error:
            row["error"] = str(error) or type(error).__name__
        collect()
    return rows


def beside_repeats(options: argparse.Namespace) -> int:
    """Fewer: each of them also has the work alone, and steps that cover all of it."""
    return max(1, options.repeats // 3)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=groups, default=GROUPS, help=f"any of {', '.join(GROUPS)}")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--repeats", type=int, default=9, help="a third of them beside work")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        print("benchmark_formats needs a CUDA GPU that torch can use; there is none here.")
        return 2
    machine = CudaMachine.of(torch.cuda.current_device())
    before = measure(machine)
    params = parameters(options.layers)
    count = sum(p.numel() for p in params)
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    for group in options.only:
        start = time.perf_counter()
        rows += measured(group, options, params)
        collect()  # what the group's work held
        seconds[group] = time.perf_counter() - start
    after = measure(machine)
    console = Console(width=120)
    if steps := [row for row in rows if row["group"] in ALONE]:
        console.print(steps_table(steps, count, before, options.repeats))
    for group in BESIDE:
        if found := [row for row in rows if row["group"] == group]:
            console.print(beside_table(found, beside_repeats(options)))
    console.print(rates_line("before", before))
    console.print(rates_line("after", after))
    peak = max((row["peak_hbm"] for row in rows if "peak_hbm" in row), default=0)
    spent = ", ".join(f"{group} {took:.0f} s" for group, took in seconds.items())
    console.print(f"{spent}; peak HBM beside work {peak / 1e9:.1f} GB")
    if options.out:
        for row in rows:
            if "seconds" in row:
                row |= {"gparam_per_s": count / row["seconds"] / 1e9, "rate": rate(row, count)}
        document = {"parameters": count, "before": before.to_dict(), "after": after.to_dict()}
        document |= {"seconds": seconds, "rows": rows}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
