"""The CPU kernels against torch within the promised bounds, and against themselves exactly."""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ghoffload.kernels import adam, golden, pool

EPSILON = 2.0**-23
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROOT = Path(__file__).resolve().parents[1]


def hyper(**changes: object) -> adam.Hyper:
    values: dict = {
        "lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1,
        "amsgrad": False, "maximize": False, "decoupled": True,
    }  # fmt: skip
    return adam.Hyper(**values | changes)


def prepared(h: adam.Hyper, steps: Tensor, **scaling: Tensor) -> Tensor:
    scalars = torch.zeros(len(steps), adam.SCALARS)
    indices = np.arange(len(steps), dtype=np.uint32)
    for launch in adam.prepare(indices, h, steps=steps, scalars=scalars, **scaling):
        launch.run_on_host()
    return scalars


def bits(tensors: Sequence[Tensor]) -> list[bytes]:
    return [t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]


def new_state(count: int, names: Sequence[str]) -> dict[str, Tensor]:
    return {name: torch.zeros(count) for name in names}


STATES = {
    "plain": ("exp_avg", "exp_avg_sq"),
    "amsgrad": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "master": ("exp_avg", "exp_avg_sq", "master"),
    "both": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master"),
}


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    betas=st.sampled_from([(0.9, 0.999), (0.95, 0.98), (0.5, 0.9), (0.9, 0.95)]),
    eps=st.sampled_from([1e-8, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    step=st.sampled_from([0, 1, 9, 5000]),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
)
def test_one_step_stays_within_the_bounds_of_torch(
    seed: int,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    flags: tuple[bool, bool, bool, bool],
) -> None:
    amsgrad, maximize, decoupled, fused = flags
    generator = torch.Generator().manual_seed(seed)
    n = 5000

    def random(decades: float) -> Tensor:
        size = 10 ** (torch.rand(n, generator=generator) * decades - decades / 2)
        return torch.randn(n, generator=generator) * size

    p, g, m, v = random(4), random(6), random(6), random(6).square()
    lr = 1e-3
    reference = torch.nn.Parameter(p.clone())
    reference.grad = g.clone()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([reference], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
                     amsgrad=amsgrad, maximize=maximize, fused=fused)  # fmt: skip
    theirs = optimizer.state[reference]
    theirs |= {"step": torch.tensor(float(step)), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    ours = {"exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    if amsgrad:
        theirs["max_exp_avg_sq"] = v * 2 * torch.rand(n, generator=generator)
        ours["max_exp_avg_sq"] = theirs["max_exp_avg_sq"].clone()
    optimizer.step()

    weight = p.clone()
    h = hyper(lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay,
              amsgrad=amsgrad, maximize=maximize, decoupled=decoupled)  # fmt: skip
    scalars = prepared(h, torch.tensor([float(step)]))
    table = adam.PieceTable([(0, 0, n, 0, 0)])
    adam.update(table, weights=[weight], grads=[g], state=ours, scalars=scalars).run_on_host()

    second = theirs["exp_avg_sq"]
    ulp = torch.nextafter(second, torch.tensor(torch.inf)) - second
    assert ((ours["exp_avg_sq"] - second).abs() <= 2 * ulp).all()
    gradient = (-g if maximize else g).double()
    gradient += 0 if decoupled else weight_decay * p.double()
    left, right = (betas[0] * m.double()).abs(), ((1 - betas[0]) * gradient).abs()
    difference = (ours["exp_avg"].double() - theirs["exp_avg"].double()).abs()
    assert (difference <= 3 * EPSILON * torch.maximum(left, right)).all()
    under = theirs["max_exp_avg_sq"] if amsgrad else second
    t = step + 1
    denominator = under.double().sqrt() / (1 - betas[1] ** t) ** 0.5 + eps
    size = p.double().abs() + lr * (left + right) / ((1 - betas[0] ** t) * denominator)
    assert ((weight.double() - reference.detach().double()).abs() <= 4 * EPSILON * size).all()
    assert (weight != p).float().mean() > 0.5


VARIANTS = [
    pytest.param(weight, grad, kind, id=f"{weight}-{grad}-{kind}".replace("torch.", ""))
    for weight, grad, kind in [
        (torch.float32, torch.float32, "plain"),
        (torch.bfloat16, torch.bfloat16, "both"),
        (torch.float16, torch.float32, "master"),
        (torch.bfloat16, torch.float16, "amsgrad"),
    ]
]


@pytest.mark.parametrize(("weight_dtype", "grad_dtype", "kind"), VARIANTS)
def test_any_split_and_any_thread_count_gives_the_same_bits(
    weight_dtype: torch.dtype, grad_dtype: torch.dtype, kind: str
) -> None:
    n = 200_000
    start_weight = torch.randn(n).to(weight_dtype)
    grad = torch.randn(n).to(grad_dtype)

    def stepped(cuts: Sequence[int], threads: int) -> list[bytes]:
        weight, state = start_weight.clone(), new_state(n, STATES[kind])
        ends = [*cuts, n]
        table = adam.PieceTable(
            [(0, a, b - a, a, 0) for a, b in zip([0, *cuts], ends, strict=True)]
        )
        steps = torch.zeros(1)
        with pool.threads(threads):
            for _ in range(2):
                scalars = prepared(hyper(), steps)
                adam.update(
                    table, weights=[weight], grads=[grad], state=state, scalars=scalars
                ).run_on_host()
        return bits([weight, *state.values()])

    once = stepped([], 1)
    for cuts, threads in [([], 2), ([], 7), ([1, 8, 70_001], 2), (range(313, n, 313), 3)]:
        assert stepped(list(cuts), threads) == once


def test_tasks_are_shared_out() -> None:
    table = adam.PieceTable([(0, 0, 1 << 20, 0, 0), (1, 0, 0, 0, 0), (1, 5, 7, 1 << 20, 1)])
    rows = table.host_rows(table.task_elements(4))
    assert len(rows) == 17
    assert rows[:, 2].sum() == (1 << 20) + 7
    assert rows[16].tolist() == [1, 5, 7, 1 << 20, 1, 5]


@given(
    sizes=st.lists(st.sampled_from([0, 1, 2, 3, 7, 8, 33, 1000]), min_size=1, max_size=6),
    starts=st.lists(st.integers(0, 5), min_size=6, max_size=6),
    gap=st.integers(0, 3),
)
@settings(max_examples=25)
def test_small_and_misaligned_pieces_touch_what_they_name_and_nothing_else(
    sizes: list[int], starts: list[int], gap: int
) -> None:
    pieces, offset = [], gap
    for index, (size, start) in enumerate(zip(sizes, starts, strict=False)):
        pieces.append((index, start, size, offset, index))
        offset += size + gap
    weights = [torch.randn(size + 8).bfloat16() for size in sizes]
    grads = [torch.randn(size + 8) for size in sizes]
    before = [weight.clone() for weight in weights]
    state = {name: torch.full((offset + 4,), torch.nan) for name in STATES["master"]}
    for _, _, size, at, _ in pieces:
        for array in state.values():
            array[at : at + size] = 0
    scalars = prepared(hyper(), torch.zeros(len(sizes)))
    table = adam.PieceTable(pieces)
    adam.update(table, weights=weights, grads=grads, state=state, scalars=scalars).run_on_host()
    inside = torch.zeros(offset + 4, dtype=torch.bool)
    for (_, start, size, at, _), weight, old, grad in zip(
        pieces, weights, before, grads, strict=True
    ):
        inside[at : at + size] = True
        p, g = old[start : start + size].float(), grad[start : start + size]
        expected = p * (1 - 1e-3) - 1e-2 * g / (g.abs() + 1e-8)
        torch.testing.assert_close(state["master"][at : at + size], expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(weight[start : start + size], state["master"][at : at + size].bfloat16())
        outside = torch.ones(len(weight), dtype=torch.bool)
        outside[start : start + size] = False
        assert torch.equal(weight[outside], old[outside])
    for array in state.values():
        assert torch.isnan(array[~inside]).all()
        assert torch.isfinite(array[inside]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_edited_weight_wins_and_an_untouched_one_keeps_its_master(dtype: torch.dtype) -> None:
    master = torch.randn(64)
    weight = master.to(dtype)
    weight[::2] += 1.0
    state = new_state(64, STATES["master"]) | {"master": master.clone()}
    scalars = prepared(hyper(lr=0.0, weight_decay=0.0), torch.zeros(1))
    edited = weight.clone()
    adam.update(
        adam.PieceTable([(0, 0, 64, 0, 0)]),
        weights=[weight],
        grads=[torch.ones(64)],
        state=state,
        scalars=scalars,
    ).run_on_host()
    assert torch.equal(weight, edited)
    assert torch.equal(state["master"][::2], edited[::2].float())
    assert torch.equal(state["master"][1::2], master[1::2])


def test_a_found_inf_leaves_every_bit_and_the_step_counter() -> None:
    steps = torch.tensor([3.0])
    scalars = prepared(
        hyper(), steps, found_inf=torch.tensor(1.0), grad_scale=torch.tensor(65536.0)
    )
    weight, grad = torch.randn(100).half(), torch.full((100,), torch.inf).half()
    # A payload that storing would canonicalise, so that rewriting the same number shows too.
    weight.view(torch.int16)[5] = 0x7C01
    state = {name: torch.randn(100) for name in STATES["both"]}
    before = bits([weight, *state.values()])
    adam.update(
        adam.PieceTable([(0, 0, 100, 0, 0)]),
        weights=[weight], grads=[grad], state=state, scalars=scalars,
    ).run_on_host()  # fmt: skip
    assert bits([weight, *state.values()]) == before
    assert steps.item() == 3.0


def test_grad_scale_is_divided_out() -> None:
    grad = torch.randn(1000)

    def stepped(factor: float, **scaling: Tensor) -> list[bytes]:
        weight, state = torch.ones(1000), new_state(1000, STATES["plain"])
        scalars = prepared(hyper(), torch.zeros(1), **scaling)
        table = adam.PieceTable([(0, 0, 1000, 0, 0)])
        adam.update(
            table, weights=[weight], grads=[grad * factor], state=state, scalars=scalars
        ).run_on_host()
        return bits([weight, *state.values()])

    scaled = stepped(1024.0, found_inf=torch.tensor([0.0]), grad_scale=torch.tensor([1024.0]))
    assert scaled == stepped(1.0)


def test_tensor_hyperparameters_are_read_when_the_launch_runs() -> None:
    lr, beta1 = torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.75)
    steps, scalars = torch.zeros(1), torch.zeros(1, adam.SCALARS)
    indices = np.zeros(1, dtype=np.uint32)
    (launch,) = adam.prepare(indices, hyper(lr=lr, beta1=beta1), steps=steps, scalars=scalars)
    assert launch.reads[0] is lr
    lr.fill_(0.25)
    launch.run_on_host()
    assert torch.equal(scalars, prepared(hyper(lr=0.25, beta1=0.75), torch.zeros(1)))


def test_step_counters_are_each_parameters_own() -> None:
    steps, scalars = torch.tensor([4.0, 9.0, 0.0]), torch.zeros(3, adam.SCALARS)
    (launch,) = adam.prepare(np.array([2, 0], np.uint32), hyper(), steps=steps, scalars=scalars)
    launch.run_on_host()
    assert steps.tolist() == [5.0, 9.0, 1.0]
    assert (scalars[1] == 0).all()
    expected = -1e-2 / (1 - 0.9**5)
    assert scalars[0, 10].item() == pytest.approx(expected, rel=1e-7)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="torch flushes on x86")
@pytest.mark.parametrize("threads", [1, 2])
def test_flush_to_zero_in_the_caller_changes_nothing(threads: int) -> None:
    only = ["adam fp32 weight, fp32 gradient", "adam fp16 weight, bf16 gradient master amsgrad"]
    assert torch.set_flush_denormal(True)
    try:
        with pool.threads(threads):
            got = golden.run("cpu", only=only)
        # The caller's own setting is still there.
        assert (torch.full((8,), 1e-39) * 1.0 == 0).all()
    finally:
        torch.set_flush_denormal(False)
    assert got == {name: golden.expected()[name] for name in only}


def test_wrong_arguments_are_refused_before_anything_changes() -> None:
    table = adam.PieceTable([(0, 0, 8, 0, 0)])
    good = {"weights": [torch.ones(8)], "grads": [torch.ones(8)], "scalars": torch.zeros(1, 16)}
    state = new_state(8, STATES["plain"])
    cases: list[tuple[dict, dict, str]] = [
        ({"weights": [torch.ones(8, dtype=torch.float64)]}, state, "weights expects float32"),
        ({"grads": [torch.ones(7)]}, state, r"grads\[0\] expects 8 elements or more, got 7"),
        ({"grads": []}, state, "grads expects 1 tensors as weights, got 0"),
        ({"scalars": torch.zeros(1, 8)}, state, "scalars expects"),
        ({}, state | {"master": torch.zeros(8)}, "expect bfloat16 or float16, got float32"),
        ({}, {"exp_avg": torch.zeros(8)}, "state expects exp_avg, exp_avg_sq"),
        ({}, state | {"exp_avg": torch.zeros(7)}, "exp_avg expects 8 elements or more, got 7"),
        ({}, state | {"exp_avg": torch.zeros(8).half()}, "exp_avg expects 1-D contiguous float32"),
        ({"grads": [torch.ones(8, device="meta")]}, state, "expects to be on cpu"),
    ]
    for changes, its_state, message in cases:
        with pytest.raises(ValueError, match=message):
            adam.update(table, state=its_state, **good | changes)
    with pytest.raises(ValueError, match="at most 640 pieces, got 641"):
        adam.PieceTable([(0, 0, 1, 0, 0)] * 641)
    steps, scalars = torch.zeros(2), torch.zeros(2, 16)
    with pytest.raises(ValueError, match="indices expect to be below 2, got 2"):
        adam.prepare(np.array([2], np.uint32), hyper(), steps=steps, scalars=scalars)
    with pytest.raises(ValueError, match="lr expects one element"):
        adam.prepare(np.array([0]), hyper(lr=torch.ones(2)), steps=steps, scalars=scalars)


def test_works_where_nothing_is_writable() -> None:
    script = """
import sys, tempfile
tempfile.tempdir = "/proc/no/such"
import numpy as np, torch
from ghoffload.kernels import adam, cache, golden
assert cache.directory() is None, cache.directory()
name = "adam bf16 weight, bf16 gradient master"
assert golden.run("cpu", only=[name])[name] == golden.expected()[name]
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("GHOFFLOAD", "XDG"))}
    environment |= {"HOME": "/proc/no/such", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=120)


def test_every_variant_is_a_golden_case() -> None:
    exact = {
        (weight, grad, master, amsgrad)
        for weight, grad in itertools.product(DTYPES, DTYPES)
        for master, amsgrad in itertools.product((False, True), (False, True))
        if not (master and weight == torch.float32)
    }
    assert len(exact) == 30
    split = 2 * len(DTYPES)  # amsgrad or not
    coded = 2 * (len(DTYPES) + 5)  # bf16 and int8; split ones and one of each other kind
    assert sum(name.startswith("adam ") for name in golden.names()) == 30 + split + coded
