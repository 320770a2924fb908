"""``ghoffload doctor``: what it says it will use, its page, its JSON and its exit code."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from test_topology_machines import HMM, container, gb200, gh200, no_gpu, x86

from ghoffload import cli
from ghoffload.config import OffloadConfig
from ghoffload.doctor import measure, page
from ghoffload.doctor.choices import choices
from ghoffload.doctor.findings import Copies, Readings
from ghoffload.doctor.report import examine_machine
from ghoffload.machine.topology import GpuEvidence, Reader, probe

FAST = Copies(gpu=0, nbytes=256_000_000, pinned=True, refusal=None, h2d=54.9e9, d2h=55e9)


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ghoffload.kernels.build.nvrtc_version", lambda: (13, 0))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Copies]:
    """Made-up copies: what is in the list is measured, and nothing in it is a failure."""
    results = [FAST]

    def measured(during: Callable) -> tuple:
        if not results:
            raise RuntimeError("the GPU fell off the bus")
        return results[0], during()

    monkeypatch.setattr(measure, "measure_copies", measured)
    return results


def on(monkeypatch: pytest.MonkeyPatch, reader: Reader) -> None:
    monkeypatch.setattr(Reader, "of_this_machine", classmethod(lambda cls: reader))


def chosen(reader: Reader, config: OffloadConfig | None = None, **readings: object) -> dict:
    made = choices(probe(reader), config or OffloadConfig(), Readings(**readings))  # type: ignore[arg-type]
    return {choice.what: (choice.value, choice.why) for choice in made}


def shown(reader: Reader, **options: bool) -> str:
    out = io.StringIO()
    page.show(examine_machine(reader, **options), Console(file=out, width=100, highlight=False))
    return " ".join(out.getvalue().split())


# --- what will be used ---------------------------------------------------------------------------


def test_choices_with_a_gpu(tmp_path: Path) -> None:
    made = chosen(x86(tmp_path), copies=FAST)
    assert made["step device"][0] == "cuda"
    assert made["memory kind"][0] == "pinned"
    assert "cannot read ordinary memory" in made["memory kind"][1]
    assert made["transfer"][0] == "copy engine"
    assert "3 copy engines, so both directions at once; 54.9 GB/s" in made["transfer"][1]
    assert made["host state"][0] == "up to 410 GB"
    assert "HMM" in chosen(x86(tmp_path / "h", chip=HMM))["memory kind"][1]
    assert "page tables" in chosen(gh200(tmp_path / "g"))["memory kind"][1]


def test_choices_follow_the_configuration(tmp_path: Path) -> None:
    config = OffloadConfig(step_device="cpu", memory_kind="device")
    made = chosen(x86(tmp_path), config)
    assert made["step device"] == ("cpu", "GHOFFLOAD_STEP_DEVICE says so")
    assert made["memory kind"] == ("device", "GHOFFLOAD_MEMORY_KIND says so")
    assert "transfer" not in made
    assert chosen(x86(tmp_path), OffloadConfig(pin_memory=False))["memory kind"][0] == "system"
    refused = dataclasses.replace(FAST, pinned=False)
    assert chosen(x86(tmp_path), copies=refused)["memory kind"] == (
        "system",
        "pinning was refused here",
    )


def test_choices_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = chosen(no_gpu(tmp_path))
    assert made["step device"] == ("cpu", "no GPU that torch can use was found; 4 threads")
    assert made["memory kind"][0] == "system"
    cpu_only = dataclasses.replace(x86(tmp_path / "x"), evidence=GpuEvidence(nvml_count=1))
    assert chosen(cpu_only)["step device"][0] == "none"
    monkeypatch.setenv("GHOFFLOAD_MACHINE", "cpu")
    assert chosen(cpu_only)["step device"] == ("cpu", "GHOFFLOAD_MACHINE is 'cpu'; 16 threads")


# --- the command ---------------------------------------------------------------------------------


def test_no_gpu_ends_with_a_plain_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on(monkeypatch, no_gpu(tmp_path))
    assert cli.main(["doctor"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.endswith(
        "No GPU was found: ghoffload steps on the CPU here, and nothing is wrong with that."
    )


def test_a_healthy_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: list) -> None:
    on(monkeypatch, x86(tmp_path))
    assert cli.main(["doctor"]) == 0
    said = shown(x86(tmp_path))
    assert "a PCIe chip, 141 GB HBM, compute capability 9.0, 132 SMs, 3 copy engines" in said
    assert "PCIe 5 x16 (best: 5 x16)" in said
    assert "580.95.05, CUDA 13.0" in said
    assert "What is wrong" not in said
    assert said.endswith("Nothing here will hurt.")


def test_an_ill_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    copies: list[Copies],
) -> None:
    copies[0] = dataclasses.replace(FAST, h2d=10e9)
    on(monkeypatch, x86(tmp_path, telemetry={"CurrPcieLinkWidth": 4}))
    assert cli.main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["hurts"] is True
    assert [(f["check"], f["severity"]) for f in report["findings"]] == [
        ("link_degraded", "hurts"),
        ("slow_copies", "hurts"),
    ]
    assert report["copies"]["h2d"] == 10e9
    assert report["nvrtc"] == [13, 0]
    assert report["topology"]["gpus"][0]["link"]["width"] == 4
    said = shown(x86(tmp_path, telemetry={"CurrPcieLinkWidth": 4}))
    assert "hurts: GPU 0: PCIe runs with 4 of 16 lanes. mend: every transfer" in said
    assert said.endswith("2 things here will hurt.")


def test_a_note_does_not_hurt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: list
) -> None:
    on(monkeypatch, x86(tmp_path, files=container(64 * 10**9)))
    assert cli.main(["doctor"]) == 0
    assert "note: this process's cgroup may use 64 GB" in shown(x86(tmp_path))


def test_the_link_is_judged_while_copies_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle GPU that wakes to a degraded link: the second look finds it."""
    reader = x86(tmp_path, telemetry={"CurrPcieLinkGeneration": 1, "PerformanceState": 8})

    def measured(during: Callable) -> tuple:
        reader.nvml.gpus[0].update(CurrPcieLinkGeneration=3, PerformanceState=0)
        reader.nvml.gpus[0]["PcieReplayCounter"] = 7
        return FAST, during()

    monkeypatch.setattr(measure, "measure_copies", measured)
    checks = [finding.check for finding in examine_machine(reader).findings]
    assert checks == ["link_degraded", "errors_growing"]


def test_copies_that_fail_are_a_finding(tmp_path: Path, copies: list) -> None:
    copies.clear()
    report = examine_machine(x86(tmp_path))
    assert [finding.check for finding in report.findings] == ["copies_failed"]
    assert "RuntimeError: the GPU fell off the bus" in report.findings[0].what
    assert examine_machine(x86(tmp_path), copies=False).findings == []


def test_a_bad_setting_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GHOFFLOAD_MEMORY_KIND", "magnetic")
    report = examine_machine(no_gpu(tmp_path))
    assert report.hurts
    assert "got 'magnetic'" in report.findings[0].what


def test_pages_of_coherent_machines(tmp_path: Path, copies: list[Copies]) -> None:
    copies[0] = dataclasses.replace(FAST, h2d=378e9, d2h=297e9)
    said = shown(gh200(tmp_path / "g"))
    assert "C2C, 5 of 5 links up" in said
    assert "coherent, NUMA mode: HBM is node 1" in said
    assert "with CPUs: 0 (480 GB); without: 1 to 8, 8 of them" in said
    assert "64 KiB; huge pages: madvise (512 MiB)" in said
    said = shown(gb200(tmp_path / "b"))
    assert "with CPUs: 0 (480 GB), 1 (480 GB); without: 2 to 33, 32 of them" in said
    assert "CDMM" in shown(gh200(tmp_path / "c", chip={"NumaConfig": 0, "NumaId": -1}))


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor", "--json", "--no-copies"])
    report = json.loads(capsys.readouterr().out)
    assert code == int(report["hurts"])
    assert report["copies"] is None
    assert report["choices"]


@pytest.mark.gpu
def test_this_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    import time

    import torch

    torch.zeros(1, device="cuda")
    start = time.perf_counter()
    code = cli.main(["doctor", "--json"])
    seconds = time.perf_counter() - start
    report = json.loads(capsys.readouterr().out)
    assert code == int(report["hurts"])
    assert "copies_failed" not in [finding["check"] for finding in report["findings"]]
    assert report["copies"]["h2d"] > 1e9
    assert report["copies"]["d2h"] > 1e9
    assert report["choices"][0]["value"] == "cuda"
    assert seconds < 3
    assert cli.main(["doctor"]) == code
