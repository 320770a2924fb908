"""``ghoffload doctor``: what this machine is, what will be used and why, and what is wrong."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ghoffload doctor``."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a page")
    parser.add_argument(
        "--no-copies", action="store_true", help="leave out the measurement of copies"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="measure again what was measured here before"
    )


def main(args: argparse.Namespace) -> int:
    """Examine this machine; 1 if something found will hurt, else 0."""
    from ghoffload.doctor.report import examine_machine
    from ghoffload.machine.topology import Reader

    report = examine_machine(Reader.of_this_machine(), copies=not args.no_copies, fresh=args.fresh)
    if args.json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        from rich.console import Console

        from ghoffload.doctor.page import show

        show(report, Console(highlight=False))
    return int(report.hurts)
