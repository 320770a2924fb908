"""``ghoffload sweep``: how coarse should an offload be, and by which way?

Every combination of the settings given, on this machine's GPU or on one that is simulated, for a
model of a public shape or one's own: step time, what of it the optimizer exposes, memory, bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from ghoffload.sweeping.settings import AXES, Setting

_HELP = {
    "bucket_bytes": "state moved and stepped together: 1MiB,64MiB or 1MiB..1GiB or 1MiB..1GiB..x4",
    "staging_buffers": "buckets in flight: 2,4 or 2..8",
    "memory_kind": "auto, pinned, managed, system, device",
    "transfer": "auto, copy_engine, kernel",
    "ctas": "thread blocks of an update in place; 0: as few as fill the link",
    "step_device": "auto, cuda, cpu",
    "moments": "fp32, bf16, int8",
    "master": "auto, split, fp32, none",
    "checkpoint": "none, layers: recompute each",
    "activations": "none, all: offload them, or budgets of HBM such as 40GiB,60GiB",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ghoffload sweep``."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help="such as llama-8b, gpt-1.3b, qwen2.5-7b, or module:function (a torch.nn.Module that "
        "maps tokens to a loss)",
    )
    parser.add_argument(
        "--machine",
        metavar="PROFILE",
        help="simulate this one, such as gh200-480, or a TOML profile (default: measure the GPU)",
    )
    parser.add_argument("--tokens", default="1x4096", metavar="BxS", help="default: %(default)s")
    for name in AXES:
        default = getattr(Setting(), name)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            metavar="LIST",
            help=f"{_HELP[name]} (default: {default})",
        )
    parser.add_argument(
        "--out", metavar="FILE", help="JSON lines, one a point; a sweep continues from them"
    )
    parser.add_argument("--picture", metavar="FILE", help="draw a .png or .svg (needs matplotlib)")
    parser.add_argument(
        "--warmup", type=int, default=2, metavar="N", help="steps (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="measured steps (default: %(default)s)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=0,
        metavar="N",
        help="processes that simulate (default: by the CPUs, 4 at the most)",
    )


def main(args: argparse.Namespace) -> int:
    """Sweep and print; 0 if any point has figures, 1 if none has, 2 for bad options."""
    # Before torch is imported, which takes seconds.
    complaint = _picture_complaint(args.picture)
    if complaint is not None:
        return _refuse(complaint)
    from ghoffload.errors import MachineUnavailableError
    from ghoffload.sweeping.models import ModelError
    from ghoffload.sweeping.sweep import Sweep, bar

    try:
        plan = Sweep(
            args.model,
            machine=args.machine,
            tokens=args.tokens,
            out=args.out,
            warmup=args.warmup,
            repeats=args.repeats,
            jobs=args.jobs,
            **{name: getattr(args, name) for name in AXES},
        )
    except (ValueError, OSError, MachineUnavailableError) as error:
        return _refuse(str(error))
    try:
        with bar(plan.open, shown=sys.stderr.isatty()) as advance:
            rows = plan.run(advance)
    except ModelError as error:
        return _refuse(str(error))
    return _show(rows, args)


def _show(rows: list[dict[str, Any]], args: argparse.Namespace) -> int:
    from rich.console import Console

    from ghoffload.sweeping.table import best, reasons, table

    # A file has no width, and every column in it is wanted.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(table(rows))
    for number, reason in enumerate(reasons(rows), 1):
        console.print(f"({number}) {reason}", markup=False)
    written = [args.out] if args.out else []
    if args.picture:
        from ghoffload.sweeping.picture import draw

        draw(Path(args.picture), rows)
        written.append(args.picture)
    if written:
        console.print(f"written: {', '.join(written)}", markup=False)
    return 1 if best(rows) is None else 0


def _picture_complaint(picture: str | None) -> str | None:
    if picture is None:
        return None
    path = Path(picture)
    if path.suffix not in (".png", ".svg"):
        return f"--picture expects a file name with .png or .svg, got {picture}"
    if not path.absolute().parent.is_dir():
        return f"--picture expects a folder that is there, got {path.parent}"
    if importlib.util.find_spec("matplotlib") is None:
        return "--picture needs matplotlib: pip install 'ghoffload[demo]'"
    return None


def _refuse(complaint: str) -> int:
    print(f"ghoffload sweep: {complaint}", file=sys.stderr)
    return 2
