"""Every example runs as a reader would run it."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("[!_]*.py"))
PROGRAMS = [name for name in EXAMPLES if not name.startswith("benchmark_")]
BENCHMARKS = [name for name in EXAMPLES if name.startswith("benchmark_")]
# Whole experiments by default: here only a few steps of them.
WORDS = {
    "loss_noise.py": ["--preset", "tiny", "--steps", "6", "--runs", "1"],
    "moment_codes.py": ["--quick"],
}


OF_THEIR_OWN = (  # tests
    "convergence.py",
    "offload_activations.py",
    "sweep_granularity.py",
    "train_offload.py",
)


def start(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    # Threads that sleep at barriers: a busy CI machine makes the others crawl.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"}
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def run(name: str, *words: str) -> str:
    done = start(name, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in OF_THEIR_OWN])
def test_a_program_runs(name: str) -> None:
    assert run(name, *WORDS.get(name, []))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_has_help(name: str) -> None:
    assert "usage:" in run(name, "--help")


def test_train_offload_trains_and_reports() -> None:
    lines = (ROOT / "examples" / "train_offload.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 60, "it is the smallest script"
    out = run("train_offload.py", "--steps", "60")
    losses = [float(loss) for loss in re.findall(r"^step +\d+ +loss (\S+)$", out, re.MULTILINE)]
    assert len(losses) == 7
    assert losses[0] > 5
    assert max(losses[-3:]) < 3.5
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    rows = {row[0]: row[1:] for row in cells if row}
    # 2 layers of 4 h^2 (attention) + 8 h^2 (feed-forward) weights, 13 h biases and norms; the
    # embedding; the output with its bias; h = 128
    parameters = 2 * (12 * 128**2 + 13 * 128) + 256 * 128 + 256 * 128 + 256
    assert f"{parameters:,} parameters" in out
    assert rows["exp_avg"] == [rows["exp_avg"][0], f"{4 * parameters:,}", "4.00"]
    assert rows["exp_avg"][0] in ("system", "pinned")


def offload_words(hidden: int, context: int) -> list[str]:
    shape = {"hidden": hidden, "layers": 3, "heads": 4, "context": context, "batch": 8, "steps": 4}
    return [word for name, value in shape.items() for word in (f"--{name}", str(value))]


def size_in(cell: str) -> float:
    number, unit = cell.split()
    return float(number) * {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def offloads_activations(picture: Path, *words: str) -> None:
    """The example's page: the same bits, a lower peak, and no more moved than that takes."""
    out = run("offload_activations.py", *words, "--picture", str(picture))
    steps = re.findall(
        r"^step (\d) +loss (\S+) +gradients ([0-9a-f]{12}) +(.*)$", out, re.MULTILINE
    )
    assert [step for step, *_ in steps] == list("12345"), "4, and one for the picture"
    assert float(steps[3][1]) < float(steps[0][1]) - 0.1, "it trains"
    assert len({gradients for _, _, gradients, _ in steps}) == 5
    assert {said for *_, said in steps} == {"the same in all three"}
    assert "bit for bit the same" in out

    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    rows = {re.sub(r"(virtual )| \(.*", "", row[0]): row[1:] for row in cells if row}
    none, everything, some = map(size_in, rows["peak HBM"])
    budget = size_in(rows["budget"][2])
    assert budget == pytest.approx((none + everything) / 2, rel=0.01)
    assert everything < some <= 1.001 * budget < none
    to_host = [size_in(cell) for cell in rows["moved to the host a step"]]
    back = [size_in(cell) for cell in rows["and back"]]
    assert to_host[0] == back[0] == 0
    assert 0 < to_host[2] < to_host[1]
    assert 0 < back[2] <= to_host[2]
    assert all(float(cell.removesuffix(" ms").replace(",", "")) > 0 for cell in rows["time a step"])
    for said in ("of what the forward saved was offloaded", "for which the budget has room"):
        assert said in out


def test_offload_activations_changes_no_bit_and_lowers_the_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GHOFFLOAD_MACHINE", "virtual")
    offloads_activations(tmp_path / "hbm.png", *offload_words(128, 64))
    assert (tmp_path / "hbm.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.gpu
def test_offload_activations_on_a_gpu(tmp_path: Path) -> None:
    offloads_activations(tmp_path / "hbm.svg", *offload_words(512, 128))
    assert "<svg" in (tmp_path / "hbm.svg").read_text(encoding="utf-8")


def test_offload_activations_fails_where_gradients_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / "examples" / "offload_activations.py"
    monkeypatch.setenv("GHOFFLOAD_MACHINE", "virtual")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # it sets it, else
    spec = importlib.util.spec_from_file_location("offload_activations", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, example)
    spec.loader.exec_module(example)
    monkeypatch.setattr(sys, "argv", [path.name, *offload_words(64, 32)])
    hashes = (f"{number:064x}" for number in itertools.count())
    monkeypatch.setattr(example, "hash_of", lambda tensors: next(hashes))
    assert example.main() == 1
    assert capsys.readouterr().out.count("NOT the same in all three") == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--picture", "hbm.jpeg"], "expected a name that ends in .png or .svg, got 'hbm.jpeg'"),
        (["--steps", "2"], "--steps expects 3 or more, got 2"),
    ],
)
def test_offload_activations_refuses(words: list[str], said: str) -> None:
    done = start("offload_activations.py", *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_convergence_compares_formats_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GHOFFLOAD_MACHINE", "virtual")  # on a GPU a run need not repeat its bits
    out, plot = tmp_path / "runs.json", tmp_path / "curves.png"
    shape = ["--preset", "tiny", "--batch", "2", "--context", "32"]
    words = [*shape, "--steps", "20", "--seeds", "2", "--out", str(out)]
    printed = run("convergence.py", *words, "--formats", "int8", "--plot", str(plot))
    document = json.loads(out.read_text(encoding="utf-8"))
    runs: dict[tuple[int, str, int], dict[str, Any]] = {
        (run["seed"], run["moments"], run["perturbed"]): run for run in document["runs"]
    }
    assert len(document["runs"]) == 6
    assert plot.read_bytes().startswith(b"\x89PNG")
    losses = {key: run["losses"] for key, run in runs.items()}
    for seed in (0, 1):
        base, nudged = losses[seed, "fp32", 0], losses[seed, "fp32", 1]
        coded = losses[seed, "int8", 0]
        assert len(base) == len(nudged) == len(coded) == 20
        assert base[0] == nudged[0] == coded[0], "the same weights and text"
        assert 0 < apart(base, nudged) < 0.1 * apart(base, coded)
        assert base[-1] < base[0] - 0.5, "it trains"
        assert runs[seed, "fp32", 0]["final_loss"] == pytest.approx(statistics.fmean(base))
    assert losses[0, "fp32", 0][0] != losses[1, "fp32", 0][0], "seeds differ"

    summary = document["summary"]
    rows = {(row["seed"], row["run"]): row for row in summary["rows"]}
    for seed in (0, 1):
        base = runs[seed, "fp32", 0]
        for moments, at, name in (("fp32", 1, "fp32, perturbed 1"), ("int8", 0, "int8")):
            other, row = runs[seed, moments, at], rows[seed, name]
            signed = statistics.fmean(other["losses"]) - statistics.fmean(base["losses"])
            assert row["distance"] == pytest.approx(apart(base["losses"], other["losses"]))
            assert row["bias"] == pytest.approx(signed, abs=1e-12)
            assert row["validation"] == other["validation_loss"] - base["validation_loss"]
    noise = max(rows[seed, "fp32, perturbed 1"]["distance"] for seed in (0, 1))
    middle = statistics.median(rows[seed, "int8"]["distance"] for seed in (0, 1))
    assert summary["noise"]["distance"] == noise < middle
    verdict = summary["verdicts"]["int8"]
    assert (verdict["verdict"], verdict["noise"]["distance"]) == ("beyond", "beyond")
    assert "int8: beyond the noise" in printed

    # A killed program has fewer runs; the one that is missing comes out as before.
    document["runs"] = [run for run in document["runs"] if run is not runs[1, "int8", 0]]
    out.write_text(json.dumps(document), encoding="utf-8")
    printed = run("convergence.py", *words)
    assert printed.count("already in") == 5
    again = json.loads(out.read_text(encoding="utf-8"))
    assert [run["losses"] for run in again["runs"]] == [*losses.values()]
    assert again["summary"] == summary

    refused = start("convergence.py", *words, "--steps", "21")
    assert refused.returncode == 1
    assert "expected steps 21, got 20" in refused.stderr


def apart(one: list[float], other: list[float]) -> float:
    """Mean absolute difference."""
    return statistics.fmean(abs(a - b) for a, b in zip(one, other, strict=True))


def test_sweep_granularity_compares_machines(tmp_path: Path) -> None:
    picture = tmp_path / "sweep.png"
    words = ["--model", "gpt-125m", "--tokens", "1x64", "--bucket-bytes", "16MiB..64MiB"]
    out = run("sweep_granularity.py", *words, "--picture", str(picture))
    rows = re.findall(r"^ *(\S+) +(\w+) +(\d+) MiB +(\S+) ms exposed$", out, re.MULTILINE)
    exposed = {(machine, way, int(size)): float(ms) for machine, way, size, ms in rows}
    assert len(exposed) == 2 * 2 * 3
    for way in ("copy_engine", "kernel"):
        assert 0 < 2 * exposed["gh200-480", way, 64] < exposed["h200-pcie5", way, 64]
    assert picture.read_bytes()[:4] == b"\x89PNG"
