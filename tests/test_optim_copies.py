"""Copies of an optimizer: deepcopy alone and with its model, pickle, torch.save."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from optim_tools import (
    CPU,
    PAIRS,
    Place,
    everywhere,
    parameters,
    same_weights,
    snapshot,
    train,
)

from ghoffload import OffloadAdamW, OffloadConfig
from ghoffload.machine.virtual import VirtualMachine

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def _params(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@everywhere
@DTYPES
@pytest.mark.parametrize("kind", [pair[0] for pair in PAIRS])
def test_deepcopy(kind: type, dtype: torch.dtype, place: Place) -> None:
    optimizer = kind(parameters(dtype=dtype), lr=0.1, amsgrad=True, config=place.config())
    train(optimizer)
    clone = copy.deepcopy(optimizer)
    assert type(clone) is kind
    assert clone.config == optimizer.config
    assert snapshot(clone) == snapshot(optimizer)
    assert all(p is not q for p, q in zip(_params(clone), _params(optimizer), strict=True))
    before = snapshot(optimizer)
    train(clone, start=3)
    assert snapshot(optimizer) == before
    train(optimizer, start=3)
    assert snapshot(optimizer) == snapshot(clone)


def test_deepcopy_before_the_first_step() -> None:
    optimizer = OffloadAdamW(parameters(), lr=torch.tensor(0.1), config=CPU.config())
    clone = copy.deepcopy(optimizer)
    assert not clone.state
    assert clone.param_groups[0]["lr"] is not optimizer.param_groups[0]["lr"]
    train(optimizer)
    train(clone)
    assert snapshot(optimizer) == snapshot(clone)


@everywhere
def test_deepcopy_with_its_model(place: Place) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(50, 40), torch.nn.Linear(40, 2))
    optimizer = OffloadAdamW(model.parameters(), config=place.config())
    train(optimizer)
    twin, clone = copy.deepcopy((model, optimizer))
    assert _params(clone) == list(twin.parameters())
    assert list(clone.state) == list(twin.parameters())
    train(clone, start=3)
    train(optimizer, start=3)
    assert same_weights(model.parameters(), twin.parameters())


@everywhere
@DTYPES
def test_pickle(dtype: torch.dtype, place: Place) -> None:
    optimizer = OffloadAdamW(parameters(dtype=dtype), lr=0.1, config=place.config())
    train(optimizer)
    clone = pickle.loads(pickle.dumps(optimizer))
    assert clone.config == optimizer.config
    assert clone.config.bucket_bytes == 4096
    assert snapshot(clone) == snapshot(optimizer)
    train(optimizer, start=3)
    train(clone, start=3)
    assert snapshot(clone) == snapshot(optimizer)


def test_torch_save_of_the_whole_optimizer() -> None:
    optimizer = OffloadAdamW(parameters(), config=CPU.config())
    train(optimizer)
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    clone = torch.load(file, weights_only=False)
    assert snapshot(clone) == snapshot(optimizer)


def test_the_machine_travels_by_name() -> None:
    optimizer = OffloadAdamW(parameters(), config=CPU.config(step_device="cuda"), machine="virtual")
    train(optimizer)
    clone = pickle.loads(pickle.dumps(optimizer))
    assert {row.memory_kind for row in clone.report().rows} == {"device", "pinned"}
    assert snapshot(clone) == snapshot(optimizer)
    # a machine object stays behind: the copy is placed anew
    optimizer = OffloadAdamW(parameters(), config=CPU.config(), machine=VirtualMachine())
    train(optimizer)
    clone = copy.deepcopy(optimizer)
    assert {row.memory_kind for row in clone.report().rows} == {"system"}
    assert snapshot(clone) == snapshot(optimizer)


def test_hooks_do_not_travel_as_in_torch() -> None:
    for kind in (OffloadAdamW, torch.optim.AdamW):
        optimizer = kind(parameters((3,)))
        optimizer.register_step_pre_hook(lambda *_: pytest.fail("the clone has the hook"))
        train(copy.deepcopy(optimizer))


def test_a_shallow_copy_has_state_of_its_own() -> None:
    optimizer = OffloadAdamW(parameters((3,)), config=CPU.config())
    train(optimizer)
    clone = copy.copy(optimizer)
    assert _params(clone) == _params(optimizer)
    del optimizer
    gc.collect()
    train(clone, start=3)
    assert clone.state[_params(clone)[0]]["step"] == 6


def test_a_clone_with_a_scheduler_steps_itself() -> None:
    optimizer = OffloadAdamW(parameters((3,)))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    clone = copy.deepcopy(optimizer)
    train(clone)
    assert len(clone.state) == 1
    assert not optimizer.state


def test_a_wrapping_optimizer_can_be_copied() -> None:
    inner = torch.optim.AdamW(parameters((30,)))
    train(inner)
    optimizer = OffloadAdamW(inner, config=OffloadConfig(bucket_bytes=8192))
    clone = copy.deepcopy(optimizer)
    train(optimizer, start=3)
    train(clone, start=3)
    assert snapshot(optimizer) == snapshot(clone)
    assert clone.config.bucket_bytes == 8192
