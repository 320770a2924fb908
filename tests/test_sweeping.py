"""``ghoffload.sweep`` and the command: rows, resuming, what is skipped, page and picture."""

from __future__ import annotations

import gc
import io
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import ghoffload
from ghoffload.errors import MachineUnavailableError
from ghoffload.machine.simulated import SimulatedMachine, load_profile
from ghoffload.sweeping import point as points
from ghoffload.sweeping import sweep as sweeping
from ghoffload.sweeping.models import ModelError
from ghoffload.sweeping.picture import draw
from ghoffload.sweeping.point import Point, equivalent, measure
from ghoffload.sweeping.rows import COLUMNS
from ghoffload.sweeping.settings import Setting
from ghoffload.sweeping.table import best, reasons, table, varied

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
Row = dict[str, Any]


class Small(nn.Module):
    """Two layers, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 512)
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.table(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Flat(nn.Linear):
    """A model without layers."""

    def __init__(self) -> None:
        super().__init__(64, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = torch.ones(tokens.numel(), 64, device=tokens.device)
        return super().forward(rows).square().mean()


def command(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ghoffload", "sweep", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def tiny(**options: Any) -> list[Row]:
    axes = {"bucket_bytes": "1MiB..4MiB", "transfer": "copy_engine,kernel"}
    given = {"machine": "gh200-480", "tokens": "1x64"} | axes | options
    return ghoffload.sweep(given.pop("model", "tiny"), **given)


def profile(tmp_path: Path, **changes: int) -> Path:
    """The GH200's profile with other sizes."""
    text = (ROOT / "ghoffload/machine/simulated/profiles/gh200-480.toml").read_text()
    for name, value in changes.items():
        lines = [f"{name} = {value}" if x.startswith(name) else x for x in text.splitlines()]
        text = "\n".join(lines)
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_a_row_for_each_combination_with_the_same_names() -> None:
    rows = tiny()
    assert [(row["bucket_bytes"], row["transfer"]) for row in rows] == [
        (size * MIB, way) for size in (1, 2, 4) for way in ("copy_engine", "kernel")
    ]
    for row in rows:
        assert tuple(row) == COLUMNS
        assert row["simulated"] is True
        assert (row["model"], row["machine"], row["tokens"]) == ("tiny", "gh200-480", "1x64")
        assert row["skipped"] is row["error"] is None
        assert row["exposed_seconds"] == row["step_seconds"] - row["forward_backward_seconds"]
        # bf16 weights with a split master: 10 bytes a parameter, but 4 of them the few of the norms
        assert row["host_bytes"] >= 10 * row["parameters"]
        assert row["h2d_bytes"] == pytest.approx(10 * row["parameters"], rel=0.01)
        assert row["d2h_bytes"] == row["h2d_bytes"]
        least = (row["h2d_bytes"] + row["d2h_bytes"]) / load_profile("gh200-480")["both_kernel"]
        assert row["optimizer_seconds"] > 0.9 * least
        assert 2 * row["parameters"] < row["peak_hbm_bytes"] < 100 * MIB
    staged = [row for row in rows if row["transfer"] == "copy_engine"]
    assert staged[0]["optimizer_seconds"] > staged[2]["optimizer_seconds"], "small copies are slow"


def test_the_step_is_what_a_program_would_take() -> None:
    """Written down again: a step's end to the next one's, with nothing that waits."""
    (row,) = tiny(bucket_bytes=MIB, transfer="copy_engine")
    with ghoffload.use_machine("simulated", profile="gh200-480") as machine:
        assert isinstance(machine, SimulatedMachine)
        from ghoffload.sweeping.llama import Llama
        from ghoffload.sweeping.models import PRESETS

        model = Llama(PRESETS["tiny"], device="meta", dtype=torch.bfloat16)  # type: ignore[arg-type]
        config = {"bucket_bytes": MIB, "transfer": "copy_engine"}
        optimizer = ghoffload.OffloadAdamW(model.parameters(), lr=1e-3, config=config)
        tokens = torch.zeros(1, 65, dtype=torch.long, device="meta")
        stamps = []
        for _ in range(4):
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            stamps.append(machine.stamp(machine.current_stream()))
        step = stamps[2].seconds_to(stamps[3])
    assert row["step_seconds"] == pytest.approx(step, rel=0.02)


def test_the_same_sweep_has_the_same_rows_and_leaves_the_collector_alone() -> None:
    assert gc.isenabled()
    options = {"bucket_bytes": MIB, "activations": "none,all", "checkpoint": "none,layers"}
    rows = tiny(**options)
    garbage = [[] for _ in range(3000)]
    del garbage
    assert tiny(**options) == rows
    assert gc.isenabled()


def test_settings_that_do_the_same_are_run_once_and_would_have_the_same_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[Setting] = []

    def counted(point: Point) -> Row:
        ran.append(point.setting)
        return measure(point)

    monkeypatch.setattr(sweeping, "measure", counted)
    rows = tiny(staging_buffers="2,4", transfer="copy_engine,kernel", bucket_bytes="1MiB,2MiB")
    assert len(rows) == 8
    assert [s.transfer for s in ran].count("kernel") == 1
    assert [s.transfer for s in ran].count("copy_engine") == 4
    machine = SimulatedMachine("gh200-480")
    for setting in (
        Setting(transfer="kernel", bucket_bytes=4 * MIB, staging_buffers=3),
        Setting(transfer="auto"),
        Setting(transfer="copy_engine", bucket_bytes=MIB),
        Setting(step_device="cpu", bucket_bytes=MIB),
        Setting(memory_kind="device"),
    ):
        same = equivalent(machine, setting)
        assert same != setting
        found = [
            measure(Point(model="tiny", profile=machine.profile, tokens=(1, 64), setting=s))
            for s in (setting, same)
        ]
        assert found[0] == found[1]
        assert found[0]["step_seconds"] > 0


def test_activations_and_checkpoints() -> None:
    wide = {"tokens": "8x512", "bucket_bytes": 4 * MIB, "transfer": "copy_engine"}
    rows = tiny(**wide, checkpoint="none,layers", activations="none,all")
    plain, gone, again, both = rows
    assert again["forward_backward_seconds"] > 1.1 * plain["forward_backward_seconds"]
    assert again["peak_hbm_bytes"] < plain["peak_hbm_bytes"]
    assert again["h2d_bytes"] == plain["h2d_bytes"]
    assert gone["d2h_bytes"] > plain["d2h_bytes"] + 20 * MIB
    assert gone["peak_hbm_bytes"] < plain["peak_hbm_bytes"] - 10 * MIB
    assert both["peak_hbm_bytes"] <= again["peak_hbm_bytes"]
    budget = (plain["peak_hbm_bytes"] + gone["peak_hbm_bytes"]) // 2
    (some,) = tiny(**wide, activations=budget)
    assert some["peak_hbm_bytes"] <= budget
    assert plain["d2h_bytes"] < some["d2h_bytes"] < gone["d2h_bytes"]


def test_what_is_refused_is_a_row_with_the_reason() -> None:
    rows = tiny(bucket_bytes="64,1MiB", step_device="cuda,cpu")
    skipped = [row["skipped"] for row in rows]
    small, on_cpu = "bucket_bytes expects an int of 4096 or more, got 64", "transfer='kernel' and"
    # bucket_bytes x transfer x step_device
    assert skipped[:4] == [small] * 4
    assert skipped[4:7] == [None] * 3
    assert skipped[7].startswith(on_cpu)
    assert all(row["step_seconds"] is None for row in rows if row["skipped"])
    (row,) = tiny(model=Flat, checkpoint="layers", bucket_bytes=MIB, transfer="kernel")
    assert row["skipped"] == "checkpoint='layers' expects a model with modules in `layers`"


def test_out_of_memory_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    mine = profile(tmp_path, hbm_bytes=24 * 10**6)
    rows = tiny(machine=mine, tokens="8x512", activations="none,all", transfer="copy_engine")
    assert all(row["error"].startswith("out of memory: ") for row in rows)
    assert all("of the simulated HBM" in row["error"] for row in rows)
    assert rows[0]["machine"].startswith("mine (")
    rows = tiny(machine=mine, bucket_bytes="1MiB,8MiB", transfer="copy_engine")
    assert rows[0]["error"] is None
    assert "24,000,000 of the simulated HBM" in rows[1]["error"], "four buffers of 8 MiB"
    host = profile(tmp_path, host_bytes=10**6)
    (row,) = tiny(machine=host, bucket_bytes=MIB, transfer="copy_engine")
    assert "of the simulated host" in row["error"]
    assert rows[0]["machine"] != row["machine"], "another profile of the same name"


def test_a_users_model() -> None:
    for given in (Small, f"{__name__}:Small"):
        (row,) = tiny(model=given, bucket_bytes=MIB, transfer="copy_engine")
        assert row["model"] == f"{__name__}:Small"
        assert row["parameters"] == 256 * 512 + 2 * (512 * 512 + 512)
        assert row["step_seconds"] > 0

    def odd() -> nn.Module:
        return nn.Embedding(256, 8)

    with pytest.raises(ModelError, match=r"returns a loss with a gradient, got shape \(1, 65, 8\)"):
        tiny(model=odd)


def test_no_gpu_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MachineUnavailableError, match=r"can be simulated instead: gb200, .*gh200"):
        tiny(machine=None)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"machine": "gh300"}, "profile expects one of .*gh200-480.* got gh300"),
        ({"repeats": 0}, "repeats expects 1 or more, got 0"),
        ({"warmup": -1}, "warmup expects 0 or more, got -1"),
        ({"jobs": -1}, "jobs expects 1 or more, got -1"),
        ({"model": Small, "jobs": 2}, "jobs expects 1 on a GPU or for a model that has no name"),
        ({"model": "gpt-125m", "tokens": "1x4096"}, "expects sequences of 2048"),
        ({"transfer": "kernal"}, "got 'kernal'"),
    ],
)
def test_bad_arguments(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        tiny(**options)


# --- resuming ---


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def test_a_killed_sweep_continues(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tiny(out=out)
    lines = out.read_text().splitlines(keepends=True)
    assert sorted(map(json.loads, lines), key=str) == sorted(rows, key=str)
    done = [json.loads(line) for line in lines[:3]]
    out.write_text("".join(lines[:3]) + lines[3][:40])  # killed while it wrote the fourth
    ran: list[Point] = []

    def counted(point: Point) -> Row:
        ran.append(point)
        return measure(point)

    monkeypatch.setattr(sweeping, "measure", counted)
    again = tiny(out=out)
    assert again == rows
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert written[:3] == done
    assert sorted(written, key=str) == sorted(rows, key=str)
    assert 0 < len(ran) <= 3
    ran.clear()
    assert tiny(out=out) == rows
    assert not ran


def test_rows_stay_as_they_are(out: Path) -> None:
    """What was measured is not measured again, whatever it says."""
    tiny(out=out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    for line in lines:
        line["step_seconds"] = 7.0
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert {row["step_seconds"] for row in tiny(out=out)} == {7.0}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tokens": "1x32"}, "line 1: its point is not of this sweep: expected tokens='1x32'"),
        ({"machine": "h200-pcie5"}, "expected machine='h200-pcie5', got 'gh200-480'"),
        ({"model": "gpt-125m"}, "expected model='gpt-125m', got 'tiny'"),
        ({"moments": "int8"}, "expected moments='int8', got 'fp32'"),
        ({"bucket_bytes": "1MiB"}, r"line \d: .* expected bucket_bytes=1048576, got"),
    ],
)
def test_rows_of_others_are_refused_before_anything_runs(
    out: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], sentence: str
) -> None:
    tiny(out=out)
    before = out.read_bytes()
    monkeypatch.setattr(sweeping, "measure", lambda point: pytest.fail("it ran"))
    with pytest.raises(ValueError, match=sentence):
        tiny(out=out, **options)
    assert out.read_bytes() == before


@pytest.mark.parametrize("line", ["{}", "[1]", "no json", '{"model": "tiny"}'])
def test_other_files_are_refused(out: Path, line: str) -> None:
    out.write_text(line + "\n")
    with pytest.raises(ValueError, match="line 1 is not a row of a sweep"):
        tiny(out=out)
    assert out.read_text() == line + "\n"


def test_an_interrupted_sweep_keeps_what_it_has(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = 0

    def stops(point: Point) -> Row:
        nonlocal ran
        ran += 1
        if ran == 3:
            raise KeyboardInterrupt
        return measure(point)

    monkeypatch.setattr(sweeping, "measure", stops)
    with pytest.raises(KeyboardInterrupt):
        tiny(out=out, transfer="copy_engine")
    assert len(out.read_text().splitlines()) == 2


# --- page and picture ---


def made(**changes: Any) -> Row:
    row: Row = dict.fromkeys(COLUMNS)
    row |= {"model": "m", "machine": "x", "simulated": True, "tokens": "1x1"}
    row |= {name: getattr(Setting(), name) for name in Setting.__dataclass_fields__}
    return row | {
        "step_seconds": 0.5,
        "forward_backward_seconds": 0.3,
        "exposed_seconds": 0.2,
        "optimizer_seconds": 0.25,
        "peak_hbm_bytes": 10**10,
        "host_bytes": 2 * 10**10,
        "h2d_bytes": 10**9,
        "d2h_bytes": 10**9,
        **changes,
    }


NOTHING = dict.fromkeys(points.FIGURES)


def text(rows: list[Row]) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=160).print(table(rows))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_the_table_marks_the_best_and_numbers_the_reasons() -> None:
    rows = [
        made(bucket_bytes=MIB, step_seconds=0.4, exposed_seconds=0.1),
        made(bucket_bytes=2 * MIB),
        made(bucket_bytes=64, **NOTHING, skipped="too small"),
        made(bucket_bytes=65, **NOTHING, skipped="too small"),
        made(bucket_bytes=1 << 30, **NOTHING, error="out of memory: much"),
    ]
    assert best(rows) is rows[0]
    assert varied(rows) == ["bucket_bytes"]
    assert reasons(rows) == ["too small", "out of memory: much"]
    lines = text(rows)
    assert lines[0] == "m, 1x1 tokens, x (simulated)"
    start = next(number for number, line in enumerate(lines) if "───" in line) + 1
    cells = [line.split() for line in lines[start : start + 5]]
    assert [row[:2] for row in cells[:2]] == [["1", "MiB"], ["2", "MiB"]]
    assert cells[0][2:] == [
        "400.0",
        "100.0",
        "300.0",
        "250.0",
        "10.0",
        "20.0",
        "1.0",
        "1.0",
        "best",
    ]
    assert cells[1][-1] == "1.0"
    assert [" ".join(row) for row in cells[2:]] == [
        "64 B skipped (1)",
        "65 B skipped (1)",
        "1 GiB failed (2)",
    ]
    assert lines[start + 6].startswith("staging_buffers 4, memory_kind auto")
    assert best(rows[2:]) is None
    assert "best" not in "\n".join(text(rows[2:]))


def drawn(rows: list[Row], path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The figure that was written to ``path``."""
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    save = Figure.savefig

    def kept(self: Figure, *args: Any, **options: Any) -> None:
        figures.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", kept)
    draw(path, rows)
    return figures[-1]


def test_lines_over_granularity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        made(bucket_bytes=size * MIB, transfer=way, exposed_seconds=seconds)
        for size in (1, 2, 4)
        for way, seconds in (("copy_engine", 0.4 / size), ("kernel", 0.1))
    ]
    rows[0] |= NOTHING | {"error": "out of memory"}
    figure = drawn(rows, tmp_path / "sweep.png", monkeypatch)
    assert (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    exposed, rate = figure.axes
    assert exposed.get_xscale() == "log"
    found = {line.get_label(): list(map(tuple, line.get_xydata())) for line in exposed.lines}
    assert found == {
        "copy_engine": [(2 * MIB, 200.0), (4 * MIB, 100.0)],
        "kernel": [(MIB, 100.0), (2 * MIB, 100.0), (4 * MIB, 100.0)],
    }
    assert {y for line in rate.lines for y in line.get_ydata()} == {8.0}


def test_a_heat_map_for_two_axes_of_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        made(
            bucket_bytes=size * MIB,
            staging_buffers=count,
            exposed_seconds=size / count,
            step_seconds=1 + size / count,
        )
        for size in (1, 4)
        for count in (2, 8)
    ]
    figure = drawn(rows, tmp_path / "map.svg", monkeypatch)
    assert (tmp_path / "map.svg").read_text().startswith("<?xml")
    axes = figure.axes[0]
    assert axes.images[0].get_array().tolist() == [[500.0, 2000.0], [125.0, 500.0]]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1 MiB", "4 MiB"]
    assert [t.get_text() for t in axes.texts if "best" in t.get_text()] == ["125\nbest"]
    first = (tmp_path / "map.svg").read_bytes()
    draw(tmp_path / "map.svg", rows)
    assert (tmp_path / "map.svg").read_bytes() == first


def test_bars_without_numbers_and_a_picture_of_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [made(transfer="kernel"), made(transfer="copy_engine", exposed_seconds=0.3)]
    axes = drawn(rows, tmp_path / "bars.png", monkeypatch).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [200.0, 300.0]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["kernel", "copy_engine"]
    nothing = [made(bucket_bytes=n * MIB, **NOTHING, error="out of memory") for n in (1, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(tmp_path / "nothing.png", nothing)
    draw(tmp_path / "zero.png", [made(ctas=n, transfer=w) for n in (0, 4) for w in ("auto", "x")])


# --- the command ---


def test_the_command_sweeps_writes_and_draws(tmp_path: Path) -> None:
    words = ["--model", "tiny", "--machine", "gh200-480", "--tokens", "1x64"]
    words += ["--bucket-bytes", "1MiB..8MiB", "--transfer", "copy_engine,kernel", "--jobs", "2"]
    words += ["--out", "rows.jsonl", "--picture", "sweep.svg"]
    done = command(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tiny, 1x64 tokens, gh200-480 (simulated)" in done.stdout
    assert done.stdout.count(" best") == 1
    assert "written: rows.jsonl, sweep.svg" in done.stdout
    assert (tmp_path / "sweep.svg").read_text().startswith("<?xml")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    expected = tiny(bucket_bytes="1MiB..8MiB")
    assert sorted(rows, key=str) == sorted(expected, key=str), "as in this process"


def test_the_command_takes_a_module_beside_it_and_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "class Bad(nn.Linear):\n"
        "    def __init__(self): super().__init__(64, 64)\n"
        "    def forward(self, tokens): return 1\n"
    )
    rest = ["--machine", "gh200-480", "--tokens", "1x8"]
    done = command("--model", "mine:Bad", *rest, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "ghoffload sweep: the model called with tokens returns a loss with a gradient, got int\n"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model", "tiny", "--machine", "gh9"], "profile expects one of"),
        (["--model", "nano", "--machine", "gh200-480"], "model expects module:function or one of"),
        (["--model", "tiny", "--picture", "x.pdf"], "--picture expects a file name with .png"),
        (["--model", "tiny", "--picture", "no/x.png"], "--picture expects a folder that is there"),
        (["--model", "tiny", "--machine", "gh200-480", "--out", "."], "Is a directory"),
        (["--model", "tiny", "--machine", "gh200-480", "--ctas", "x"], "ctas expects whole"),
    ],
)
def test_a_bad_command_line(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ghoffload import cli

    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", *words]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("ghoffload sweep: ")
    assert sentence in found.err
    assert found.err.count("\n") == 1


def test_the_command_without_a_gpu_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ghoffload import cli

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["sweep", "--model", "tiny"]) == 2
    said = capsys.readouterr().err
    assert "a machine can be simulated instead: gb200" in said
    assert said.count("\n") == 1


def test_a_sweep_without_a_figure_ends_with_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from ghoffload import cli

    words = ["--machine", "gh200-480", "--tokens", "1x64", "--bucket-bytes", "64"]
    assert cli.main(["sweep", "--model", "tiny", *words]) == 1
    assert "(1) bucket_bytes expects an int of 4096 or more, got 64" in capsys.readouterr().out


@pytest.mark.gpu
def test_a_gpu_is_measured(tmp_path: Path) -> None:
    options = {"machine": None, "tokens": "2x128", "bucket_bytes": "1MiB,4MiB", "repeats": 3}
    rows = tiny(**options, out=tmp_path / "rows.jsonl")
    for row in rows:
        assert (row["simulated"], row["machine"]) == (False, torch.cuda.get_device_name())
        assert row["error"] is row["skipped"] is None
        assert 0 < row["forward_backward_seconds"] < row["step_seconds"] < 1
        assert row["h2d_bytes"] == row["d2h_bytes"] > 9 * row["parameters"]
        assert row["host_bytes"] >= 10 * row["parameters"]
        assert row["peak_hbm_bytes"] > 4 * row["parameters"]
    assert tiny(**options, out=tmp_path / "rows.jsonl") == rows
