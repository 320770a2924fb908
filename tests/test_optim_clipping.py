"""``clip_grad_norm_``: torch's clipping with the factor applied by the step, and whose it is."""

from __future__ import annotations

import math
import pickle
import weakref
from typing import Any

import pytest
import torch
from optim_tools import (
    CPU,
    PLACES,
    Place,
    assert_near,
    everywhere,
    parameters,
    raw,
    same_weights,
    set_grads,
    snapshot,
)
from torch import Tensor

import ghoffload
from ghoffload import OffloadAdam, OffloadAdamW
from ghoffload.kernels import norm as norms

MAX_NORM = 0.5


def made(place: Place = CPU, **options: Any) -> tuple[list[torch.nn.Parameter], OffloadAdamW]:
    params = parameters()
    return params, OffloadAdamW(params, lr=0.1, config=place.config(), **options)


@everywhere
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6])
def test_norm_and_weights_are_those_of_torchs_clip(
    max_norm: float, norm_type: float, place: Place
) -> None:
    # no empty one: torch has no infinity norm of those
    ours, theirs = (parameters((1500, 3), (7,), (), (40, 60)) for _ in range(2))
    optimizer = OffloadAdamW(ours, lr=0.1, config=place.config())
    reference = torch.optim.AdamW(theirs, lr=0.1)
    for step in range(3):
        set_grads(ours, step)
        set_grads(theirs, step)
        before = [raw(p.grad) for p in ours]
        norm = optimizer.clip_grad_norm_(max_norm, norm_type)
        expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
        assert norm.shape == expected.shape
        assert norm.dtype == torch.float32
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        assert [raw(p.grad) for p in ours] == before
        optimizer.step()
        reference.step()
    assert_near(ours, theirs, 1e-5)


@everywhere
def test_the_bits_are_those_of_gradients_times_the_factor(place: Place) -> None:
    ours, optimizer = made(place, amsgrad=True)
    plain, other = made(place, amsgrad=True)
    for step in range(2):
        set_grads(ours, step)
        set_grads(plain, step)
        grads = [p.grad for p in plain]
        partials = torch.empty(norms.partials_needed(grads), dtype=torch.float64)
        total, found, factor = (torch.empty(()) for _ in range(3))
        for launch in norms.norm(
            grads,
            partials=partials,
            total_norm=total,
            found_inf=found,
            clip=factor,
            max_norm=MAX_NORM,
        ):
            launch.run_on_host()
        for grad in grads:
            grad *= factor
        assert raw(optimizer.clip_grad_norm_(MAX_NORM)) == raw(total)
        optimizer.step()
        other.step()
    assert snapshot(optimizer) == snapshot(other)


def test_the_norm_of_every_place_has_the_same_bits() -> None:
    def run(place: Place) -> tuple[list[bytes], dict[str, Any]]:
        with place.entered():
            params, optimizer = made(place)
            norms = []
            for step in range(3):
                set_grads(params, step)
                norms.append(raw(optimizer.clip_grad_norm_(MAX_NORM)))
                optimizer.step()
            return norms, snapshot(optimizer)

    expected = run(CPU)
    assert len(set(expected[0])) == 3
    for place in PLACES[1:]:
        assert run(place) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_not_rounded_again(dtype: torch.dtype) -> None:
    params = parameters((1500, 2), (3,), dtype=dtype)
    optimizer = OffloadAdamW(params, lr=0.01, config=CPU.config(master="fp32"))
    masters = [torch.nn.Parameter(p.detach().float()) for p in params]
    reference = torch.optim.AdamW(masters, lr=0.01)
    for step in range(3):
        set_grads(params, step)
        for p, master in zip(params, masters, strict=True):
            master.grad = p.grad.float()
        optimizer.clip_grad_norm_(0.01)
        torch.nn.utils.clip_grad_norm_(masters, 0.01)
        optimizer.step()
        reference.step()
    assert_near([optimizer.state[p]["master"] for p in params], masters, 1e-5)


def test_a_returned_norm_is_the_callers_own() -> None:
    params, optimizer = made()
    norms = []
    for step in range(3):
        set_grads(params, step, scale=step + 1.0)
        norms.append(optimizer.clip_grad_norm_(MAX_NORM))
        norms[-1].sub_(1.0)  # and changing it changes no step
        optimizer.step()
    assert len({norm.item() for norm in norms}) == 3
    plain, other = made()
    for step in range(3):
        set_grads(plain, step, scale=step + 1.0)
        other.clip_grad_norm_(MAX_NORM)
        other.step()
    assert snapshot(optimizer) == snapshot(other)


# ---- whose factor it is


def stepped(clip: float | None, steps: int = 1) -> dict[str, Any]:
    params, optimizer = made()
    set_grads(params, 0)
    if clip is not None:
        optimizer.clip_grad_norm_(clip)
    for _ in range(steps):
        optimizer.step()
    return snapshot(optimizer)


def test_a_later_clip_replaces_an_earlier_one() -> None:
    params, optimizer = made()
    set_grads(params, 0)
    optimizer.clip_grad_norm_(0.1)
    optimizer.clip_grad_norm_(MAX_NORM)
    optimizer.step()
    assert snapshot(optimizer) == stepped(MAX_NORM) != stepped(0.1)


def test_the_factor_stays_with_gradients_that_are_stepped_twice() -> None:
    params, optimizer = made()
    set_grads(params, 0)
    optimizer.clip_grad_norm_(MAX_NORM)
    optimizer.step()
    optimizer.step()
    assert snapshot(optimizer) == stepped(MAX_NORM, 2)
    theirs = parameters()
    reference = torch.optim.AdamW(theirs, lr=0.1)
    set_grads(theirs, 0)
    torch.nn.utils.clip_grad_norm_(theirs, MAX_NORM)
    reference.step()
    reference.step()
    assert_near(params, theirs, 1e-5)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("by_model", [True, False])
def test_the_next_step_without_a_clip_is_not_clipped(by_model: bool, to_none: bool) -> None:
    model, plain = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    plain.load_state_dict(model.state_dict())
    optimizer = OffloadAdamW(model.parameters(), lr=0.1)
    other = OffloadAdamW(plain.parameters(), lr=0.1)
    inputs = torch.randn(4, 5)
    for step in range(3):
        for its, one in ((model, optimizer), (plain, other)):
            its(inputs).square().sum().backward()
            if step == 0:
                one.clip_grad_norm_(0.01)
            one.step()
            if its is plain:
                one.zero_grad()
            elif by_model:
                its.zero_grad(set_to_none=to_none)
            else:
                one.zero_grad(set_to_none=to_none)
    assert same_weights(model.parameters(), plain.parameters())


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_forgets_a_clip_that_no_step_has_applied(to_none: bool) -> None:
    params, optimizer = made()
    set_grads(params, 5)
    optimizer.clip_grad_norm_(1e-3)
    optimizer.zero_grad(set_to_none=to_none)
    set_grads(params, 0)
    optimizer.step()
    assert snapshot(optimizer) == stepped(None)


def add_(params: list[torch.nn.Parameter]) -> None:
    params[1].grad.add_(1.0)


def accumulate(params: list[torch.nn.Parameter]) -> None:
    (params[0] * 2).sum().backward()


def replace(params: list[torch.nn.Parameter]) -> None:
    for p in params:
        p.grad = p.grad / 2


def torch_clip(params: list[torch.nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(params, 1e-3)


@pytest.mark.parametrize("change", [add_, accumulate, replace, torch_clip])
def test_gradients_changed_between_clip_and_step_are_refused(change: Any) -> None:
    params, optimizer = made()
    set_grads(params, 0)
    optimizer.clip_grad_norm_(MAX_NORM)
    before = snapshot(optimizer)
    change(params)
    with pytest.raises(RuntimeError, match="expects gradients as they were in clip_grad_norm_"):
        optimizer.step()
    assert snapshot(optimizer) == before
    optimizer.clip_grad_norm_(MAX_NORM)  # the mend that the message names
    optimizer.step()
    assert snapshot(optimizer) != before


def test_a_gradient_that_came_after_the_clip_is_refused_and_a_dropped_one_is_not() -> None:
    params, optimizer = made()
    set_grads(params, 0)
    late, params[0].grad = params[0].grad, None
    optimizer.clip_grad_norm_(MAX_NORM)
    params[0].grad = late
    with pytest.raises(RuntimeError, match="changed, replaced or added since"):
        optimizer.step()
    optimizer.clip_grad_norm_(MAX_NORM)
    params[0].grad = None
    optimizer.step()
    assert params[0] not in optimizer.state or not optimizer.state[params[0]]


def test_a_new_gradient_at_the_address_of_an_old_one_is_not_taken_for_it() -> None:
    params = parameters((7,))
    optimizer = OffloadAdamW(params)
    params[0].grad = torch.ones(7)
    optimizer.clip_grad_norm_(MAX_NORM)
    number = id(params[0].grad)
    params[0].grad = None
    candidates = [torch.ones(7) for _ in range(1000)]
    found = [tensor for tensor in candidates if id(tensor) == number]
    if not found:
        pytest.skip("needs a Python that uses the memory of a dead object again")
    params[0].grad = found[0]
    with pytest.raises(RuntimeError, match="changed, replaced or added since"):
        optimizer.step()


def test_the_optimizer_keeps_no_gradient_alive() -> None:
    params, optimizer = made()
    set_grads(params, 0)
    optimizer.clip_grad_norm_(MAX_NORM)
    grads = [weakref.ref(p.grad) for p in params]
    for p in params:
        p.grad = None
    assert [ref() for ref in grads] == [None] * len(grads)


def test_within_a_closure() -> None:
    params, optimizer = made()

    def closure() -> Tensor:
        optimizer.zero_grad()
        set_grads(params, 0)
        return optimizer.clip_grad_norm_(MAX_NORM)

    assert optimizer.step(closure) > MAX_NORM
    assert snapshot(optimizer) == stepped(MAX_NORM)


# ---- inputs


def test_no_gradients_at_all() -> None:
    params, optimizer = made()
    norm = optimizer.clip_grad_norm_(MAX_NORM, error_if_nonfinite=True)
    assert norm.item() == 0.0
    set_grads(params, 0)
    optimizer.step()
    assert snapshot(optimizer) == stepped(None)


@everywhere
def test_gradients_of_other_strides_and_signs(place: Place) -> None:
    def grads() -> list[Tensor]:
        negative = torch.view_as_complex(torch.randn(60, 2)).conj().imag
        assert negative.is_neg()
        return [
            torch.randn(3, 1500).t(),
            torch.ones(1).expand(7),
            torch.randn(40, 120)[:, ::2],
            negative,
            torch._efficientzerotensor(5),
        ]

    torch.manual_seed(3)
    shapes = ((1500, 3), (7,), (40, 60), (60,), (5,))
    params, theirs = parameters(*shapes), parameters(*shapes)
    optimizer = OffloadAdam(params, lr=0.1, config=place.config())
    reference = torch.optim.Adam(theirs, lr=0.1)
    for p, q, grad in zip(params, theirs, grads(), strict=True):
        p.grad, q.grad = grad, grad.clone()
    norm = optimizer.clip_grad_norm_(MAX_NORM)
    expected = torch.nn.utils.clip_grad_norm_(theirs, MAX_NORM)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    optimizer.step()
    reference.step()
    assert_near(params, theirs, 1e-5)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_non_finite_gradients_as_in_torch(bad: float) -> None:
    ours, optimizer = made()
    theirs = parameters()
    reference = torch.optim.AdamW(theirs, lr=0.1)
    for params in (ours, theirs):
        set_grads(params, 0)
        params[3].grad[2, 2] = bad
    with pytest.raises(RuntimeError, match=r"total norm of order 2\.0 .* cannot be clipped"):
        optimizer.clip_grad_norm_(MAX_NORM, error_if_nonfinite=True)
    norm = optimizer.clip_grad_norm_(MAX_NORM)
    expected = torch.nn.utils.clip_grad_norm_(theirs, MAX_NORM)
    assert not norm.isfinite()
    assert norm.isnan() == expected.isnan()
    optimizer.step()
    reference.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p.isnan(), q.isnan())


def test_wrong_arguments() -> None:
    params, optimizer = made()
    set_grads(params, 0)
    optimizer.clip_grad_norm_(MAX_NORM)
    with pytest.raises(ValueError, match="norm_type expects 2 or inf, got 1"):
        optimizer.clip_grad_norm_(1.0, norm_type=1.0)
    with pytest.raises(ValueError, match="max_norm expects a number of 0 or more, got -1"):
        optimizer.clip_grad_norm_(-1.0)
    optimizer.step()
    assert snapshot(optimizer) == stepped(MAX_NORM)  # a refused call changes nothing
    params[0].grad = torch.ones(1500, 3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.clip_grad_norm_(1.0)


def test_a_wrapped_and_an_unpickled_optimizer_clip_too() -> None:
    params = parameters()
    wrapped = OffloadAdam(torch.optim.AdamW(params, lr=0.1), config=CPU.config())
    set_grads(params, 0)
    wrapped.clip_grad_norm_(MAX_NORM)
    wrapped.step()
    plain, other = made()
    set_grads(plain, 0)
    other.clip_grad_norm_(MAX_NORM)
    other.step()
    assert same_weights(params, plain)
    copied = pickle.loads(pickle.dumps(other))
    its = [p for group in copied.param_groups for p in group["params"]]
    set_grads(its, 1)
    assert copied.clip_grad_norm_(MAX_NORM) > MAX_NORM
    copied.step()


# ---- GradScaler


def scaled(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, step: int) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    set_grads(params, step, scale=scaler.scale(torch.ones(())).item())


@everywhere
@pytest.mark.parametrize("unscale", [False, True], ids=["in the step", "by the scaler"])
def test_with_a_scaler_as_torchs_unscale_and_clip(unscale: bool, place: Place) -> None:
    ours, optimizer = made(place)
    theirs = parameters()
    reference = torch.optim.AdamW(theirs, lr=0.1)
    mine, other = (
        torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)
    )
    scales = set()
    for step in range(7):
        scaled(optimizer, mine, step)
        scaled(reference, other, step)
        if step in (1, 4):
            ours[3].grad[7, 7] = theirs[3].grad[7, 7] = math.nan
        if unscale:
            mine.unscale_(optimizer)
        before = snapshot(optimizer)
        norm = optimizer.clip_grad_norm_(MAX_NORM, scaler=mine)
        other.unscale_(reference)
        expected = torch.nn.utils.clip_grad_norm_(theirs, MAX_NORM)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0, equal_nan=True)
        mine.step(optimizer)
        other.step(reference)
        assert (snapshot(optimizer) == before) == (step in (1, 4))
        mine.update()
        other.update()
        scales.add(mine.get_scale())
        assert mine.state_dict() == other.state_dict()
    assert len(scales) == 2
    assert_near(ours, theirs, 1e-5)
    assert not hasattr(optimizer, "grad_scale")


def test_the_scaler_does_not_read_the_gradients_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaled(optimizer, scaler, 0)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the scaler reads the gradients")

    monkeypatch.setattr(scaler, "_unscale_grads_", refuse)
    optimizer.clip_grad_norm_(MAX_NORM, scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert snapshot(optimizer) == stepped(MAX_NORM)


def test_what_the_scaler_has_found_itself_stays_found() -> None:
    params, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaled(optimizer, scaler, 0)
    params[0].grad[5, 1] = math.inf
    scaler.unscale_(optimizer)
    params[0].grad.nan_to_num_(posinf=0.0)
    before = snapshot(optimizer)["weights"]
    assert optimizer.clip_grad_norm_(MAX_NORM, scaler=scaler).isfinite()
    scaler.step(optimizer)
    assert snapshot(optimizer)["weights"] == before


def test_fp16_gradients_need_no_unscale() -> None:
    params = parameters((1500, 2), dtype=torch.float16)
    optimizer = OffloadAdamW(params, lr=0.01, config=CPU.config())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaled(optimizer, scaler, 0)
    expected = params[0].grad.double().norm() / 64.0
    norm = optimizer.clip_grad_norm_(MAX_NORM, scaler=scaler)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    scaler.step(optimizer)


def test_scaled_gradients_are_not_taken_for_unscaled_ones() -> None:
    _, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaled(optimizer, scaler, 0)
    optimizer.clip_grad_norm_(MAX_NORM)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=r"call clip_grad_norm_\(max_norm, scaler=scaler\)"):
        scaler.step(optimizer)
    assert snapshot(optimizer) == before


def test_a_scaler_at_the_wrong_time_or_disabled() -> None:
    params, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    set_grads(params, 0)
    with pytest.raises(RuntimeError, match=r"expects scaler.scale\(loss\) before it"):
        optimizer.clip_grad_norm_(MAX_NORM, scaler=scaler)
    scaled(optimizer, scaler, 0)
    optimizer.clip_grad_norm_(MAX_NORM, scaler=scaler)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"before scaler.step\(\), not after"):
        optimizer.clip_grad_norm_(MAX_NORM, scaler=scaler)
    params, optimizer = made()
    set_grads(params, 0)
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    optimizer.clip_grad_norm_(MAX_NORM, scaler=disabled)
    disabled.step(optimizer)
    assert snapshot(optimizer) == stepped(MAX_NORM)


def test_a_grad_scale_that_the_user_has_set() -> None:
    params, optimizer = made()
    set_grads(params, 0, scale=4.0)
    optimizer.grad_scale = torch.tensor(4.0)
    norm = optimizer.clip_grad_norm_(MAX_NORM)
    optimizer.step()
    assert snapshot(optimizer) == stepped(MAX_NORM)
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm([p.grad / 4 for p in params]))


# ---- ordering


@pytest.mark.parametrize("order", ["earliest", "latest", "adversarial"])
@pytest.mark.parametrize("step_device", ["cuda", "cpu"])
def test_nothing_is_out_of_order_on_the_virtual_machine(step_device: str, order: str) -> None:
    def loop(config: dict[str, Any]) -> dict[str, Any]:
        params = parameters((3000, 3), (7,))
        optimizer = OffloadAdamW(params, lr=0.1, config=config)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            if step < 2:
                set_grads(params, step)
                optimizer.clip_grad_norm_(MAX_NORM)
                optimizer.step()
            else:
                scaled(optimizer, scaler, step)
                optimizer.clip_grad_norm_(MAX_NORM, scaler=scaler)
                scaler.step(optimizer)
            optimizer.zero_grad()
            torch.full((64,), 7.0)  # who is given the memory of the factor next
        return snapshot(optimizer)

    expected = loop(CPU.config())
    with ghoffload.use_machine("virtual", order=order, check=True):
        assert loop(CPU.config(step_device=step_device)) == expected
