"""``ghoffload bandwidth``: what the link and the memories of this machine give.

Copies between host and device by copy engine and by kernel, for each memory kind, by size and by
number of CTAs; HBM; host memory by threads; what one copy and one launch cost. Medians, warm.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ghoffload bandwidth``."""
    parser.add_argument("--quick", action="store_true", help="fewer sizes and samples")
    parser.add_argument(
        "--device", type=int, default=0, help="CUDA device index (default: %(default)s)"
    )
    parser.add_argument("--cpu", action="store_true", help="host memory alone")
    parser.add_argument("--json", metavar="FILE", help="write every figure to this file")
    parser.add_argument("--plot", metavar="FILE", help="draw a PNG (needs matplotlib)")
    parser.add_argument(
        "--save-profile", metavar="FILE", help="write a machine profile (TOML; needs a GPU)"
    )


def main(args: argparse.Namespace) -> int:
    """Measure and print; 0 if all went well, 1 if something failed, 2 for bad options."""
    # Before torch is imported, which takes seconds.
    complaint = _unwritable(args) or _no_matplotlib(args)
    if complaint is not None:
        return _refuse(complaint)
    import torch

    device = None
    if not args.cpu and torch.cuda.is_available():
        count = torch.cuda.device_count()
        if not 0 <= args.device < count:
            return _refuse(f"--device expects 0 to {count - 1}, got {args.device}")
        device = args.device
    if device is None and args.save_profile:
        why = "--cpu leaves it out" if args.cpu else "torch finds none here"
        return _refuse(f"--save-profile needs a GPU to measure, and {why}")
    return _run(args, device)


def _run(args: argparse.Namespace, device: int | None) -> int:
    from rich.console import Console

    from ghoffload.bandwidth.profile import to_toml
    from ghoffload.bandwidth.run import measure, no_gpu_sentence
    from ghoffload.bandwidth.table import tables

    console = Console(highlight=False)
    with console.status("measuring") as status:
        results = measure(quick=args.quick, device=device, say=status.update)
    about = results.environment
    console.print(f"{about['gpu'] or 'host memory'}, {about['date']}, torch {about['torch']}")
    for table in tables(results):
        console.print(table)
    for note in results.notes:
        console.print(note, markup=False)
    if results.exposed:
        console.print(f"{results.exposed} samples contain launch cost: this host was too slow")
    written = []
    if args.json:
        text = json.dumps(results.to_json(), indent=1) + "\n"
        Path(args.json).write_text(text, encoding="utf-8")
        written.append(args.json)
    if args.save_profile:
        Path(args.save_profile).write_text(to_toml(results), encoding="utf-8")
        written.append(args.save_profile)
    if args.plot:
        from ghoffload.bandwidth.picture import draw

        draw(Path(args.plot), results)
        written.append(args.plot)
    for failure in results.failures:
        print(f"ghoffload bandwidth: {failure}", file=sys.stderr)
    ending = f"; written: {', '.join(written)}" if written else ""
    console.print(f"{len(results.rows)} figures in {results.seconds:.0f} s{ending}", markup=False)
    if device is None and not args.cpu:
        console.print(no_gpu_sentence(), markup=False)
    return 1 if results.failures else 0


def _refuse(complaint: str) -> int:
    print(f"ghoffload bandwidth: {complaint}", file=sys.stderr)
    return 2


def _unwritable(args: argparse.Namespace) -> str | None:
    """A minute of measuring should not end in a typing error."""
    for option, name in (
        ("--json", args.json),
        ("--plot", args.plot),
        ("--save-profile", args.save_profile),
    ):
        if not name:
            continue
        path = Path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8"):
                pass
        except OSError as error:
            return f"{option} {name!r} cannot be written: {error}"
    return None


def _no_matplotlib(args: argparse.Namespace) -> str | None:
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install 'ghoffload[demo]'"
    return None
