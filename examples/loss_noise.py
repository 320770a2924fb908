"""Is the distance between two loss curves the optimizer's, or chaos?

Trains the demo's model several times from one seed on the same batches: with torch's AdamW on fp32
masters, with the same after a change of one part in 2^23 in each master (the smallest there is: no
weight changes), and with ghoffload's OffloadAdamW. The perturbed runs' distances from the first are
the noise: two exact optimizers cannot be told apart beneath it.

    python examples/loss_noise.py --steps 500 --out loss-noise.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

from _loss_curves import PRESETS, differences, perturbed_torch

from ghoffload.demo.place import Place
from ghoffload.demo.steppers import InHbm, Offloaded
from ghoffload.demo.text import read_text
from ghoffload.demo.train import Interrupt, Result, train


def distance(one: Result, other: Result, last: int) -> dict[str, float]:
    """How far two curves are apart: largest and mean over all steps, and mean at the end."""
    apart = [abs(d) for d in differences(one.losses, other.losses)]
    return {
        "largest": max(apart),
        "mean": statistics.fmean(apart),
        f"mean of the last {last}": statistics.fmean(apart[-last:]),
        "final loss": other.final_loss,
        "validation": other.validation[-1][1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default=None)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--runs", type=int, default=4, help="perturbed runs")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    args = parser.parse_args()
    place = Place.find()
    name = args.preset or ("tiny" if place.simulated else "25m")
    preset = replace(PRESETS[name], steps=args.steps)
    text = read_text(context=preset.context)
    last = min(100, args.steps)
    kinds: list[type[InHbm] | type[Offloaded]] = [InHbm, *map(perturbed_torch, range(args.runs))]
    kinds.append(Offloaded)
    runs = []
    for kind in kinds:
        with Interrupt(lambda: None) as interrupt:
            run = train(
                kind, place, preset, text, seed=0, interrupt=interrupt, on_step=lambda result: None
            )
        if run.stopped:
            raise SystemExit(f"{kind.name}: {run.stopped}")
        runs.append(run)
        print(f"{kind.name}: final loss {run.final_loss:.4f}", flush=True)
    rows = {run.name: distance(runs[0], run, last) for run in runs[1:]}
    noise = [row[f"mean of the last {last}"] for label, row in rows.items() if "torch" in label]
    ours = rows[Offloaded.name][f"mean of the last {last}"]
    print(f"\n{preset.parameters:,} parameters, {args.steps} steps; distance from {runs[0].name}:")
    for label, row in rows.items():
        print(f"  {label:30s} " + "  ".join(f"{k} {v:.5f}" for k, v in row.items()))
    verdict = "within" if ours <= max(noise) else "beyond"
    print(f"mean of the last {last}: {ours:.5f}, {verdict} the noise ({min(noise):.5f} to", end=" ")
    print(f"{max(noise):.5f})")
    if args.out:
        curves = {run.name: run.losses for run in runs}
        document = {"preset": name, "distances": rows, "verdict": verdict, "losses": curves}
        args.out.write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
