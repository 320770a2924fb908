"""Does training with coded moments converge as with fp32 moments?

    python examples/convergence.py --out convergence.json --plot convergence.png
    python examples/convergence.py --formats int8,bf16 --out convergence.json   # one more format

The first takes about 7 minutes on one H200: 3 seeds x 3 runs x 300 steps of the 1.1 B model with
8 x 1024 bytes of text a step. Without a GPU it is the tiny preset, a few minutes on 2 CPUs. The
JSON file is written after every run; started again with the same file, only the missing runs are
trained. So a killed program loses one run, and seeds, formats and perturbed runs can be added.

A seed sets the model's initial weights and the order of the text. For each it trains the demo's
model with OffloadAdamW on split masters, once for each format of the moments, and with fp32 moments
once more after a change of one unit in the last place of each master (no bf16 weight changes). How
far this perturbed run is from the unperturbed one is the noise: rounding, and on a GPU the order of
sums in attention's backward. Everything is compared with the fp32 run of the same seed, over the
last 100 steps:

    distance       mean of the absolute difference of the losses
    bias           mean of the difference: above 0 is worse than fp32
    validation     difference of the validation losses, on the same text for all seeds

A format is "within" the noise in one of these where the median of its seeds is no further from 0
than the furthest perturbed run, and "within" as a whole where it is so in all three. That is a
coarse test: with 3 seeds and a perturbed run each, a format that is nothing but noise comes out
beyond it in distance about one time in 5 (in 12 with --perturbed 2). So look at the figures, not at
the word alone. "Spread of seeds", mostly much wider, is the same between fp32 runs of two seeds:
another initialisation and, but for the validation loss, other text.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any, get_args

import torch
from _convergence_report import Run, draw, label, report, summarise
from _loss_curves import PRESETS, perturbed_offloaded

from ghoffload.config import MemoryKind
from ghoffload.demo.place import Place
from ghoffload.demo.presets import Preset
from ghoffload.demo.steppers import Offloaded
from ghoffload.demo.text import Text, read_text
from ghoffload.demo.train import Interrupt, train

FINAL = 20  # steps that a final loss is the mean of


def train_one(place: Place, preset: Preset, text: Text, seed: int, moments: str, at: int) -> Run:
    """One run; ``at`` numbers the perturbed ones from 1, 0 is none."""
    wanted = {**preset.config, "moments": moments}
    preset = dataclasses.replace(preset, config=wanted)
    kind = perturbed_offloaded(at) if at else Offloaded
    before = time.perf_counter()
    with Interrupt(lambda: print("stops after this step")) as interrupt:
        result = train(
            kind, place, preset, text, seed=seed, interrupt=interrupt, on_step=lambda result: None
        )
    if result.stopped:
        raise SystemExit(f"seed {seed}, {label(moments, at)}: {result.stopped}")
    other = {name: result.config[name] for name in wanted if result.config[name] != wanted[name]}
    if other:
        raise SystemExit(f"expected {wanted}, got {other}: unset the GHOFFLOAD_ variables")
    return {
        "seed": seed,
        "moments": moments,
        "perturbed": at,
        "final_loss": statistics.fmean(result.losses[-FINAL:]),
        "validation_loss": result.validation[-1][1],
        "seconds": time.perf_counter() - before,
        "step_seconds": result.step_seconds,
        "config": result.config,
        "validation": result.validation,
        "losses": result.losses,
    }


def settings_of(name: str, preset: Preset, place: Place, text: Text) -> dict[str, Any]:
    """What has to be the same for runs to be compared."""
    facts = place.describe(preset)
    return {
        "preset": name,
        **dataclasses.asdict(preset),
        "parameters": preset.parameters,
        "machine": facts.get("gpu", facts["kind"]),
        "torch": torch.__version__,
        "text": [text.files, len(text.train), len(text.validation)],
    }


def read_runs(path: Path | None, settings: dict[str, Any]) -> list[Run]:
    """The finished runs of a file that an earlier call left."""
    if path is None or not path.exists():
        return []
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        found, runs = document["settings"], document["runs"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} is not a file of this program: {error!r}") from error
    for key, value in settings.items():
        if found.get(key) != value:
            raise SystemExit(
                f"{path} has runs of other settings: expected {key} {value!r}, "
                f"got {found.get(key)!r}; take another --out"
            )
    return list(runs)


def write(path: Path, document: dict[str, Any]) -> None:
    """Write the file whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(document), encoding="utf-8")
    os.replace(part, path)


def formats_of(text: str) -> list[str]:
    given = [name.strip() for name in text.split(",") if name.strip()]
    if not given or not set(given) <= {"fp32", "bf16", "int8"}:
        raise argparse.ArgumentTypeError(f"expected some of fp32,bf16,int8, got {text!r}")
    return list(dict.fromkeys(["fp32", *given]))


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, got {text!r}")
    return int(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="default: 1b on a GPU, tiny without")
    add("--steps", type=positive, default=300)
    add("--seeds", type=positive, default=3, help="how many, from 0 on")
    add("--formats", type=formats_of, default="fp32,int8", help="fp32 is always among them")
    add("--perturbed", type=positive, default=1, help="perturbed fp32 runs a seed")
    add("--batch", type=positive, help="sequences a step, if not the preset's")
    add("--context", type=positive, help="bytes of text a sequence, if not the preset's")
    kinds = get_args(MemoryKind)
    add("--memory-kind", choices=kinds, help="default: device on a GPU, auto without; same bits")
    add("--out", type=Path, help="JSON file; runs that it already has are not trained again")
    add("--plot", type=Path, help="PNG file")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    place = Place.find()
    name = args.preset or ("tiny" if place.simulated else "1b")
    preset = PRESETS[name]
    kind = args.memory_kind or ("auto" if place.simulated else "device")
    preset = dataclasses.replace(
        preset,
        steps=args.steps,
        batch=args.batch or preset.batch,
        context=args.context or preset.context,
        config={**preset.config, "memory_kind": kind, "master": "split"},
    )
    text = read_text(context=preset.context)
    settings = settings_of(name, preset, place, text)
    runs = read_runs(args.out, settings)
    done = {(run["seed"], run["moments"], run["perturbed"]) for run in runs}
    states = [("fp32", at) for at in range(args.perturbed + 1)]
    states += [(moments, 0) for moments in args.formats if moments != "fp32"]
    wanted = [(seed, *state) for seed in range(args.seeds) for state in states]
    print(
        f"{preset.parameters:,} parameters, {preset.steps} steps of {preset.tokens:,} bytes of "
        f"text, {len(wanted)} runs on {place.name}",
        flush=True,
    )
    for at, (seed, moments, perturbed) in enumerate(wanted, 1):
        title = f"{at} of {len(wanted)}: seed {seed}, {label(moments, perturbed)}"
        if (seed, moments, perturbed) in done:
            print(f"{title}: already in {args.out}", flush=True)
            continue
        run = train_one(place, preset, text, seed, moments, perturbed)
        runs.append(run)
        if args.out:
            write(args.out, {"settings": settings, "summary": summarise(runs), "runs": runs})
        print(
            f"{title}: final loss {run['final_loss']:.4f}, validation "
            f"{run['validation_loss']:.4f}, {run['seconds']:.0f} s",
            flush=True,
        )
    report(runs, summarise(runs))
    if args.plot:
        draw(args.plot, f"{preset.parameters / 1e6:,.1f} M parameters, {place.name}", runs)


if __name__ == "__main__":
    main()
