"""Made-up machines, for the probe here and for the doctor in test_doctor_*.py."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ghoffload.machine.topology import GpuEvidence, Reader, Topology, probe
from ghoffload.machine.topology.files import number_list

GB = 10**9
C2C_COUNT, C2C_STATUS, C2C_SPEED = 170, 171, 172


class MadeUpCuda:
    """A CUDA runtime of some GPUs, each a dict of attributes; ``name``, ``bus`` and ``bytes``."""

    def __init__(self, gpus: list[dict[str, Any]], version: int = 13000) -> None:
        self.gpus, self.version = gpus, version

    def driver_version(self) -> int:
        return self.version

    def count(self) -> int:
        if not self.gpus:
            raise RuntimeError("cudaErrorNoDevice")
        return len(self.gpus)

    def name(self, index: int) -> str:
        return self.gpus[index]["name"]

    def bus_id(self, index: int) -> str:
        return self.gpus[index]["bus"]

    def memory_bytes(self, index: int) -> int:
        return self.gpus[index]["bytes"]

    def attribute(self, name: str, index: int) -> int | None:
        return self.gpus[index].get(name)


class MadeUpNvml:
    """A ``pynvml`` that answers ``nvmlDeviceGetX(handle)`` with ``gpus[handle]["X"]``."""

    def __init__(self, gpus: list[dict[str, Any]], version: str = "580.95.05") -> None:
        self.gpus, self.version = gpus, version
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.version

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12080

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> int:
        (index,) = [i for i, gpu in enumerate(self.gpus) if gpu["bus"].lower().endswith(bus)]
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(busId=f"0000{self.gpus[handle]['bus'].upper()}")

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, since: int) -> int:
        assert since == 0
        return self.gpus[handle]["ecc"][kind]

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list) -> list:
        ((number, scope),) = fields
        answer = self.gpus[handle].get(number)
        answer = answer[scope] if isinstance(answer, list) else answer
        return [
            types.SimpleNamespace(
                nvmlReturn=0 if answer is not None else 3,
                valueType=1,
                value=types.SimpleNamespace(uiVal=answer),
            )
        ]

    def __getattr__(self, name: str) -> Any:
        start = "nvmlDeviceGet"
        if not name.startswith(start):
            raise AttributeError(name)

        def ask(handle: int) -> Any:
            return self.gpus[handle][name[len(start) :]]  # KeyError: "not supported"

        return ask


def write(root: Path, files: Mapping[str, str | None]) -> None:
    for name, text in files.items():
        if text is not None:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def node(index: int, cpus: str, total: int, cached: int = 0) -> dict[str, str]:
    folder = f"sys/devices/system/node/node{index}"
    rows = {"MemTotal": total, "MemFree": total // 2, "FilePages": cached}
    lines = [f"Node {index} {name}:   {value // 1024} kB\n" for name, value in rows.items()]
    return {f"{folder}/cpulist": f"{cpus}\n", f"{folder}/meminfo": "".join(lines)}


def host(nodes: Mapping[str, str], cpus: str, memory: int, **changed: str | None) -> dict:
    files: dict[str, str | None] = {
        "proc/self/status": f"Name:\tx\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t0-63\n",
        "proc/self/limits": "Max locked memory         unlimited   unlimited   bytes     \n",
        "proc/sys/kernel/numa_balancing": "0\n",
        "proc/meminfo": f"MemTotal: {memory // 1024} kB\nMemAvailable: {memory // 1280} kB\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "sys/kernel/mm/transparent_hugepage/hpage_pmd_size": "2097152\n",
    }
    return {**files, **nodes, **changed}


ATS = {
    "ConcurrentManagedAccess": 1,
    "PageableMemoryAccess": 1,
    "PageableMemoryAccessUsesHostPageTables": 1,
    "DirectManagedMemAccessFromHost": 1,
    "HostNativeAtomicSupported": 1,
}
HMM = {**dict.fromkeys(ATS, 0), "ConcurrentManagedAccess": 1, "PageableMemoryAccess": 1}
NO_HMM = {**HMM, "PageableMemoryAccess": 0}
GH200 = {
    "name": "a coherent chip",
    "bus": "0009:01:00.0",
    "bytes": 96 * GB,
    "ComputeCapabilityMajor": 9,
    "ComputeCapabilityMinor": 0,
    "MultiProcessorCount": 132,
    "AsyncEngineCount": 3,
    "HostNumaId": 0,
    "NumaConfig": 1,
    "NumaId": 1,
    **ATS,
}
H200 = {
    **GH200,
    **NO_HMM,
    "name": "a PCIe chip",
    "bus": "0000:1b:00.0",
    "bytes": 141 * GB,
    "NumaConfig": 0,
    "NumaId": -1,
}
TELEMETRY = {
    "AddressingMode": 0,
    "CurrentClocksEventReasons": 0,
    "CurrPcieLinkGeneration": 5,
    "CurrPcieLinkWidth": 16,
    "EccMode": [1, 1],
    "GpuMaxPcieLinkGeneration": 5,
    "MaxPcieLinkGeneration": 5,
    "MaxPcieLinkWidth": 16,
    "MigMode": [0, 0],
    "PcieReplayCounter": 0,
    "PerformanceState": 0,
    "ecc": (0, 0),
}
# Five links a C2C side, and a PCIe side that nothing is connected to.
C2C = {
    **TELEMETRY,
    "AddressingMode": 2,
    "CurrPcieLinkGeneration": 1,
    "CurrPcieLinkWidth": 1,
    C2C_COUNT: 5,
    C2C_STATUS: [1, 1, 1, 1, 1],
    C2C_SPEED: [89424] * 5,
}
WORKS = GpuEvidence(
    cuda_available=True, torch_version="2.13.0", torch_cuda="13.0", architecture="x86_64"
)


def reader(
    root: Path,
    files: Mapping[str, str | None],
    chips: list[dict],
    telemetry: list[dict],
    evidence: GpuEvidence = WORKS,
    page: int = 4096,
) -> Reader:
    write(root, files)
    told = [{**t, "bus": c["bus"]} for c, t in zip(chips, telemetry, strict=True)]
    return Reader(
        root=root,
        nvml=MadeUpNvml(told) if told else None,
        cuda=MadeUpCuda(chips) if chips else None,
        page_bytes=page,
        evidence=evidence,
    )


def gh200(
    root: Path,
    *,
    chip: dict | None = None,
    telemetry: dict | None = None,
    cached: int = 0,
    files: Mapping[str, str | None] | None = None,
) -> Reader:
    """Nine nodes: Grace, its HBM, and seven that MIG slices would become."""
    nodes = {**node(0, "0-71", 480 * GB), **node(1, "", 96 * GB, cached)}
    for index in range(2, 9):
        nodes |= node(index, "", 0)
    nodes["sys/kernel/mm/transparent_hugepage/hpage_pmd_size"] = str(512 << 20)
    return reader(
        root,
        {**host(nodes, "0-71", 480 * GB), **(files or {})},
        [{**GH200, **(chip or {})}],
        [{**C2C, **(telemetry or {})}],
        dataclasses.replace(WORKS, architecture="aarch64"),
        page=64 << 10,
    )


def gb200(root: Path, *, files: Mapping[str, str | None] | None = None) -> Reader:
    """34 nodes: two Graces, and eight for each of four GPUs."""
    nodes = {**node(0, "0-71", 480 * GB), **node(1, "72-143", 480 * GB)}
    for index in range(2, 34):
        nodes |= node(index, "", 186 * GB if index % 8 == 2 else 0)
    chips = [
        {
            **GH200,
            "bus": f"{8 + i:04x}:01:00.0",
            "bytes": 186 * GB,
            "ComputeCapabilityMajor": 10,
            "HostNumaId": i // 2,
            "NumaId": 2 + 8 * i,
        }
        for i in range(4)
    ]
    made = {**host(nodes, "0-143", 960 * GB), **(files or {})}
    return reader(root, made, chips, [C2C] * 4, dataclasses.replace(WORKS, architecture="aarch64"))


def x86(
    root: Path,
    *,
    chip: dict | None = None,
    telemetry: dict | None = None,
    files: Mapping[str, str | None] | None = None,
    evidence: GpuEvidence = WORKS,
) -> Reader:
    """Two sockets and one GPU at the second, which says so on the PCI bus alone."""
    nodes = {**node(0, "0-15", 256 * GB), **node(1, "16-31", 256 * GB)}
    made = {
        **host(nodes, "16-31", 512 * GB),
        "sys/bus/pci/devices/0000:1b:00.0/numa_node": "1\n",
        **(files or {}),
    }
    chips = [{**H200, "HostNumaId": -1, **(chip or {})}]
    return reader(root, made, chips, [{**TELEMETRY, **(telemetry or {})}], evidence)


def no_gpu(root: Path) -> Reader:
    evidence = GpuEvidence(torch_version="2.13.0", torch_cuda="13.0", architecture="x86_64")
    return reader(root, host(node(0, "0-3", 16 * GB), "0-3", 16 * GB), [], [], evidence)


def container(limit: int) -> dict[str, str]:
    return {
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": f"{limit}\n",
        "sys/fs/cgroup/job/memory.current": f"{limit // 2}\n",
        "sys/fs/cgroup/job/memory.stat": f"active_file {limit // 8}\ninactive_file {limit // 8}\n",
        "sys/fs/cgroup/job/cpu.max": "400000 100000\n",
    }


# --- the probe -----------------------------------------------------------------------------------


def test_gh200_in_numa_mode(tmp_path: Path) -> None:
    found = probe(gh200(tmp_path))
    (gpu,) = found.gpus
    assert found.driver == "580.95.05"
    assert found.driver_cuda == (13, 0)
    assert (gpu.index, gpu.name, gpu.compute_capability) == (0, "a coherent chip", (9, 0))
    assert (gpu.sm_count, gpu.hbm_bytes, gpu.copy_engines) == (132, 96 * GB, 3)
    assert all(dataclasses.astuple(gpu.capabilities))
    assert (gpu.coherent, gpu.coherent_memory, gpu.addressing) == (True, "numa", "ats")
    assert (gpu.numa_id, gpu.host_numa_id, gpu.near_node) == (1, 0, 0)
    assert (gpu.link.kind, gpu.link.c2c_links, gpu.link.c2c_links_up) == ("c2c", 5, 5)
    assert gpu.link.c2c_bytes_per_second == 5 * 89424e6
    assert [n.index for n in found.host.nodes] == list(range(9))
    assert [n.index for n in found.host.cpu_nodes] == [0]
    assert found.host.nodes[1].total_bytes == 96 * GB
    assert (found.host.page_bytes, found.host.huge_page_bytes) == (64 << 10, 512 << 20)
    assert (found.host.cpus, found.host.affinity) == (72, "0-71")


@pytest.mark.parametrize(
    ("chip", "params", "expected"),
    [
        ({"NumaConfig": 0, "NumaId": -1}, None, "cdmm"),
        ({"NumaConfig": 1}, 'CoherentGPUMemoryMode: "driver"\n', "numa"),  # CUDA knows best
        ({"NumaConfig": None}, 'CoherentGPUMemoryMode: "driver"\n', "cdmm"),
        ({"NumaConfig": None}, 'CoherentGPUMemoryMode: "numa"\n', "numa"),
        ({"NumaConfig": None}, 'CoherentGPUMemoryMode: ""\n', "numa"),
        ({"NumaConfig": None, "NumaId": -1}, None, "cdmm"),
        ({"NumaConfig": None, "NumaId": None}, None, None),
    ],
)
def test_who_manages_coherent_hbm(
    tmp_path: Path, chip: dict, params: str | None, expected: str | None
) -> None:
    made = gh200(tmp_path, chip=chip, files={"proc/driver/nvidia/params": params})
    assert probe(made).gpus[0].coherent_memory == expected


def test_gb200_tells_cpuless_nodes_apart(tmp_path: Path) -> None:
    found = probe(gb200(tmp_path))
    assert len(found.host.nodes) == 34
    assert [n.index for n in found.host.cpu_nodes] == [0, 1]
    assert [gpu.near_node for gpu in found.gpus] == [0, 0, 1, 1]
    assert [gpu.numa_id for gpu in found.gpus] == [2, 10, 18, 26]
    assert found.host.own_nodes() == {0, 1}


@pytest.mark.parametrize(("attributes", "expected"), [(HMM, True), (NO_HMM, False)])
def test_x86_with_and_without_hmm(tmp_path: Path, attributes: dict, expected: bool) -> None:
    (gpu,) = probe(x86(tmp_path, chip=attributes)).gpus
    assert gpu.capabilities.pageable_memory_access is expected
    assert (gpu.coherent, gpu.coherent_memory) == (False, None)
    assert (gpu.link.kind, gpu.link.generation, gpu.link.width) == ("pcie", 5, 16)
    assert gpu.link.pcie_bytes_per_second() == pytest.approx(63.0e9, rel=0.001)
    assert gpu.near_node == 1  # the bus knows where CUDA says -1


@pytest.mark.parametrize(
    ("chip", "told"),
    [
        (ATS, {C2C_COUNT: None, "AddressingMode": 0}),
        ({}, {C2C_COUNT: None, "AddressingMode": 2}),
        ({}, {C2C_COUNT: 5, "AddressingMode": 0}),
    ],
)
def test_each_sign_of_c2c_counts(tmp_path: Path, chip: dict, told: dict) -> None:
    chip = {**dict.fromkeys(ATS), **chip}
    assert probe(gh200(tmp_path, chip=chip, telemetry=told)).gpus[0].link.kind == "c2c"


def test_one_node_with_cpus_is_the_nearest(tmp_path: Path) -> None:
    made = gh200(tmp_path, chip={"HostNumaId": -1})
    assert probe(made).gpus[0].near_node == 0
    bus = {"sys/bus/pci/devices/0000:1b:00.0/numa_node": "-1\n"}
    assert probe(x86(tmp_path / "x", files=bus)).gpus[0].near_node is None


def test_nothing_follows_from_a_name(tmp_path: Path) -> None:
    one = probe(x86(tmp_path, chip={"name": "NVIDIA GH200 480GB"})).gpus[0]
    other = probe(x86(tmp_path, chip={"name": "?"})).gpus[0]
    assert dataclasses.replace(one, name="") == dataclasses.replace(other, name="")


def test_telemetry(tmp_path: Path) -> None:
    told = {
        "MigMode": [1, 1],
        "ecc": (7, 2),
        "CurrentClocksEventReasons": 0x44,
        "PcieReplayCounter": 3,
        "PerformanceState": 32,  # "unknown"
    }
    made = x86(tmp_path, telemetry=told)
    (gpu,) = probe(made).gpus
    assert (gpu.mig, gpu.ecc, gpu.ecc_corrected, gpu.ecc_uncorrected) == (True, True, 7, 2)
    assert gpu.clock_reasons == ("sw_power_cap", "hw_thermal_slowdown")
    assert (gpu.link.replays, gpu.performance_state) == (3, None)
    assert made.nvml.open == 0  # NVML is shut down again


def test_telemetry_is_of_the_gpu_that_cuda_means(tmp_path: Path) -> None:
    """CUDA's order and NVML's differ; CUDA_VISIBLE_DEVICES leaves some out."""
    made = x86(tmp_path)
    other = {**TELEMETRY, "bus": "0000:00:05.0", "PcieReplayCounter": 99}
    made = dataclasses.replace(made, nvml=MadeUpNvml([other, *made.nvml.gpus]))
    (gpu,) = probe(made).gpus
    assert (gpu.bus_id, gpu.link.replays) == ("0000:1b:00.0", 0)


def test_old_names_of_nvml(tmp_path: Path) -> None:
    made = x86(tmp_path, telemetry={"CurrentClocksThrottleReasons": 0x8})
    del made.nvml.gpus[0]["CurrentClocksEventReasons"]
    assert probe(made).gpus[0].clock_reasons == ("hw_slowdown",)


def test_a_container(tmp_path: Path) -> None:
    locked = {"proc/self/limits": "Max locked memory         8388608   8388608   bytes\n"}
    found = probe(x86(tmp_path, files={**container(64 * GB), **locked})).host
    assert found.limits.cgroup_bytes == 64 * GB
    assert found.limits.cgroup_available_bytes == 48 * GB
    assert found.limits.room_bytes == 48 * GB
    assert found.limits.memlock_bytes == 8 << 20
    assert found.cpus == 4


def test_no_gpu(tmp_path: Path) -> None:
    found = probe(no_gpu(tmp_path))
    assert found.gpus == ()
    assert (found.driver, found.driver_cuda) == (None, None)
    assert len(found.unasked) == 2
    assert found.host.limits.total_bytes == 16 * GB // 1024 * 1024


def test_nothing_at_all(tmp_path: Path) -> None:
    found = probe(Reader(root=tmp_path / "nowhere"))
    assert found.host.nodes == ()
    assert found.host.affinity is None
    assert found.host.limits.total_bytes is None


def test_a_gpu_that_only_nvml_sees(tmp_path: Path) -> None:
    made = dataclasses.replace(x86(tmp_path), cuda=None)
    (gpu,) = probe(made).gpus
    assert (gpu.index, gpu.bus_id, gpu.near_node) == (None, "0000:1b:00.0", 1)
    assert gpu.link.generation == 5
    assert gpu.compute_capability is None
    assert probe(made).driver_cuda == (12, 8)


def test_a_broken_nvml_and_cuda_say_nothing(tmp_path: Path) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            def fail(*arguments: object) -> None:
                raise RuntimeError("driver on fire")

            return fail

    made = dataclasses.replace(x86(tmp_path), nvml=Broken(), cuda=Broken())
    found = probe(made)
    assert found.gpus == ()
    assert found.unasked == ("NVML (it does not start: no driver, or no access to it)",)


def test_a_result_is_frozen_and_json(tmp_path: Path) -> None:
    found = probe(gb200(tmp_path))
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.driver = "1"  # type: ignore[misc]
    again = json.loads(json.dumps(found.to_dict()))
    assert again["gpus"][3]["numa_id"] == 26
    assert again["host"]["nodes"][0]["cpus"] == "0-71"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-2,5\n", {0, 1, 2, 5}), ("", set()), ("3", {3}), ("x,1-y,4", {4})],
)
def test_number_list(text: str, expected: set[int]) -> None:
    assert number_list(text) == expected


def test_this_machine() -> None:
    found = probe()
    assert isinstance(found, Topology)
    assert found.host.page_bytes >= 4096
    json.dumps(found.to_dict())


@pytest.mark.gpu
def test_this_gpu() -> None:
    import torch

    found = probe()
    properties = torch.cuda.get_device_properties(0)
    gpu = found.gpus[0]
    assert len(found.gpus) == torch.cuda.device_count()
    assert gpu.name == properties.name
    assert gpu.sm_count == properties.multi_processor_count
    assert gpu.compute_capability == (properties.major, properties.minor)
    assert gpu.hbm_bytes == properties.total_memory
    assert gpu.copy_engines is not None
    assert gpu.copy_engines >= 1
    assert gpu.capabilities.concurrent_managed_access is not None
    assert gpu.link.kind in ("pcie", "c2c")
    assert found.driver_cuda is not None
    assert not [name for name in found.unasked if name.startswith("CUDA")]
