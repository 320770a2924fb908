"""Wrapping a torch optimizer: everything it had is taken over, and it can no longer step."""

from __future__ import annotations

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
from ghoffload import OffloadAdam, OffloadAdamW
from ghoffload.memory import ledger

WRAPS = [
    (OffloadAdam, torch.optim.Adam),
    (OffloadAdam, torch.optim.AdamW),
    (OffloadAdamW, torch.optim.AdamW),
]
EACH = pytest.mark.parametrize(("kind", "inner_kind"), WRAPS)


def _states(optimizer: torch.optim.Optimizer) -> list[dict[str, bytes]]:
    return snapshot(optimizer)["state"]


@everywhere
@EACH
def test_training_goes_on(kind: type, inner_kind: type, place: Place) -> None:
    _go_on(kind, inner_kind, place)


@EACH
@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_training_of_other_implementations_goes_on(
    kind: type, inner_kind: type, option: str
) -> None:
    _go_on(kind, inner_kind, CPU, **{option: True})


def _go_on(kind: type, inner_kind: type, place: Place, **options: bool) -> None:
    ours, theirs = parameters(), parameters()
    inner = inner_kind(ours, lr=0.02, weight_decay=0.3, amsgrad=True, **options)
    reference = inner_kind(theirs, lr=0.02, weight_decay=0.3, amsgrad=True)
    train(inner)
    train(reference)
    before = _states(inner)
    weights = [raw(p) for p in ours]
    optimizer = kind(inner, config=place.config())
    assert _states(optimizer) == before
    assert [raw(p) for p in ours] == weights
    # bit for bit as an optimizer of ours that was never wrapped, from the same state
    unwrapped = parameters()
    own = kind(
        unwrapped,
        lr=0.02,
        weight_decay=0.3,
        amsgrad=True,
        config=CPU.config(),
        **(
            {"decoupled_weight_decay": inner_kind is torch.optim.AdamW}
            if kind is OffloadAdam
            else {}
        ),
    )
    with torch.no_grad():
        for p, q in zip(unwrapped, ours, strict=True):
            p.copy_(q)
            own.state[p] = optimizer.state[q]
    for any_kind in (optimizer, own, reference):
        train(any_kind, start=3)
    assert _states(optimizer) == _states(own)
    assert same_weights(ours, unwrapped)
    assert_near(ours, theirs, 2e-5)


@EACH
def test_groups_defaults_and_hooks_are_the_same_objects(kind: type, inner_kind: type) -> None:
    params = parameters((3,), (4,))
    inner = inner_kind([{"params": params[:1], "lr": 0.5}, {"params": params[1:], "eps": 1e-3}])
    calls: list[str] = []
    inner.register_step_pre_hook(lambda *_: calls.append("pre"))
    inner.register_step_post_hook(lambda *_: calls.append("post"))
    inner.register_state_dict_pre_hook(lambda *_: calls.append("state_dict"))
    inner.register_load_state_dict_post_hook(lambda *_: calls.append("load"))
    groups, defaults = inner.param_groups, inner.defaults
    optimizer = kind(inner)
    assert optimizer.param_groups is groups is inner.param_groups
    assert optimizer.defaults is defaults
    train(optimizer, steps=1)
    assert calls == ["pre", "post"]
    state_dict = optimizer.state_dict()
    optimizer.load_state_dict(state_dict)
    assert calls == ["pre", "post", "state_dict", "load"]
    assert optimizer.param_groups is groups is inner.param_groups
    assert [group["lr"] for group in inner.param_groups] == [0.5, 0.001]
    inner.zero_grad()
    assert params[0].grad is None
    optimizer.add_param_group({"params": parameters((2,))})
    assert len(inner.param_groups) == 3


@EACH
def test_the_inner_one_can_no_longer_step(kind: type, inner_kind: type) -> None:
    params = parameters((3,))
    inner = inner_kind(params)
    train(inner)
    optimizer = kind(inner)
    before = snapshot(optimizer)
    assert not inner.state  # its memory is given back
    set_grads(params, 3)
    for name, arguments in (
        ("step", ()),
        ("add_param_group", ({"params": parameters((2,))},)),
        ("state_dict", ()),
        ("load_state_dict", (optimizer.state_dict(),)),
    ):
        with pytest.raises(
            RuntimeError, match=rf"was wrapped: call {name}\(\) of the {kind.__name__}"
        ):
            getattr(inner, name)(*arguments)
    assert snapshot(optimizer) == before


@pytest.mark.parametrize(("kind", "torch_kind"), PAIRS, ids=["Adam", "AdamW"])
def test_before_the_first_step(kind: type, torch_kind: type) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = kind(torch_kind(ours, lr=0.1), config=CPU.config())
    assert not optimizer.state
    plain = kind(theirs, lr=0.1, config=CPU.config())
    train(optimizer)
    train(plain)
    assert same_weights(ours, theirs)


def test_adam_keeps_decoupled_decay() -> None:
    ends = []
    for build in (
        lambda params: OffloadAdam(torch.optim.AdamW(params, weight_decay=0.5)),
        lambda params: OffloadAdamW(params, weight_decay=0.5),
        lambda params: OffloadAdam(params, weight_decay=0.5, decoupled_weight_decay=True),
        lambda params: OffloadAdam(
            torch.optim.Adam(params, weight_decay=0.5, decoupled_weight_decay=True)
        ),
        lambda params: OffloadAdam(torch.optim.Adam(params, weight_decay=0.5)),
    ):
        params = parameters()
        train(build(params))
        ends.append(params)
    assert all(same_weights(ends[0], end) for end in ends[1:4])
    assert not same_weights(ends[0], ends[4])


def test_groups_added_after_wrapping_have_its_defaults() -> None:
    inner = torch.optim.AdamW(parameters((3,)), lr=0.5, weight_decay=0.25)
    optimizer = OffloadAdam(inner)
    optimizer.add_param_group({"params": parameters((4,))})
    group = inner.param_groups[1]
    assert (group["lr"], group["weight_decay"], group["decoupled_weight_decay"]) == (
        0.5,
        0.25,
        True,
    )


def test_bf16_parameters_with_torchs_bf16_moments() -> None:
    params = parameters((1500,), (7,), dtype=torch.bfloat16)
    inner = torch.optim.AdamW(params, lr=0.1)
    train(inner)
    moments = [inner.state[p]["exp_avg"].clone() for p in params]
    optimizer = OffloadAdamW(inner, config=CPU.config())
    for p, moment in zip(params, moments, strict=True):
        assert torch.equal(optimizer.state[p]["exp_avg"], moment.float())
        assert optimizer.state[p]["exp_avg_sq"].dtype == torch.float32
    train(optimizer, start=3)
    assert all(raw(optimizer.state[p]["master"].bfloat16()) == raw(p) for p in params)


def test_partly_stepped_frozen_and_extra_state() -> None:
    params = parameters((3,), (4,), (5,))
    inner = torch.optim.AdamW(params)
    set_grads(params, 0)
    params[1].grad = None
    inner.step()
    inner.state[params[0]]["note"] = 1
    inner.state[torch.zeros(1)]["step"] = 1  # of a parameter that is no longer there
    params[2].requires_grad_(False)  # frozen, but with state
    before = _states(inner)
    optimizer = OffloadAdamW(inner)
    assert _states(optimizer) == before
    assert params[1] not in optimizer.state
    assert len(optimizer.state) == 2


def test_frozen_state_is_reserved_at_once() -> None:
    params = parameters(*[(10,)] * 6)
    inner = torch.optim.AdamW(params)
    train(inner)
    for p in params:
        p.requires_grad_(False)
    optimizer = OffloadAdamW(inner)
    assert len(optimizer._engine.sections) == 1


class _Subclass(torch.optim.AdamW):
    pass


def _two_devices(params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*params, torch.zeros(3, device="meta")])


def _float64(params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*params, torch.zeros(3, dtype=torch.float64)])


def _broken_state(params: list[Any]) -> torch.optim.Optimizer:
    inner = torch.optim.AdamW(params)
    train(inner)
    del inner.state[params[1]]["exp_avg_sq"]
    return inner


def _wrapped(params: list[Any]) -> torch.optim.Optimizer:
    inner = torch.optim.AdamW(params)
    params.append(OffloadAdamW(inner))  # keep it alive
    return inner


@pytest.mark.parametrize(
    ("kind", "make", "arguments", "error", "match"),
    [
        (OffloadAdamW, torch.optim.Adam, {}, TypeError, "AdamW wraps torch.optim.AdamW, got Adam"),
        (OffloadAdam, torch.optim.SGD, {}, TypeError, "torch.optim.AdamW, got SGD"),
        (OffloadAdamW, _Subclass, {}, TypeError, "got _Subclass"),
        (OffloadAdamW, OffloadAdamW, {}, TypeError, "got OffloadAdamW"),
        (OffloadAdamW, torch.optim.AdamW, {"lr": 0.1}, ValueError, "lr beside a wrapped"),
        (OffloadAdamW, torch.optim.AdamW, {"lr": 1e-3}, ValueError, "lr beside a wrapped"),
        (OffloadAdam, torch.optim.Adam, {"weight_decay": 0}, ValueError, "weight_decay beside"),
        (
            OffloadAdam,
            torch.optim.Adam,
            {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": True, "maximize": True},
            ValueError,
            "betas, eps, amsgrad, maximize beside",
        ),
        (OffloadAdamW, torch.optim.AdamW, {"differentiable": True}, ValueError, "differentiable"),
        (
            OffloadAdamW,
            lambda params: torch.optim.AdamW(params, differentiable=True),
            {},
            ValueError,
            "expects differentiable=False, got True",
        ),
        (OffloadAdamW, _two_devices, {}, ValueError, "on one device, got cpu, meta"),
        (OffloadAdamW, _float64, {}, TypeError, "got torch.float64"),
        (OffloadAdamW, _broken_state, {}, ValueError, "'exp_avg_sq' is missing"),
        (OffloadAdamW, _wrapped, {}, ValueError, "was wrapped before"),
        (OffloadAdamW, torch.optim.AdamW, {"config": {"colour": 1}}, ValueError, "'colour'"),
        (OffloadAdamW, torch.optim.AdamW, {"machine": "abacus"}, ValueError, "'abacus'"),
    ],
)
def test_refusals_change_nothing(
    kind: type, make: Any, arguments: dict[str, Any], error: type, match: str
) -> None:
    params = parameters((3,), (4,))
    inner = make(params)
    if make in (torch.optim.Adam, torch.optim.AdamW):
        train(inner)
    before = snapshot(inner)
    with pytest.raises(error, match=match):
        kind(inner, **arguments)
    assert snapshot(inner) == before
    if make in (torch.optim.Adam, torch.optim.AdamW):
        train(inner, start=3)  # it still steps by itself


def test_out_of_memory_leaves_the_inner_one_as_it_was() -> None:
    params = parameters((3000,))
    inner = torch.optim.AdamW(params)
    train(inner)
    before = snapshot(inner)
    held = ledger.total()
    with (
        ghoffload.use_machine("virtual", host_bytes=1000),
        pytest.raises(torch.OutOfMemoryError),
    ):
        OffloadAdamW(inner, config=CPU.config())
    assert snapshot(inner) == before
    assert ledger.total() == held
    train(inner, start=3)
