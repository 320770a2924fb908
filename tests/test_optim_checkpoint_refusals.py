"""State dicts that do not fit are refused with one sentence, and nothing has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_tools import CPU, parameters, snapshot, train

from ghoffload import OffloadAdamW

Edit = Callable[[dict[str, Any]], object]


def _set(index: int, name: str, value: Any) -> Edit:
    return lambda d: d["state"][index].__setitem__(name, value)


def _option(name: str, value: Any) -> Edit:
    return lambda d: d["param_groups"][1].__setitem__(name, value)


EDITS: list[tuple[Edit, type[Exception], str]] = [
    (
        _set(1, "exp_avg", torch.zeros(7)),
        ValueError,
        r"parameter 1 expects shape \(40,\), got \(7,\)",
    ),
    (
        _set(0, "exp_avg", torch.zeros(4, 1500)),
        ValueError,
        r"expects shape \(1500, 4\), got \(4, 1500\)",
    ),
    (
        _set(2, "exp_avg_sq", torch.zeros(3).double()),
        ValueError,
        "'exp_avg_sq' of parameter 2 expects torch.float32",
    ),
    (_set(2, "exp_avg_sq", torch.zeros(3).int()), ValueError, "got torch.int32"),
    (_set(2, "exp_avg", 3.0), TypeError, "expects a tensor, got float"),
    (_set(2, "master", torch.zeros(3).double()), ValueError, "'master' of parameter 2"),
    (_set(0, "step", -1.0), ValueError, "'step' of parameter 0 expects a whole number"),
    (
        _set(0, "step", torch.tensor(0.5)),
        ValueError,
        "'step' of parameter 0 expects a whole number",
    ),
    (_set(0, "step", "3"), TypeError, "'step' of parameter 0 expects a tensor, got str"),
    (
        lambda d: d["state"][1].pop("exp_avg"),
        ValueError,
        "parameter 1 expects .*; 'exp_avg' is missing",
    ),
    (lambda d: d["state"][3].pop("max_exp_avg_sq"), ValueError, "'max_exp_avg_sq' is missing"),
    (lambda d: d["state"][0].pop("step"), ValueError, "'step' is missing"),
    (
        lambda d: d["state"].__setitem__(2, [1, 2]),
        TypeError,
        "state of parameter 2 expects a dict, got list",
    ),
    (
        lambda d: d["state"].__setitem__(77, {"step": 1.0}),
        ValueError,
        "an entry for parameter 77, which is in none",
    ),
    (
        lambda d: d["state"].__setitem__("w", d["state"].pop(0)),
        ValueError,
        "an entry for parameter 'w'",
    ),
    (lambda d: d.pop("state"), ValueError, "'state' is missing"),
    (lambda d: d.pop("param_groups"), ValueError, "'param_groups' is missing"),
    (
        lambda d: d["param_groups"].pop(),
        ValueError,
        "different number of parameter groups: expected 2, got 1",
    ),
    (
        lambda d: d["param_groups"][1]["params"].pop(),
        ValueError,
        "doesn't match the size of optimizer's group 1",
    ),
    (lambda d: d["param_groups"][0].pop("betas"), ValueError, "group 0 .*'betas' is missing"),
    (_option("amsgrad", False), ValueError, "group 1 expects amsgrad=True.*got amsgrad=False"),
    (_option("differentiable", True), ValueError, "expects differentiable=False, got True"),
    (_option("lr", -2.0), ValueError, "Invalid learning rate: -2.0"),
    (_option("betas", (0.9, 2.0)), ValueError, "Invalid beta parameter at index 1: 2.0"),
    (_option("weight_decay", None), TypeError, "weight_decay expects a number, got None"),
    (
        lambda d: d["ghoffload"].__setitem__("version", 99),
        ValueError,
        "expects version 1 or 2, got 99",
    ),
    (lambda d: d.__setitem__("ghoffload", "yes"), TypeError, "'ghoffload' expects a dict, got str"),
]


def _build() -> OffloadAdamW:
    params = [
        *parameters((1500, 4), (40,)),
        *parameters((3,), dtype=torch.bfloat16),
        *parameters((5,), (6,)),
    ]
    groups = [{"params": params[:3]}, {"params": params[3:], "amsgrad": True}]
    return OffloadAdamW(groups, config=CPU.config())


@pytest.mark.parametrize(("edit", "error", "match"), EDITS, ids=[match for _, _, match in EDITS])
def test_refusals_change_nothing(edit: Edit, error: type[Exception], match: str) -> None:
    source = _build()
    train(source, steps=2)
    state_dict = copy.deepcopy(source.state_dict(native=True))
    for group in state_dict["param_groups"]:
        group["lr"] = 0.25
    optimizer = _build()
    train(optimizer)
    before, given = snapshot(optimizer), optimizer.state_dict()
    posts: list[Any] = []
    optimizer.register_load_state_dict_post_hook(posts.append)
    edit(state_dict)
    with pytest.raises(error, match=match):
        optimizer.load_state_dict(state_dict)
    assert snapshot(optimizer) == before
    assert not posts
    train(optimizer, start=3)  # and it goes on
    edit(copy.deepcopy(given) | {"ghoffload": {"version": 1}})  # the edits fit what they edit


def test_what_was_edited_does_load_unedited() -> None:
    source, optimizer = _build(), _build()
    train(source)
    groups = (o.param_groups for o in (optimizer, source))
    with torch.no_grad():  # a split master is its weight and a rest
        for mine, theirs in zip(*groups, strict=True):
            for p, q in zip(mine["params"], theirs["params"], strict=True):
                p.copy_(q)
    optimizer.load_state_dict(copy.deepcopy(source.state_dict(native=True)))
    assert snapshot(optimizer)["state"] == snapshot(source)["state"]


def test_another_optimizers_dict() -> None:
    params = parameters((3,))
    sgd = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    train(sgd)
    optimizer = OffloadAdamW(parameters((3,)))
    train(optimizer)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"group 0 .*'betas', 'eps' is missing"):
        optimizer.load_state_dict(sgd.state_dict())
    with pytest.raises(TypeError, match="state dict expects a dict, got NoneType"):
        optimizer.load_state_dict(None)
    assert snapshot(optimizer) == before


def test_a_refusal_reserves_nothing_for_a_frozen_parameter() -> None:
    source = OffloadAdamW(parameters((30,), (40,)))
    train(source)
    params = parameters((30,), (40,))
    params[1].requires_grad_(False)
    optimizer = OffloadAdamW(params)
    state_dict = copy.deepcopy(source.state_dict())
    state_dict["state"][1]["exp_avg"] = torch.zeros(41)
    with pytest.raises(ValueError, match=r"parameter 1 expects shape \(40,\), got \(41,\)"):
        optimizer.load_state_dict(state_dict)
    assert optimizer.report().parameters == 30
    assert not optimizer.state
