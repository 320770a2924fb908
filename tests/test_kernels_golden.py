"""The golden hashes on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ghoffload.kernels import golden, pool
from ghoffload.machine.virtual import VirtualMachine

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("threads", [1, 3])
def test_the_cpu_gives_the_golden_hashes(threads: int) -> None:
    with pool.threads(threads):
        assert golden.run("cpu") == golden.expected()


def test_a_machine_gives_the_golden_hashes(virtual: VirtualMachine) -> None:
    before = virtual.memory_allocated()
    only = golden.names()[::11]
    assert golden.run(virtual, only=only) == {name: golden.expected()[name] for name in only}
    assert virtual.memory_allocated() == before


def test_the_hashes_are_recorded_for_every_case_and_differ() -> None:
    recorded = golden.expected()
    assert list(recorded) == golden.names()
    assert len(set(recorded.values())) == len(recorded)


def test_the_command_names_a_difference(tmp_path: Path) -> None:
    changed = golden.expected()
    changed["pack bf16"] = "0" * 64
    path = tmp_path / "golden.json"
    path.write_text(json.dumps(changed))
    script = f"""
import sys, pathlib
from ghoffload.kernels import golden
golden._PATH = pathlib.Path({str(path)!r})
sys.argv = ["golden"]
sys.exit(golden._main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("pack bf16: expected 000")
    assert "55 of 56 golden hashes agree" in done.stdout
