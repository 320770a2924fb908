"""Timelines: figures by hand, traces that others read, and both sources."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType

import ghoffload
from ghoffload.machine.simulated import SimulatedMachine
from ghoffload.tracing import Span, Timeline
from ghoffload.tracing.sources import _OURS, fill
from ghoffload.tracing.spans import sentences
from ghoffload.tracing.trace import to_trace

MIB = 1 << 20


def by_hand() -> Timeline:
    return Timeline(
        "a machine",
        simulated=False,
        begin=10.0,
        end=20.0,
        spans=[
            Span("mm", "model", "compute", 10.0, 14.0),
            Span("mm", "model", "compute", 13.0, 15.0),  # beside another: counted once
            Span("in", "h2d", "h2d", 12.0, 16.0, 8 * 10**9),
            Span("out", "d2h", "d2h 0", 15.5, 18.0, 5 * 10**9),
            Span("adam_update", "runtime", "compute", 16.0, 17.0),
        ],
        memory=[(10.0, 100), (12.0, 300), (19.0, 50)],
    )


def test_figures() -> None:
    timeline = by_hand()
    assert timeline.seconds == 10.0
    assert timeline.busy("model") == 5.0
    assert timeline.exposed_seconds == 5.0
    assert timeline.busy("h2d", "d2h") == 6.0
    assert timeline.overlap() == 3.0 / 6.0  # 12 to 15 of 12 to 18
    assert (timeline.moved("h2d"), timeline.peak_bytes) == (8 * 10**9, 300)
    said = "\n".join(sentences(timeline))
    assert "a machine (measured): 10000.0 ms" in said
    assert "exposed: 5000.0 ms" in said
    assert "from the host: 8.00 GB in 4000.0 ms, 2.0 GB/s; the link was in use 40 %" in said
    assert "beside the model's kernels: 50 % of that" in said
    empty = Timeline("x", simulated=True)
    assert (empty.overlap(), empty.exposed_seconds, empty.peak_bytes) == (0.0, 0.0, 0)


def test_a_trace_has_tracks_spans_and_a_counter() -> None:
    trace = to_trace(by_hand())
    names = {
        e["args"]["name"]: e["tid"] for e in trace["traceEvents"] if e["name"] == "thread_name"
    }
    assert list(names) == ["compute", "h2d", "d2h 0"]
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == 5
    copy = next(e for e in spans if e["name"] == "in")
    assert (copy["tid"], copy["cat"]) == (names["h2d"], "h2d")
    assert (copy["ts"], copy["dur"]) == (2e6, 4e6)
    counters = [
        (e["ts"], e["args"]["bytes in use"]) for e in trace["traceEvents"] if e["ph"] == "C"
    ]
    assert counters == [(0.0, 100), (2e6, 300), (9e6, 50)]
    assert trace["otherData"]["exposed_seconds"] == 5.0


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))


def test_a_simulated_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ghoffload.use_machine("simulated", profile="h200-pcie5") as machine:
        assert isinstance(machine, SimulatedMachine)
        net = model().to("meta", torch.bfloat16)
        optimizer = ghoffload.OffloadAdamW(net.parameters(), lr=1e-3)
        x = torch.empty(4096, 2048, device="meta", dtype=torch.bfloat16)
        net(x).sum().backward()
        optimizer.step()
        begin = machine.elapsed()
        with ghoffload.timeline(tmp_path / "a.json", picture=tmp_path / "a.png") as timeline:
            net(x).sum().backward()
            optimizer.step()
        assert timeline.simulated
        assert timeline.seconds == pytest.approx(machine.elapsed() - begin, abs=1e-4)
    # Split master: 10 bytes of state for each parameter, both ways.
    state = 10 * 4 * 2048**2
    assert timeline.moved("h2d") == pytest.approx(state, rel=0.01)
    assert timeline.moved("d2h") == pytest.approx(state, rel=0.01)
    flops = 4 * 3 * 2 * 4096 * 2048**2 - 2 * 4096 * 2048**2  # the first layer's input needs none
    assert timeline.busy("model") > flops / machine.profile["bf16"]
    assert timeline.exposed_seconds == pytest.approx(timeline.seconds - timeline.busy("model"))
    assert timeline.exposed_seconds > state / machine.profile["both_engine"]
    assert timeline.peak_bytes == max(nbytes for _, nbytes in timeline.memory)
    assert timeline.peak_bytes > 2 * 2 * 4 * 2048**2
    trace = json.loads((tmp_path / "a.json").read_text())
    assert {e["cat"] for e in trace["traceEvents"] if e["ph"] == "X"} == {
        *("model", "runtime", "h2d", "d2h"),
    }
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert "(simulated)" in capsys.readouterr().out


def test_nothing_is_written_where_the_block_fails(tmp_path: Path) -> None:
    with (
        ghoffload.use_machine("simulated"),
        pytest.raises(ZeroDivisionError),
        ghoffload.timeline(tmp_path / "a.json"),
    ):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("enter", "message"),
    [
        (lambda path: ghoffload.timeline(path / "a.txt"), "path expects a file name with .json"),
        (lambda path: ghoffload.timeline(path / "b" / "a.json"), "a folder that is there"),
        (
            lambda path: ghoffload.timeline(picture=path / "a.gif"),
            "picture expects .* .png or .svg",
        ),
    ],
)
def test_bad_places_are_refused_first(
    tmp_path: Path, enter: Callable[[Path], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message), enter(tmp_path):
        raise AssertionError("nothing runs")


def test_a_machine_without_a_clock_is_refused() -> None:
    with (
        ghoffload.use_machine("virtual"),
        pytest.raises(TypeError, match="got a virtual machine, which has no clock"),
        ghoffload.timeline(),
    ):
        pass


# -- what torch's profiler finds on a GPU


@dataclass
class Found:
    what: str
    begin: int
    end: int
    stream: int = 7
    device: Any = DeviceType.CUDA
    size: int = 0

    def name(self) -> str:
        return self.what

    def start_ns(self) -> int:
        return self.begin

    def end_ns(self) -> int:
        return self.end

    def nbytes(self) -> int:
        return self.size

    def device_type(self) -> Any:
        return self.device

    def device_resource_id(self) -> int:
        return self.stream

    def metadata_json(self) -> str:
        return f'"device": 0, "stream": {self.stream}, "bytes": {32 * MIB}, "memory bandwidth": 1'


def test_events_of_a_profiler() -> None:
    timeline = Timeline("a GPU", simulated=False)
    events = [
        Found("Memcpy HtoD (Pinned -> Device)", 2_000, 9_000, stream=20),
        Found("nvjet_tst_128x256", 1_000, 5_000),
        Found("adam_update_large_split", 6_000, 7_000),
        Found("Memcpy DtoH (Device -> Pinned)", 8_000, 9_500, stream=24),
        Found("Memcpy DtoD (Device -> Device)", 9_500, 9_600),
        Found("aten::mm", 0, 100, device=DeviceType.CPU),
        Found("[memory]", 3_000, 3_000, size=-400),
        Found("[memory]", 1_500, 1_500, size=1_000),
        Found("[memory]", 1_500, 1_500, size=77, device=DeviceType.CPU),
    ]
    fill(timeline, events, in_use=500)
    assert [(s.track, s.stream, s.nbytes) for s in timeline.spans] == [
        ("model", "stream 7", 0),
        ("h2d", "stream 20", 32 * MIB),
        ("runtime", "stream 7", 0),
        ("d2h", "stream 24", 32 * MIB),
        ("hbm", "stream 7", 32 * MIB),
    ]
    assert timeline.seconds == pytest.approx(8.6e-6)
    assert timeline.memory == [(1.5e-6, 1_500), (3e-6, 1_100)]


def test_the_runtimes_kernels_are_known_by_name() -> None:
    manifest = json.loads((Path(__file__).parents[1] / "csrc" / "manifest.json").read_text())
    for source, kernels in manifest.items():
        for kernel in kernels:
            assert kernel.startswith(_OURS) == (source != "bandwidth"), kernel


@pytest.mark.gpu
def test_a_step_on_a_gpu(tmp_path: Path) -> None:
    net = model().to("cuda", torch.bfloat16)
    optimizer = ghoffload.OffloadAdamW(
        net.parameters(), lr=1e-3, config={"transfer": "copy_engine"}
    )
    x = torch.ones(4096, 2048, device="cuda", dtype=torch.bfloat16)
    net(x).sum().backward()
    optimizer.step()
    with ghoffload.timeline(tmp_path / "a.json", machine=None) as timeline:
        net(x).sum().backward()
        optimizer.step()
    state = 10 * 4 * 2048**2
    assert timeline.moved("h2d") == pytest.approx(state, rel=0.02)
    assert timeline.moved("d2h") == pytest.approx(state, rel=0.02)
    assert 0 < timeline.busy("runtime") < timeline.seconds
    assert 0 < timeline.busy("model") < timeline.seconds
    assert timeline.peak_bytes >= 2 * 2 * 4 * 2048**2
