"""The demo from its first check to its last file."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from ghoffload.config import OffloadConfig
from ghoffload.demo import page
from ghoffload.demo.display import Display
from ghoffload.demo.place import Place
from ghoffload.demo.presets import AUTO, PRESETS, Preset
from ghoffload.demo.steppers import InHbm, Offloaded
from ghoffload.demo.text import Text, read_text
from ghoffload.demo.train import Interrupt, Result, train
from ghoffload.errors import MachineUnavailableError

_FAILED, _REFUSED, _INTERRUPTED = 1, 2, 130


def run(name: str, steps: int | None, out: Path, seed: int) -> int:
    """Check, train with both optimizers, report. Returns the exit code."""
    try:
        check_picture()
        check_out(out)
        place = Place.find()
        name = place.choose() if name == AUTO else name
        preset = PRESETS[name]
        OffloadConfig.of(preset.config)  # the environment may hold a bad value
        text = read_text(context=preset.context)
    except (MachineUnavailableError, ValueError, OSError) as error:
        print(f"ghoffload demo: error: {error}", file=sys.stderr)
        return _REFUSED
    preset = dataclasses.replace(preset, steps=steps or preset.steps)
    console = Console(highlight=False)
    console.print(escape(_introduction(place, name, preset, text)))
    results: list[Result] = []
    with Interrupt(lambda: console.print("stopping after this step; Ctrl-C again aborts")) as stop:
        with Display(console, steps=preset.steps, tokens=preset.tokens) as display:
            for kind in (Offloaded, InHbm):
                if stop.noted:
                    break
                display.start(kind.name)
                result = train(
                    kind,
                    place,
                    preset,
                    text,
                    seed=seed,
                    interrupt=stop,
                    on_step=display.step,
                )
                results.append(result)
        report(console, place, name, preset, seed, text, results, out, interrupted=stop.noted)
    if stop.noted:
        return _INTERRUPTED
    return 0 if results[0].stopped is None else _FAILED


def report(
    console: Console,
    place: Place,
    name: str,
    preset: Preset,
    seed: int,
    text: Text,
    results: list[Result],
    out: Path,
    *,
    interrupted: bool,
) -> None:
    """Print the table and write the files, of what there is."""
    from ghoffload.demo import picture

    made = [result for result in results if result.losses]
    console.print()
    if made:
        console.print(page.table(place, preset, made))
    for line in page.remarks(place, results):
        console.print(escape(line))
    written = [out / "demo.json"]
    page.write_json(written[0], place, name, preset, seed, text, results, interrupted=interrupted)
    if made:
        written.append(out / "demo.png")
        title = f"{made[0].parameters:,} bf16 parameters on {place.name}"
        picture.draw(written[1], place, title, made)
    console.print(f"Written: {', '.join(escape(str(path)) for path in written)}", soft_wrap=True)


def check_out(out: Path) -> None:
    """Make the directory and see that a file can be written there.

    Raises:
        ValueError: it cannot.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(
            f"expected a directory to write to, got '{out}': {error.strerror or error}"
        ) from error


def check_picture() -> None:
    """See that the picture can be drawn.

    Raises:
        ValueError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "the demo draws a picture and needs matplotlib for it: pip install 'ghoffload[demo]'"
        )


def _introduction(place: Place, name: str, preset: Preset, text: Text) -> str:
    facts = place.describe(preset)
    if place.simulated:
        where = (
            f"virtual, as there is no GPU here: {page.size(preset.hbm_bytes)} of virtual HBM, "
            f"{facts['torch_threads']} threads"
        )
    else:
        where = f"{place.name}, {page.size(facts['hbm_bytes'])} of HBM"
    lines = (
        f"text     {text.files:,} files of Python's standard library, {page.size(len(text.train))}",
        f"model    GPT '{name}': {preset.parameters:,} parameters in bf16, "
        f"{preset.layers} layers of {preset.hidden}",
        f"batches  {preset.batch} x {preset.context} bytes, {preset.steps:,} steps, activations in "
        f"{'fp32' if place.simulated else 'bf16'}",
        f"machine  {where}",
    )
    return "\n".join(lines)
