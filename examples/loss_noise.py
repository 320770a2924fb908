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

import torch
from torch import nn

from ghoffload.demo.place import Place
from ghoffload.demo.presets import PRESETS, Preset
from ghoffload.demo.steppers import InHbm, Offloaded
from ghoffload.demo.text import read_text
from ghoffload.demo.train import Interrupt, Result, train

PRESETS_HERE = {
    "tiny": PRESETS["tiny"],
    "25m": Preset(hidden=512, layers=8, heads=8, context=256, batch=32, steps=500, lr=1e-3),
    "1b": PRESETS["1b"],
}


def perturbed(seed: int) -> type[InHbm]:
    """Torch's AdamW whose masters begin one unit in the last place off, up or down."""

    class Perturbed(InHbm):
        name = f"torch AdamW, perturbed {seed}"

        def __init__(self, model: nn.Module, lr: float, config: dict[str, object]) -> None:
            super().__init__(model, lr, config)
            generator = torch.Generator(device=self.masters[0].device).manual_seed(seed)
            with torch.no_grad():
                for master in self.masters:
                    bits = master.view(torch.int32)
                    shape, device = bits.shape, bits.device
                    noise = torch.randint(0, 2, shape, generator=generator, device=device)
                    bits.add_(torch.where(master == 0, 0, 2 * noise - 1).to(torch.int32))

    return Perturbed


def distance(one: Result, other: Result, last: int) -> dict[str, float]:
    """How far two curves are apart: largest and mean over all steps, and mean at the end."""
    apart = [abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)]
    return {
        "largest": max(apart),
        "mean": statistics.fmean(apart),
        f"mean of the last {last}": statistics.fmean(apart[-last:]),
        "final loss": other.final_loss,
        "validation": other.validation[-1][1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS_HERE, default=None)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--runs", type=int, default=4, help="perturbed runs")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    args = parser.parse_args()
    place = Place.find()
    name = args.preset or ("tiny" if place.simulated else "25m")
    preset = replace(PRESETS_HERE[name], steps=args.steps)
    text = read_text(context=preset.context)
    last = min(100, args.steps)
    kinds: list[type[InHbm] | type[Offloaded]] = [InHbm, *map(perturbed, range(args.runs))]
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
