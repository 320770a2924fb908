"""What one process of the benchmark does: one optimizer through all sections, noted as it goes."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _bench_measure as measure
import psutil
import torch
from _bench_model import SHAPES, Llama
from _bench_optimizers import OPTIMIZERS, Offload, Optimizer

# The pipeline leaves about one bucket to be written back when the last update has ended.
ITEM_CONFIG = {"bucket_bytes": 5_000_000_000, "staging_buffers": 2}
ITEM_BYTES = 4_000_000_000


@dataclass(frozen=True)
class Settings:
    """What to measure, and how often."""

    sections: tuple[str, ...]
    shape: str = "1.1b"
    batch: int = 4
    sequence: int = 2048
    repeats: int = 10
    warmup: int = 3
    steady_steps: int = 200


class Notes:
    """Findings of a worker, written to a file after every section: nothing is lost to a crash."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = {"seconds": {}}
        self.write()

    def write(self) -> None:
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.found, indent=1), encoding="utf-8")
        beside.replace(self.path)

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.found["seconds"][name] = time.perf_counter() - start
            self.write()
            print(f"    {name}: {self.found['seconds'][name]:.1f} s", file=sys.stderr, flush=True)


def main(name: str, settings: Settings, path: Path) -> int:
    """Measure the optimizer ``name`` and write what is found to ``path``; 0 if all went well."""
    notes = Notes(path)
    try:
        _measure(name, settings, notes)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        lines = str(error).strip().splitlines() or [""]
        notes.found["error"] = f"{type(error).__name__}: {lines[0]} ({where})"
        notes.write()
        traceback.print_exc()
        return 1
    notes.found["finished"] = True
    notes.write()
    if name == "deepspeed":  # its process group may wait for peers at exit; there are none
        sys.stdout.flush()
        os._exit(0)
    return 0


def _measure(name: str, settings: Settings, notes: Notes) -> None:
    wanted, found = settings.sections, notes.found
    kind = OPTIMIZERS[name]
    torch.manual_seed(0)
    with notes.section("model, forward + backward alone"):
        model = Llama(SHAPES[settings.shape], device=measure.DEVICE, dtype=torch.bfloat16)
        found["parameters"] = parameters = sum(weight.numel() for weight in model.parameters())
        found["machine"] = _machine()
        long = _tokens(settings, settings.batch, settings.sequence)
        short = _tokens(settings, 1, min(128, settings.sequence))
        nothing = Optimizer(model)
        if "whole" in wanted:
            found["alone"] = measure.whole_step(nothing, long, settings.repeats)
        else:
            measure.train(nothing, short)
        nothing.zero_grad()
        measure.collect()
        found["host"] = {"bare": _host()}
    with notes.section("imports"):
        kind.load()
        found["host"]["imported"] = _host()
    with notes.section("construction and first steps"):
        start = time.perf_counter()
        optimizer = kind(model)
        torch.cuda.synchronize()
        found["construction_s"] = time.perf_counter() - start
        found["version"] = optimizer.version()
        found["host"]["constructed"] = _host()
        for _ in range(2):
            measure.train(optimizer, short)
        optimizer.zero_grad()
        measure.collect()
        found["host"]["stepped"] = _host()
        if isinstance(optimizer, Offload):
            found["ledger"] = optimizer.ledger()
            found["report"] = optimizer.report()
    if "link" in wanted:
        with notes.section("link"):
            found["link"] = [measure.link(settings.repeats)]
            measure.collect()
    if "step" in wanted:
        with notes.section("step alone"):
            found["step"] = measure.step_alone(
                optimizer, parameters, settings.repeats, settings.warmup
            )
            measure.collect()
    if "link" in wanted:
        with notes.section("link again"):
            found["link"].append(measure.link(settings.repeats))
            measure.collect()
    if "whole" in wanted:
        with notes.section("whole step"):
            found["whole"] = measure.whole_step(optimizer, long, settings.repeats)
            optimizer.zero_grad()
            measure.collect()
    if type(optimizer) is Offload:  # memory, waits and item() are no matter of the format
        _measure_ours(optimizer, settings, notes, short)


def _measure_ours(optimizer: Offload, settings: Settings, notes: Notes, short: Any) -> None:
    wanted, found = settings.sections, notes.found
    if "steady" in wanted:
        with notes.section("steady"):
            found["steady"] = measure.steady(optimizer, short, settings.steady_steps)
    if "sync" in wanted:
        with notes.section("hidden waits and allocations"):
            found["sync"] = measure.unsynchronised(optimizer, short, steps=3)
    if "item" in wanted:
        with notes.section("item() while state drains"):
            model = optimizer.model
            d2h = (found["link"][-1] if "link" in found else measure.link(3))["d2h"]
            measure.collect()
            found["item"] = {
                "default": measure.item_latency(optimizer, short, settings.warmup, d2h)
            }
            optimizer.zero_grad()
            del optimizer.optimizer  # frees what it holds: the next one needs as much again
            measure.collect()
            found["host"]["freed"] = _host()
            found["ledger_freed"] = Offload.ledger()
            large = Offload(model, ITEM_CONFIG)
            found["item"]["large"] = measure.item_latency(large, short, settings.warmup + 2, d2h)
            found["item"]["unpaced_ms"] = measure.item_latency_unpaced(ITEM_BYTES, settings.warmup)


def _tokens(settings: Settings, batch: int, sequence: int) -> torch.Tensor:
    size = (batch, sequence + 1)
    return torch.randint(SHAPES[settings.shape].vocabulary, size, device=measure.DEVICE)


def _host() -> dict[str, int]:
    return {"rss": measure.rss(), "used": measure.host_used()}


def _machine() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "hbm": properties.total_memory,
        "cpus": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "host_memory": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
