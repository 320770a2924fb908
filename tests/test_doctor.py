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
from ghoffload.doctor import link, page, units
from ghoffload.doctor.choices import choices
from ghoffload.doctor.findings import Readings
from ghoffload.doctor.report import examine_machine
from ghoffload.machine.topology import GpuEvidence, Reader, probe
from ghoffload.measure import KernelRate, Rates

FAST = Rates(
    measured=1.0,
    h2d=54.9e9,
    d2h=55e9,
    both=96.2e9,
    hbm=4191e9,
    pinned=KernelRate(rate=84.7e9, ctas=4),
    managed=KernelRate(rate=84.8e9, ctas=1),
    pinned_bytes=134_217_728,
)


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ghoffload.kernels.build.nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr("ghoffload.kernels.build.packaged_nvrtc", lambda arch: (12, 9))


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[Rates]:
    """Made-up rates: what is in the list is measured, and nothing in it is a failure."""
    results = [FAST]

    def read(during: Callable, *, fresh: bool = False) -> tuple:
        if not results:
            raise RuntimeError("the GPU fell off the bus")
        age = 0.0 if fresh else 3 * 86400.0
        return {"rates": results[0], "gpu": 0, "age": age}, during()

    monkeypatch.setattr(link, "read", read)
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
    made = chosen(x86(tmp_path), rates=FAST)
    assert made["step device"][0] == "cuda"
    assert made["memory kind"][0] == "pinned"
    assert "managed 84.8 GB/s, not 5 % more" in made["memory kind"][1]
    assert made["transfer"][0] == "copy engine"
    assert "96.2 GB/s by copy engine, 84.7 GB/s by kernel in place" in made["transfer"][1]
    assert made["transfer"][1].endswith("3 copy engines, so both directions at once")
    assert "CTAs" not in made
    assert made["host state"][0] == "up to 410 GB"
    made = chosen(x86(tmp_path / "none"))
    assert (made["memory kind"][0], made["transfer"][0]) == ("pinned", "copy engine")
    assert "nothing was measured" in made["memory kind"][1]


def test_a_kernel_that_is_faster_is_chosen_with_its_ctas(tmp_path: Path) -> None:
    slow = dataclasses.replace(FAST, both=80e9, managed=None)
    made = chosen(x86(tmp_path), rates=slow)
    assert made["transfer"][0] == "kernel"
    assert made["CTAs"][0] == "4"
    assert "filled the link on pinned memory: 84.7 GB/s" in made["CTAs"][1]


def test_only_what_the_gpu_reaches_is_chosen(tmp_path: Path) -> None:
    """Figures of system memory count where the attributes say that kernels read it."""
    rates = dataclasses.replace(FAST, system=KernelRate(rate=200e9, ctas=8))
    assert chosen(x86(tmp_path), rates=rates)["memory kind"][0] == "pinned"
    for name, reader in (
        ("h", x86(tmp_path / "h", chip=HMM)),
        ("g", gh200(tmp_path / "g")),
    ):
        made = chosen(reader, rates=rates)
        assert made["memory kind"][0] == "system", name
        assert made["transfer"][0] == "kernel"
        assert made["CTAs"][0] == "8"


def test_choices_follow_the_configuration(tmp_path: Path) -> None:
    config = OffloadConfig(step_device="cpu", memory_kind="device")
    made = chosen(x86(tmp_path), config)
    assert made["step device"] == ("cpu", "GHOFFLOAD_STEP_DEVICE says so")
    assert made["memory kind"] == ("device", "GHOFFLOAD_MEMORY_KIND says so")
    assert "transfer" not in made
    assert chosen(x86(tmp_path), OffloadConfig(pin_memory=False))["memory kind"][0] == "pageable"
    config = OffloadConfig(memory_kind="system", ctas=7)
    made = chosen(x86(tmp_path), config)
    assert made["memory kind"] == (
        "system",
        "GHOFFLOAD_MEMORY_KIND says so, and this device does not reach it",
    )
    assert made["CTAs"] == ("7", "GHOFFLOAD_CTAS says so")
    refused = Rates(pin_refusal="no", managed=KernelRate(rate=84e9, ctas=4))
    value, why = chosen(x86(tmp_path), rates=refused)["memory kind"]
    assert value == "managed"
    assert "pinning was refused here (no)" in why


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


def test_a_healthy_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rates: list) -> None:
    on(monkeypatch, x86(tmp_path))
    assert cli.main(["doctor"]) == 0
    said = shown(x86(tmp_path))
    assert "a PCIe chip, 141 GB HBM, compute capability 9.0, 132 SMs, 3 copy engines" in said
    assert "PCIe 5 x16 (best: 5 x16)" in said
    assert "580.95.05, CUDA 13.0" in said
    assert "What is wrong" not in said
    assert (
        "copy engine 54.9 GB/s to the GPU, 55.0 GB/s from it, 96.2 GB/s both ways at once" in said
    )
    assert "pinned 84.7 GB/s with 4 CTAs, managed 84.8 GB/s with 1 CTA" in said
    assert "HBM 4,191 GB/s" in said
    assert "measured 3 days ago; --fresh measures again" in said
    assert "measured just now" in shown(x86(tmp_path), fresh=True)
    assert "What its link gives" not in shown(x86(tmp_path), copies=False)
    assert said.endswith("Nothing here will hurt.")


def test_ages_read_well() -> None:
    ages = {5: "just now", 60: "1 minute ago", 7300: "2 hours ago", 86400: "1 day ago"}
    assert {seconds: units.age(seconds) for seconds in ages} == ages


def test_an_ill_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rates: list[Rates],
) -> None:
    rates[0] = dataclasses.replace(FAST, h2d=10e9)
    on(monkeypatch, x86(tmp_path, telemetry={"CurrPcieLinkWidth": 4}))
    assert cli.main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["hurts"] is True
    assert [(f["check"], f["severity"]) for f in report["findings"]] == [
        ("link_degraded", "hurts"),
        ("slow_copies", "hurts"),
    ]
    assert report["rates"]["h2d"] == 10e9
    assert report["nvrtc"] == [13, 0]
    assert report["packaged_nvrtc"] == [12, 9]
    assert report["topology"]["gpus"][0]["link"]["width"] == 4
    said = shown(x86(tmp_path, telemetry={"CurrPcieLinkWidth": 4}))
    assert "hurts: GPU 0: PCIe runs with 4 of 16 lanes. mend: every transfer" in said
    assert said.endswith("2 things here will hurt.")


def test_a_note_does_not_hurt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rates: list) -> None:
    on(monkeypatch, x86(tmp_path, files=container(64 * 10**9)))
    assert cli.main(["doctor"]) == 0
    assert "note: this process's cgroup may use 64 GB" in shown(x86(tmp_path))


def test_the_link_is_judged_while_copies_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle GPU that wakes to a degraded link: the second look finds it."""
    reader = x86(tmp_path, telemetry={"CurrPcieLinkGeneration": 1, "PerformanceState": 8})

    def read(during: Callable, *, fresh: bool) -> tuple:
        reader.nvml.gpus[0].update(CurrPcieLinkGeneration=3, PerformanceState=0)
        reader.nvml.gpus[0]["PcieReplayCounter"] = 7
        return {"rates": FAST, "gpu": 0}, during()

    monkeypatch.setattr(link, "read", read)
    checks = [finding.check for finding in examine_machine(reader).findings]
    assert checks == ["link_degraded", "errors_growing"]


def test_copies_that_fail_are_a_finding(tmp_path: Path, rates: list) -> None:
    rates.clear()
    report = examine_machine(x86(tmp_path))
    assert [finding.check for finding in report.findings] == ["copies_failed"]
    assert "RuntimeError: the GPU fell off the bus" in report.findings[0].what
    assert examine_machine(x86(tmp_path), copies=False).findings == []


def test_a_bad_setting_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GHOFFLOAD_MEMORY_KIND", "magnetic")
    report = examine_machine(no_gpu(tmp_path))
    assert report.hurts
    assert "got 'magnetic'" in report.findings[0].what


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"MEASURE": "often"}, "GHOFFLOAD_MEASURE expects 0, 1, true or false, got 'often'"),
        ({"MEMORY_KIND": "managed", "TRANSFER": "copy_engine"}, "got 'copy_engine'"),
    ],
)
def test_settings_that_stop_an_optimizer_are_a_finding(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rates: list,
    variables: dict,
    sentence: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"GHOFFLOAD_{name}", value)
    report = examine_machine(x86(tmp_path))
    assert report.findings[0].check == "settings"
    assert sentence in report.findings[0].what
    assert report.choices


def test_pages_of_coherent_machines(tmp_path: Path, rates: list[Rates]) -> None:
    rates[0] = dataclasses.replace(FAST, h2d=378e9, d2h=297e9)
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
    assert report["rates"] is None
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
    assert report["rates"]["h2d"] > 1e9
    assert report["rates"]["d2h"] > 1e9
    assert report["choices"][0]["value"] == "cuda"
    assert seconds < 3
    assert report["rates"]["both"] > report["rates"]["h2d"]
    assert cli.main(["doctor", "--fresh"]) == code
