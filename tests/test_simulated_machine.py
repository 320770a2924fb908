"""The simulated machine: times by arithmetic, bytes exactly, and what is published of a GH200."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ghoffload
from ghoffload.machine.simulated import SimulatedMachine
from ghoffload.measure import rates_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

GB = 10**9


def parameters(billions: float, pieces: int = 20) -> list[nn.Parameter]:
    count = int(billions * GB) // pieces
    found = []
    for _ in range(pieces):
        parameter = nn.Parameter(torch.empty(count, device="meta", dtype=torch.bfloat16))
        parameter.grad = torch.empty_like(parameter)
        found.append(parameter)
    return found


def step_seconds(profile: str, billions: float, **config: Any) -> float:
    with ghoffload.use_machine("simulated", profile=profile) as machine:
        assert isinstance(machine, SimulatedMachine)
        optimizer = ghoffload.OffloadAdamW(parameters(billions), lr=1e-3, config=config)
        optimizer.step()
        begin = machine.elapsed()
        optimizer.step()
        return machine.elapsed() - begin


def test_a_copy_takes_its_bytes_over_the_rate_and_two_ways_share_the_link() -> None:
    machine = SimulatedMachine("h200-pcie5")
    p = machine.profile
    hbm = torch.empty(GB, dtype=torch.uint8, device="meta")
    host = torch.empty(1, dtype=torch.uint8).expand(GB)
    begin = machine.elapsed()
    machine.copy(hbm, host, stream=machine.h2d)
    one = machine.elapsed() - begin
    assert one == pytest.approx(GB / p["h2d_engine"] + p["copy_call"] + p["copy_device"], rel=1e-9)
    begin = machine.elapsed()
    machine.copy(hbm, host, stream=machine.h2d)
    machine.copy(host, hbm, stream=machine.d2h[0])
    both = machine.elapsed() - begin
    assert both == pytest.approx(2 * GB / p["both_engine"], rel=0.01)
    assert (machine.traffic.h2d_bytes, machine.traffic.d2h_bytes) == (2 * GB, GB)


def test_the_host_runs_ahead_until_it_needs_a_number() -> None:
    machine = SimulatedMachine("gh200-480")
    with machine.modes():
        a = torch.empty(8192, 8192, device="meta", dtype=torch.bfloat16)
        for _ in range(10):
            b = a @ a
        queued = machine.host_seconds
        assert b.sum().item() == 1.0
        waited = machine.host_seconds
    assert queued == pytest.approx(10 * machine.profile["eager_call"])
    assert waited >= 10 * 2 * 8192**3 / machine.profile["bf16"]


def test_events_order_streams_and_the_host() -> None:
    machine = SimulatedMachine("h200-pcie5")
    hbm, host = torch.empty(GB, dtype=torch.uint8, device="meta"), torch.empty(1).expand(GB // 4)
    event = machine.event("copied")
    with pytest.raises(RuntimeError, match="event 'copied', which was never recorded"):
        machine.synchronize(event, label="early")
    machine.copy(hbm, host, stream=machine.h2d)
    machine.record(event, machine.h2d)
    machine.wait(machine.current_stream(), event, label="compute waits")
    stamp = machine.stamp(machine.current_stream())
    assert machine.host_seconds < 1e-4
    machine.synchronize(event, label="host waits")
    assert machine.host_seconds == pytest.approx(GB / machine.profile["h2d_engine"], rel=0.01)
    assert stamp.seconds_to(machine.stamp(machine.current_stream())) < 1e-4


@pytest.mark.parametrize(
    ("config", "measured"),
    [
        ({"master": "fp32", "transfer": "copy_engine"}, 0.273),
        ({"transfer": "copy_engine"}, 0.236),
        ({"transfer": "copy_engine", "moments": "int8"}, 0.0975),
        ({"memory_kind": "device", "master": "fp32"}, 0.0078),
    ],
)
def test_steps_take_what_was_measured_on_an_h200(config: dict[str, Any], measured: float) -> None:
    """1.1 B parameters; BENCHMARKS.md."""
    assert step_seconds("h200-pcie5", 1.1, **config) == pytest.approx(measured, rel=0.08)


def test_a_gh200_steps_as_is_published() -> None:
    """8 B parameters with fp32 state: about 0.5 s, and 1.2 to 1.6 times as fast as its CPU."""
    in_place = step_seconds("gh200-480", 8, master="fp32", transfer="kernel", ctas=8)
    staged = step_seconds("gh200-480", 8, master="fp32", transfer="copy_engine")
    on_cpu = step_seconds("gh200-480", 8, master="fp32", step_device="cpu")
    assert 0.45 < in_place <= staged < 0.6
    assert 1.2 < on_cpu / in_place < 1.7
    # Copy engines of the 120 GB part write back slowly, kernels do not.
    engines = step_seconds("gh200-120", 8, master="fp32", transfer="copy_engine")
    kernel = step_seconds("gh200-120", 8, master="fp32", transfer="kernel", ctas=8)
    assert engines > 1.4 * kernel


def llama(**sizes: int) -> Any:
    from _bench_model import Llama, Shape

    return Llama(Shape(**sizes), device="meta", dtype=torch.bfloat16)


def test_forward_and_backward_of_1_1_billion_take_what_an_h200_did() -> None:
    """Measured: 120 ms and 18.98 GB at the most."""
    with ghoffload.use_machine("simulated", profile="h200-pcie5") as machine:
        assert isinstance(machine, SimulatedMachine)
        model = llama()
        tokens = torch.zeros(4, 2049, dtype=torch.long, device="meta")
        assert machine.memory_allocated() == pytest.approx(2 * 1.1e9, rel=0.01)
        model(tokens).backward()
        model.zero_grad(set_to_none=True)
        begin = machine.elapsed()
        model(tokens).backward()
        assert machine.elapsed() - begin == pytest.approx(0.120, rel=0.12)
        assert machine.memory_peak() == pytest.approx(18.98 * GB, rel=0.03)


def test_the_same_program_takes_the_same_time() -> None:
    def run() -> tuple[float, int, list[tuple[str, float]]]:
        with ghoffload.use_machine("simulated", profile="gh200-480") as machine:
            assert isinstance(machine, SimulatedMachine)
            model = llama(hidden=256, layers=2, feed_forward=512, heads=4, kv_heads=2)
            optimizer = ghoffload.OffloadAdamW(model.parameters(), lr=1e-3)
            for _ in range(2):
                model(torch.zeros(2, 65, dtype=torch.long, device="meta")).backward()
                optimizer.step()
                optimizer.zero_grad()
            end = machine.elapsed()
            return end, machine.memory_peak(), [(t.name, t.end) for t in machine.fluid.finished]

    assert run() == run()


def test_a_70_b_models_step_takes_seconds_and_no_memory() -> None:
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with ghoffload.use_machine("simulated", profile="gh200-480") as machine:
        assert isinstance(machine, SimulatedMachine)
        machine.live.limit = 400 * GB  # as if four of them had shared it
        machine.profile.__dict__["host_bytes"] = 2000 * GB
        model = llama(hidden=8192, layers=80, feed_forward=28672, heads=64, kv_heads=8)
        for block in model.blocks:
            block.forward = _recomputed(block.forward)
        optimizer = ghoffload.OffloadAdamW(model.parameters(), lr=1e-3)
        model(torch.zeros(1, 2049, dtype=torch.long, device="meta")).backward()
        optimizer.step()
        seconds = machine.elapsed()
    count = sum(p.numel() for p in model.parameters())
    assert 68e9 < count < 72e9
    least = 8 * count * 2048 / machine.profile["bf16"]  # with recomputation
    assert least < seconds < 2 * least + 12 * count / 200e9
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 2 * GB
    assert time.perf_counter() - begun < 60


def _recomputed(forward: Any) -> Any:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def test_what_does_not_fit_is_refused_with_figures() -> None:
    with ghoffload.use_machine("simulated", profile="gh200-120") as machine:
        assert isinstance(machine, SimulatedMachine)
        kept = torch.empty(90 * GB, dtype=torch.uint8, device="meta")
        with pytest.raises(torch.OutOfMemoryError, match=r"7,000,000,000 more bytes do not fit"):
            torch.empty(7 * GB, dtype=torch.uint8, device="meta")
        del kept
        torch.empty(90 * GB, dtype=torch.uint8, device="meta")
        with pytest.raises(torch.OutOfMemoryError, match="of the simulated host"):
            ghoffload.OffloadAdamW(parameters(20), lr=1e-3)


def test_attention_and_norms_save_what_their_kernels_do() -> None:
    with ghoffload.use_machine("simulated", profile="gh200-480") as machine:
        assert isinstance(machine, SimulatedMachine)
        q, k = (
            torch.empty(1, heads, 4096, 128, device="meta", dtype=torch.bfloat16).requires_grad_()
            for heads in (32, 8)
        )
        before = machine.memory_allocated()
        y = F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        extra = machine.memory_allocated() - before
        assert q.nbytes <= extra <= 1.1 * q.nbytes  # the output and the logarithms of its sums
        y.sum().backward()
        assert q.grad is not None
        assert k.grad is not None
        assert (q.grad.shape, k.grad.shape) == (q.shape, k.shape)
        del y
        mask = torch.ones(4096, 4096, dtype=torch.bool, device="meta")
        wide = k.repeat_interleave(4, 1)
        before = machine.memory_allocated()
        z = F.scaled_dot_product_attention(q, wide, wide, attn_mask=mask)
        assert machine.memory_allocated() - before < 2.1 * q.nbytes
        del z
        x = torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16).requires_grad_()
        weight = nn.Parameter(torch.empty(4096, device="meta", dtype=torch.bfloat16))
        before = machine.memory_allocated()
        normed = F.rms_norm(x, (4096,), weight, 1e-5)
        assert machine.memory_allocated() - before <= 1.01 * x.nbytes
        normed.sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)


def test_causal_attention_costs_half() -> None:
    def seconds(causal: bool) -> float:
        machine = SimulatedMachine("gh200-480")
        with machine.modes():
            q = torch.empty(1, 32, 8192, 128, device="meta", dtype=torch.bfloat16)
            F.scaled_dot_product_attention(q, q, q, is_causal=causal)
        return machine.fluid.run()

    assert seconds(True) == pytest.approx(seconds(False) / 2, rel=0.01)


def test_meta_needs_a_simulated_machine_and_it_needs_meta() -> None:
    with pytest.raises(ValueError, match="use a SimulatedMachine"):
        ghoffload.OffloadAdamW(parameters(0.001), lr=1e-3)
    with pytest.raises(ValueError, match=r"the simulated machine .* expects parameters on meta"):
        ghoffload.OffloadAdamW(
            [nn.Parameter(torch.zeros(4))], lr=1e-3, machine=SimulatedMachine("gh200-480")
        )
    with pytest.raises(ValueError, match="does not say which profile"):
        ghoffload.OffloadAdamW(parameters(0.001), lr=1e-3, machine="simulated")


def test_auto_follows_the_profile() -> None:
    def chosen(profile: str) -> tuple[str, str, int]:
        with ghoffload.use_machine("simulated", profile=profile):
            config = {"master": "fp32"}
            optimizer = ghoffload.OffloadAdamW(parameters(0.1), lr=1e-3, config=config)
            resolved = optimizer._engine.resolved
            return resolved.memory_kind, "kernel" if resolved.in_place else "engine", resolved.ctas

    # Copy engines are better over PCIe; they write back at half of a kernel's rate in quad nodes.
    assert chosen("h200-pcie5") == ("pinned", "engine", 0)
    assert chosen("gh200-120") == ("pinned", "kernel", 4)


def test_rates_are_for_as_many_bytes_each_way() -> None:
    machine = SimulatedMachine("gh200-120")
    rates = rates_of(machine)
    assert rates is not None
    assert rates.both == 2 * machine.profile["d2h_engine"]
    assert rates.pinned is not None
    assert rates.pinned.rate == machine.profile["both_kernel"]
