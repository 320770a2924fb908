"""What the demo leaves behind, as text: the table and the JSON file."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from ghoffload._version import __version__
from ghoffload.demo.place import Place
from ghoffload.demo.presets import Preset
from ghoffload.demo.text import Text
from ghoffload.demo.train import Result

_STATE = ("master", "rest", "exp_avg", "exp_avg_sq")
_MEANS_OVER = 10  # steps


def size(nbytes: float) -> str:
    """Bytes as text: ``"32.8 MB"``."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.{1 if nbytes >= 10 * scale else 2}f} {unit}"
    return f"{nbytes:.0f} B"


def places(result: Result, *things: str) -> dict[str, int]:
    """Bytes of things by memory kind."""
    found: dict[str, int] = {}
    for what, kind, nbytes in result.held:
        if what in things:
            found[kind] = found.get(kind, 0) + nbytes
    return found


def called(kind: str, place: Place) -> str:
    """A memory kind, as a reader knows it."""
    if kind == "device":
        return place.hbm
    return "virtual host" if place.simulated else f"{kind} host"


def comparison(results: Sequence[Result]) -> dict[str, Any] | None:
    """How far the losses of two runs are apart over the steps that both made."""
    if len(results) < 2:
        return None
    differences = [abs(a - b) for a, b in zip(results[0].losses, results[1].losses, strict=False)]
    if not differences:
        return None
    largest = max(differences)
    return {
        "steps": len(differences),
        "max_loss_difference": largest,
        "max_at_step": differences.index(largest) + 1,
        "mean_last_loss_difference": float(np.mean(differences[-_MEANS_OVER:])),
        "mean_last_over_steps": min(_MEANS_OVER, len(differences)),
    }


def table(place: Place, preset: Preset, results: Sequence[Result]) -> Table:
    """One column a run."""
    page = Table(title_justify="left", title_style="bold")
    page.title = (
        f"{results[0].parameters:,} bf16 parameters, {preset.tokens:,} bytes of text a step"
    )
    if place.simulated:
        page.title += "\nVIRTUAL MACHINE: bytes as on a GPU, times of this CPU"
    page.add_column("")
    for result in results:
        page.add_column(result.name, justify="right")

    def row(name: str, *values: str) -> None:
        page.add_row(name, *values)

    def bytes_row(name: str, *things: str) -> None:
        cells = []
        for result in results:
            held = places(result, *things)
            cells.append(
                "\n".join(f"{size(n)}  {called(k, place)}" for k, n in held.items()) or "-"
            )
        row(name, *cells)

    row("steps", *(_steps(result) for result in results))
    row("training loss", *(f"{result.final_loss:.4f}" for result in results))
    validated = [f"{r.validation[-1][1]:.4f}" if r.validation else "-" for r in results]
    row("validation loss", *validated)
    page.add_section()
    bytes_row("weights", "weights")
    bytes_row("gradients", "gradients")
    bytes_row("master and moments", *_STATE)
    bytes_row("staging buffers", "staging buffers")
    peaks = [size(r.peak_hbm_bytes) if r.peak_hbm_bytes else "-" for r in results]
    row(f"peak {place.hbm}", *peaks)
    page.add_section()
    row("to HBM a step", *(size(result.moved("h2d")) for result in results))
    row("to the host a step", *(size(result.moved("d2h")) for result in results))
    on = " (this CPU)" if place.simulated else ""
    row(f"time a step{on}", *(f"{1e3 * result.step_seconds:,.0f} ms" for result in results))
    row("tokens/s", *(f"{preset.tokens / result.step_seconds:,.0f}" for result in results))
    return page


def remarks(place: Place, results: Sequence[Result]) -> list[str]:
    """What the table needs a sentence for."""
    lines = [f"{r.name} stopped: {r.stopped}" for r in results if r.stopped]
    both = comparison(results)
    if both is not None:
        also = "" if place.simulated else "; some of torch's backward kernels add in no fixed order"
        lines.append(
            f"Losses of the two differ by at most {both['max_loss_difference']:.2g} (step "
            f"{both['max_at_step']} of {both['steps']}), on average over the last "
            f"{both['mean_last_over_steps']} steps by {both['mean_last_loss_difference']:.2g}. "
            "Seed, batches and forward kernels are the same; an update differs by a few units in "
            f"the last place{also}, and training amplifies what differs."
        )
    return lines


def write_json(
    path: Path,
    place: Place,
    name: str,
    preset: Preset,
    seed: int,
    text: Text,
    results: Sequence[Result],
    *,
    interrupted: bool,
) -> None:
    """Write everything that is known of the runs."""
    document = {
        "ghoffload": __version__,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "interrupted": interrupted,
        "figures": "simulated: bytes are counted on a virtual machine, times are this CPU's"
        if place.simulated
        else "measured",
        "preset": {"name": name, **asdict(preset)},
        "seed": seed,
        "dtype": {"weights": "bfloat16", "activations": str(place.compute).split(".")[-1]},
        "text": {
            "files": text.files,
            "train_bytes": len(text.train),
            "validation_bytes": len(text.validation),
        },
        "machine": place.describe(preset),
        "versions": _versions(),
        "runs": [_run(preset, result) for result in results],
        "comparison": comparison(results),
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _steps(result: Result) -> str:
    return f"{len(result.losses)}{' (stopped early)' if result.stopped else ''}"


def _run(preset: Preset, result: Result) -> dict[str, Any]:
    made = bool(result.losses)
    return {
        **asdict(result),
        "held": [row._asdict() for row in result.held],
        "h2d_bytes_per_step": result.moved("h2d") if made else None,
        "d2h_bytes_per_step": result.moved("d2h") if made else None,
        "final_loss": result.final_loss if made else None,
        "final_validation_loss": result.validation[-1][1] if result.validation else None,
        "median_step_seconds": result.step_seconds if made else None,
        "tokens_per_second": preset.tokens / result.step_seconds if made else None,
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
    }
    for name in ("numpy", "numba", "cuda-bindings"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
