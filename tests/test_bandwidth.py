"""``ghoffload bandwidth`` away from a GPU: plan, figures, profile, table, options, host memory."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ghoffload import bandwidth
from ghoffload.bandwidth import run
from ghoffload.bandwidth.plan import GB, KB, MB, Plan, calls_in_a_sample, make_plan
from ghoffload.bandwidth.profile import entries, to_toml
from ghoffload.bandwidth.results import Results, Row, best, fewest_blocks, largest, latency, rate
from ghoffload.bandwidth.table import figure, size, tables

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ghoffload", "bandwidth", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


# --- the plan ---


def h200(**changes: Any) -> Plan:
    keywords = {
        "quick": False,
        "cpus": 16,
        "host_free": 120 * GB,
        "hbm_free": 139 * GB,
        "hbm_total": 140 * GB,
    }
    return make_plan(**(keywords | changes))


def test_the_plan_of_a_large_machine() -> None:
    plan = h200()
    assert plan.sizes[0] == 4 * KB
    assert plan.sizes[-1] == GB == plan.buffer_bytes
    assert len(plan.sizes) == 10
    assert plan.blocks == (1, 2, 4, 8, 16, 32)
    assert (plan.kernel_bytes, plan.managed_bytes) == (256 * MB, 256 * MB)
    assert plan.threads == (1, 2, 4, 8, 16)
    assert h200(cpus=72).threads == (1, 2, 4, 8, 16, 32, 64, 72)
    assert h200(cpus=1).threads == (1,)
    assert h200(host_free=None).sizes[-1] == GB


def test_a_quick_plan_is_a_part_of_the_full_one() -> None:
    quick, full = h200(quick=True), h200()
    assert set(quick.sizes) <= set(full.sizes)
    assert set(quick.blocks) < set(full.blocks)
    assert quick.threads == (1, 16)
    assert quick.repeats < full.repeats
    assert quick.buffer_bytes < full.buffer_bytes


@given(
    host=st.integers(0, 2**42),
    hbm=st.integers(0, 2**38),
    share=st.floats(0, 1),
    cpus=st.integers(1, 500),
    quick=st.booleans(),
)
def test_a_plan_fits(host: int, hbm: int, share: float, cpus: int, quick: bool) -> None:
    free = int(hbm * share)
    plan = make_plan(quick=quick, cpus=cpus, host_free=host, hbm_free=free, hbm_total=hbm)
    assert list(plan.sizes) == sorted(set(plan.sizes))
    assert all(nbytes % 4096 == 0 for nbytes in (*plan.sizes, plan.kernel_bytes))
    assert plan.kernel_bytes <= plan.buffer_bytes
    assert 2 * plan.managed_bytes <= min(GB, hbm / 4)
    assert list(plan.threads) == sorted(set(plan.threads))
    assert plan.threads[0] == 1
    assert plan.threads[-1] == cpus
    if host >= GB:
        assert 2 * plan.buffer_bytes <= host / 4
        assert 3 * plan.host_bytes <= host / 4
        if free >= GB:
            assert 2 * plan.buffer_bytes <= free / 4


def test_small_copies_come_in_rows() -> None:
    assert [calls_in_a_sample(n) for n in (4 * KB, 4 * MB, 16 * MB, 64 * MB, GB)] == [
        16,
        16,
        4,
        1,
        1,
    ]


# --- figures ---


def test_a_rate_is_a_median_with_its_spread() -> None:
    row = rate([0.5, 0.1, 0.2], 10**9, what="hbm", direction="read", by="words")
    assert (row.value, row.low, row.high, row.samples) == (5.0, 2.0, 10.0, 3)
    assert row.unit == "GB/s"
    row = latency([3e-6, 5e-6], what="latency", direction="launch", by="call")
    assert (row.value, row.unit) == (pytest.approx(4.0), "us")
    with pytest.raises(ValueError, match="expected one sample or more, got none"):
        rate([], 1, what="hbm", direction="read", by="words")


def copies(by: str, direction: str, figures: dict[int, float], memory: str = "pinned") -> list[Row]:
    name = "nbytes" if by == "engine" else "blocks"
    size_of_all = {} if by == "engine" else {"nbytes": 256 * MB}
    return [
        Row(
            what="copy", memory=memory, direction=direction, by=by, value=value, unit="GB/s",
            low=value, high=value, samples=5, **{name: key}, **size_of_all,
        )
        for key, value in figures.items()
    ]  # fmt: skip


@pytest.fixture
def results() -> Results:
    found = Results(
        environment={
            "gpu": 'NVIDIA "H200"\\',
            "date": "2026-11-30",
            "torch": "2.13",
            "hbm_bytes": 141 * GB,
            "host_bytes": 125 * GB,
            "cpus": 16,
        }
    )
    for direction, top in (("h2d", 54.9), ("d2h", 55.0), ("both", 96.2)):
        # The largest size and not the fastest is what a profile takes.
        found.rows += copies("engine", direction, {4 * KB: 0.5, 64 * MB: top + 1, GB: top})
        found.rows += copies("words", direction, {1: 10.0, 2: 20.0, 32: top - 1})
        found.rows += copies("bulk", direction, {1: 30.0, 2: top - 2, 32: top - 1.5})
        found.rows += copies("bulk", direction, {1: 1000.0}, memory="managed")
    for by, value in (("words", 4100.0), ("driver", 4191.0)):
        found.rows.append(rate([1 / value], 10**9, what="hbm", direction="copy", by=by, nbytes=GB))
    for name, value in (("triad", 96.0), ("update", 120.0)):
        for threads in (1, 16):
            row = rate(
                [1 / (value * threads / 16)], 10**9, what="host", direction=name, by="cpu",
                threads=threads, nbytes=GB,
            )  # fmt: skip
            found.rows.append(row)
    for by, value in (("call", 3.1), ("device", 1.2), ("round trip", 9.0)):
        for name in ("launch", "h2d"):
            found.rows.append(latency([value * 1e-6], what="latency", direction=name, by=by))
    return found


def test_rows_are_found_by_what_they_are_of(results: Results) -> None:
    rows = results.select(what="copy", memory="pinned", by="bulk", direction="h2d")
    assert [row.blocks for row in rows] == [1, 2, 32]
    top, fewest, longest = best(rows), fewest_blocks(rows), largest(results.rows)
    assert top is not None
    assert fewest is not None
    assert longest is not None
    assert (top.blocks, fewest.blocks, longest.nbytes) == (32, 2, GB)
    assert best([]) is fewest_blocks([]) is largest([]) is None
    with pytest.raises(ValueError, match=r"expected one of what, memory, .*, got 'kind'"):
        results.select(kind="pinned")


def test_the_profile_says_what_and_how_and_when(results: Results) -> None:
    profile = tomllib.loads(to_toml(results))
    assert profile["machine"] == 'NVIDIA "H200"\\'
    assert (profile["date"], profile["hbm_bytes"]) == ("2026-11-30", 141 * GB)
    values = {name: entry["value"] for name, entry in profile.items() if isinstance(entry, dict)}
    assert values == {
        "h2d_engine": 54.9, "d2h_engine": 55.0, "both_engine": 96.2,
        "h2d_kernel": 52.9, "d2h_kernel": 53.0, "both_kernel": 94.2,
        "hbm": 4191.0, "host_read_write": 120.0, "host_triad": 96.0,
        "launch_call": 3.1, "launch_device": 1.2, "copy_call": 3.1, "copy_device": 1.2,
    }  # fmt: skip
    for name in values:
        assert profile[name]["date"] == "2026-11-30"
        assert profile[name]["how"]
        assert profile[name]["unit"] == (
            "us" if name.split("_")[0] in ("launch", "copy") else "GB/s"
        )
    assert profile["h2d_kernel"]["blocks"] == 2
    assert profile["h2d_kernel"]["how"].startswith("bulk-copy kernel, pinned memory")
    assert "16 CPU threads" in profile["host_read_write"]["how"]
    assert "median of 5" in profile["both_engine"]["how"]


def test_a_profile_leaves_out_what_was_not_measured() -> None:
    assert entries(Results()) == []
    assert tomllib.loads(to_toml(Results(environment={"gpu": None, "date": "2026-11-30"}))) == {
        "date": "2026-11-30"
    }


def test_the_tables_have_every_figure(results: Results) -> None:
    console = Console(width=100, file=io.StringIO())
    for table in tables(results):
        console.print(table)
    text = console.file.getvalue()
    for row in results.rows:
        assert figure(row.value) in text
    for title in (
        "pinned memory, copy engine (GB/s)",
        "pinned memory, bulk-copy kernel, 256 MB (GB/s)",
        "managed memory, bulk-copy kernel, 256 MB (GB/s)",
        "one call (us)",
    ):
        assert title in text
    line = next(line for line in text.splitlines() if "64 MB" in line)
    assert line.replace("│", " ").split() == ["64", "MB", "55.9", "56.0", "97.2"]
    assert "pageable" not in text


def test_sizes_and_figures_read_well() -> None:
    assert [size(n) for n in (4096, MB, 256 * MB, GB, 5000)] == [
        "4 KB", "1 MB", "256 MB", "1 GB", "5,000 B",
    ]  # fmt: skip
    assert [figure(x) for x in (0.5312, 54.94, 4191.4)] == ["0.53", "54.9", "4,191"]


def test_the_picture(results: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from ghoffload.bandwidth.picture import draw

    draw(tmp_path / "link.png", results)
    results.rows = results.select(what="host")
    draw(tmp_path / "host.png", results)
    for name in ("link.png", "host.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_an_error_ends_its_group_and_no_other() -> None:
    runner = run.Runner(lambda name: None)

    def group():  # type: ignore[no-untyped-def]
        yield rate([1.0], 1, what="hbm", direction="read", by="words")
        raise RuntimeError("the driver\nsaid no")

    runner.group("HBM", group())
    runner.group("more", iter([rate([1.0], 1, what="hbm", direction="copy", by="words")]))
    assert [row.direction for row in runner.results.rows] == ["read", "copy"]
    assert runner.results.failures == ["HBM: the driver said no"]


# --- the command ---


def test_help() -> None:
    done = command("--help")
    assert done.returncode == 0, done.stderr
    assert "usage: ghoffload bandwidth" in done.stdout
    assert "--save-profile FILE" in done.stdout


def test_without_a_gpu_host_memory_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.json"
    done = command("--quick", "--json", str(path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    sentence = " ".join(done.stdout.split()).rpartition("Only host memory was measured: ")[2]
    assert sentence.endswith(".")
    found = json.loads(path.read_text())
    assert {(row["what"], row["direction"]) for row in found["rows"]} == {
        ("host", "copy"), ("host", "triad"), ("host", "update"),
    }  # fmt: skip
    assert all(0 < row["low"] <= row["value"] <= row["high"] for row in found["rows"])
    assert found["environment"]["gpu"] is None
    assert found["failures"] == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--json", "/proc/nowhere/x.json"], "--json '/proc/nowhere/x.json' cannot be written"),
        (["--save-profile", "/proc/x.toml"], "--save-profile '/proc/x.toml' cannot be written"),
        (["--cpu", "--save-profile", "p.toml"], "--save-profile needs a GPU to measure, and --cpu"),
        (["--device", "many"], "argument --device: invalid int value: 'many'"),
    ],
)
def test_bad_options_end_before_anything_is_measured(
    tmp_path: Path, words: list[str], sentence: str
) -> None:
    words = [str(tmp_path / word) if word == "p.toml" else word for word in words]
    done = command(*words)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_device_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import argparse

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    parser = argparse.ArgumentParser()
    bandwidth.add_arguments(parser)
    assert bandwidth.main(parser.parse_args(["--device", "2"])) == 2
    assert "--device expects 0 to 1, got 2" in capsys.readouterr().err
