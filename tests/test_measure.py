"""The short measurement and its cache, on a made-up device: what is timed, kept and left alone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bandwidth_dry import BACK, BULK, ENGINE, FakeDriver, FakeMachine, FakeRaw, FakeStream
from test_bandwidth_dry import machine as made_up_device  # noqa: F401 - a fixture

from ghoffload import measure
from ghoffload.kernels import bandwidth, cache
from ghoffload.machine.virtual import VirtualMachine
from ghoffload.measure import KernelRate, Rates, measuring, remembered
from ghoffload.measure.measuring import COPY_BYTES
from ghoffload.memory import HostArena, ledger

GB = 1e9
WHOLE = Rates(
    uuid="ab" * 16,
    driver="580.95.05",
    source="0" * 64,
    measured=1e9,
    h2d=55 * GB,
    d2h=55 * GB,
    both=96 * GB,
    hbm=4191 * GB,
    pinned=KernelRate(rate=84.7 * GB, ctas=4),
    managed=KernelRate(rate=84.8 * GB, ctas=4),
    pinned_bytes=2 * COPY_BYTES,
)


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def device(made_up_device: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMachine]:  # noqa: F811
    """The made-up device, which measures with small buffers and finds no lack of room."""
    fake = made_up_device
    fake.memory_kinds = frozenset({"device", "pinned", "managed", "system"})  # type: ignore[attr-defined]
    streams = iter(range(100, 100000))
    current = FakeStream(99)
    fake.streams[99] = current

    def stream(device: torch.device) -> FakeStream:
        handle = next(streams)
        fake.streams[handle] = FakeStream(handle)
        return fake.streams[handle]

    now = [current]

    @contextlib.contextmanager
    def entered(stream: FakeStream) -> Iterator[None]:
        now.append(stream)
        yield
        now.pop()

    def arena(kind: str, nbytes: int, *, machine: Any, owner: str) -> HostArena:
        assert now[-1] is not current  # managed memory is placed on the current stream
        return HostArena(nbytes, machine=machine, owner=owner, pin=kind == "pinned")

    monkeypatch.setattr(measuring, "Raw", FakeRaw)
    monkeypatch.setattr(remembered, "Raw", FakeRaw)
    monkeypatch.setattr(measuring, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(measuring, "state_arena", arena)
    monkeypatch.setattr(measuring.Driver, "of", classmethod(lambda cls, m: FakeDriver(m)))
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(remembered, "available_host_bytes", lambda: 64 << 30)
    monkeypatch.setattr(remembered, "_known", {})
    yield fake
    assert current.time == 0.0  # nothing was queued on the caller's stream
    assert ledger.total(owner="measuring the link") == 0


# --- one measurement -----------------------------------------------------------------------------


def test_every_figure_is_the_rate_that_went_in(device: FakeMachine) -> None:
    rates = measure.measure(device)
    assert (rates.h2d, rates.d2h) == pytest.approx((ENGINE, BACK))
    assert rates.both == pytest.approx(2 * BACK)  # both take as long as the slower one
    for kind in ("pinned", "managed", "system"):
        found = rates.by_kernel(kind)
        assert found is not None
        assert found.rate == pytest.approx(2 * BULK)
        assert found.ctas == 1
    assert rates.hbm is not None
    assert (rates.uuid, rates.driver) == ("ab" * 16, "580.95.05")
    assert abs(rates.measured - time.time()) < 100
    assert rates.pinned_bytes == 2 << 20
    assert rates.complete


def test_the_fewest_ctas_that_fill_the_link(
    device: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = {1: 25e9, 2: 96.9e9, 4: 97.1e9, 8: 96e9, 16: 100e9, 32: 99e9}

    def launch(parameters: Any, blocks: int, index: int, stream: int) -> None:
        device.busy(stream, 2 * int(parameters[2][0]) / reached[blocks])

    monkeypatch.setattr(bandwidth, "_launch_bulk", launch)
    found = measure.measure(device).pinned
    assert found is not None
    assert (found.ctas, round(found.rate / GB, 1)) == (4, 97.1)


def test_a_median_forgives_a_slow_round(
    device: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved, count = device.moved, iter(range(10**6))

    def sometimes_slow(destination: int, nbytes: int, handle: int) -> None:
        for _ in range(20 if next(count) % 7 == 0 else 1):
            moved(destination, nbytes, handle)

    monkeypatch.setattr(device, "moved", sometimes_slow)
    assert measure.measure(device).h2d == pytest.approx(ENGINE)


def test_a_refused_pin_leaves_the_other_kinds(device: FakeMachine) -> None:
    device.pins = False
    rates = measure.measure(device)
    assert rates.pin_refusal == "CUDA_ERROR_NOT_PERMITTED"
    assert rates.pinned is rates.h2d is rates.both is None
    assert rates.managed is not None
    assert rates.hbm is not None
    assert not rates.complete


def test_a_kind_that_is_not_reached_is_not_tried(device: FakeMachine) -> None:
    device.memory_kinds = frozenset({"device", "pinned"})  # type: ignore[attr-defined]
    rates = measure.measure(device)
    assert rates.managed is rates.system is None
    assert rates.pinned is not None
    assert rates.complete


def test_no_room_in_hbm_leaves_the_kernels(
    device: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: FakeRaw, nbytes: int) -> int:
        raise torch.OutOfMemoryError("allocating failed: CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(FakeRaw, "allocate", refuse)
    rates = measure.measure(device)
    assert rates.h2d is rates.hbm is None
    assert rates.pinned is not None
    assert rates.left_out == ("copies by engine: allocating failed: CUDA_ERROR_OUT_OF_MEMORY",)
    assert not rates.complete
    with pytest.raises(torch.OutOfMemoryError, match="copies by engine"):
        measure.under_load(device, lambda: None)


def test_a_kernel_that_fails_takes_no_other_figure_with_it(
    device: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("launch of\nmove_bulk failed")

    monkeypatch.setattr(bandwidth, "_launch_bulk", refuse)
    rates = measure.measure(device)
    assert rates.pinned is rates.managed is rates.system is None
    assert rates.h2d == pytest.approx(ENGINE)
    assert rates.left_out == tuple(
        f"{kind}: launch of move_bulk failed" for kind in ("pinned", "managed", "system")
    )


def test_memory_that_moved_to_hbm_is_not_counted(
    device: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """System memory's rate is the device's own once its pages have moved there."""
    arenas: list[HostArena] = []

    def arena(kind: str, nbytes: int, *, machine: Any, owner: str) -> HostArena:
        made = HostArena(nbytes, machine=machine, owner=owner, pin=kind == "pinned")
        arenas.append(made)
        return made

    def launch(parameters: Any, blocks: int, index: int, stream: int) -> None:
        moved = arenas[-1].address <= int(parameters[0][0]) < arenas[-1].address + arenas[-1].nbytes
        device.busy(stream, int(parameters[2][0]) / (1e12 if moved else BULK))

    monkeypatch.setattr(measuring, "state_arena", arena)
    monkeypatch.setattr(bandwidth, "_launch_bulk", launch)
    rates = measure.measure(device)
    assert rates.system is None
    assert rates.managed is not None
    assert rates.notes[0].startswith("system memory: its pages moved to HBM (2,000 GB/s")
    assert rates.complete  # it would be so the next time


def test_an_error_gives_everything_back(
    device: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bandwidth, "_launch_bulk", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure.measure(device)  # the fixtures look at what is still held


def test_the_link_is_busy_while_somebody_looks(
    device: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_MOST_COPIES", 10**5)
    seen = []

    def look() -> str:
        seen.append(max(stream.time for stream in device.streams.values()))
        assert device.held == 1
        return "seen"

    assert measure.under_load(device, look, rate=ENGINE) == "seen"
    assert seen[0] == pytest.approx(0.15 * ENGINE / BACK, rel=0.01)
    device.pins = False
    seen.clear()
    assert measure.under_load(device, look, rate=ENGINE) == "seen"


# --- figures as JSON -----------------------------------------------------------------------------


def test_rates_survive_json() -> None:
    for rates in (
        WHOLE,
        dataclasses.replace(WHOLE, left_out=("a: b",), pin_refusal="no", h2d=None),
    ):
        assert Rates.of(json.loads(json.dumps(rates.to_dict()))) == rates


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("h2d", -1.0),
        ("both", "fast"),
        ("hbm", float("inf")),
        ("measured", None),
        ("uuid", 7),
        ("pinned", {"rate": 1.0}),
        ("pinned", {"rate": 1.0, "ctas": 0}),
        ("managed", {"rate": True, "ctas": 1}),
        ("left_out", "text"),
        ("notes", [1]),
        ("pinned_bytes", 0.5),
        ("pin_refusal", 3),
    ],
)
def test_what_is_no_measurement_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} is not a figure"):
        Rates.of({**WHOLE.to_dict(), name: value})


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="expected both, d2h"):
        Rates.of({**WHOLE.to_dict(), "speed": 1})
    with pytest.raises(ValueError, match="expected both, d2h"):
        Rates.of({"h2d": 1.0})


# --- remembered ----------------------------------------------------------------------------------


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Measurements made, by the device's UUID; each takes a while and wants to be alone."""
    made: list[str] = []
    alone = threading.Lock()

    def measured(machine: FakeMachine) -> Rates:
        assert alone.acquire(blocking=False), "two measurements at once"
        time.sleep(0.05)
        alone.release()
        made.append(machine.uuid)
        return dataclasses.replace(WHOLE, uuid=machine.uuid)

    monkeypatch.setattr(remembered, "measure", measured)
    return made


def forget() -> None:
    """As in a new process."""
    remembered._known.clear()


def entry(root: Path) -> Path:
    (found,) = root.glob("rates-*.json")
    return found


def test_measured_once_per_machine(
    device: FakeMachine, count: list[str], cache_directory: Path
) -> None:
    first = measure.rates_of(device)
    assert first == WHOLE
    assert measure.rates_of(device) is first
    forget()
    assert measure.rates_of(device) == first
    assert len(count) == 1
    device.uuid = "cd" * 16  # another slice of the same card, say
    assert measure.rates_of(device) != first
    assert count == ["ab" * 16, "cd" * 16]
    device.uuid = "ab" * 16
    assert measure.rates_of(device) == first
    assert len(count) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(FakeRaw, "driver_version", lambda self: "590.1"),
        lambda patch: patch.setattr(remembered, "source_digest", lambda: "other kernels"),
        lambda patch: patch.setattr(remembered, "FORMAT", 99),
        lambda patch: patch.setattr(remembered, "read_text", lambda path: "another host"),
    ],
    ids=["driver", "kernels", "format", "host"],
)
def test_what_no_longer_holds_is_measured_again(
    device: FakeMachine, count: list[str], monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    measure.rates_of(device)
    change(monkeypatch)
    measure.rates_of(device)
    assert len(count) == 2


def test_a_broken_or_foreign_entry_is_measured_again(
    device: FakeMachine, count: list[str], cache_directory: Path
) -> None:
    measure.rates_of(device)
    name = entry(cache_directory).name
    foreign = json.dumps(dataclasses.replace(WHOLE, uuid="ef" * 16).to_dict()).encode()
    nonsense = (b"", b"[]", b"{}", b"not json", b"\xff\xfe", foreign)
    for payload in nonsense:
        cache.write(name, payload)
        forget()
        assert measure.rates_of(device) == WHOLE
    entry(cache_directory).write_bytes(b"torn")
    forget()
    assert measure.rates_of(device) == WHOLE
    assert len(count) == len(nonsense) + 2


def test_what_is_incomplete_is_kept_for_this_process_alone(
    device: FakeMachine, monkeypatch: pytest.MonkeyPatch, cache_directory: Path
) -> None:
    poor = dataclasses.replace(WHOLE, left_out=("managed memory: no room",))
    monkeypatch.setattr(remembered, "measure", lambda machine: poor)
    assert measure.rates_of(device) is poor
    monkeypatch.setattr(remembered, "measure", lambda machine: WHOLE)
    assert measure.rates_of(device) is poor
    assert not list(cache_directory.glob("rates-*.json"))
    forget()
    assert measure.rates_of(device) is WHOLE


def test_fresh_measures_and_is_remembered(device: FakeMachine, count: list[str]) -> None:
    measure.rates_of(device)
    measure.look_up(device, fresh=True)
    assert len(count) == 2
    measure.rates_of(device)
    assert len(count) == 2


def test_ranks_measure_one_at_a_time(device: FakeMachine, count: list[str]) -> None:
    """Eight GPUs of one host, two processes on each, as far as one process can act them."""
    others = [FakeMachine() for _ in range(8)]
    for index, other in enumerate(others):
        other.uuid = f"{index:032x}"
    threads = [
        threading.Thread(target=measure.rates_of, args=(other,)) for other in others for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(count) == [other.uuid for other in others]


def test_a_lock_that_nobody_gives_back_is_not_waited_for_forever(
    device: FakeMachine,
    count: list[str],
    cache_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remembered, "_PATIENCE", 0.1)
    names: list[str] = []
    locked = cache.locked

    @contextlib.contextmanager
    def noted(name: str, **options: Any) -> Iterator[bool]:
        names.append(name)
        with locked(name, **options) as held:
            yield held

    monkeypatch.setattr(cache, "locked", noted)
    measure.rates_of(device)
    (name,) = names
    # By a thread of this process, then by another process (a file of its own locks as one does).
    with locked(name):
        start = time.monotonic()
        measure.look_up(device, fresh=True)
    assert 0.1 < time.monotonic() - start < 5
    fcntl = pytest.importorskip("fcntl")
    with (cache_directory / f"{name}.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        start = time.monotonic()
        measure.look_up(device, fresh=True)
        assert 0.1 < time.monotonic() - start < 5
    assert len(count) == 3
    with locked(name, timeout=0) as held:
        assert held


# --- left alone ----------------------------------------------------------------------------------


def test_no_gpu_no_rates(count: list[str]) -> None:
    assert measure.rates_of(None) is None
    assert measure.rates_of(VirtualMachine()) is None


@pytest.mark.parametrize(("text", "on"), [("0", False), ("False", False), ("1", True)])
def test_measuring_can_be_switched_off(
    device: FakeMachine,
    count: list[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    on: bool,
) -> None:
    monkeypatch.setenv("GHOFFLOAD_MEASURE", text)
    assert (measure.rates_of(device) is not None) == on
    assert len(count) == on


def test_a_switch_that_is_neither(device: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GHOFFLOAD_MEASURE", "perhaps")
    with pytest.raises(ValueError, match="GHOFFLOAD_MEASURE expects 0, 1, true or false, got"):
        measure.rates_of(device)


@pytest.mark.parametrize("reason", ["capture", "hbm", "host"])
def test_where_measuring_would_be_in_the_way(
    device: FakeMachine, count: list[str], monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    with monkeypatch.context() as patch:
        if reason == "capture":
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        elif reason == "hbm":
            patch.setattr(torch.cuda, "mem_get_info", lambda device: (10**8, 10**11))
        else:
            patch.setattr(remembered, "available_host_bytes", lambda: 10**8)
        assert measure.rates_of(device) is None
    assert count == []
    known = measure.rates_of(device)  # it was not remembered that there are none
    assert known is not None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert measure.rates_of(device) is known


def test_a_failure_is_no_error(device: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(machine: FakeMachine) -> Rates:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(remembered, "measure", lost)
    assert measure.rates_of(device) is None
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure.look_up(device)
