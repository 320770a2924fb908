"""``ghoffload.sweep``: every combination of settings, one row each.

Note [points that are alike]
    On a simulated machine the same work takes the same time, so settings that do the same are run
    once: an update in place, say, stages nothing and has no granularity. On a GPU each is measured.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ghoffload.errors import MachineUnavailableError
from ghoffload.machine.simulated import Profile, load_profile, profiles
from ghoffload.machine.topology import unusable_gpu
from ghoffload.sweeping.models import Model, maker_of, name_of
from ghoffload.sweeping.point import Point, equivalent, machine_of, measure, refusal
from ghoffload.sweeping.rows import Row, RowFile, identity, row_of
from ghoffload.sweeping.settings import Setting, parse_axes, parse_tokens, product


def sweep(
    model: Model,
    *,
    machine: str | Path | None = None,
    tokens: str | tuple[int, int] = (1, 4096),
    out: str | Path | None = None,
    warmup: int = 2,
    repeats: int = 5,
    jobs: int = 1,
    progress: bool = False,
    **axes: Any,
) -> list[Row]:
    """Measure a model's training step with every combination of settings.

    Args:
        model: a preset such as ``"llama-8b"``; ``"module:function"``, or a function, that makes
            one: sweeping/models.py has what is expected of it.
        machine: a profile's name, or the TOML file of one: that machine is simulated. ``None``
            measures on the current GPU.
        tokens: batch and sequence length, as ``(1, 4096)`` or ``"1x4096"``.
        out: a file of JSON lines. Points that are there already are not measured again.
        warmup, repeats: steps before those that count, and how many count; for a GPU.
        jobs: processes; more than one for a simulated machine alone. A script that asks for more
            needs ``if __name__ == "__main__":``.
        progress: draw a bar.
        axes: values of ``bucket_bytes``, ``staging_buffers``, ``memory_kind``, ``transfer``,
            ``ctas``, ``step_device``, ``moments``, ``master``, ``checkpoint`` (``"none"``,
            ``"layers"``) and ``activations`` (``"none"``, ``"all"``, a budget in bytes): one, a
            list, or text such as ``"1MiB..1GiB"`` (in powers of two) or ``"1MiB..1GiB..x4"``.

    Returns:
        A row for each combination, the last axis varying first: plain values by name, the same
        names in each. Times are in seconds: sweeping/point.py has what they mean. ``skipped`` says
        why a combination is none, ``error`` that it ran out of memory.

    Raises:
        ValueError, TypeError: a bad argument, or a file with other rows; before anything runs.
        ModelError: a ``ValueError``: the user's model is not one.
        MachineUnavailableError: no machine is given and torch finds no GPU.
    """
    plan = Sweep(
        model,
        machine=machine,
        tokens=tokens,
        out=out,
        warmup=warmup,
        repeats=repeats,
        jobs=jobs,
        **axes,
    )
    with bar(plan.open, shown=progress) as advance:
        return plan.run(advance)


class Sweep:
    """A sweep that is ready to run: its arguments and its file are in order.

    Args:
        jobs: 0 takes two or more where there is enough to do.

    Attributes:
        axes: the values of each.
        open: points without a row yet.
        rows: by setting.

    Raises:
        As ``sweep``.
    """

    def __init__(
        self,
        model: Model,
        *,
        machine: str | Path | None = None,
        tokens: str | tuple[int, int] = (1, 4096),
        out: str | Path | None = None,
        warmup: int = 2,
        repeats: int = 5,
        jobs: int = 1,
        **axes: Any,
    ) -> None:
        for name, value, least in (("warmup", warmup, 0), ("repeats", repeats, 1)):
            if type(value) is not int or value < least:
                raise ValueError(f"{name} expects {least} or more, got {value!r}")
        self.axes = parse_axes(axes)
        self.settings = product(self.axes)
        self._tokens = parse_tokens(tokens)
        maker_of(model, self._tokens[1])
        self._model, self._warmup, self._repeats = model, warmup, repeats
        self._profile = None if machine is None else load_profile(machine)
        if self._profile is None:
            _require_gpu()
        self.about: Row = {
            "model": name_of(model),
            "machine": _machine_name(self._profile),
            "simulated": self._profile is not None,
            "tokens": f"{self._tokens[0]}x{self._tokens[1]}",
        }
        expected = {setting: row_of(self.about, setting, {}) for setting in self.settings}
        self._file = None if out is None else RowFile(out, expected.values())
        known = {identity(row): row for row in self._file.found} if self._file else {}
        self.rows: dict[Setting, Row] = {
            setting: known[identity(row)]
            for setting, row in expected.items()
            if identity(row) in known
        }
        self.open = len(self.settings) - len(self.rows)
        self._jobs = self._processes(jobs)

    def _processes(self, jobs: int) -> int:
        if type(jobs) is not int or jobs < 0:
            raise ValueError(f"jobs expects 1 or more, got {jobs!r}")
        if self._profile is None or callable(self._model):
            if jobs > 1:
                raise ValueError(
                    f"jobs expects 1 on a GPU or for a model that has no name, got {jobs}"
                )
            return 1
        # Another process takes seconds to start.
        return jobs or max(1, min(multiprocessing.cpu_count(), 4, self.open // 4))

    def run(self, done: Callable[[int], None]) -> list[Row]:
        """Measure what has no row yet.

        Args:
            done: told how many points more are.

        Returns:
            All rows, in the settings' order.
        """
        machine = machine_of(self._profile)
        alike: dict[Setting, list[Setting]] = {}
        for setting in self.settings:
            if setting in self.rows:
                continue
            why = refusal(machine, setting)
            if why is not None:
                self._add([setting], {"skipped": why}, done)
            else:
                same = setting if self._profile is None else equivalent(machine, setting)
                alike.setdefault(same, []).append(setting)
        for settings, found in self._measured(list(alike.values())):
            self._add(settings, found, done)
        return [self.rows[setting] for setting in self.settings]

    def _measured(
        self, groups: list[list[Setting]]
    ) -> Iterator[tuple[list[Setting], dict[str, Any]]]:
        points = [self._point(settings[0]) for settings in groups]
        workers = min(self._jobs, len(points))
        if workers < 2:
            for settings, point in zip(groups, points, strict=True):
                yield settings, measure(point)
            return
        # Not forked: torch has threads.
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, mp_context=spawn)
        try:
            running = {
                pool.submit(measure, point): settings
                for settings, point in zip(groups, points, strict=True)
            }
            for future in concurrent.futures.as_completed(running):
                yield running[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _point(self, setting: Setting) -> Point:
        return Point(
            model=self._model,
            profile=self._profile,
            tokens=self._tokens,
            setting=setting,
            warmup=self._warmup,
            repeats=self._repeats,
        )

    def _add(
        self, settings: list[Setting], found: dict[str, Any], done: Callable[[int], None]
    ) -> None:
        for setting in settings:
            row = self.rows[setting] = row_of(self.about, setting, found)
            if self._file is not None:
                self._file.append(row)
        done(len(settings))


@contextlib.contextmanager
def bar(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, and what moves it on."""
    if not shown:
        yield lambda points: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task("points", total=total)
        yield lambda points: drawn.advance(task, points)


def _require_gpu() -> None:
    if not torch.cuda.is_available():
        why = unusable_gpu() or "torch finds no GPU here"
        known = ", ".join(profiles())
        raise MachineUnavailableError(f"{why}; a machine can be simulated instead: {known}")


def _machine_name(profile: Profile | None) -> str:
    if profile is None:
        return str(torch.cuda.get_device_name())
    if profile.name in profiles() and profile == load_profile(profile.name):
        return profile.name
    # Someone's own may change under its name; rows of another one must not be continued.
    return f"{profile.name} ({hashlib.sha256(repr(profile).encode()).hexdigest()[:8]})"
