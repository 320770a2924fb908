"""``optimizer.state``: lazy as torch's, complete when read, and what is put into it counts."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict

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
    snapshot,
    train,
)

import ghoffload
from ghoffload import OffloadAdam, OffloadAdamW


@everywhere
@pytest.mark.parametrize("amsgrad", [False, True])
def test_state_is_torchs(amsgrad: bool, place: Place) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = OffloadAdamW(ours, amsgrad=amsgrad, config=place.config())
    reference = torch.optim.AdamW(theirs, amsgrad=amsgrad)
    assert not optimizer.state
    assert list(optimizer.state.items()) == []
    assert ours[0] not in optimizer.state
    assert optimizer.state[ours[0]] == {}
    assert optimizer.state.get(ours[0]) is None
    assert optimizer.state.get(ours[0], 3) == 3
    train(optimizer)
    train(reference)
    assert len(optimizer.state) == len(theirs)
    assert list(optimizer.state) == ours
    assert list(optimizer.state.keys()) == ours
    assert [list(v) for v in optimizer.state.values()] == [
        list(v) for v in reference.state.values()
    ]
    for (p, mine), (q, other) in zip(optimizer.state.items(), reference.state.items(), strict=True):
        assert isinstance(mine, dict)
        assert mine["step"] == other["step"] == 3
        for name, tensor in other.items():
            assert mine[name].shape == tensor.shape
            assert mine[name].dtype == tensor.dtype == torch.float32
            assert mine[name].stride() == tensor.stride()
        assert_near(mine.values(), other.values(), 1e-5)
        assert p.shape == q.shape


def test_master_stands_in_the_state_of_half_parameters() -> None:
    params = parameters((3, 4), (2,), dtype=torch.bfloat16)
    optimizer = OffloadAdamW(params, config=CPU.config())
    train(optimizer)
    for p in params:
        assert list(optimizer.state[p]) == ["step", "exp_avg", "exp_avg_sq", "master"]
        assert {t.dtype for t in optimizer.state[p].values()} == {torch.float32}
        assert raw(optimizer.state[p]["master"].bfloat16()) == raw(p)
    optimizer = OffloadAdamW(params, config=CPU.config(master="none"))
    train(optimizer)
    assert list(optimizer.state[params[0]]) == ["step", "exp_avg", "exp_avg_sq"]


def test_unknown_keys_are_empty_as_in_torch() -> None:
    optimizer = OffloadAdam(parameters((3,)))
    stranger = torch.nn.Parameter(torch.zeros(2))
    assert optimizer.state[stranger] == {}
    assert stranger not in optimizer.state
    assert "text" not in optimizer.state
    with pytest.raises(KeyError):
        optimizer.state[stranger] = {"step": torch.tensor(1.0)}
    with pytest.raises(KeyError):
        del optimizer.state[stranger]


@pytest.mark.parametrize("step_device", ["cuda", "cpu"])
def test_reading_completes_the_write_back(step_device: str) -> None:
    expected = parameters()
    reference = OffloadAdamW(expected, config=CPU.config())
    params = parameters()
    # nothing queued runs before it must: what is read too early is old
    with ghoffload.use_machine("virtual", order="latest", check=True):
        place = Place("latest", step_device, virtual=True)
        optimizer = OffloadAdamW(params, config=place.config())
        for step in range(3):
            train(reference, start=step, steps=1)
            train(optimizer, start=step, steps=1)
            for p, q in zip(params, expected, strict=True):
                assert same_weights(optimizer.state[p].values(), reference.state[q].values())


@everywhere
def test_edits_in_place_and_replacements_count(place: Place) -> None:
    runs = []
    for replace in (False, True, None):
        params = parameters()
        kind, config = (
            (torch.optim.AdamW, {})
            if replace is None
            else (
                OffloadAdamW,
                {"config": place.config()},
            )
        )
        optimizer = kind(params, lr=0.01, **config)
        train(optimizer)
        for p in params:
            entries = optimizer.state[p]
            if replace:
                entries["exp_avg"] = entries["exp_avg"] * 2
                optimizer.state[p]["step"] = torch.tensor(10.0)
                optimizer.state[p]["exp_avg_sq"] = torch.ones(p.shape)
            else:
                entries["exp_avg"].mul_(2)
                entries["step"].fill_(10)
                optimizer.state[p]["exp_avg_sq"].fill_(1)
        assert optimizer.state[params[0]]["step"] == 10
        train(optimizer, start=3, steps=1)
        runs.append(params)
    assert same_weights(runs[0], runs[1])
    assert_near(runs[0], runs[2])


@everywhere
def test_whole_entries_can_be_assigned(place: Place) -> None:
    ours, theirs = parameters(), parameters()
    reference = torch.optim.AdamW(theirs, lr=0.01)
    train(reference, steps=2)
    optimizer = OffloadAdamW(ours, lr=0.01, config=place.config())
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            p.copy_(q)
            optimizer.state[p] = {
                name: 2 if name == "step" else tensor.clone()
                for name, tensor in reference.state[q].items()
            }
    assert [raw(t) for s in optimizer.state.values() for t in s.values()] == [
        raw(t) for s in reference.state.values() for t in s.values()
    ]
    train(optimizer, start=2, steps=1)
    train(reference, start=2, steps=1)
    assert_near(ours, theirs)


def _reset_by_delete(optimizer: torch.optim.Optimizer) -> None:
    for p in list(optimizer.state):
        del optimizer.state[p]


def _reset_by_assigning(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def _reset_entries(optimizer: torch.optim.Optimizer) -> None:
    for entries in list(optimizer.state.values()):
        entries.clear()
        assert not entries


@everywhere
@pytest.mark.parametrize(
    "reset",
    [_reset_by_delete, lambda o: o.state.clear(), _reset_by_assigning, _reset_entries],
    ids=["delete", "clear", "assign", "entries"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cleared_state_begins_anew(reset: object, dtype: torch.dtype, place: Place) -> None:
    params = parameters((1500, 2), (3,), dtype=dtype)
    optimizer = OffloadAdamW(params, config=place.config())
    train(optimizer)
    fresh = [torch.nn.Parameter(p.detach().clone()) for p in params]
    reset(optimizer)  # type: ignore[operator]
    assert not optimizer.state
    assert optimizer.state_dict()["state"] == {}
    train(optimizer, start=3)
    other = OffloadAdamW(fresh, config=place.config())
    train(other, start=3)
    assert same_weights(params, fresh)
    assert snapshot(optimizer) == snapshot(other)


@everywhere
def test_state_assigned_to_itself_is_unchanged(place: Place) -> None:
    optimizer = OffloadAdamW(parameters(dtype=torch.bfloat16), config=place.config())
    train(optimizer)
    before = snapshot(optimizer)
    optimizer.state = optimizer.state
    assert snapshot(optimizer) == before
    optimizer.state = {p: dict(entries) for p, entries in optimizer.state.items()}
    assert snapshot(optimizer) == before
    for p in optimizer.state:
        optimizer.state[p] = optimizer.state[p]
        optimizer.state[p].update(optimizer.state[p])
    assert snapshot(optimizer) == before
    first, *rest = optimizer.state
    optimizer.state = {first: optimizer.state[first]}
    assert list(optimizer.state) == [first]
    assert rest


def test_copies_of_the_state_are_plain_and_stay_as_they_are() -> None:
    optimizer = OffloadAdamW(parameters(), config=CPU.config())
    train(optimizer)
    p = optimizer.param_groups[0]["params"][0]
    clone, pickled = copy.deepcopy(optimizer.state), pickle.loads(pickle.dumps(optimizer.state))
    assert type(clone) is type(pickled) is dict
    entries = copy.deepcopy(optimizer.state[p])
    assert type(entries) is dict
    before = raw(optimizer.state[p]["exp_avg"])
    train(optimizer, start=3)
    assert raw(optimizer.state[p]["exp_avg"]) != before
    for kept in (entries, next(iter(clone.values())), next(iter(pickled.values()))):
        assert raw(kept["exp_avg"]) == before
    shallow = copy.copy(optimizer.state)
    assert shallow.keys() == set(optimizer.state)


def test_a_users_own_entries_stay() -> None:
    params = parameters((3,), (4,))
    optimizer = OffloadAdamW(params, config=CPU.config())
    optimizer.state[params[1]]["note"] = "early"
    assert dict(optimizer.state[params[1]]) == {"note": "early"}
    train(optimizer)
    optimizer.state[params[0]]["ema"] = torch.ones(3)
    entries = optimizer.state[params[0]]
    assert list(entries) == ["step", "exp_avg", "exp_avg_sq", "ema"]
    assert entries.setdefault("ema") is entries["ema"]
    assert optimizer.state[params[1]]["note"] == "early"
    state = optimizer.state_dict()["state"]
    assert torch.equal(state[0]["ema"], torch.ones(3))
    other = OffloadAdamW(parameters((3,), (4,)), config=CPU.config())
    other.load_state_dict(optimizer.state_dict())
    assert other.state[other.param_groups[0]["params"][1]]["note"] == "early"
    assert entries.pop("ema").sum() == 3
    assert entries.pop("ema", None) is None
    assert "ema" not in optimizer.state[params[0]]
    entries |= {"a": 1}
    assert optimizer.state[params[0]]["a"] == 1


@pytest.mark.parametrize(
    ("name", "value", "error", "match"),
    [
        ("exp_avg", torch.zeros(4), ValueError, r"expects shape \(3,\), got \(4,\)"),
        ("exp_avg", torch.zeros(3, dtype=torch.float64), ValueError, "got torch.float64"),
        ("exp_avg", torch.zeros(3, dtype=torch.int64), ValueError, "got torch.int64"),
        ("exp_avg", [0.0] * 3, TypeError, "expects a tensor, got list"),
        ("step", torch.tensor(-1.0), ValueError, "whole number"),
        ("step", torch.tensor(2.5), ValueError, "whole number"),
        ("step", float("nan"), ValueError, "whole number"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(
    name: str, value: object, error: type[Exception], match: str
) -> None:
    (p,) = parameters((3,))
    optimizer = OffloadAdamW([p])
    train(optimizer)
    before = snapshot(optimizer)
    with pytest.raises(error, match=match):
        optimizer.state[p][name] = value
    with pytest.raises(error, match=match):
        optimizer.state[p] = dict(optimizer.state[p]) | {name: value}
    assert snapshot(optimizer) == before


@pytest.mark.parametrize(("kind", "torch_kind"), PAIRS, ids=["Adam", "AdamW"])
def test_defaults_and_groups_are_torchs(kind: type, torch_kind: type) -> None:
    ours, theirs = kind(parameters((2,))), torch_kind(parameters((2,)))
    assert ours.defaults == theirs.defaults
    assert list(ours.defaults) == list(theirs.defaults)
    assert list(ours.param_groups[0]) == list(theirs.param_groups[0])
    assert repr(ours).startswith(f"{kind.__name__} (\nParameter Group 0")
    assert isinstance(ours, torch.optim.Optimizer)


def test_a_parameter_without_reserved_state_is_read_as_empty_and_not_written() -> None:
    trained, frozen = parameters((3,), (4,))
    frozen.requires_grad_(False)
    optimizer = OffloadAdamW([trained, frozen])
    assert optimizer.state[frozen] == {}
    for write in (
        lambda: optimizer.state[frozen].__setitem__("note", 1),
        lambda: optimizer.state[frozen].update(note=1),
        lambda: optimizer.state[frozen].setdefault("note", 1),
        lambda: optimizer.state.__setitem__(frozen, {"note": 1}),
    ):
        with pytest.raises(KeyError, match="gets its state at its first step"):
            write()
