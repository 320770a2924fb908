"""``ghoffload check``: does this machine compute the bits it should?

For machines nobody has tried yet: golden hashes of every kernel on every memory kind, the waits,
a short training against torch, and one JSON file to attach to a report.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ghoffload check``."""
    parser.add_argument(
        "--out", default="ghoffload-check.json", help="JSON file to write (default: %(default)s)"
    )
    parser.add_argument(
        "--cpu", action="store_true", help="leave the GPU out and check the CPU kernels alone"
    )
    parser.add_argument(
        "--seeds", type=int, default=20, help="adversarial orders to try (default: %(default)s)"
    )


def main(args: argparse.Namespace) -> int:
    """Run the checks, stop at the first difference; 0 if all agree, 1 if not, 2 for bad options."""
    out = Path(args.out)
    if args.seeds < 1:
        print(f"ghoffload check: --seeds expects 1 or more, got {args.seeds}", file=sys.stderr)
        return 2
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        print(f"ghoffload check: --out {args.out!r} cannot be written: {error}", file=sys.stderr)
        return 2
    from rich.console import Console

    from ghoffload.check.environment import describe
    from ghoffload.check.suite import checks

    console = Console()
    report: dict[str, Any] = {"environment": describe(), "checks": [], "passed": False}
    failed = False
    try:
        for check in checks(gpu=not args.cpu, seeds=args.seeds):
            start = time.perf_counter()
            try:
                detail, passed = check.run(), True
            except Exception as error:  # a difference, or a machine that cannot do it: both end it
                detail, passed = f"{type(error).__name__}: {error}", False
            seconds = round(time.perf_counter() - start, 2)
            report["checks"].append(
                {"name": check.name, "passed": passed, "detail": detail, "seconds": seconds}
            )
            mark = "[green]ok[/]  " if passed else "[red]FAIL[/]"
            text = detail if isinstance(detail, str) else json.dumps(detail)
            console.print(f"{mark} {check.name} ({seconds:.1f} s)", highlight=False)
            console.print(f"     {text}", highlight=False, markup=False)
            if not passed:
                failed = True
                break
        report["passed"] = not failed
    finally:
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    verdict = "a difference was found" if failed else "everything agrees"
    console.print(f"{verdict}; the report is in {out}", highlight=False)
    return int(failed)
