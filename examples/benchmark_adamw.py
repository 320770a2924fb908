"""OffloadAdamW beside torch, torchao, DeepSpeed and bitsandbytes on 1.1 billion parameters.

    python examples/benchmark_adamw.py --out results.json      # all of it: about 7 minutes
    python examples/benchmark_adamw.py --quick                 # ghoffload and torch: under a minute
    python examples/benchmark_adamw.py --sections link,step --optimizers formats   # 2 minutes
    python examples/benchmark_adamw.py --sections link,step --optimizers peers     # 3 to 4 minutes

Each optimizer runs in a process of its own, so that neither memory nor settings mix; one that fails
is a row with the reason. Compare ratios within one run: the link to the host is measured in it.
It needs a CUDA GPU with 40 GB of free memory, and 40 GB of free host memory. torchao, DeepSpeed and
bitsandbytes are measured where they are installed.

The columns "state" and "rounds" say what is kept and what of it is rounded at each step; where that
is nothing, the optimizer is exact: fp32 masters, fp32 moments. ghoffload is measured with its
defaults, with fp32 masters of their own, with int8 moments, and with all state in HBM.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import _bench_tables
import _bench_worker
import torch
from _bench_model import SHAPES
from _bench_optimizers import OPTIMIZERS, SELECTIONS, missing

SECTIONS = {
    "link": "rates of the copy engines and of HBM, before and after the step",
    "step": "the optimizer's step alone",
    "whole": "a whole training step and its peak HBM",
    "steady": "many steps: is memory flat? (ghoffload's defaults only)",
    "item": "loss.item() while state is written back (the same)",
    "sync": "hidden waits and allocations (the same)",
}
QUICK = ["ours", "torch"]
NO_GPU = 2


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    listed = ", ".join(f"{name} ({what})" for name, what in SECTIONS.items())
    parser.add_argument("--sections", type=_names(SECTIONS), help=f"any of {listed}")
    parser.add_argument("--optimizers", type=_names(OPTIMIZERS, SELECTIONS),
                        help=f"any of {', '.join([*OPTIMIZERS, *SELECTIONS])}")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="ghoffload and torch, fewer repeats")
    parser.add_argument("--shape", choices=SHAPES, default="1.1b")
    parser.add_argument("--batch", type=_positive, default=4, help="sequences in a whole step")
    parser.add_argument("--sequence", type=_positive, default=2048, help="tokens in each")
    parser.add_argument("--repeats", type=_positive, help="timed repeats behind each median")
    parser.add_argument("--steady-steps", type=_positive, default=200)
    parser.add_argument("--limit", type=_positive, default=240, metavar="SECONDS",
                        help="for one optimizer, then it is stopped")  # fmt: skip
    parser.add_argument("--total-limit", type=_positive, default=480, metavar="SECONDS",
                        help="for everything; what does not fit is left out")  # fmt: skip
    parser.add_argument("--out", type=Path, help="write everything that was found as JSON")
    parser.add_argument("--worker", nargs=2, metavar=("OPTIMIZER", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    sections = [name for name in SECTIONS if not options.quick or name != "steady"]
    options.sections = options.sections or sections
    options.optimizers = options.optimizers or (QUICK if options.quick else list(OPTIMIZERS))
    options.repeats = options.repeats or (5 if options.quick else 12)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        print(
            "benchmark_adamw needs a CUDA GPU that torch can use; "
            f"torch {torch.__version__} finds none here.",
            file=sys.stderr,
        )
        return NO_GPU
    settings = _bench_worker.Settings(
        sections=tuple(options.sections),
        shape=options.shape,
        batch=options.batch,
        sequence=options.sequence,
        repeats=options.repeats,
        warmup=2 if options.quick else 3,
        steady_steps=options.steady_steps,
    )
    if options.worker:
        return _bench_worker.main(options.worker[0], settings, Path(options.worker[1]))
    if options.out and not options.out.resolve().parent.is_dir():
        print(f"--out expects a file in a folder that exists, got {options.out}", file=sys.stderr)
        return 1
    return compare(options, settings)


def compare(options: argparse.Namespace, settings: _bench_worker.Settings) -> int:
    """Run every optimizer in a process of its own; print tables; 0 where none of them failed."""
    rows: dict[str, dict[str, Any]] = {}
    start = time.monotonic()
    for name in options.optimizers:
        left = options.total_limit - (time.monotonic() - start)
        print(f"{OPTIMIZERS[name].label} ...", file=sys.stderr, flush=True)
        if (module := missing(name)) is not None:
            rows[name] = {"left_out": f"{module} is not installed"}
        else:
            rows[name] = run(name, options, min(options.limit, left))
        if options.out:
            _write(options.out, settings, rows, time.monotonic() - start)
    seconds = time.monotonic() - start
    machine = next((row["machine"] for row in rows.values() if "machine" in row), {})
    parameters = next((row["parameters"] for row in rows.values() if "parameters" in row), 0)
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"{parameters:,} bf16 parameters; {options.batch} x {options.sequence} tokens; "
          f"medians of {options.repeats}\n")  # fmt: skip
    print(_bench_tables.render(rows))
    if "report" in rows.get("ours", {}):
        print(f"\n### What ghoffload says it holds\n\n{rows['ours']['report']}")
    print(f"\n{seconds:.0f} s in all; " + "; ".join(_bench_tables.figures(rows)))
    return 1 if any("error" in row for row in rows.values()) else 0


def run(name: str, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """What the process of one optimizer found, with ``error`` where it came to no end."""
    if limit < 20:
        return {"error": f"left out: --total-limit of {options.total_limit} s was used up"}
    with tempfile.TemporaryDirectory() as folder:
        notes, log = Path(folder) / "notes.json", Path(folder) / "log"
        command = [sys.executable, os.path.abspath(__file__), "--worker", name, str(notes)]
        for flag in ("shape", "batch", "sequence", "repeats", "steady_steps"):
            command += [f"--{flag.replace('_', '-')}", str(getattr(options, flag))]
        command += ["--sections", ",".join(options.sections)]
        command += ["--quick"] if options.quick else []
        with log.open("wb") as output:
            # A session of its own, so that what it starts (a compiler) ends with it.
            worker = subprocess.Popen(command, stdout=output, start_new_session=True)
            try:
                ending = f"ended with exit code {worker.wait(limit)}"
            except subprocess.TimeoutExpired:
                ending = f"stopped after {limit:.0f} s"
            finally:
                if worker.poll() is None:
                    os.killpg(worker.pid, signal.SIGKILL)
                    worker.wait()
        found = json.loads(notes.read_text(encoding="utf-8")) if notes.exists() else {}
        if not found.get("finished"):
            found.setdefault("error", ending)
            print(f"    {found['error']}", file=sys.stderr)
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
            print("\n".join(f"    > {line}" for line in tail), file=sys.stderr, flush=True)
        return found


def _write(
    path: Path, settings: _bench_worker.Settings, rows: _bench_tables.Rows, seconds: float
) -> None:
    document = {
        "settings": dataclasses.asdict(settings),
        "seconds": seconds,
        "rows": rows,
        "verdicts": _bench_tables.verdicts(rows),
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _names(known: Iterable[str], several: Mapping[str, list[str]] | None = None) -> Any:
    several = several or {}
    words = [*known, *several]

    def names(text: str) -> list[str]:
        given = [name.strip() for name in text.split(",") if name.strip()]
        for name in given:
            if name not in words:
                raise argparse.ArgumentTypeError(f"expects any of {', '.join(words)}, got {name!r}")
        if not given:
            raise argparse.ArgumentTypeError(f"expects any of {', '.join(words)}, got nothing")
        return list(dict.fromkeys(n for name in given for n in several.get(name, [name])))

    return names


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expects a whole number of 1 or more, got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
