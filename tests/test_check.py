"""``ghoffload check`` on this machine, and what it does at a difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ghoffload import cli
from ghoffload.kernels import golden


def test_everything_agrees_and_the_report_says_so(tmp_path: Path) -> None:
    out = tmp_path / "sub" / "check.json"
    assert cli.main(["check", "--cpu", "--seeds", "2", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["passed"] is True
    assert len(report["checks"]) >= 6
    assert all(check["passed"] for check in report["checks"])
    assert report["environment"]["packages"]["torch"]


def test_the_first_difference_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = golden.expected()
    wrong[golden.names()[3]] = "0" * 64
    monkeypatch.setattr(golden, "expected", lambda: wrong)
    out = tmp_path / "check.json"
    assert cli.main(["check", "--cpu", "--out", str(out)]) == 1
    report = json.loads(out.read_text())
    assert report["passed"] is False
    assert [check["passed"] for check in report["checks"]] == [False]
    assert golden.names()[3] in report["checks"][0]["detail"]


@pytest.mark.parametrize(
    "options", [["--seeds", "0"], ["--out", "/proc/none/check.json"]], ids=["seeds", "out"]
)
def test_bad_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--cpu", *options]) == 2
    assert options[0] in capsys.readouterr().err


@pytest.mark.gpu
def test_the_gpu_agrees(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    assert cli.main(["check", "--seeds", "5", "--out", str(out)]) == 0
