"""The short measurement on a real GPU: its time, its figures to one another, and no trace of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ghoffload import measure
from ghoffload.config import OffloadConfig
from ghoffload.kernels import bandwidth, cache, cuda
from ghoffload.machine.cuda import CudaMachine
from ghoffload.measure import Rates, remembered
from ghoffload.measure.measuring import COPY_BYTES
from ghoffload.memory import ledger

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def machine() -> CudaMachine:
    torch.zeros(1, device="cuda")
    made = CudaMachine.of(torch.cuda.current_device())
    cuda.preload(made.device.index, (bandwidth.SOURCE,))
    return made


@pytest.fixture(scope="module")
def rates(machine: CudaMachine) -> Rates:
    return measure.measure(machine)


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path))
    yield tmp_path
    remembered._known.clear()


def test_figures_are_sane_beside_one_another(machine: CudaMachine, rates: Rates) -> None:
    assert rates.left_out == ()
    assert rates.pin_refusal is None
    assert rates.h2d is not None
    assert rates.d2h is not None
    assert rates.both is not None
    assert rates.hbm is not None
    assert rates.pinned is not None
    assert 0.2 < rates.d2h / rates.h2d < 5
    # Both ways at once no less than one after the other, and no more than both undisturbed.
    one_after_the_other = 2 / (1 / rates.h2d + 1 / rates.d2h)
    assert 0.8 * one_after_the_other < rates.both < 1.15 * (rates.h2d + rates.d2h)
    assert 0.4 < rates.pinned.rate / rates.both < 3
    assert rates.hbm > 2 * rates.both
    for kind in ("pinned", "managed"):
        found = rates.by_kernel(kind)
        assert (found is not None) == (kind in machine.memory_kinds)
        if found is not None:
            assert 0.7 < found.rate / rates.pinned.rate < 1.4
            assert 1 <= found.ctas <= 32
    assert len(rates.uuid) == 32
    assert rates.driver
    choice = measure.resolve(OffloadConfig(), machine, rates)
    assert choice.memory_kind in machine.memory_kinds


def test_it_takes_no_time_and_leaves_no_trace(machine: CudaMachine, rates: Rates) -> None:
    held = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    free, _ = torch.cuda.mem_get_info()
    traffic = (machine.traffic.copies, machine.traffic.launches, machine.traffic.h2d_bytes)
    current = torch.cuda.current_stream()
    start = time.perf_counter()
    again = measure.measure(machine)
    seconds = time.perf_counter() - start
    assert seconds < 2
    assert again.complete == rates.complete
    assert torch.cuda.memory_stats() == before
    assert torch.cuda.current_stream() == current
    assert traffic == (machine.traffic.copies, machine.traffic.launches, machine.traffic.h2d_bytes)
    assert ledger.total(owner="measuring the link") == 0
    assert torch.cuda.mem_get_info()[0] >= free - (32 << 20)  # nothing of 128 MB is still there
    del held


def test_figures_repeat(machine: CudaMachine, rates: Rates) -> None:
    again = measure.measure(machine)
    assert rates.both is not None
    assert again.both is not None
    assert 0.6 < again.both / rates.both < 1.6


def test_the_second_call_costs_nothing(machine: CudaMachine, fresh_cache: Path) -> None:
    first = measure.rates_of(machine)
    assert first is not None
    times = []
    for forget in (False, False, True, True):
        if forget:
            remembered._known.clear()  # as in another process
        start = time.perf_counter()
        assert measure.rates_of(machine) == first
        times.append(time.perf_counter() - start)
    assert min(times[:2]) < 5e-3
    assert min(times[2:]) < 5e-3


def test_nothing_is_measured_during_a_capture(machine: CudaMachine, fresh_cache: Path) -> None:
    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        assert measure.rates_of(machine) is None
    graph.replay()
    assert y.tolist() == [2.0] * 8
    assert measure.rates_of(machine) is not None
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert measure.rates_of(machine) is not None  # remembered


def test_it_waits_for_the_callers_work_and_not_the_other_way(machine: CudaMachine) -> None:
    torch.cuda._sleep(200_000_000)  # about 0.1 s
    x = torch.ones(1 << 20, device="cuda")
    measured = measure.measure(machine)
    x += 1
    assert measured.both is not None
    assert x.sum().item() == 2 << 20


def test_a_card_that_is_full_is_left_alone(
    machine: CudaMachine, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "_ROOM", 1 << 60)
    assert measure.rates_of(machine) is None
    torch.ones(1, device="cuda").item()


def test_the_link_can_be_looked_at_while_it_is_busy(machine: CudaMachine, rates: Rates) -> None:
    start = time.perf_counter()
    seen = measure.under_load(machine, lambda: time.perf_counter() - start, rate=rates.h2d)
    assert seen < 0.5  # the look came while copies were in flight ...
    assert time.perf_counter() - start > 0.1  # ... and the call ended after them


def test_two_processes_measure_once(machine: CudaMachine, fresh_cache: Path) -> None:
    program = (
        "import json, torch; from ghoffload import measure\n"
        "from ghoffload.machine.cuda import CudaMachine\n"
        "print(json.dumps(measure.rates_of(CudaMachine.of(0)).to_dict()))"
    )
    environment = {
        **os.environ,
        cache.ENVIRONMENT_VARIABLE: str(fresh_cache),
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
    }
    both = [
        subprocess.Popen(
            [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    found = [json.loads(process.communicate(timeout=120)[0]) for process in both]
    assert found[0] == found[1]  # the time of the measurement among it
    assert found[0]["pinned_bytes"] == 2 * COPY_BYTES
