"""The device's measurements on a made-up device with a clock of its own: who is timed for what.

Copies and kernels there take exactly bytes / rate, streams run side by side, and every figure must
come out as the rate that went in.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ghoffload.bandwidth as command
from ghoffload.bandwidth import managed, run
from ghoffload.bandwidth.plan import GB, MB
from ghoffload.bandwidth.results import Results
from ghoffload.kernels import bandwidth, cuda
from ghoffload.machine.cuda import CudaMachine, CudaStream
from ghoffload.measure import clock, raw

ENGINE, BACK, WORDS, BULK, HBM, LAUNCH = 50e9, 25e9, 40e9, 45e9, 4e12, 2e-6


class FakeStream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle
        self.time = 0.0

    def wait_event(self, event: FakeEvent) -> None:
        assert event.time is not None
        self.time = max(self.time, event.time)

    def synchronize(self) -> None:
        pass


class FakeEvent:
    late: list[bool] = []  # noqa: RUF012 - what the next queries answer

    def __init__(self, enable_timing: bool = False) -> None:
        self.time: float | None = None

    def record(self, stream: FakeStream) -> None:
        self.time = stream.time

    def query(self) -> bool:
        return self.late.pop() if self.late else False

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.time is not None
        assert other.time is not None
        return (other.time - self.time) * 1e3


class FakeMachine:
    """Copies tensors at once, and knows how long it would have taken."""

    kind = "cuda"
    device = torch.device("cuda", 0)
    pin_refusal = "CUDA_ERROR_NOT_PERMITTED"
    host_node = None
    imaginary = False

    def __init__(self) -> None:
        self.streams = {k: FakeStream(k) for k in (1, 2, 3)}
        self.h2d, *rest = (CudaStream(f"lane {k}", s) for k, s in self.streams.items())  # type: ignore[arg-type]
        self.d2h = tuple(rest)
        self.pins = True
        self.uuid = "ab" * 16
        self.registered: set[int] = set()
        self.held = 0
        self.hbm: dict[int, int] = {}
        self.clock = 0.0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.held += 1
        tensor = torch.empty(shape, dtype=dtype)
        self.hbm[tensor.data_ptr()] = tensor.nbytes
        return tensor

    def free(self, tensor: Tensor) -> None:
        self.held -= 1

    def register_host(
        self, address: int, nbytes: int, *, pin: bool, node: int | None = None
    ) -> bool:
        self.registered.add(address)
        return pin and self.pins

    def unregister_host(self, address: int) -> None:
        self.registered.remove(address)

    def synchronize_all(self) -> None:
        pass

    def copy(self, destination: Tensor, source: Tensor, *, stream: CudaStream) -> None:
        assert destination.nbytes == source.nbytes
        self.moved(destination.data_ptr(), destination.nbytes, stream.handle)

    def moved(self, destination: int, nbytes: int, handle: int) -> None:
        inwards = any(start <= destination < start + size for start, size in self.hbm.items())
        self.busy(handle, nbytes / (ENGINE if inwards else BACK))

    def busy(self, handle: int, seconds: float) -> None:
        self.streams[handle].time += seconds
        self.clock += seconds


class FakeRaw:
    """The driver's calls by address; HBM is memory of this process."""

    def __init__(self, machine: FakeMachine) -> None:
        self.machine = machine
        self.memory: dict[int, Tensor] = {}

    def allocate(self, nbytes: int) -> int:
        memory = torch.empty(nbytes, dtype=torch.uint8)
        self.memory[memory.data_ptr()] = memory
        self.machine.held += 1
        self.machine.hbm[memory.data_ptr()] = nbytes
        return memory.data_ptr()

    def free(self, address: int) -> None:
        self.machine.held -= 1
        del self.memory[address], self.machine.hbm[address]

    def copy(self, destination: int, source: int, nbytes: int, *, stream: int) -> None:
        self.machine.moved(destination, nbytes, stream)

    def uuid(self) -> str:
        return self.machine.uuid

    def driver_version(self) -> str:
        return "580.95.05"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMachine]:
    fake = FakeMachine()
    properties = types.SimpleNamespace(
        name="made up", major=9, minor=0, multi_processor_count=4, total_memory=8 * GB,
        L2_cache_size=MB,
    )  # fmt: skip

    def launch(source, kernel, device, *, blocks, threads, parameters, stream):  # type: ignore[no-untyped-def]
        assert source == bandwidth.SOURCE
        numbers = [int(p[0]) for p in parameters]
        fake.busy(
            stream,
            {
                "nothing": lambda: LAUNCH,
                "spin": lambda: numbers[0] / 1e9,
                "move_words": lambda: numbers[2] / WORDS,
                "read_words": lambda: numbers[2] / HBM,
            }[kernel](),
        )

    def launch_bulk(parameters: Any, blocks: int, device: int, stream: int) -> None:
        fake.busy(stream, int(parameters[2][0]) / BULK)

    monkeypatch.setattr(cuda, "launch", launch)
    monkeypatch.setattr(cuda, "preload", lambda device, sources: None)
    monkeypatch.setattr(bandwidth, "_launch_bulk", launch_bulk)
    monkeypatch.setattr(CudaMachine, "of", classmethod(lambda cls, index: fake))
    monkeypatch.setattr(managed, "Driver", lambda index: FakeDriver(fake))
    monkeypatch.setattr(raw, "Raw", FakeRaw)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (8 * GB, 8 * GB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, properties.minor))
    monkeypatch.setattr(clock.time, "perf_counter", lambda: fake.clock)
    monkeypatch.setattr(run, "available_host_bytes", lambda: GB)
    monkeypatch.setattr(run.host, "measure", lambda plan: iter(()))
    FakeEvent.late = []
    yield fake
    assert fake.held == 0
    assert not fake.registered


class FakeDriver:
    def __init__(self, machine: FakeMachine) -> None:
        self.machine = machine
        self.calls: list[str] = []
        self.memory: Tensor | None = None

    def attribute(self, name: str) -> int:
        return 1

    def allocate(self, nbytes: int) -> int:
        self.memory = torch.empty(nbytes, dtype=torch.uint8)
        self.nbytes = nbytes
        return self.memory.data_ptr()

    def free(self, address: int) -> None:
        self.memory = None

    def stay_on_host(self, address: int, nbytes: int) -> None:
        pass

    def prefetch(self, address: int, nbytes: int, *, to_device: bool, stream: int) -> None:
        self.machine.busy(stream, nbytes / (40e9 if to_device else 10e9))


def measured() -> Results:
    return run.measure(quick=True, device=0, say=lambda text: None)


def values(results: Results, **keys: Any) -> dict[str, set[float]]:
    found: dict[str, set[float]] = {}
    for row in results.select(**keys):
        found.setdefault(row.direction, set()).add(round(row.value, 3))
    return found


def test_every_figure_is_the_rate_that_went_in(machine: FakeMachine) -> None:
    results = measured()
    assert results.failures == []
    assert results.notes == []
    assert results.exposed == 0
    for memory in ("pinned", "managed", "system"):
        words = values(results, memory=memory, by="words")
        bulk = values(results, memory=memory, by="bulk")
        assert words == {"h2d": {40.0}, "d2h": {40.0}, "both": {80.0}}
        assert bulk == {"h2d": {45.0}, "d2h": {45.0}, "both": {90.0}}
    # Two streams at once, so both directions take as long as the slower one.
    engine = values(results, what="copy", memory="pinned", by="engine")
    assert engine == {"h2d": {50.0}, "d2h": {25.0}, "both": {50.0}}
    assert values(results, memory="pageable") == {"h2d": {50.0}, "d2h": {25.0}}
    assert results.select(memory="managed", by="engine") == []
    assert values(results, what="prefetch") == {"h2d": {40.0}, "d2h": {10.0}}
    assert values(results, what="hbm", by="words") == {"read": {4000.0}, "copy": {80.0}}
    assert values(results, what="hbm", by="driver") == {"copy": {100.0}}
    launches = {row.by: row.value for row in results.select(what="latency", direction="launch")}
    assert launches == pytest.approx({"call": 2.0, "device": 2.0, "round trip": 2.0})
    copies = {row.by: row.value for row in results.select(what="latency", direction="d2h")}
    one = 4096 / BACK * 1e6
    assert copies == pytest.approx({"call": one, "device": one, "round trip": one})


def test_each_block_count_and_size_has_its_row(machine: FakeMachine) -> None:
    results = measured()
    rows = results.select(what="copy", memory="pinned", direction="both")
    assert [row.nbytes for row in rows if row.by == "engine"] == [4096, 1 << 18, 1 << 22, 1 << 26]
    for kernel in ("words", "bulk"):
        assert [row.blocks for row in rows if row.by == kernel] == [2, 8, 32]


def test_a_sample_with_launch_cost_in_it_is_taken_again(machine: FakeMachine) -> None:
    FakeEvent.late = [True]
    assert measured().exposed == 0
    FakeEvent.late = [True] * 4
    assert measured().exposed == 1


def test_where_pinning_is_refused_the_rest_is_measured(machine: FakeMachine) -> None:
    machine.pins = False
    results = measured()
    assert results.notes == ["pinned memory: left out, this system lets no memory be pinned"]
    assert results.select(memory="pinned") == []
    assert results.select(memory="managed")
    assert results.select(what="latency", direction="launch")
    assert results.failures == []


def test_what_a_machine_has_not_is_left_out(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeDriver, "attribute", lambda self, name: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    results = measured()
    assert results.notes == [
        "bulk-copy kernel: left out, it needs compute capability 9.0 or later",
        "managed memory: left out, ConcurrentManagedAccess is 0 here",
        "system memory: left out, PageableMemoryAccess is 0 here",
    ]
    assert results.select(by="bulk") == []
    assert results.failures == []


def test_a_failure_loses_no_figure(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("launch of move_bulk failed")

    monkeypatch.setattr(bandwidth, "_launch_bulk", refuse)
    results = measured()
    assert [text.partition(":")[0] for text in results.failures] == [
        "pinned memory by kernel",
        "managed memory",
        "system memory",
    ]
    assert results.select(memory="pinned", by="words")
    assert results.select(memory="pageable")


def test_the_command_writes_what_it_measured(
    machine: FakeMachine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    names = ("figures.json", "machine.toml", "link.png")
    json_path, profile_path, plot_path = (tmp_path / name for name in names)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = f"--quick --json {json_path} --save-profile {profile_path} --plot {plot_path}"
    assert command.main(parser.parse_args(words.split())) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "made up" in printed.out
    assert "managed memory, prefetch (GB/s)" in printed.out
    assert "Only host memory" not in printed.out
    found = json.loads(json_path.read_text())
    assert found["environment"]["gpu"] == "made up"
    assert len(found["rows"]) > 60
    assert "value = 50.0" in profile_path.read_text()
    assert plot_path.read_bytes().startswith(b"\x89PNG")

    def refuse(*arguments: object) -> None:
        raise RuntimeError("launch of move_bulk failed")

    monkeypatch.setattr(bandwidth, "_launch_bulk", refuse)
    assert command.main(parser.parse_args(["--quick"])) == 1
    expected = "ghoffload bandwidth: managed memory: launch of move_bulk failed"
    assert expected in capsys.readouterr().err


# --- the driver's signatures ---


def bindings(version: int) -> tuple[Any, list[tuple[Any, ...]]]:
    """As much of cuda.bindings.driver as managed memory needs, as 12.9 or 13 has it."""
    calls: list[tuple[Any, ...]] = []
    member = types.SimpleNamespace

    class Location:
        type = id = None

    def call(name: str, *answer: object) -> Any:
        def function(*arguments: Any) -> tuple[Any, ...]:
            arguments = tuple((a.type, a.id) if isinstance(a, Location) else a for a in arguments)
            calls.append((name, *arguments))
            return (0, *answer)

        return function

    def old(*arguments: object) -> None:
        raise AssertionError("takes a device, not a location")

    suffix = "_v2" if version == 12 else ""
    driver = member(
        CUmemLocation=Location,
        CUmemLocationType=member(CU_MEM_LOCATION_TYPE_DEVICE="D", CU_MEM_LOCATION_TYPE_HOST="H"),
        CUmem_advise=member(
            CU_MEM_ADVISE_SET_PREFERRED_LOCATION=member(name="prefer"),
            CU_MEM_ADVISE_SET_ACCESSED_BY=member(name="accessed"),
        ),
        CUdevice_attribute=member(CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS="P"),
        cuMemAdvise=old,
        cuMemPrefetchAsync=old,
        cuDeviceGet=call("device", "dev"),
        cuDeviceGetAttribute=call("attribute", 1),
        cuMemAllocManaged=call("allocate", 4096),
        cuMemFree=call("free"),
    )
    setattr(driver, f"cuMemAdvise{suffix}", call("advise"))
    setattr(driver, f"cuMemPrefetchAsync{suffix}", call("prefetch"))
    return driver, calls


@pytest.mark.parametrize("version", [12, 13])
def test_advice_and_prefetch_of_either_version(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cuda.bindings

    driver, calls = bindings(version)
    monkeypatch.setattr(cuda.bindings, "driver", driver, raising=False)
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.driver", driver)
    ours = managed.Driver(3)
    assert ours.attribute("PAGEABLE_MEMORY_ACCESS") == 1
    assert ours.allocate(100) == 4096
    ours.stay_on_host(4096, 100)
    ours.prefetch(4096, 100, to_device=True, stream=7)
    ours.prefetch(4096, 100, to_device=False, stream=7)
    advice = driver.CUmem_advise
    assert calls[2:] == [
        ("allocate", 100, 1),
        ("advise", 4096, 100, advice.CU_MEM_ADVISE_SET_PREFERRED_LOCATION, ("H", 0)),
        ("advise", 4096, 100, advice.CU_MEM_ADVISE_SET_ACCESSED_BY, ("D", 3)),
        ("prefetch", 4096, 100, ("D", 3), 0, 7),
        ("prefetch", 4096, 100, ("H", 0), 0, 7),
    ]
    driver.cuMemFree = lambda address: (719,)
    with pytest.raises(RuntimeError, match="freeing managed memory failed: 719"):
        ours.free(4096)
