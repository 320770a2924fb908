"""How coarse should an offload be? Bucket size by way of transfer, on two simulated machines.

    python examples/sweep_granularity.py                  # llama-8b on a GH200, and over PCIe
    python examples/sweep_granularity.py --real           # measured on this machine's GPU
    python examples/sweep_granularity.py --model tiny --tokens 1x64 --bucket-bytes 1MiB..2MiB

It needs no GPU unless it is asked for. Where copies are small their start costs more than they
carry; where they are large there are few, and the first has nothing to hide behind. A kernel that
works on host memory in place has no granularity.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ghoffload
from ghoffload.sweeping.picture import draw

MACHINES = ("gh200-480", "h200-pcie5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-8b", help="default: %(default)s")
    parser.add_argument("--tokens", default="1x4096", help="batch x sequence")
    parser.add_argument("--bucket-bytes", default="4MiB..512MiB", help="default: %(default)s")
    parser.add_argument("--real", action="store_true", help="measure on this GPU")
    parser.add_argument("--picture", type=Path, default=Path("sweep.png"), help=".png or .svg")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for machine in (None,) if args.real else MACHINES:
        rows += ghoffload.sweep(
            args.model,
            machine=machine,
            tokens=args.tokens,
            bucket_bytes=args.bucket_bytes,
            transfer=["copy_engine", "kernel"],
            progress=True,
        )
    for row in rows:
        print(
            f"{row['machine']:>12}  {row['transfer']:>11}  {row['bucket_bytes'] >> 20:4} MiB  "
            + (row["skipped"] or row["error"] or f"{1e3 * row['exposed_seconds']:9.2f} ms exposed")
        )
    draw(args.picture, rows)
    print(f"written: {args.picture}")


if __name__ == "__main__":
    main()
