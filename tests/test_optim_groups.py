"""Parameter groups: several, added later, with names, frozen parameters, tied weights."""

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


def _groups(params: list[Any]) -> list[dict[str, Any]]:
    return [
        {"params": params[:2], "lr": 0.1, "weight_decay": 0.0},
        {"params": params[2:4], "betas": (0.5, 0.6), "eps": 1e-3},
        {"params": [params[4]], "amsgrad": True, "maximize": True},
        {"params": params[5:]},
    ]


@everywhere
@pytest.mark.parametrize(("kind", "torch_kind"), PAIRS, ids=["Adam", "AdamW"])
def test_groups_with_their_own_options(kind: type, torch_kind: type, place: Place) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = kind(_groups(ours), lr=0.02, weight_decay=0.3, config=place.config())
    reference = torch_kind(_groups(theirs), lr=0.02, weight_decay=0.3)
    for step in range(3):
        train(optimizer, start=step, steps=1)
        train(reference, start=step, steps=1)
        for group, other in zip(optimizer.param_groups, reference.param_groups, strict=True):
            group["lr"] *= 0.9
            other["lr"] *= 0.9
            group["weight_decay"] = other["weight_decay"] = 0.1 * step
    assert_near(ours, theirs, 1e-5)


@everywhere
def test_groups_added_later(place: Place) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = OffloadAdamW(ours[:2], lr=0.02, config=place.config())
    reference = torch.optim.AdamW(theirs[:2], lr=0.02)
    train(optimizer, steps=2)
    train(reference, steps=2)
    for params, kind in ((ours, optimizer), (theirs, reference)):
        group = {"params": params[2:5], "lr": 0.3, "amsgrad": True}
        kind.add_param_group(group)
        assert kind.param_groups[1] is group
        kind.add_param_group({"params": params[5]})
        kind.add_param_group({"params": iter(params[6:])})
    train(optimizer, start=2, steps=3)
    train(reference, start=2, steps=3)
    assert_near(ours, theirs, 1e-5)
    assert [s["step"].item() for s in optimizer.state.values()] == [
        s["step"].item() for s in reference.state.values()
    ]
    assert {k: v for k, v in optimizer.param_groups[1].items() if k != "params"} == {
        k: v for k, v in reference.param_groups[1].items() if k != "params"
    }


@everywhere
def test_a_group_added_later_may_need_larger_buffers(place: Place) -> None:
    small, large = parameters((5,)), parameters((5000,), seed=1)
    optimizer = OffloadAdamW(small, config=place.config(bucket_bytes=1 << 20))
    train(optimizer)
    optimizer.add_param_group({"params": large})
    train(optimizer, start=3)
    expected = parameters((5,)), parameters((5000,), seed=1)
    plain = OffloadAdamW(expected[0])
    train(plain)
    plain.add_param_group({"params": expected[1]})
    train(plain, start=3)
    assert same_weights([*small, *large], [*expected[0], *expected[1]])


@pytest.mark.parametrize(
    ("group", "error", "match"),
    [
        (lambda p: {"params": [p]}, ValueError, "more than one parameter group"),
        (lambda p: {"params": [torch.zeros(2, dtype=torch.float64)]}, TypeError, "float64"),
        (lambda p: {"params": [torch.zeros(2, dtype=torch.complex64)]}, TypeError, "complex64"),
        (lambda p: {"params": [torch.zeros(2, device="meta")]}, ValueError, "on cpu, got meta"),
        (lambda p: {"params": [p.detach()[1:]]}, ValueError, "parameters 0 and 1 overlap"),
        (lambda p: {"params": [torch.zeros(1).expand(3)]}, ValueError, "an expanded one"),
        (lambda p: {"params": {p}}, TypeError, "ordered collections"),
        (lambda p: [p], TypeError, "param_group must be a dict"),
        (lambda p: {"params": ["text"]}, TypeError, "only optimize Tensors"),
    ],
)
def test_a_group_that_does_not_fit_is_refused(group: Any, error: type, match: str) -> None:
    params = parameters((4,))
    optimizer = OffloadAdamW(params)
    train(optimizer)
    before = snapshot(optimizer)
    given = group(params[0])
    copy = list(given) if isinstance(given, list) else dict(given)
    with pytest.raises(error, match=match):
        optimizer.add_param_group(given)
    assert list(given) == list(copy)
    assert snapshot(optimizer) == before
    train(optimizer, start=3)


def test_named_parameters() -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = OffloadAdamW(model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    train(optimizer)
    state_dict = optimizer.state_dict()
    assert state_dict["param_groups"][0]["param_names"] == ["weight", "bias"]
    other = OffloadAdamW(torch.nn.Linear(4, 3).named_parameters())
    del state_dict["param_groups"][0]["param_names"]
    other.load_state_dict(state_dict)
    assert other.param_groups[0]["param_names"] == ["weight", "bias"]
    optimizer.add_param_group({"params": [("extra", parameters((2,))[0])]})
    assert optimizer.param_groups[1]["param_names"] == ["extra"]


@everywhere
def test_frozen_parameters_later_unfrozen(place: Place) -> None:
    ours, theirs = parameters(), parameters()
    for params in (ours, theirs):
        for p in params[::2]:
            p.requires_grad_(False)
    optimizer = OffloadAdamW(ours, lr=0.02, config=place.config())
    reference = torch.optim.AdamW(theirs, lr=0.02)
    for step in range(4):
        if step == 2:
            for p in (*ours, *theirs):
                p.requires_grad_(True)
        for params in (ours, theirs):
            set_grads(params, step)
            for p in params:
                if not p.requires_grad:
                    p.grad = None
        optimizer.step()
        reference.step()
        if step == 1:
            assert len(optimizer.state) == len(reference.state) == 3
    assert_near(ours, theirs, 1e-5)
    assert [optimizer.state[p]["step"].item() for p in ours] == [2, 4, 2, 4, 2, 4, 2]


@everywhere
def test_all_frozen_at_first(place: Place) -> None:
    ours, theirs = parameters(), parameters()
    for p in ours:
        p.requires_grad_(False)
    optimizer = OffloadAdamW(ours, config=place.config())
    assert optimizer.report().parameters == 0
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    for p in ours:
        p.requires_grad_(True)
    train(optimizer)
    train(OffloadAdamW(theirs))
    assert same_weights(ours, theirs)


@everywhere
def test_one_optimizer_a_parameter_stepped_in_backward(place: Place) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4, 50)
    ends = []
    for in_backward in (True, False):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(50, 40), torch.nn.Linear(40, 1))
        params = list(model.parameters())
        if in_backward:
            each = {p: OffloadAdamW([p], lr=0.1, config=place.config()) for p in params}

            def step(p: torch.Tensor, each: Any = each) -> None:
                each[p].step()
                each[p].zero_grad()

            for p in params:
                p.register_post_accumulate_grad_hook(step)
        optimizer = OffloadAdamW(params, lr=0.1)
        for _ in range(3):
            model(inputs).square().mean().backward()
            if not in_backward:
                optimizer.step()
                optimizer.zero_grad()
        ends.append(params)
    assert same_weights(*ends)


def test_frozen_parameters_take_no_state() -> None:
    params = parameters((1000,), (500,))
    params[0].requires_grad_(False)
    optimizer = OffloadAdamW(params)
    assert optimizer.report().parameters == 500
    optimizer.add_param_group({"params": [torch.zeros(300)]})
    assert optimizer.report().parameters == 500


@everywhere
def test_a_gradient_missing_now_and_then(place: Place) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = OffloadAdam(ours, lr=0.02, config=place.config())
    reference = torch.optim.Adam(theirs, lr=0.02)
    for step in range(6):
        for params in (ours, theirs):
            set_grads(params, step)
            for index, p in enumerate(params):
                if (index + step) % 3 == 0:
                    p.grad = None
        optimizer.step()
        reference.step()
        steps = [s["step"].item() for s in (optimizer.state[p] for p in ours) if s]
        assert steps == [s["step"].item() for s in (reference.state[p] for p in theirs) if s]
    assert_near(ours, theirs, 1e-5)
    assert len({optimizer.state[p]["step"].item() for p in ours}) == 1


class _Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(90, 20)
        self.head = torch.nn.Linear(20, 90, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


@everywhere
def test_tied_weights(place: Place) -> None:
    tokens = torch.arange(12)
    runs = []
    for kind, extra in ((OffloadAdamW, {"config": place.config()}), (torch.optim.AdamW, {})):
        model = _Tied()
        optimizer = kind(model.parameters(), lr=0.01, **extra)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(tokens), tokens).backward()
            optimizer.step()
        assert len(optimizer.state) == 1
        assert model.head.weight is model.embedding.weight
        runs.append(model.embedding.weight)
    assert_near([runs[0]], [runs[1]], 1e-5)


def test_memory_tied_behind_our_back_is_refused() -> None:
    model = _Tied()
    model.head.weight = torch.nn.Parameter(model.embedding.weight.data)
    with pytest.raises(ValueError, match="parameters 0 and 1 overlap: pass a tied parameter once"):
        OffloadAdamW(model.parameters())
    base = torch.zeros(10)
    overlapping = [torch.nn.Parameter(base[:4]), torch.nn.Parameter(base[3:])]
    with pytest.raises(ValueError, match="0 and 1 overlap"):
        OffloadAdamW(overlapping)


@everywhere
def test_interleaved_parameters_of_one_memory(place: Place) -> None:
    base, plain = torch.ones(30, 90), torch.ones(30, 90)
    ours = [torch.nn.Parameter(part) for part in (base[:, :40], base[:, 40::2], base[:, 41::2])]
    theirs = [
        torch.nn.Parameter(part) for part in (plain[:, :40], plain[:, 40::2], plain[:, 41::2])
    ]
    train(OffloadAdamW(ours, lr=0.1, config=place.config()))
    train(torch.optim.AdamW(theirs, lr=0.1))
    assert_near([base], [plain], 1e-5)
    assert not (base == 1).any()


@everywhere
def test_two_optimizers_on_one_model(place: Place) -> None:
    ours, theirs = parameters(), parameters()
    runs = []
    for params, kinds, extra in (
        (ours, (OffloadAdamW, OffloadAdam), {"config": place.config()}),
        (theirs, (torch.optim.AdamW, torch.optim.Adam), {}),
    ):
        first = kinds[0](params[::2], lr=0.01, **extra)
        second = kinds[1](params[1::2], lr=0.02, **extra)
        both = kinds[1](params, lr=0.001, **extra)  # and a third one on all of it
        for step in range(3):
            set_grads(params, step)
            for optimizer in (first, second, both):
                optimizer.step()
        runs.append([len(optimizer.state) for optimizer in (first, second, both)])
    assert runs[0] == runs[1]
    assert_near(ours, theirs, 1e-5)


def test_amsgrad_cannot_change_afterwards() -> None:
    params = parameters((3,), (4,))
    optimizer = OffloadAdamW([{"params": [p]} for p in params])
    train(optimizer)
    before = snapshot(optimizer)
    optimizer.param_groups[1]["amsgrad"] = True
    set_grads(params, 3)
    with pytest.raises(ValueError, match="amsgrad of group 1 was changed"):
        optimizer.step()
    optimizer.param_groups[1]["amsgrad"] = False
    assert snapshot(optimizer) == before
    optimizer.step()


def test_no_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        OffloadAdamW([])
    with pytest.raises(ValueError, match="all parameters on one device, got no parameter"):
        OffloadAdamW([{"params": []}])
    (p,) = parameters((3,))
    optimizer = OffloadAdamW([{"params": []}, {"params": [p]}])
    train(optimizer)
    assert raw(optimizer.state[p]["step"]) == raw(torch.tensor(3.0))


def test_the_machine_of_construction_stays() -> None:
    (p,) = parameters((3000,))
    with ghoffload.use_machine("virtual"):
        optimizer = OffloadAdamW([p], config=CPU.config())
    train(optimizer)  # outside
    (q,) = parameters((3000,))
    train(OffloadAdamW([q]))
    assert same_weights([p], [q])
