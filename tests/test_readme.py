"""The README's snippets run, its commands are what CI runs, and its files and names exist."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ghoffload
from ghoffload.config import OffloadConfig
from ghoffload.machine.host_ranges import DEBUG_VARIABLE
from ghoffload.measure import remembered

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def blocks(language: str) -> list[tuple[int, str]]:
    """The fenced blocks of one language, each with the line of its first line."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [(README.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


def test_the_python_snippets_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other, as a reader would type them; an error names the README's line."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    snippets = blocks("python")
    assert len(snippets) >= 5
    for line, source in snippets:
        exec(compile("\n" * (line - 1) + source, str(ROOT / "README.md"), "exec"), names)
    optimizer = names["optimizer"]
    assert isinstance(optimizer, ghoffload.OffloadAdamW)
    assert optimizer.state_dict()["state"], "no snippet stepped"
    assert capsys.readouterr().out.strip(), "report() printed nothing"


def test_the_snippets_as_a_script_end_quietly(tmp_path: Path) -> None:
    """The write-back of the last ``step()`` is still under way as Python exits."""
    script = tmp_path / "script.py"
    script.write_text("\n".join(source for _, source in blocks("python")), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["demo", "test"])
def test_ci_runs_the_commands_as_they_stand(name: str) -> None:
    """.ci/run takes the text from here; the two commands need no more than Python and a clone."""
    match = re.search(rf"^<!-- command: {name} -->\n```bash\n(.*?)^```$", README, re.M | re.DOTALL)
    assert match is not None
    extract = [str(ROOT / ".ci" / "readme-command"), name]
    said = subprocess.run(["bash", *extract], capture_output=True, text=True, check=True).stdout
    assert said == match[1]
    assert said.startswith("python3 -m venv .venv && .venv/bin/pip install ")
    assert f'eval "$(.ci/readme-command {name})' in CI


def test_an_unknown_command_is_an_error() -> None:
    extract = ["bash", str(ROOT / ".ci" / "readme-command"), "tset"]
    done = subprocess.run(extract, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "README.md has no command named 'tset'\n"


def test_the_extras_it_names_exist() -> None:
    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg", encoding="utf-8")
    named = {extra for _, block in blocks("bash") for extra in re.findall(r"'\.\[(\w+)\]'", block)}
    assert named == {"demo", "test", "dev"}
    assert named <= set(options["options.extras_require"])


def test_the_options_and_files_it_names_exist() -> None:
    named = set(re.findall(r"`(\w+)(?:=[^`]*)?`", README))
    fields = set(OffloadConfig.__dataclass_fields__)
    assert {"bucket_bytes", "staging_buffers", "step_device"} <= named & fields
    others = {remembered.ENVIRONMENT_VARIABLE, DEBUG_VARIABLE, "GHOFFLOAD_CUBINS"}
    assert "GHOFFLOAD_CUBINS" in (ROOT / "setup.py").read_text(encoding="utf-8")
    for variable in re.findall(r"(GHOFFLOAD_\w+)=", README):
        field = variable.removeprefix("GHOFFLOAD_").lower()
        assert field in fields or variable in others
    for path in re.findall(r"`((?:examples|csrc|ghoffload)/[\w./]*)`", README):
        assert (ROOT / path).exists(), path


def test_every_figure_has_a_status() -> None:
    table = README.split("## Status", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 5
    for row in rows:
        assert re.search(r"\| (measured|simulated|unmeasured)\b[^|]*\|$", row), row
