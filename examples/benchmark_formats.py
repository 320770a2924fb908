"""OffloadAdamW's step by state format, memory kind and transfer, beside the rates of the machine.

    python examples/benchmark_formats.py --out formats.json      # about 3 minutes on an H200
    python examples/benchmark_formats.py --only staged,streamed  # some of the groups

For each setting the state of 1.1 billion bf16 parameters is made, and ``step()`` is timed until
everything is drained: medians, warmed up, in one process. Rates of copy engines, kernels and HBM
are measured before and after it in the same run; each step is held against the rate of its way.
The group "beside" times bf16 matrix products with a step in flight against those without one.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import ghoffload
from ghoffload.machine.cuda import CudaMachine
from ghoffload.measure.measuring import measure

Setting = dict[str, Any]

SPLIT, FP32 = {"master": "split"}, {"master": "fp32"}
BF16, INT8 = {"master": "split", "moments": "bf16"}, {"master": "split", "moments": "int8"}
ENGINE, KERNEL, HBM = (
    {"transfer": "copy_engine"},
    {"transfer": "kernel"},
    {"memory_kind": "device"},
)
GROUPS: dict[str, list[Setting]] = {
    "staged": [FP32 | ENGINE, SPLIT | ENGINE, BF16 | ENGINE, INT8 | ENGINE],
    "streamed": [
        *(FP32 | KERNEL | {"ctas": n} for n in (2, 4, 8, 16)),
        *(form | KERNEL | {"ctas": n} for form in (SPLIT, INT8) for n in (4, 8)),
    ],
    "managed": [FP32 | {"memory_kind": "managed", "ctas": n} for n in (4, 8)],
    "hbm": [form | HBM for form in (FP32, SPLIT, BF16, INT8)],
}
BESIDE: list[Setting] = [
    FP32 | ENGINE,
    INT8 | ENGINE,
    *(FP32 | KERNEL | {"ctas": n} for n in (2, 4, 8)),
]


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


def timed_step(params: list[torch.nn.Parameter], setting: Setting, repeats: int) -> dict[str, Any]:
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


def beside_matmul(params: list[torch.nn.Parameter], setting: Setting) -> dict[str, Any]:
    """Matrix products alone, and with a step of the optimizer running beside all of them."""
    optimizer = ghoffload.OffloadAdamW(params, lr=1e-4, config=setting)
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    other = torch.cuda.Stream()
    optimizer.step()
    torch.cuda.synchronize()

    def products(count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            a @ a
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / count

    products(20)
    alone, beside = [], []
    for _ in range(5):
        alone.append(products(150))
        # The step's stream is its own here, so that products need not wait for its updates.
        with torch.cuda.stream(other):
            optimizer.step()
        beside.append(products(150))
    del optimizer
    ratio = statistics.median(beside) / statistics.median(alone)
    return {"alone_ms": statistics.median(alone), "beside_ms": statistics.median(beside),
            "slowdown": ratio - 1}  # fmt: skip


def collect() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"groups, of {', '.join(GROUPS)}, beside")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    chosen = options.only.split(",") if options.only else [*GROUPS, "beside"]
    if unknown := set(chosen) - {*GROUPS, "beside"}:
        print(f"--only expects {', '.join(GROUPS)} or beside, got {sorted(unknown)}")
        return 1
    if not torch.cuda.is_available():
        print("benchmark_formats needs a CUDA GPU that torch can use; there is none here.")
        return 2
    machine = CudaMachine.of(torch.cuda.current_device())
    before = measure(machine)
    params = parameters(options.layers)
    count = sum(p.numel() for p in params)
    ways = {
        "staged": before.both,
        "streamed": before.pinned and before.pinned.rate,
        "managed": before.managed and before.managed.rate,
        "hbm": before.hbm,
    }
    table = Table(title=f"{count:,} bf16 parameters, medians of {options.repeats}")
    for column in ("way", "setting", "ms", "returns, ms", "Gparam/s", "GB/s", "of the way's rate"):
        table.add_column(column, justify="left" if column in ("way", "setting") else "right")
    rows: list[dict[str, Any]] = []
    for group in chosen:
        for setting in GROUPS.get(group, []):
            row: dict[str, Any] = {"group": group, "setting": setting}
            rows.append(row)
            text = " ".join(f"{v}" if k != "ctas" else f"{v} CTAs" for k, v in setting.items())
            try:
                found = timed_step(params, setting, options.repeats)
            except (RuntimeError, ValueError, torch.OutOfMemoryError) as error:
                row["error"] = str(error)
                table.add_row(group, text, str(error).splitlines()[0][:60])
                continue
            finally:
                collect()
            moved = bytes_moved(setting) + (6 if group == "hbm" else 0)  # weight twice, gradient
            rate = count * moved / found["seconds"]
            row |= found | {"gparam_per_s": count / found["seconds"] / 1e9, "rate": rate}
            way = ways[group]
            table.add_row(
                group,
                text,
                f"{1e3 * found['seconds']:.1f}",
                f"{1e3 * found['returned']:.1f}",
                f"{row['gparam_per_s']:.2f}",
                f"{rate / 1e9:.1f}",
                "" if way is None else f"{rate / way:.3f}",
            )
    console = Console(width=110)
    console.print(table)
    if "beside" in chosen:
        side = Table(title="8192 x 8192 bf16 products beside a step that runs")
        for column in ("setting", "alone, ms", "beside, ms", "slowdown"):
            side.add_column(column, justify="left" if column == "setting" else "right")
        for setting in BESIDE:
            found = beside_matmul(params, setting)
            collect()
            rows.append({"group": "beside", "setting": setting} | found)
            text = " ".join(f"{v}" if k != "ctas" else f"{v} CTAs" for k, v in setting.items())
            side.add_row(text, f"{found['alone_ms']:.3f}", f"{found['beside_ms']:.3f}",
                         f"{100 * found['slowdown']:+.1f} %")  # fmt: skip
        console.print(side)
    after = measure(machine)
    for name, rates in (("before", before), ("after", after)):
        kernel = {k: r for k in ("pinned", "managed") if (r := rates.by_kernel(k)) is not None}
        kinds = ", ".join(f"{k} {r.rate / 1e9:.1f} ({r.ctas} CTAs)" for k, r in kernel.items())
        engines, hbm = (rates.both or 0) / 1e9, (rates.hbm or 0) / 1e9
        console.print(
            f"rates {name}, GB/s: copy engines both ways {engines:.1f}; kernel both ways {kinds}; "
            f"HBM {hbm:,.0f}"
        )
    if options.out:
        document = {"parameters": count, "before": before.to_dict(), "after": after.to_dict()}
        options.out.write_text(json.dumps(document | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
