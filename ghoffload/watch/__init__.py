"""``ghoffload watch``: what processes that use the runtime hold and do, while they do it."""

from __future__ import annotations

import argparse
import os
import sys

_LEAST_SECONDS = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ghoffload watch``."""
    parser.add_argument(
        "pid",
        metavar="PID",
        nargs="?",
        type=int,
        help="the process to watch (default: every one of this user that uses ghoffload)",
    )
    parser.add_argument(
        "--interval",
        metavar="S",
        type=float,
        default=1.0,
        help="seconds between looks (default: %(default)s)",
    )
    parser.add_argument(
        "--once", action="store_true", help="look twice, an interval apart, print once and end"
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each look")


def main(args: argparse.Namespace) -> int:
    """Watch until interrupted or nothing is left; 1 if there was nothing, 2 for bad options."""
    if not _LEAST_SECONDS <= args.interval <= 3600:
        print(
            f"ghoffload watch: --interval expects {_LEAST_SECONDS} to 3600 seconds, "
            f"got {args.interval:g}",
            file=sys.stderr,
        )
        return 2
    from ghoffload.watch.run import watch

    try:
        return watch(args.pid, interval=args.interval, once=args.once, as_json=args.json)
    except KeyboardInterrupt:  # the ordinary end of watching
        return 0
    except BrokenPipeError:  # so is that of whoever reads it; Python would flush once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
