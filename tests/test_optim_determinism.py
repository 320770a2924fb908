"""The same bits from any bucket size, number of buffers and threads, way to step, and machine."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from optim_tools import parameters, raw, set_grads

import ghoffload
from ghoffload import OffloadAdamW
from ghoffload.kernels import pool

LARGE = ((70_000,), (3, 50), (), (7,), (0,), (130, 61))
SMALL = ((2600,), (3, 50), (), (7,), (0,), (1025,))


def _build(shapes: tuple[tuple[int, ...], ...]) -> list[torch.nn.Parameter]:
    """fp32, bf16 and fp16 parameters, some transposed, one a slice."""
    params = parameters(*shapes)
    params += parameters(*shapes[:4], dtype=torch.bfloat16, seed=1)
    params += parameters(*shapes[2:], dtype=torch.float16, seed=2)
    params.append(torch.nn.Parameter(params[1].detach().clone().t()))
    params.append(torch.nn.Parameter(torch.arange(900.0).view(30, 30)[:, ::3]))
    return params


def _digest(params: list[torch.nn.Parameter], config: dict[str, Any]) -> str:
    """A hash of weights and state after training with all that can differ between parameters."""
    groups = [
        {"params": params[::2], "lr": 0.05, "amsgrad": True},
        {"params": params[1::2], "weight_decay": 0.3, "maximize": True},
    ]
    optimizer = OffloadAdamW(groups, config=config)
    for step in range(3):
        set_grads(params, step)
        params[step].grad = None
        optimizer.step()
    sha = hashlib.sha256()
    for p in params:
        sha.update(raw(p))
        for tensor in optimizer.state[p].values():
            sha.update(raw(tensor))
    return sha.hexdigest()


@pytest.fixture(scope="module")
def large() -> str:
    return _digest(_build(LARGE), {"cpu_threads": 1})


@pytest.fixture(scope="module")
def small() -> str:
    return _digest(_build(SMALL), {"cpu_threads": 1})


@pytest.mark.parametrize("bucket_bytes", [4096, 100_000, 1 << 30])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_buckets_and_threads_on_the_cpu(bucket_bytes: int, threads: int, large: str) -> None:
    config = {"bucket_bytes": bucket_bytes, "cpu_threads": threads}
    assert _digest(_build(LARGE), config) == large


def test_the_number_of_threads_of_the_process(large: str) -> None:
    pool.set_threads(3)
    try:
        assert _digest(_build(LARGE), {}) == large
    finally:
        pool.set_threads(0)


def test_flush_to_zero_outside_changes_nothing(large: str) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-to-zero")
    try:
        digest = _digest(_build(LARGE), {"cpu_threads": 2})
    finally:
        torch.set_flush_denormal(False)
    assert digest == large


@pytest.mark.parametrize("step_device", ["cuda", "cpu"])
@pytest.mark.parametrize("order", ["earliest", "latest", "adversarial"])
@pytest.mark.parametrize(("bucket_bytes", "buffers"), [(4096, 2), (40_000, 3), (1 << 24, 4)])
def test_the_virtual_machine(
    step_device: str, order: Any, bucket_bytes: int, buffers: int, small: str
) -> None:
    config = {
        "step_device": step_device,
        "bucket_bytes": bucket_bytes,
        "staging_buffers": buffers,
    }
    with ghoffload.use_machine("virtual", order=order, seed=buffers):
        assert _digest(_build(SMALL), config) == small


@pytest.mark.parametrize(
    "options",
    [
        {"memory_kind": "device"},
        {"hbm_state_bytes": 15_000},
        {"min_offload_bytes": 2_000},
        {"pin_memory": False},
        {"transfer": "kernel"},
        {"transfer": "kernel", "hbm_state_bytes": 15_000},
        {"memory_kind": "managed"},
        {"memory_kind": "managed", "transfer": "kernel", "min_offload_bytes": 2_000, "ctas": 2},
        {"memory_kind": "system"},
    ],
    ids=str,
)
def test_where_the_state_lives(options: dict[str, Any], small: str) -> None:
    config = {"bucket_bytes": 8192} | options
    with ghoffload.use_machine("virtual", order="adversarial", seed=1, check=True):
        assert _digest(_build(SMALL), config) == small


def test_another_current_stream(small: str) -> None:
    with ghoffload.use_machine("virtual", order="adversarial", seed=2, check=True) as machine:
        side = machine.stream("a stream of the user's")
        ready = machine.event("the user's")
        machine.record(ready, machine.current_stream())
        machine.wait(side, ready, label="the user's")
        with machine.use_stream(side):
            assert _digest(_build(SMALL), {"bucket_bytes": 8192}) == small


@pytest.mark.parametrize("step_device", ["cuda", "cpu"])
def test_streams_that_take_turns(step_device: str) -> None:
    """Steps on the main and on a side stream in turns, ordered by the user alone."""

    def run(machine: Any) -> list[bytes]:
        params = parameters(*SMALL)
        config = {"bucket_bytes": 8192}
        if machine is not None:
            config["step_device"] = step_device
        optimizer = OffloadAdamW(params, lr=0.05, config=config)
        for step in range(4):
            set_grads(params, step)
            if machine is None or step % 2 == 0:
                optimizer.step()
                continue
            main, side = machine.current_stream(), machine.stream(f"side {step}")
            for source, target in ((main, side), (side, main)):
                event = machine.event(f"turn {step}")
                machine.record(event, source)
                machine.wait(target, event, label="the user's")
                if target is side:
                    with machine.use_stream(side):
                        optimizer.step()
        return [raw(t) for p in params for t in (p, *optimizer.state[p].values())]

    expected = run(None)
    with ghoffload.use_machine("virtual", order="adversarial", seed=3, check=True) as machine:
        assert run(machine) == expected
