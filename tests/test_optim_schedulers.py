"""Learning-rate schedulers of every kind, on our optimizer and on one that it wraps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_tools import CPU, Place, assert_near, everywhere, parameters, set_grads, snapshot, train
from torch.optim import lr_scheduler as lrs

from ghoffload import OffloadAdam, OffloadAdamW

STEPS = 7


def _sequential(opt: Any) -> Any:
    parts = [lrs.ConstantLR(opt, 0.1, 2), lrs.ExponentialLR(opt, 0.5)]
    return lrs.SequentialLR(opt, parts, milestones=[3])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda opt: lrs.LambdaLR(opt, lambda epoch: 0.9**epoch),
    "multiplicative": lambda opt: lrs.MultiplicativeLR(opt, lambda epoch: 0.8),
    "step": lambda opt: lrs.StepLR(opt, 2, 0.5),
    "multistep": lambda opt: lrs.MultiStepLR(opt, [1, 4], 0.5),
    "constant": lambda opt: lrs.ConstantLR(opt, 0.5, 3),
    "linear": lambda opt: lrs.LinearLR(opt, 0.2, total_iters=4),
    "exponential": lambda opt: lrs.ExponentialLR(opt, 0.7),
    "cosine": lambda opt: lrs.CosineAnnealingLR(opt, 5),
    "restarts": lambda opt: lrs.CosineAnnealingWarmRestarts(opt, 3),
    "cyclic": lambda opt: lrs.CyclicLR(opt, 0.001, 0.1, 2),
    "onecycle": lambda opt: lrs.OneCycleLR(opt, 0.1, total_steps=STEPS + 1),
    "plateau": lambda opt: lrs.ReduceLROnPlateau(opt, patience=1),
    "polynomial": lambda opt: lrs.PolynomialLR(opt, 5, 2.0),
    "chained": lambda opt: lrs.ChainedScheduler(
        [lrs.ConstantLR(opt, 0.1, 2), lrs.ExponentialLR(opt, 0.9)]
    ),
    "sequential": _sequential,
}
EACH = pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
TENSOR = pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])


def _lr(tensor: bool) -> Any:
    return torch.tensor(0.01) if tensor else 0.01


def _run(optimizer: Any, scheduler: Any) -> list[list[Any]]:
    """Train; the options that schedulers change, after each step. Warnings are errors."""
    seen = []
    for step in range(STEPS):
        train(optimizer, start=step, steps=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scheduler.step(*((1.0,) if isinstance(scheduler, lrs.ReduceLROnPlateau) else ()))
        groups = optimizer.param_groups
        seen.append([(float(g["lr"]), *map(float, g["betas"])) for g in groups])
    return seen


@EACH
@TENSOR
def test_a_scheduler_on_ours(make: Callable[[Any], Any], tensor: bool) -> None:
    ours, theirs = parameters((30, 40), (5,)), parameters((30, 40), (5,))
    groups = [[{"params": [p], "lr": _lr(tensor)} for p in params] for params in (ours, theirs)]
    optimizer = OffloadAdamW(groups[0], config=CPU.config())
    reference = torch.optim.AdamW(groups[1])
    mine, other = _run(optimizer, make(optimizer)), _run(reference, make(reference))
    assert mine == other
    assert len(set(map(tuple, mine))) > 1
    assert_near(ours, theirs, 1e-5)


@EACH
@TENSOR
def test_a_scheduler_made_before_wrapping(make: Callable[[Any], Any], tensor: bool) -> None:
    ours, theirs = parameters((30, 40), (5,)), parameters((30, 40), (5,))
    inner = torch.optim.AdamW(ours, lr=_lr(tensor))
    scheduler = make(inner)
    optimizer = OffloadAdam(inner, config=CPU.config())
    reference = torch.optim.AdamW(theirs, lr=_lr(tensor))
    assert _run(optimizer, scheduler) == _run(reference, make(reference))
    assert_near(ours, theirs, 1e-5)


def test_a_scheduler_made_on_the_inner_one_after_wrapping() -> None:
    inner = torch.optim.AdamW(parameters((5,)), lr=0.01)
    optimizer = OffloadAdamW(inner, config=CPU.config())
    seen = _run(optimizer, lrs.ExponentialLR(inner, 0.5))
    assert seen[-1][0][0] == pytest.approx(0.01 * 0.5**STEPS)


def test_a_scheduler_stepped_too_early_still_warns() -> None:
    inner = torch.optim.AdamW(parameters((5,)))
    scheduler = lrs.ExponentialLR(inner, 0.5)
    OffloadAdamW(inner)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


@everywhere
def test_a_tensor_learning_rate_changed_in_place(place: Place) -> None:
    ours, theirs = parameters(), parameters()
    rates = torch.tensor(0.01), torch.tensor(0.01)
    optimizer = OffloadAdamW(ours, lr=rates[0], config=place.config())
    reference = torch.optim.AdamW(theirs, lr=rates[1])
    for step in range(3):
        set_grads(ours, step)
        set_grads(theirs, step)
        optimizer.step()
        reference.step()
        for rate in rates:  # after step() has returned: the step before must not see it
            rate.mul_(3)
    assert optimizer.param_groups[0]["lr"] is rates[0]
    assert_near(ours, theirs, 1e-5)


@pytest.mark.parametrize("name", ["onecycle", "sequential", "plateau"])
def test_resuming_scheduler_and_optimizer(name: str) -> None:
    runs = []
    for stop in (False, True):
        params = parameters((1200, 3))
        optimizer = OffloadAdamW(params, lr=0.01, config=CPU.config())
        scheduler = SCHEDULERS[name](optimizer)
        for step in range(6):
            if stop and step == 3:
                saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
                optimizer = OffloadAdamW(params, lr=0.01, config=CPU.config())
                scheduler = SCHEDULERS[name](optimizer)
                optimizer.load_state_dict(saved[0])
                scheduler.load_state_dict(saved[1])
            train(optimizer, start=step, steps=1)
            scheduler.step(*((1.0,) if name == "plateau" else ()))
        runs.append(snapshot(optimizer))
    assert runs[0] == runs[1]


def test_averaged_models_swap_learning_rates() -> None:
    from torch.optim.swa_utils import SWALR

    ours, theirs = parameters((30,)), parameters((30,))
    optimizer, reference = OffloadAdamW(ours, lr=0.01), torch.optim.AdamW(theirs, lr=0.01)
    assert _run(optimizer, SWALR(optimizer, 0.05, 3)) == _run(reference, SWALR(reference, 0.05, 3))
    assert_near(ours, theirs, 1e-5)
