"""Every example runs as a reader would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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


def run(name: str, *words: str) -> str:
    # Threads that sleep at barriers: a busy CI machine makes the others crawl.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n != "train_offload.py"])
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
