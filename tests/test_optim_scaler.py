"""``torch.amp.GradScaler``: the skip lives in the step, and leaves every bit as it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from optim_tools import (
    CPU,
    PAIRS,
    Place,
    assert_near,
    everywhere,
    parameters,
    raw,
    same_weights,
    set_grads,
    snapshot,
    train,
)

import ghoffload
from ghoffload import OffloadAdamW

BAD = pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan], ids=str)


def _scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, **options)


def _scaled_step(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    step: int,
    *,
    bad: float | None = None,
    clip: bool = False,
) -> None:
    """One step as in a training loop, with gradients scaled as ``scaler.scale(loss)`` would."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    scale = scaler.scale(torch.ones(())).item()
    set_grads(params, step, scale=scale)
    if bad is not None:
        params[-1].grad.view(-1)[-1] = bad
    if clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 0.1)
    scaler.step(optimizer)
    scaler.update()


@everywhere
@BAD
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
def test_a_bad_gradient_leaves_everything_as_it_was(bad: float, clip: bool, place: Place) -> None:
    optimizer = OffloadAdamW(parameters(), lr=0.1, amsgrad=True, config=place.config())
    scaler = _scaler()
    for step in range(2):
        _scaled_step(optimizer, scaler, step, clip=clip)
    before, scale = snapshot(optimizer), scaler.get_scale()
    _scaled_step(optimizer, scaler, 2, bad=bad, clip=clip)
    assert snapshot(optimizer) == before
    assert scaler.get_scale() == scale / 2
    _scaled_step(optimizer, scaler, 2, clip=clip)
    # bit for bit as if the bad step had never been
    plain = OffloadAdamW(parameters(), lr=0.1, amsgrad=True, config=place.config())
    other = _scaler()
    for step in range(3):
        _scaled_step(plain, other, step, clip=clip)
    assert snapshot(optimizer) == snapshot(plain)
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_bad_first_step(dtype: torch.dtype, place: Place) -> None:
    params = parameters((1500, 2), (3,), dtype=dtype)
    optimizer = OffloadAdamW(params, lr=0.1, config=place.config())
    scaler = _scaler()
    before = [raw(p) for p in params]
    _scaled_step(optimizer, scaler, 0, bad=math.inf)
    assert [raw(p) for p in params] == before
    for p in params:  # as torch's fused optimizers: there, but as before the first step
        assert optimizer.state[p]["step"] == 0
        assert not any(t.any() for t in optimizer.state[p].values())
    fresh = OffloadAdamW(parameters((1500, 2), (3,), dtype=dtype), lr=0.1, config=place.config())
    other = torch.amp.GradScaler("cpu", init_scale=2.0**9)
    for one, its in ((optimizer, scaler), (fresh, other)):
        _scaled_step(one, its, 1)
    assert snapshot(optimizer) == snapshot(fresh)


@pytest.mark.parametrize(("kind", "torch_kind"), PAIRS, ids=["Adam", "AdamW"])
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
def test_scale_and_weights_follow_torchs(
    kind: type, torch_kind: type, options: dict[str, bool], clip: bool
) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = kind(ours, lr=0.1, config=CPU.config())
    reference = torch_kind(theirs, lr=0.1, **options)
    mine, other = _scaler(), _scaler()
    scales = []
    for step in range(9):
        bad = math.inf if step in (0, 3, 4) else None
        _scaled_step(optimizer, mine, step, bad=bad, clip=clip)
        _scaled_step(reference, other, step, bad=bad, clip=clip)
        scales.append(mine.get_scale())
        assert mine.get_scale() == other.get_scale()
        assert mine.state_dict() == other.state_dict()
    assert len(set(scales)) > 2
    assert_near(ours, theirs, 1e-5)
    assert optimizer.state[ours[0]]["step"] == reference.state[theirs[0]]["step"] == 6


@pytest.mark.parametrize("order", ["earliest", "latest"])
def test_the_scalers_tensors_live_until_they_are_used(order: str) -> None:
    # torch deletes grad_scale and found_inf as soon as step() has returned
    params = parameters((3000, 3))
    with ghoffload.use_machine("virtual", order=order, check=True):
        optimizer = OffloadAdamW(params, config=CPU.config(step_device="cuda"))
        scaler = _scaler()
        for step in range(3):
            _scaled_step(optimizer, scaler, step, bad=math.nan if step == 1 else None)
            torch.full((64,), 7.0)  # who is given the memory of the scale next
        end = snapshot(optimizer)
    plain = OffloadAdamW(parameters((3000, 3)), config=CPU.config())
    scaler = _scaler()
    for step in range(3):
        _scaled_step(plain, scaler, step, bad=math.nan if step == 1 else None)
    assert end == snapshot(plain)


@everywhere
def test_fp16_parameters_with_scaled_fp16_gradients(place: Place) -> None:
    params = parameters((1500, 2), (3,), dtype=torch.float16)
    masters = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer = OffloadAdamW(params, lr=0.01, config=place.config())
    reference = torch.optim.AdamW(masters, lr=0.01)
    scaler = _scaler()
    for step in range(3):
        scale = scaler.scale(torch.ones(())).item()
        set_grads(params, step, scale=scale)
        for p, master in zip(params, masters, strict=True):
            master.grad = p.grad.float() / scale
        scaler.step(optimizer)
        scaler.update()
        reference.step()
    assert_near([optimizer.state[p]["master"] for p in params], masters, 1e-5)


def test_one_scaler_for_two_optimizers() -> None:
    params = parameters((3,), (4,))
    first, second = OffloadAdamW(params[:1]), OffloadAdamW(params[1:])
    scaler = _scaler()
    set_grads(params, 0, scale=2.0**10)
    params[1].grad[0] = math.inf
    before = [raw(p) for p in params]
    scaler.scale(torch.ones(()))
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert raw(params[0]) != before[0]
    assert raw(params[1]) == before[1]
    assert scaler.get_scale() == 2.0**9


def test_a_disabled_scaler_and_no_gradients() -> None:
    params = parameters((3,))
    optimizer, scaler = OffloadAdamW(params), torch.amp.GradScaler("cpu", enabled=False)
    set_grads(params, 0)
    scaler.step(optimizer)
    plain = OffloadAdamW(parameters((3,)))
    train(plain, steps=1)
    assert same_weights(params, plain.param_groups[0]["params"])


@everywhere
@BAD
@pytest.mark.parametrize("amsgrad", [False, True])
def test_without_a_scaler_a_bad_gradient_propagates_as_in_torch(
    bad: float, amsgrad: bool, place: Place
) -> None:
    ours, theirs = parameters((1500, 2), (7,)), parameters((1500, 2), (7,))
    optimizer = OffloadAdamW(ours, amsgrad=amsgrad, config=place.config())
    reference = torch.optim.AdamW(theirs, amsgrad=amsgrad)
    for step in range(3):
        for params, one in ((ours, optimizer), (theirs, reference)):
            set_grads(params, step)
            if step == 1:
                params[0].grad[700, 1] = bad
            one.step()
    assert ours[0].isnan().sum() == 1
    assert_near(ours, theirs)
    for p, q in zip(ours, theirs, strict=True):
        for name, tensor in reference.state[q].items():
            # an infinite moment stays infinite here, where torch's lerp makes inf - inf of it
            finite = tensor.isfinite()
            assert torch.equal(optimizer.state[p][name].isfinite(), finite)
            assert_near([optimizer.state[p][name][finite]], [tensor[finite]], 1e-5)
