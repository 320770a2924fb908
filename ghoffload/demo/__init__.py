"""``ghoffload demo``: train a small GPT twice, with its optimizer state on the host and in HBM.

Only what the command line needs is imported here; torch and the rest come with ``main``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ghoffload.demo.presets import AUTO, PRESETS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to ``parser``."""
    parser.add_argument(
        "--preset",
        type=_preset,
        default=AUTO,
        metavar="NAME",
        help=f"size of the model: {', '.join((AUTO, *PRESETS))} (default: %(default)s: by the "
        "memory that is there; without a GPU the laptop's)",
    )
    parser.add_argument(
        "--steps",
        type=_steps,
        metavar="N",
        help="training steps of each run (default: the preset's)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("ghoffload-demo"),
        metavar="DIR",
        help="where demo.png and demo.json are written (default: ./%(default)s)",
    )
    parser.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="of weights and batches (default: 0)"
    )


def main(args: argparse.Namespace) -> int:
    """Run the demo.

    Returns:
        The exit code: 0 for success, 1 where memory did not suffice, 2 for something that was
        asked for and cannot be had (nothing was trained), 130 after Ctrl-C.
    """
    # Read when torch is imported. Threads that spin at their barriers hold each other up as soon as
    # anything else runs: 7 times slower on two busy cores, measured.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from ghoffload.demo.command import run

    return run(args.preset, args.steps, args.out, args.seed)


def _preset(text: str) -> str:
    if text != AUTO and text not in PRESETS:
        raise argparse.ArgumentTypeError(
            f"expected one of {', '.join((AUTO, *PRESETS))}; got {text!r}"
        )
    return text


def _steps(text: str) -> int:
    return _integer(text, 1)


def _seed(text: str) -> int:
    return _integer(text, 0)


def _integer(text: str, least: int, most: int = 2**63 - 1) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:  # torch takes seeds of 64 bits
        raise argparse.ArgumentTypeError(
            f"expected a whole number of {least} or more, got {text!r}"
        )
    return value
