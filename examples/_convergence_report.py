"""What the runs of convergence.py say: comparisons, verdicts, tables and the plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _loss_curves import differences
from rich.console import Console
from rich.table import Table

TAIL = 100  # steps at the end that curves are compared over
SMOOTH = 20  # steps that a point of the plot is the mean of, at most
MEASURES = ("distance", "bias", "validation")
COLOURS = {"fp32": "#5b9bd5", "perturbed": "#9aa0a6", "int8": "#c0392b", "bf16": "#7b5ea7"}

Run = dict[str, Any]


def label(moments: str, perturbed: int) -> str:
    return f"{moments}, perturbed {perturbed}" if perturbed else moments


def compare(base: Run, run: Run) -> dict[str, float]:
    apart = differences(base["losses"], run["losses"])[-TAIL:]
    found = {
        "distance": statistics.fmean(map(abs, apart)),
        "bias": statistics.fmean(apart),
        "validation": run["validation_loss"] - base["validation_loss"],
    }
    # A run that diverged is far away: NaN would compare as neither.
    return {name: math.inf if math.isnan(value) else value for name, value in found.items()}


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """The comparisons of all runs whose seed has an fp32 run, and the verdicts."""
    bases = {r["seed"]: r for r in runs if r["moments"] == "fp32" and not r["perturbed"]}
    rows = [
        {
            "seed": run["seed"],
            "run": label(run["moments"], run["perturbed"]),
            **compare(bases[run["seed"]], run),
        }
        for run in runs
        if run["seed"] in bases and run is not bases[run["seed"]]
    ]
    noise = [row for row in rows if "perturbed" in row["run"]]
    largest = {m: max((abs(row[m]) for row in noise), default=None) for m in MEASURES}
    seeds = sorted(bases)
    pairs = [(bases[a], bases[b]) for at, a in enumerate(seeds) for b in seeds[at + 1 :]]
    compared = [compare(a, b) for a, b in pairs]
    spread = {m: statistics.median(abs(c[m]) for c in compared) for m in MEASURES if compared}
    verdicts = {}
    for moments in dict.fromkeys(row["run"] for row in rows if row not in noise):
        mine = [row for row in rows if row["run"] == moments]
        middle = {m: statistics.median(row[m] for row in mine) for m in MEASURES}
        words = {m: word(middle[m], largest[m]) for m in MEASURES}
        verdicts[moments] = {
            "verdict": max(words.values(), key=["within", "unknown", "beyond"].index),
            "noise": words,
            "spread_of_seeds": {m: word(middle[m], spread.get(m)) for m in MEASURES},
            "median": middle,
            "worse_in_seeds": sum(row["bias"] > 0 for row in mine),
            "seeds": len(mine),
        }
    return {"rows": rows, "noise": largest, "spread_of_seeds": spread, "verdicts": verdicts}


def word(value: float, most: float | None) -> str:
    """The verdict on one figure."""
    if most is None:
        return "unknown"
    return "within" if abs(value) <= most else "beyond"


def report(runs: Sequence[Run], summary: dict[str, Any]) -> None:
    """Print every run, then medians and ranges, then the verdicts."""
    console = Console(width=140)
    compared = {(row["seed"], row["run"]): row for row in summary["rows"]}
    table = Table(title=f"Each run, and beside fp32 of its seed (last {TAIL} steps at most)")
    for column in ("seed", "moments", "final loss", "validation loss", *MEASURES, "ms a step"):
        table.add_column(column, justify="left" if column == "moments" else "right")
    for run in sorted(runs, key=lambda run: run["seed"]):
        name = label(run["moments"], run["perturbed"])
        row = compared.get((run["seed"], name), {})
        losses = (f"{run[loss]:.4f}" for loss in ("final_loss", "validation_loss"))
        cells = (figure(m, row[m]) if row else "" for m in MEASURES)
        table.add_row(str(run["seed"]), name, *losses, *cells, f"{1e3 * run['step_seconds']:.0f}")
    console.print(table)

    table = Table(title="Median over the seeds (smallest to largest)")
    for column in ("run", *MEASURES):
        table.add_column(column, justify="left" if column == "run" else "right")
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in summary["rows"]:
        groups.setdefault("fp32, perturbed" if "pert" in row["run"] else row["run"], []).append(row)
    for name, rows in groups.items():
        cells = []
        for m in MEASURES:
            values = sorted(row[m] for row in rows)
            middle, low, high = statistics.median(values), values[0], values[-1]
            cells.append(f"{figure(m, middle)} ({figure(m, low)} to {figure(m, high)})")
        table.add_row(name, *cells)
    if summary["spread_of_seeds"]:
        apart = summary["spread_of_seeds"]
        table.add_row("fp32, two seeds apart", *(figure("distance", apart[m]) for m in MEASURES))
    console.print(table)

    for moments, found in summary["verdicts"].items():
        noise, spread = found["noise"], found["spread_of_seeds"]
        parts = ", ".join(
            f"{m} {figure(m, found['median'][m])} {noise[m]}"
            + ("" if summary["noise"][m] is None else f" {summary['noise'][m]:.3g}")
            for m in MEASURES
        )
        seeds = ", ".join(f"{m} {spread[m]}" for m in MEASURES)
        print(f"{moments}: {found['verdict']} the noise ({parts})")
        print(f"    spread of seeds: {seeds}")
        print(f"    worse than fp32 in {found['worse_in_seeds']} of {found['seeds']} seeds")


def figure(measure: str, value: float) -> str:
    return f"{value:.3g}" if measure == "distance" else f"{value:+.3g}"


def smoothed(values: Sequence[float]) -> list[float]:
    width = min(SMOOTH, -(-len(values) // 4))
    return [statistics.fmean(values[i : i + width]) for i in range(len(values) - width + 1)]


def draw(path: Path, title: str, runs: Sequence[Run]) -> None:
    """Write the PNG: smoothed curves, and how far they are from fp32 of their seed."""
    from matplotlib.figure import Figure  # only here: the figures do without it

    page = Figure(figsize=(12, 5), dpi=150, layout="constrained")
    left, right = page.subplots(1, 2)
    page.suptitle(title, x=0.01, ha="left", fontweight="bold")
    bases = {r["seed"]: r["losses"] for r in runs if r["moments"] == "fp32" and not r["perturbed"]}
    named = set()
    for run in runs:
        name = "fp32, perturbed" if run["perturbed"] else run["moments"]
        line = {"color": COLOURS["perturbed" if run["perturbed"] else name], "linewidth": 1.2}
        line |= {} if name in named else {"label": name}
        named.add(name)
        curve = smoothed(run["losses"])
        steps = range(len(run["losses"]) - len(curve) + 1, len(run["losses"]) + 1)
        left.plot(steps, curve, **line)
        base = bases.get(run["seed"])
        if base is not None and base is not run["losses"]:
            right.plot(steps, smoothed(differences(base, run["losses"])), **line)
    right.axhline(0, color="black", linewidth=0.8)
    for axes, what in ((left, "Training loss"), (right, "Training loss above fp32's, same seed")):
        axes.set_title(f"{what}; a line a seed, smoothed", loc="left", fontsize=10)
        axes.set_xlabel("step")
        axes.set_ylabel("cross entropy, nats a byte")
        axes.grid(color="#e6e6e6")
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
    page.savefig(path, format="png")
