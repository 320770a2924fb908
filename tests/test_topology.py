from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from ghoffload.machine import topology
from ghoffload.machine.topology import GpuEvidence, cpu_count, huge_page_size, unusable_gpu


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_cpu_only_torch_on_aarch64_is_named_with_its_mend() -> None:
    evidence = GpuEvidence(torch_version="2.13.0", nvml_count=1, architecture="aarch64")
    said = unusable_gpu(evidence)
    assert said is not None
    assert "NVML sees 1 GPU)" in said
    assert "torch 2.13.0 was built without CUDA" in said
    assert "aarch64" in said
    assert "Install a CUDA build" in said


def test_cpu_only_torch_on_x86_does_not_speak_of_aarch64() -> None:
    said = unusable_gpu(GpuEvidence(nodes=("nvidia0", "nvidiactl"), architecture="x86_64"))
    assert said is not None
    assert "/dev/nvidia0 is there" in said
    assert "without CUDA" in said
    assert "aarch64" not in said


@pytest.mark.parametrize(
    "sign",
    [
        {"nvml_count": 8},
        {"driver_gpus": 1, "nvml_count": 0},
        {"nodes": ("nvidia-uvm", "nvidia3")},
        {"nodes": ("nvidiactl",)},
    ],
)
def test_each_sign_of_a_gpu_counts(sign: dict) -> None:
    assert unusable_gpu(GpuEvidence(**sign)) is not None


@pytest.mark.parametrize(
    "evidence",
    [
        GpuEvidence(),
        GpuEvidence(nvml_count=0, torch_cuda="13.0"),
        GpuEvidence(nodes=("nvidia-caps", "nvidia-uvm")),
        GpuEvidence(nodes=("nvidiactl",), nvml_count=0),  # a driver, and no GPU
        GpuEvidence(cuda_available=True, nvml_count=1, torch_cuda="13.0"),
    ],
)
def test_nothing_to_say(evidence: GpuEvidence) -> None:
    assert unusable_gpu(evidence) is None


@pytest.mark.parametrize("choice", ["", "-1", " -1", "-1,0", "NoDevFiles"])
def test_hiding_all_gpus_is_the_users_choice(choice: str) -> None:
    assert unusable_gpu(GpuEvidence(nvml_count=4, visible_devices=choice)) is None


def test_causes_with_a_cuda_build() -> None:
    old = GpuEvidence(
        nvml_count=1,
        torch_cuda="13.0",
        torch_warning="CUDA initialization: The NVIDIA driver on your system is too old\n(found 1)",
    )
    said = unusable_gpu(old)
    assert said is not None
    assert "the driver is too old for CUDA 13.0" in said
    assert "system is too old (found 1)" in said
    beyond = unusable_gpu(GpuEvidence(nvml_count=1, torch_cuda="13.0", visible_devices="7"))
    assert beyond is not None
    assert "CUDA_VISIBLE_DEVICES='7'" in beyond
    unknown = unusable_gpu(GpuEvidence(nvml_count=1, torch_cuda="13.0"))
    assert unknown is not None
    assert "finds no device" in unknown
    assert "--gpus all" in unknown


def test_evidence_is_read_from_the_file_system(tmp_path: Path) -> None:
    write(tmp_path, {"dev/nvidia0": "", "dev/null": "", "proc/driver/nvidia/gpus/0000/x": ""})
    evidence = GpuEvidence.gather(tmp_path)
    assert evidence.nodes == ("nvidia0",)
    assert evidence.driver_gpus == 1
    assert GpuEvidence.gather(tmp_path / "nothing").nodes == ()


def test_the_probe_asks_once_and_survives_a_broken_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def broken() -> bool:
        asked.append(1)
        raise RuntimeError("driver on fire")

    monkeypatch.setattr("torch.cuda.is_available", broken)
    topology.evidence._evidence.cache_clear()
    try:
        unusable_gpu()
        unusable_gpu()
        assert topology.evidence._evidence().torch_warning == "driver on fire"
        assert len(asked) == 1
    finally:
        topology.evidence._evidence.cache_clear()


def test_cpu_count_heeds_v2_quotas_of_every_level(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a/cpu.max": "250000 100000\n",
        },
    )
    assert cpu_count(root, affinity=16) == 3
    assert cpu_count(root, affinity=2) == 2


def test_cpu_count_heeds_v1_quotas(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/a\n",
        "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
    }
    assert cpu_count(write(tmp_path, files), affinity=16) == 1
    files["sys/fs/cgroup/cpu/a/cpu.cfs_quota_us"] = "-1\n"
    assert cpu_count(write(tmp_path, files), affinity=16) == 16


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs CPU affinity (Linux)")
def test_cpu_count_here() -> None:
    assert 1 <= cpu_count() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("enabled", "size", "expected"),
    [
        ("always [madvise] never\n", "2097152\n", 2 << 20),
        ("[always] madvise never\n", "536870912\n", 512 << 20),
        ("always madvise [never]\n", "2097152\n", None),
        (None, "2097152\n", None),
        ("always [madvise] never\n", None, None),
    ],
)
def test_huge_page_size(
    tmp_path: Path, enabled: str | None, size: str | None, expected: int | None
) -> None:
    folder = "sys/kernel/mm/transparent_hugepage"
    files = {f"{folder}/enabled": enabled, f"{folder}/hpage_pmd_size": size}
    write(tmp_path, {name: text for name, text in files.items() if text is not None})
    assert huge_page_size(tmp_path) == expected


def test_page_size_is_asked_for() -> None:
    assert topology.page_size() == mmap.PAGESIZE
