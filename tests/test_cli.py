"""The ``ghoffload`` command hands over to its commands and ends with the right code."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from ghoffload import cli
from ghoffload._version import __version__
from ghoffload.errors import MachineUnavailableError

ROOT = Path(__file__).resolve().parents[1]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "ghoffload", *words], env=environment, capture_output=True, text=True
    )


def test_version() -> None:
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"ghoffload {__version__}\n")


def test_help_names_the_commands() -> None:
    done = command("--help")
    assert done.returncode == 0
    assert "  demo " in done.stdout
    assert "  check " in done.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["dmeo"], f"error: expected a command, one of {', '.join(cli._COMMANDS)}; got 'dmeo'"),
        (["--stepz"], "error: unrecognized arguments: --stepz"),
        ([], "commands:"),
    ],
)
def test_a_command_line_that_cannot_be_read(words: list[str], sentence: str) -> None:
    done = command(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["demo", "check"])
def test_each_command_has_help(name: str) -> None:
    done = command(name, "--help")
    assert done.returncode == 0, done.stderr
    assert f"usage: ghoffload {name}" in done.stdout


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(main: object) -> int:
        module = types.SimpleNamespace(add_arguments=lambda parser: None, main=main)
        monkeypatch.setattr(cli.importlib, "import_module", lambda name: module)
        return cli.main(["demo"])

    def fails(error: BaseException) -> object:
        def main(args: object) -> None:
            raise error

        return main

    assert run(lambda args: None) == 0
    assert run(lambda args: 1) == 1
    assert run(fails(KeyboardInterrupt())) == 130
    assert run(fails(SystemExit("no"))) == 1
    assert run(fails(MachineUnavailableError("the GPU is away"))) == 1
    assert capsys.readouterr().err.endswith("ghoffload: error: the GPU is away\n")
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        run(fails(ZeroDivisionError()))
