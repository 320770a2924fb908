"""Hooks, closures and ``zero_grad``, as ``torch.optim`` has them."""

from __future__ import annotations

from collections.abc import Iterator
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
    same_weights,
    set_grads,
    snapshot,
    train,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ghoffload import OffloadAdam, OffloadAdamW

KINDS = pytest.mark.parametrize("kind", [pair[0] for pair in PAIRS])


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """What global hooks have seen; the hooks are removed again."""
    seen: list[str] = []
    handles = (
        register_optimizer_step_pre_hook(lambda *_: seen.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: seen.append("global post")),
    )
    yield seen
    for handle in handles:
        handle.remove()


@everywhere
@KINDS
def test_step_hooks_fire_once(kind: type, calls: list[str], place: Place) -> None:
    params = parameters((3,))
    optimizer = kind(params, config=place.config())
    weights = []

    def pre(opt: Any, args: Any, kwargs: Any) -> None:
        assert opt is optimizer
        weights.append(params[0].detach().clone())
        calls.append("pre")

    def post(opt: Any, args: Any, kwargs: Any) -> None:
        weights.append(params[0].detach().clone())
        calls.append("post")

    handle = optimizer.register_step_pre_hook(pre)
    optimizer.register_step_post_hook(post)
    train(optimizer, steps=1)
    assert calls == ["global pre", "pre", "post", "global post"]
    assert not torch.equal(*weights)
    handle.remove()
    calls.clear()
    train(optimizer, steps=1)
    assert calls == ["global pre", "post", "global post"]


@KINDS
def test_step_hooks_fire_once_with_a_scheduler_and_when_both_kinds_exist(
    kind: type, calls: list[str]
) -> None:
    for other in (OffloadAdam, OffloadAdamW):
        other(parameters((3,)))
    optimizer = kind(parameters((3,)))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(optimizer, steps=1)
    assert calls == ["global pre", "global post"]


def test_a_pre_hook_may_change_the_arguments() -> None:
    optimizer = OffloadAdamW(parameters((3,)))
    optimizer.register_step_pre_hook(lambda o, args, kwargs: ((o, lambda: 42), {}))
    assert optimizer.step() == 42


def test_state_dict_hooks_fire_once_and_in_order() -> None:
    calls: list[str] = []
    optimizer = OffloadAdamW(parameters((3,)), config=CPU.config())
    train(optimizer)
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("pre"))
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("first"), prepend=True)

    def post(opt: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        assert opt is optimizer
        calls.append("post")
        return state_dict | {"mark": 1}

    optimizer.register_state_dict_post_hook(post)
    assert optimizer.state_dict()["mark"] == 1
    assert calls == ["first", "pre", "post"]
    assert optimizer.state_dict(native=True)["mark"] == 1


def test_load_hooks_fire_once_and_may_replace_the_dict() -> None:
    calls: list[str] = []
    source = OffloadAdamW(parameters((3,)), config=CPU.config())
    train(source)
    optimizer = OffloadAdamW(parameters((3,)), config=CPU.config())

    def pre(opt: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append("pre")
        state_dict["param_groups"] = [state_dict["param_groups"][0] | {"lr": 0.5}]
        return state_dict

    optimizer.register_load_state_dict_pre_hook(pre)
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("post"))
    given = source.state_dict()
    optimizer.load_state_dict(given)
    assert calls == ["pre", "post"]
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert given["param_groups"][0]["lr"] == 0.001  # the hook saw a shallow copy
    assert snapshot(optimizer)["state"] == snapshot(source)["state"]


@everywhere
@pytest.mark.parametrize(("kind", "torch_kind"), PAIRS, ids=["Adam", "AdamW"])
def test_closure(kind: type, torch_kind: type, place: Place) -> None:
    ours, theirs = parameters((1500, 2)), parameters((1500, 2))
    losses = []
    for params, optimizer in (
        (ours, kind(ours, lr=0.1, config=place.config())),
        (theirs, torch_kind(theirs, lr=0.1)),
    ):

        def closure(params: Any = params, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            assert torch.is_grad_enabled()
            loss = params[0].square().sum()
            loss.backward()
            return loss

        with torch.no_grad():
            losses.append([optimizer.step(closure).item() for _ in range(3)])
            losses[-1].append(optimizer.step(closure=closure).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][3] < losses[0][0]
    assert_near(ours, theirs)


def test_step_returns_nothing_without_a_closure_or_gradient() -> None:
    (p,) = parameters((3,))
    optimizer = OffloadAdamW([p])
    assert optimizer.step() is None
    assert not optimizer.state
    assert same_weights([p], parameters((3,)))


@everywhere
@pytest.mark.parametrize("foreach", [None, True])
def test_zero_grad_both_ways(foreach: bool | None, place: Place) -> None:
    params = parameters()
    optimizer = OffloadAdamW(params, foreach=foreach, config=place.config())
    train(optimizer, steps=1)
    grads = [p.grad for p in params]
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    assert not any(g.any() for g in grads if g is not None)
    optimizer.step()  # a zero gradient is a step, none is not
    assert optimizer.state[params[0]]["step"] == 2
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)
    before = snapshot(optimizer)
    optimizer.step()
    assert snapshot(optimizer) == before


@everywhere
def test_gradient_accumulation_and_clipping(place: Place) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(6, 50)
    runs = []
    for kind, extra in ((OffloadAdamW, {"config": place.config()}), (torch.optim.AdamW, {})):
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(50, 40), torch.nn.ReLU(), torch.nn.Linear(40, 1)
        )
        optimizer = kind(model.parameters(), lr=0.01, **extra)
        norms = []
        for _ in range(3):
            optimizer.zero_grad()
            for part in inputs.chunk(3):
                (100 * model(part).square().mean()).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
        runs.append((list(model.parameters()), norms))
    assert runs[0][1] == pytest.approx(runs[1][1], rel=1e-5)
    assert_near(runs[0][0], runs[1][0], 1e-5)


def test_step_runs_without_gradients_and_under_no_grad() -> None:
    first, second = parameters(), parameters()
    optimizer, other = OffloadAdamW(first), OffloadAdamW(second)
    for step in range(2):
        set_grads(first, step)
        set_grads(second, step)
        optimizer.step()
        with torch.no_grad():
            other.step()
    assert same_weights(first, second)
    assert all(p.requires_grad and p.is_leaf for p in first)
