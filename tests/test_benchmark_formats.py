"""examples/benchmark_formats.py: its tables, and its measurement on a device that is only thought.

With a GPU, its group "model" in small.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from rich.console import Console
from rich.table import Table

SCRIPT = ROOT / "examples" / "benchmark_formats.py"


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))


class Device:
    """Two streams; where both are busy, work takes ``slow`` times as long, steps ``slow_steps``.

    ``queued`` milliseconds of the host's time go by when a step is queued.
    """

    def __init__(
        self, *, slow: float = 1.0, slow_steps: float | None = None, queued: float = 1.0
    ) -> None:
        self.slow = {"main": slow, "side": slow if slow_steps is None else slow_steps}
        self.queued = queued
        self.host = 0.0
        self.stream = "main"
        self.queues: dict[str, list[list[Any]]] = {"main": [], "side": []}
        self.passed: dict[object, float] = {}
        self.most_steps = 0

    def work(self, ms: float) -> None:
        self.queues[self.stream].append([self.host, ms, None])

    def step(self, ms: float) -> None:
        assert self.stream == "side"
        self.work(ms)
        self.host += self.queued
        self.most_steps = max(self.most_steps, sum(q[2] is None for q in self.queues["side"]))

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        self.stream = "side"
        yield
        self.stream = "main"

    def mark(self) -> object:
        mark = object()
        self.queues[self.stream].append([self.host, 0.0, mark])
        return mark

    def ms(self, start: object, end: object) -> float:
        return self.passed[end] - self.passed[start]

    def now(self) -> float:
        return self.host

    def synchronize(self) -> None:
        """Run what is queued: each stream in its order, nothing before it was queued."""
        time = 0.0
        while any(self.queues.values()):
            heads = {name: queue[0] for name, queue in self.queues.items() if queue}
            ready = {name: head for name, head in heads.items() if head[0] <= time}
            ended = next((name for name, head in ready.items() if head[1] <= 1e-9), None)
            if ended is not None:
                self.passed[self.queues[ended].pop(0)[2]] = time
                continue
            slow = {name: self.slow[name] if len(ready) == 2 else 1.0 for name in ready}
            ends = [time + slow[name] * head[1] for name, head in ready.items()]
            then = min(ends + [head[0] for head in heads.values() if head[0] > time])
            for name, head in ready.items():
                head[1] -= (then - time) / slow[name]
            time = then
        self.host = max(self.host, time)


def found(device: Device, *, work: float, step: float, repeats: int = 3) -> dict[str, Any]:
    from _bench_beside import Work, beside

    busy = Work("ten things", lambda: device.work(work), 10)
    return beside(busy, lambda: device.step(step), device, repeats=repeats)


def test_work_and_step_are_timed_alone_and_each_beside_the_other() -> None:
    result = found(Device(slow=1.25), work=100, step=300)
    assert result["alone_ms"] == pytest.approx(10)
    assert result["beside_ms"] == pytest.approx(12.5)
    assert result["slowdown"] == pytest.approx(0.25)
    assert result["covered"] == 1
    assert result["steps"] == 1
    assert result["step_alone_ms"] == pytest.approx(300)
    assert result["step_beside_ms"] == pytest.approx(375)


def test_short_steps_are_queued_until_they_cover_the_work() -> None:
    device = Device(slow=3, queued=4)
    result = found(device, work=100, step=20)
    # Beside work a step takes 60 ms, so five of them last for the 300 ms the work then takes; the
    # first, alone until the host has queued them all, has nearly ended before the work begins.
    assert result["steps"] == 8
    assert result["covered"] == 1
    assert result["slowdown"] == pytest.approx(2)
    assert result["step_beside_ms"] == pytest.approx(60)


def test_a_sample_that_was_not_covered_is_taken_again_with_one_step_more() -> None:
    # The first try is for 125 ms, three steps; they last for 150 of the 200 ms that the work takes.
    result = found(Device(slow=2, slow_steps=1, queued=0), work=100, step=50)
    assert result["steps"] == 4
    assert result["covered"] == 1
    assert result["slowdown"] == pytest.approx(1)
    assert result["step_beside_ms"] == pytest.approx(50)


def test_steps_that_the_host_cannot_keep_going_are_said_not_to_cover() -> None:
    from _bench_beside import MOST_STEPS

    device = Device(queued=20)
    result = found(device, work=100, step=10)
    assert result["steps"] == device.most_steps == MOST_STEPS
    assert result["covered"] == 0
    assert result["step_beside_ms"] == pytest.approx(20)  # it is the host's time, then


def test_no_figure_for_a_step_that_no_work_covers() -> None:
    result = found(Device(), work=1, step=1000)
    assert result["covered"] == 1
    assert result["step_beside_ms"] is None


@pytest.mark.parametrize(
    ("work", "step", "returned", "steps"),
    [(100, 400, 20, 1), (100, 20, 4, 8), (100, 10, 10, 12), (100, 0.1, 0, 12)],
)
def test_how_many_steps_are_queued_at_first(
    work: float, step: float, returned: float, steps: int
) -> None:
    from _bench_beside import steps_to_cover

    assert steps_to_cover(work, step, returned) == steps


def test_groups_are_chosen_by_name_and_run_in_their_order() -> None:
    from benchmark_formats import parse

    assert parse(["--only", "model"]).only == ["model"]
    assert parse(["--only", "model,staged"]).only == ["staged", "model"]
    assert parse([]).only == ["staged", "streamed", "managed", "hbm", "beside", "model"]


@pytest.mark.parametrize("text", ["modle", "model,modle", ","])
def test_an_unknown_group_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmark_formats import parse

    with pytest.raises(SystemExit):
        parse(["--only", text])
    got = "'modle'" if "modle" in text else "nothing"
    assert f"hbm, beside, model, got {got}" in capsys.readouterr().err


def test_the_model_runs_beside_both_ways_of_transfer() -> None:
    from benchmark_formats import BESIDE, words

    from ghoffload import OffloadConfig

    copies, *others = BESIDE["model"]
    assert words(copies) == "copies alone"
    settings = [OffloadConfig(**setting) for setting in others]
    engine = [(c.moments, c.master) for c in settings if c.transfer == "copy_engine"]
    assert engine == [("fp32", "fp32"), ("int8", "split")]
    assert [c.ctas for c in settings if c.transfer == "kernel"] == [1, 2, 4, 8]


def text(table: Table) -> list[str]:
    out = io.StringIO()
    Console(width=160, file=out).print(table)
    return out.getvalue().splitlines()


def test_the_table_of_a_group_beside_work() -> None:
    from benchmark_formats import BESIDE, beside_table

    engine, int8, kernel = (BESIDE["model"][k] for k in (1, 2, 4))
    times = {
        "work": "forward + backward",
        "alone_ms": 118.25,
        "beside_ms": 130.1,
        "slowdown": 0.1002,
        "step_alone_ms": 283.0,
    }
    lines = text(
        beside_table(
            [
                {"setting": engine, "covered": 1.0, "step_beside_ms": 290.04} | times,
                {"setting": int8, "covered": 0.9999, "step_beside_ms": None} | times,
                {"setting": kernel, "error": "no room\nfor it"},
            ],
            3,
        )
    )
    title = "forward + backward: alone, and with steps running beside it; medians of 3"
    assert any(title in line for line in lines)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert rows == [
        ["fp32 copy_engine", "118.250", "130.100", "+10.0 %", "100.0 %", "283.0", "290.0"],
        ["split int8 copy_engine", "118.250", "130.100", "+10.0 %", "99.9 %", "283.0", "-"],
        ["fp32 kernel 2 CTAs", "no room", "", "", "", "", ""],
    ]


def test_the_table_of_steps_holds_each_against_the_rate_of_its_way() -> None:
    from benchmark_formats import ALONE, steps_table

    from ghoffload.measure import KernelRate, Rates

    rates = Rates(both=100e9, hbm=4000e9, pinned=KernelRate(rate=80e9, ctas=4))
    rows = [
        {"group": group, "setting": ALONE[group][at], "seconds": 0.3, "returned": 0.05}
        for group, at in (("staged", 0), ("streamed", 0), ("managed", 0), ("hbm", 3))
    ]
    lines = text(steps_table([*rows, {**rows[0], "error": "refused"}], 10**9, rates, 9))
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    common = ["300.0", "50.0", "3.33"]
    assert cells == [
        ["staged", "fp32 copy_engine", *common, "80.0", "0.800"],
        ["streamed", "fp32 kernel 2 CTAs", *common, "80.0", "1.000"],
        ["managed", "fp32 managed 4 CTAs", *common, "80.0", ""],
        # 4.0625 bytes there and back, the weight likewise, and the gradient
        ["hbm", "split int8 device", *common, "47.1", "0.012"],
        ["staged", "fp32 copy_engine", "refused", "", "", "", ""],
    ]


@pytest.mark.gpu
@pytest.mark.slow
def test_the_group_model_runs_in_small(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--only", "model", "--layers", "2", "--repeats", "3"]
    done = subprocess.run(
        [*command, "--out", str(out)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 7
    assert not [row["error"] for row in rows if "error" in row]
    assert all(row["covered"] == 1 for row in rows)
