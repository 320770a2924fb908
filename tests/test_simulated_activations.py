"""Activations on the simulated machine: what was measured on an H200, and what a GH200 would do."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ghoffload
from ghoffload.machine.simulated import SimulatedMachine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

GB = 10**9


def step(profile: str, options: dict[str, Any] | None, **shape: int) -> tuple[float, int, int]:
    """Seconds, peak HBM and bytes that left, of a forward and backward of 4 x 2048 tokens."""
    from _bench_model import Llama, Shape

    with ghoffload.use_machine("simulated", profile=profile) as machine:
        assert isinstance(machine, SimulatedMachine)
        model = Llama(Shape(**shape), device="meta", dtype=torch.bfloat16)
        tokens = torch.zeros(4, 2049, dtype=torch.long, device="meta")
        context: Any = contextlib.nullcontext()
        if options is not None:
            if "blocks" in options:
                options = options | {"blocks": model.blocks}
            context = ghoffload.offload_activations(model=model, **options)
        for _ in range(5):
            model.zero_grad(set_to_none=True)
            begin, moved = machine.elapsed(), machine.traffic.d2h_bytes
            machine.reset_peak()
            with context:
                loss = model(tokens)
            loss.backward()
            del loss
        moved = machine.traffic.d2h_bytes - moved
        return machine.elapsed() - begin, machine.memory_peak(), moved


@pytest.mark.parametrize(
    ("options", "milliseconds", "peak", "moved"),
    [
        ({}, 500.1, 5.42, 13.56),
        ({"compress": "fp8"}, 262.7, 5.42, 7.00),
        ({"fraction": 0.5}, 253.1, 12.19, 6.79),
        ({"budget_bytes": 8_810_000_000}, 377.5, 8.81, 10.71),
        ({"budget_bytes": 12_200_000_000}, 251.7, 12.20, 7.32),
        ({"budget_bytes": 15_590_000_000}, 141.5, 15.59, 3.93),
    ],
    ids=str,
)
def test_what_was_measured_on_an_h200(
    options: dict[str, Any], milliseconds: float, peak: float, moved: float
) -> None:
    """BENCHMARKS.md: 1.1 B parameters."""
    found = step("h200-pcie5", options)
    assert 1e3 * found[0] == pytest.approx(milliseconds, rel=0.05)
    assert found[1] / GB == pytest.approx(peak, rel=0.02)
    assert found[2] / GB == pytest.approx(moved, rel=0.02)
    if "budget_bytes" in options:
        assert found[1] <= options["budget_bytes"]


def test_blocks_keep_the_budget_and_take_what_they_expect() -> None:
    kept: list[float] = []
    for budget in (6_300_000_000, 11_320_000_000, 16_430_000_000):
        seconds, peak, _ = step("h200-pcie5", {"blocks": True, "budget_bytes": budget})
        assert peak <= budget
        kept.append(seconds)
    assert kept == sorted(kept, reverse=True)


def test_on_a_gh200_wide_models_offload_for_free_and_on_pcie_they_do_not() -> None:
    """h = 4096 at 500 TFLOP/s and more: free over C2C, not over PCIe."""
    shape = {"hidden": 4096, "layers": 8, "feed_forward": 14336, "kv_heads": 8}
    for profile, least, most in (("gh200-480", 1.0, 1.06), ("h200-pcie5", 1.5, 4.0)):
        alone, full, _ = step(profile, None, **shape)
        beside, less, moved = step(profile, {}, **shape)
        assert least <= beside / alone < most, profile
        assert less < full - 0.7 * moved
