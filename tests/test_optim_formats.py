"""State formats in the optimizer: bytes, bits everywhere, saving and loading between them."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from optim_tools import Place, everywhere, parameters, raw, same_weights, set_grads, snapshot, train

import ghoffload
from ghoffload import OffloadAdam, OffloadAdamW
from ghoffload.memory import ledger

SHAPES = ((1500, 3), (7,), (), (40, 60), (0, 5), (1025,), (128,))
FORMATS: list[dict[str, Any]] = [
    {"master": "split"},
    {"master": "split", "moments": "bf16"},
    {"master": "fp32", "moments": "bf16"},
    {"master": "split", "moments": "int8"},
    {"master": "fp32", "moments": "int8"},
    {"master": "none", "moments": "int8"},
]
FORMS = pytest.mark.parametrize("fields", FORMATS, ids=lambda f: "-".join(f.values()))


def made(fields: dict[str, Any], dtype: torch.dtype = torch.bfloat16, **more: Any) -> OffloadAdamW:
    config = {"moments_fp32_below": 100, "bucket_bytes": 4096, "staging_buffers": 2}
    return OffloadAdamW(
        parameters(*SHAPES, dtype=dtype), lr=0.03, weight_decay=0.1, config=config | fields | more
    )


@FORMS
@everywhere
def test_the_bits_are_the_same_everywhere(fields: dict[str, Any], place: Place) -> None:
    reference = OffloadAdamW(
        parameters(*SHAPES, dtype=torch.bfloat16),
        lr=0.03,
        weight_decay=0.1,
        config=fields | {"moments_fp32_below": 100},
        machine="cpu",
    )
    train(reference, steps=4)
    for more in ({}, {"bucket_bytes": 1 << 20}):
        optimizer = made(fields, step_device=place.step_device, **more)
        train(optimizer, steps=4)
        assert snapshot(optimizer) == snapshot(reference)


@pytest.mark.parametrize(
    "more",
    [
        {"memory_kind": "device"},
        {"memory_kind": "managed"},
        {"transfer": "kernel"},
        {"hbm_state_bytes": 9_000},
        {"min_offload_bytes": 3_000},
    ],
    ids=str,
)
@FORMS
def test_the_bits_are_the_same_wherever_state_lives(
    fields: dict[str, Any], more: dict[str, Any]
) -> None:
    reference = made(fields)
    train(reference, steps=3)
    with ghoffload.use_machine("virtual", order="adversarial", seed=4, check=True):
        optimizer = made(fields, **more)
        train(optimizer, steps=3)
        assert snapshot(optimizer) == snapshot(reference)


@pytest.mark.parametrize(
    ("fields", "dtype", "each"),
    [
        ({}, torch.bfloat16, 10),
        ({}, torch.float16, 12),
        ({}, torch.float32, 8),
        ({"master": "fp32"}, torch.bfloat16, 12),
        ({"master": "split"}, torch.float16, 12),
        ({"moments": "bf16"}, torch.bfloat16, 6),
        ({"moments": "int8"}, torch.bfloat16, 4 + 8 / 128),
        ({"moments": "int8", "master": "none"}, torch.bfloat16, 2 + 8 / 128),
    ],
    ids=str,
)
def test_bytes_a_parameter(fields: dict[str, Any], dtype: torch.dtype, each: float) -> None:
    count = 1 << 16
    optimizer = OffloadAdamW(parameters((count,), dtype=dtype), config=fields)
    owner = optimizer.report().title
    assert ledger.total(owner=owner) == count * each


def test_small_parameters_and_chosen_groups_keep_fp32_moments() -> None:
    small, chosen, large = parameters((4095,), (5000,), (5000,), dtype=torch.bfloat16)
    groups = [{"params": [small, large]}, {"params": [chosen], "moments": "fp32"}]
    optimizer = OffloadAdamW(groups, config={"moments": "int8"})
    rows = {row.what: row.nbytes for row in optimizer.report().rows}
    blocks = -(-5000 // 128)
    padded = -(-4095 // 8) * 8
    assert rows["exp_avg"] == 4 * (padded + 5000) + blocks * 128
    assert rows["exp_avg_scale"] == 4 * blocks
    set_grads([small, chosen, large], 0)
    optimizer.step()
    assert {p.dtype for p in optimizer.state[large].values()} == {torch.float32}


def test_refusals() -> None:
    with pytest.raises(ValueError, match="amsgrad expects moments='fp32', got moments='int8'"):
        OffloadAdam(parameters((5000,)), amsgrad=True, config={"moments": "int8"})
    with pytest.raises(ValueError, match=r"moments expects one of .*, got 'int4'"):
        OffloadAdam([{"params": parameters((5000,)), "moments": "int4"}])
    before = ledger.rows()
    optimizer = OffloadAdam(parameters((5000,)), config={"moments": "int8"})
    with pytest.raises(ValueError, match="amsgrad expects"):
        optimizer.add_param_group({"params": parameters((5000,)), "amsgrad": True})
    assert len(optimizer.param_groups) == 1
    del optimizer
    assert ledger.rows() == before


@FORMS
@pytest.mark.parametrize("native", [False, True])
def test_a_resumed_run_has_the_same_bits(fields: dict[str, Any], native: bool) -> None:
    whole = made(fields)
    train(whole, steps=5)
    first = made(fields)
    train(first, steps=3)
    stream = io.BytesIO()
    torch.save(first.state_dict(native=native), stream)
    weights = [p.detach().clone() for g in first.param_groups for p in g["params"]]
    stream.seek(0)
    resumed = made(fields)
    with torch.no_grad():
        for p, saved in zip(resumed.param_groups[0]["params"], weights, strict=True):
            p.copy_(saved)
    resumed.load_state_dict(torch.load(stream, weights_only=True))
    assert snapshot(resumed) == snapshot(first)
    train(resumed, start=3, steps=2)
    assert snapshot(resumed) == snapshot(whole)


def test_the_native_form_is_as_small_as_the_state() -> None:
    optimizer = OffloadAdamW(
        parameters((1 << 16,), dtype=torch.bfloat16), config={"moments": "int8"}
    )
    train(optimizer, steps=1)
    entries = optimizer.state_dict(native=True)["state"][0]
    assert {name: value.dtype for name, value in entries.items()} == {
        "step": torch.float32,
        "exp_avg": torch.int8,
        "exp_avg_sq": torch.uint8,
        "exp_avg_scale": torch.float32,
        "exp_avg_sq_scale": torch.float32,
        "rest": torch.int16,
    }
    assert sum(value.nbytes for value in entries.values()) == (1 << 16) * 4 + 512 * 8 + 4
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(native=True), stream)
    assert stream.tell() < 1.05 * (1 << 16) * (4 + 8 / 128)


@pytest.mark.parametrize("native", [False, True])
@FORMS
def test_each_form_goes_into_each_format(fields: dict[str, Any], native: bool) -> None:
    source = made(fields)
    train(source, steps=3)
    saved = source.state_dict(native=native)
    exact = [dict(entries) for entries in source.state.values()]
    for target_fields in ({"master": "fp32"}, {"master": "split"}, *FORMATS):
        target = made(target_fields)
        with torch.no_grad():
            groups = (o.param_groups[0]["params"] for o in (target, source))
            for mine, theirs in zip(*groups, strict=True):
                mine.copy_(theirs)
        target.load_state_dict(saved)
        for mine, theirs in zip(target.state.values(), exact, strict=True):
            assert mine["step"] == theirs["step"]
            same = "master" in mine and "master" in theirs
            assert not same or raw(mine["master"]) == raw(theirs["master"])
            for name in ("exp_avg", "exp_avg_sq"):
                scale = float(theirs[name].abs().max()) if theirs[name].numel() else 0.0
                torch.testing.assert_close(
                    mine[name].float(), theirs[name].float(), rtol=0.03, atol=0.03 * scale
                )


def test_the_split_master_is_the_fp32_master_but_for_ties() -> None:
    split, whole = made({"master": "split"}), made({"master": "fp32"})
    train(split, steps=6)
    train(whole, steps=6)
    pairs = zip(split.state.values(), whole.state.values(), strict=True)
    for mine, theirs in pairs:
        for name in ("master", "exp_avg", "exp_avg_sq", "step"):
            assert raw(mine[name]) == raw(theirs[name])
    weights = (o.param_groups[0]["params"] for o in (split, whole))
    for mine, theirs in zip(*weights, strict=True):
        ties = whole.state[theirs]["master"].view(torch.int32) & 0xFFFF == 0x8000
        assert same_weights([mine[~ties]], [theirs[~ties]])


def test_loading_a_master_on_a_tie_moves_the_weight_up() -> None:
    (p,) = parameters((4,), dtype=torch.bfloat16)
    tie = torch.tensor([0x3F808000, 0x3F818000, 0x3F800001, 0x40000000], dtype=torch.int32)
    with torch.no_grad():
        p.copy_(tie.view(torch.float32))  # to even: 0x3F80, 0x3F82
    p.data[3] = 3.0  # edited since
    optimizer = OffloadAdamW([p], config={"master": "split"})
    zeros = torch.zeros(4)
    optimizer.state[p] = {
        "step": 1,
        "exp_avg": zeros,
        "exp_avg_sq": zeros,
        "master": tie.view(torch.float32),
    }
    bits = p.detach().view(torch.int16).tolist()
    assert bits == [0x3F81, 0x3F82, 0x3F80, 0x4040]
    master = optimizer.state[p]["master"].view(torch.int32)
    assert master.tolist() == [0x3F808000, 0x3F818000, 0x3F800001, 0x40400000]


def test_entries_of_coded_state_are_read_and_written() -> None:
    (p,) = parameters((100, 50), dtype=torch.bfloat16)
    optimizer = OffloadAdamW([p], config={"moments": "int8"})
    train(optimizer, steps=2)
    before = snapshot(optimizer)
    entries = optimizer.state[p]
    for name in list(entries):
        entries[name] = entries[name].clone()
    assert snapshot(optimizer) == before
    entries["exp_avg"] = torch.full((100, 50), 0.25)
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.full((100, 50), 0.25))
    del entries["exp_avg_sq"]
    assert not optimizer.state[p]["exp_avg_sq"].any()
    optimizer.state[p].clear()
    assert p not in optimizer.state


def test_parameters_in_another_order_of_memory() -> None:
    def run(native: bool | None) -> dict[str, Any]:
        dense = parameters((64, 96), dtype=torch.bfloat16)[0].detach()
        p = torch.nn.Parameter(dense.t())
        fields: dict[str, Any] = {"moments": "int8"}
        optimizer = OffloadAdamW([p], config=fields)
        train(optimizer, steps=2)
        if native is not None:
            saved = optimizer.state_dict(native=native)
            other = OffloadAdamW([torch.nn.Parameter(p.detach().clone())], config=fields)
            assert other.param_groups[0]["params"][0].stride() == p.stride()
            other.load_state_dict(saved)
            optimizer = other
        train(optimizer, start=2, steps=2)
        return snapshot(optimizer)

    assert run(None) == run(False) == run(True)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("rest", torch.zeros(3, dtype=torch.int16), "expects torch.int16 .*got torch.int16 .3,."),
        ("rest", torch.zeros(5000), "'rest' .* expects torch.int16"),
        ("exp_avg", torch.zeros(5000), "'exp_avg' .* expects torch.int8"),
        ("exp_avg_scale", torch.zeros(7), r"'exp_avg_scale' .* expects torch.float32 \(40,\)"),
    ],
)
def test_native_entries_that_do_not_fit(name: str, value: torch.Tensor, match: str) -> None:
    optimizer = OffloadAdamW(parameters((5000,), dtype=torch.bfloat16), config={"moments": "int8"})
    train(optimizer, steps=1)
    before = snapshot(optimizer)
    saved = optimizer.state_dict(native=True)
    saved["state"][0] = saved["state"][0] | {name: value}
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(saved)
    assert snapshot(optimizer) == before


def test_random_rounding_repeats_and_differs_between_parameters() -> None:
    def run() -> OffloadAdamW:
        values = parameters((5000,), dtype=torch.bfloat16)[0].detach()
        params = [torch.nn.Parameter(values.clone()) for _ in range(2)]
        optimizer = OffloadAdamW(params, config={"moments": "bf16"})
        grad = torch.randn(5000, generator=torch.Generator().manual_seed(1)).bfloat16()
        for _ in range(3):
            for p in params:
                p.grad = grad.clone()
            optimizer.step()
        return optimizer

    first = run()
    assert snapshot(first) == snapshot(run())
    one, other = first.state.values()
    assert raw(one["exp_avg"]) != raw(other["exp_avg"])


def test_the_random_numbers_of_a_parameter_follow_its_place_in_the_optimizer() -> None:
    """However the parameters were planned: all at once, or a group that came later."""

    def run(later: bool) -> list[bytes]:
        values = parameters((5000,), dtype=torch.bfloat16)[0].detach()
        params = [torch.nn.Parameter(values.clone()) for _ in range(3)]
        optimizer = OffloadAdamW(params[: 1 if later else 3], config={"moments": "bf16"})
        if later:
            optimizer.add_param_group({"params": params[1:]})
        grad = torch.randn(5000, generator=torch.Generator().manual_seed(1)).bfloat16()
        for _ in range(2):
            for p in params:
                p.grad = grad.clone()
            optimizer.step()
        return [raw(optimizer.state[p]["exp_avg"]) for p in params]

    together = run(later=False)
    assert len(set(together)) == 3
    assert run(later=True) == together


def test_deleting_a_coded_entry_leaves_no_scales() -> None:
    (p,) = parameters((5000,), dtype=torch.bfloat16)
    optimizer = OffloadAdamW([p], config={"moments": "int8"})
    train(optimizer, steps=1)
    del optimizer.state[p]["exp_avg_sq"]
    native = optimizer.state_dict(native=True)["state"][0]
    assert not native["exp_avg_sq_scale"].any()
    assert native["exp_avg_scale"].any()
