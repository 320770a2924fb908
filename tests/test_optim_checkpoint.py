"""State dicts out and in: torch's form, the native one, files, and resuming bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from optim_tools import (
    CPU,
    PAIRS,
    Place,
    everywhere,
    parameters,
    raw,
    same_weights,
    set_grads,
    snapshot,
    train,
)

from ghoffload import OffloadAdamW

HALVES = (torch.bfloat16, torch.float16)
SETTINGS = [(torch.float32, "auto"), *((d, m) for d in HALVES for m in ("fp32", "none"))]


def _saved(state_dict: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return file


def _states(state_dict: dict[str, Any]) -> dict[Any, Any]:
    return {
        index: {n: raw(v) if isinstance(v, torch.Tensor) else v for n, v in entries.items()}
        for index, entries in state_dict["state"].items()
    }


@pytest.mark.parametrize(("kind", "torch_kind"), PAIRS, ids=["Adam", "AdamW"])
def test_torchs_form_goes_there_and_back_bit_for_bit(kind: type, torch_kind: type) -> None:
    ours, theirs = parameters(), parameters()
    groups = [{"params": ours[:3], "lr": 0.3}, {"params": ours[3:], "amsgrad": True}]
    optimizer = kind(groups, config=CPU.config())
    train(optimizer)
    reference = torch_kind(
        [{"params": theirs[:3]}, {"params": theirs[3:], "amsgrad": True}], lr=0.7
    )
    reference.load_state_dict(optimizer.state_dict())
    assert _states(reference.state_dict()) == _states(optimizer.state_dict())
    assert reference.param_groups[0]["lr"] == 0.3
    assert reference.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    train(reference, start=3)
    other = kind([{"params": ours[:3]}, {"params": ours[3:], "amsgrad": True}])
    other.load_state_dict(reference.state_dict())
    assert _states(other.state_dict()) == _states(reference.state_dict())
    assert other.param_groups[0]["lr"] == 0.3


def test_the_form_is_torchs() -> None:
    ours, theirs = parameters(), parameters()
    optimizer, reference = OffloadAdamW(ours), torch.optim.AdamW(theirs)
    train(optimizer)
    train(reference)
    mine, other = optimizer.state_dict(), reference.state_dict()
    assert list(mine) == list(other)
    assert mine["param_groups"] == other["param_groups"]
    assert list(mine["state"]) == list(other["state"])
    for index, entries in other["state"].items():
        assert list(mine["state"][index]) == list(entries)
        for name, tensor in entries.items():
            assert mine["state"][index][name].shape == tensor.shape
            assert mine["state"][index][name].dtype == tensor.dtype
            assert mine["state"][index][name].device.type == "cpu"


def test_for_half_parameters_torch_rounds_the_moments() -> None:
    params = parameters((1500,), (7,), dtype=torch.bfloat16)
    optimizer = OffloadAdamW(params, config=CPU.config())
    train(optimizer)
    reference = torch.optim.AdamW(parameters((1500,), (7,), dtype=torch.bfloat16))
    reference.load_state_dict(optimizer.state_dict())
    for p, q in zip(params, reference.param_groups[0]["params"], strict=True):
        for name in ("exp_avg", "exp_avg_sq", "master"):
            mine, theirs = optimizer.state[p][name], reference.state[q][name]
            assert theirs.dtype == torch.bfloat16
            assert torch.equal(theirs, mine.bfloat16())
            assert not torch.equal(theirs.float(), mine)
    train(reference, start=3)  # a key that torch does not know does it no harm
    # and back: the rounded moments are taken as they are, a master that is the weight as well
    fresh = parameters((1500,), (7,), dtype=torch.bfloat16)
    back = OffloadAdamW(fresh, config=CPU.config())
    back.load_state_dict(reference.state_dict())
    for p, q in zip(fresh, reference.param_groups[0]["params"], strict=True):
        assert torch.equal(back.state[p]["exp_avg"], reference.state[q]["exp_avg"].float())


@everywhere
@pytest.mark.parametrize(("dtype", "master"), SETTINGS)
def test_resuming_from_a_file_is_exact(dtype: torch.dtype, master: str, place: Place) -> None:
    _resume(dtype, master, place, native=True)


@pytest.mark.parametrize(("dtype", "master"), SETTINGS)
def test_resuming_from_torchs_form_is_exact_too(dtype: torch.dtype, master: str) -> None:
    _resume(dtype, master, CPU, native=False)


def _resume(dtype: torch.dtype, master: str, place: Place, *, native: bool) -> None:
    config = place.config(master=master)
    straight = OffloadAdamW(parameters(dtype=dtype), lr=0.1, amsgrad=True, config=config)
    train(straight, steps=10)
    params = parameters(dtype=dtype)
    optimizer = OffloadAdamW(params, lr=0.1, amsgrad=True, config=config)
    train(optimizer, steps=5)
    files = [_saved(optimizer.state_dict(native=native)), _saved(params)]
    loaded, weights = (torch.load(file, weights_only=True) for file in files)
    assert ("ghoffload" in loaded) == native
    params = parameters(dtype=dtype, seed=1)
    with torch.no_grad():
        for p, w in zip(params, weights, strict=True):
            p.copy_(w)
    # an optimizer of another bucket size: what is saved does not depend on it
    config = place.config(master=master, bucket_bytes=50000, staging_buffers=3)
    optimizer = OffloadAdamW(params, lr=0.5, amsgrad=True, config=config)
    optimizer.load_state_dict(loaded)
    train(optimizer, start=5, steps=5)
    assert snapshot(optimizer) == snapshot(straight)


def test_a_master_counts_only_where_it_rounds_to_the_weight() -> None:
    source = parameters((2000,), dtype=torch.bfloat16)
    optimizer = OffloadAdamW(source, config=CPU.config())
    train(optimizer)
    (p,) = parameters((2000,), dtype=torch.bfloat16)
    with torch.no_grad():
        p.copy_(source[0])
        p[::2] += 1.0  # another weight than the one that was saved
    other = OffloadAdamW([p], lr=0.0, weight_decay=0.0, config=CPU.config())
    state_dict = optimizer.state_dict()
    state_dict["param_groups"] = other.state_dict()["param_groups"]
    other.load_state_dict(state_dict)
    weight = p.detach().clone()
    train(other, start=3, steps=1)
    assert torch.equal(p, weight)
    master = other.state[p]["master"]
    assert torch.equal(master[::2], weight[::2].float())
    assert torch.equal(master[1::2], optimizer.state[source[0]]["master"][1::2])


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_file_is_as_large_as_the_state(dtype: torch.dtype, native: bool) -> None:
    # buckets, padding and neighbours must not be saved with each tensor
    shapes = [(300_000,), (64, 512), *(((3000,),) * 20)]
    optimizer = OffloadAdamW(parameters(*shapes, dtype=dtype), config=CPU.config())
    train(optimizer, steps=1)
    elements = sum(p.numel() for p in optimizer.param_groups[0]["params"])
    # torch's form has a split master as the fp32 master that it stands for
    nbytes = elements * (8 if dtype == torch.float32 else 10 if native else 12)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pt"
        torch.save(optimizer.state_dict(native=native), path)
        assert nbytes < path.stat().st_size < 1.02 * nbytes


def test_one_entry_saved_alone_is_its_own_bytes() -> None:
    optimizer = OffloadAdamW(parameters((300_000,), (500,)))
    train(optimizer, steps=1)
    entries = optimizer.state_dict()["state"][1]
    assert len(_saved(entries["exp_avg"]).getvalue()) < 4 * 500 + 2000
    assert len(pickle.dumps(entries)) < 8 * 500 + 2000


def test_a_state_dict_is_the_live_memory_not_a_copy() -> None:
    params = parameters((100,), (7,))
    optimizer = OffloadAdamW(params, config=CPU.config())
    train(optimizer)
    for native in (False, True):
        state = optimizer.state_dict(native=native)["state"]
        for index, p in enumerate(params):
            for name in ("exp_avg", "exp_avg_sq"):
                assert state[index][name].data_ptr() == optimizer.state[p][name].data_ptr()


@everywhere
def test_an_empty_state_loads_empty(place: Place) -> None:
    optimizer = OffloadAdamW(parameters(), config=place.config())
    empty = optimizer.state_dict()
    assert empty["state"] == {}
    assert "ghoffload" in optimizer.state_dict(native=True)
    optimizer.load_state_dict(empty)
    assert not optimizer.state
    train(optimizer)
    # what Accelerate does with a fresh optimizer: its state to a device and back
    fresh = OffloadAdamW(parameters(), config=place.config())
    moved = fresh.state_dict()
    for entries in moved["state"].values():
        for name, value in entries.items():
            entries[name] = value.to("cpu")
    fresh.load_state_dict(moved)
    train(fresh)
    assert snapshot(fresh) == snapshot(optimizer)
    optimizer.load_state_dict(torch.optim.AdamW(parameters()).state_dict())
    assert not optimizer.state  # loading an empty one forgets what was there


@everywhere
@pytest.mark.parametrize("native", [False, True])
def test_loading_its_own_state_changes_nothing(native: bool, place: Place) -> None:
    optimizer = OffloadAdamW(parameters(dtype=torch.bfloat16), config=place.config())
    train(optimizer)
    before = snapshot(optimizer)
    optimizer.load_state_dict(optimizer.state_dict(native=native))
    assert snapshot(optimizer) == before


def test_live_entries_may_change_places() -> None:
    params = parameters((3,), (3,))
    optimizer = OffloadAdamW(params, config=CPU.config())
    train(optimizer)
    state_dict = optimizer.state_dict()
    expected = _states(state_dict)
    state_dict["state"] = {0: state_dict["state"][1], 1: state_dict["state"][0]}
    optimizer.load_state_dict(state_dict)
    assert _states(optimizer.state_dict()) == {0: expected[1], 1: expected[0]}


@everywhere
def test_rolling_back(place: Place) -> None:
    params = parameters()
    optimizer = OffloadAdamW(params, config=place.config())
    train(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = [p.detach().clone() for p in params]
    train(optimizer, start=3)
    end = snapshot(optimizer)
    with torch.no_grad():
        for p, weight in zip(params, weights, strict=True):
            p.copy_(weight)
    optimizer.load_state_dict(saved)
    train(optimizer, start=3)
    assert snapshot(optimizer) == end


def test_state_of_some_parameters_only() -> None:
    params = parameters((3,), (4,), (5,))
    optimizer = OffloadAdamW(params)
    set_grads(params[:2], 0)
    optimizer.step()
    optimizer.state[params[2]]["note"] = 7
    fresh = parameters((3,), (4,), (5,))
    fresh[1].requires_grad_(False)  # frozen here, but it has state
    other = OffloadAdamW(fresh)
    other.load_state_dict(optimizer.state_dict())
    assert _states(other.state_dict()) == _states(optimizer.state_dict())
    assert list(other.state_dict()["state"]) == [0, 1, 2]


def test_capturable_and_old_forms_of_the_step() -> None:
    reference = torch.optim.AdamW(parameters((3,), (4,)))
    train(reference)
    state_dict = reference.state_dict()
    state_dict["state"][0]["step"] = 3  # as saved by torch before 1.12
    state_dict["state"][1]["step"] = torch.tensor([3.0], dtype=torch.float64)
    for old in ("maximize", "foreach", "capturable", "differentiable", "fused"):
        del state_dict["param_groups"][0][old]
    optimizer = OffloadAdamW(parameters((3,), (4,)))
    optimizer.load_state_dict(state_dict)
    assert [s["step"].item() for s in optimizer.state.values()] == [3.0, 3.0]
    assert optimizer.param_groups[0]["fused"] is None
    train(optimizer, start=3)


def test_an_adamw_dict_makes_adam_decoupled_as_in_torch() -> None:
    source = torch.optim.AdamW(parameters((9,)), weight_decay=0.5)
    train(source)
    ours, theirs = parameters((9,)), parameters((9,))
    for kind, params in ((PAIRS[0][0], ours), (PAIRS[0][1], theirs)):
        optimizer = kind(params)
        optimizer.load_state_dict(source.state_dict())
        assert optimizer.param_groups[0]["decoupled_weight_decay"]
        train(optimizer, start=3)
    torch.testing.assert_close(ours, theirs)


def test_master_is_dropped_where_there_is_none() -> None:
    half = OffloadAdamW(parameters((30,), dtype=torch.bfloat16))
    train(half)
    full = OffloadAdamW(parameters((30,)))
    full.load_state_dict(half.state_dict())
    assert list(full.state_dict()["state"][0]) == ["step", "exp_avg", "exp_avg_sq"]


def test_loaded_groups_are_copies_and_keep_identity() -> None:
    optimizer = OffloadAdamW(parameters((3,)), lr=torch.tensor(0.1))
    state_dict = copy.deepcopy(optimizer.state_dict())
    group = optimizer.param_groups[0]
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0] is group
    assert group["lr"] is not state_dict["param_groups"][0]["lr"]
    state_dict["param_groups"][0]["lr"].fill_(9)
    assert group["lr"] == 0.1


@everywhere
def test_distributed_checkpoint_without_a_process_group(place: Place) -> None:
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    def build() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(50, 30), torch.nn.Linear(30, 2)).bfloat16()
        return model, OffloadAdamW(model.parameters(), config=place.config())

    model, optimizer = build()
    train(optimizer)
    gotten = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    assert set(gotten["state"]) == {name for name, _ in model.named_parameters()}
    assert "master" in gotten["state"]["0.weight"]
    twin, other = build()
    twin.load_state_dict(model.state_dict())
    set_optimizer_state_dict(twin, other, gotten)
    train(optimizer, start=3)
    train(other, start=3)
    assert same_weights(model.parameters(), twin.parameters())
    assert snapshot(other) == snapshot(optimizer)


def test_a_file_of_many_parameters_pickles_plainly() -> None:
    optimizer = OffloadAdamW(parameters(*[(3,)] * 50))
    train(optimizer)
    state_dict = pickle.loads(pickle.dumps(optimizer.state_dict(native=True)))
    other = OffloadAdamW(parameters(*[(3,)] * 50))
    other.load_state_dict(state_dict)
    assert snapshot(other)["state"] == snapshot(optimizer)["state"]
