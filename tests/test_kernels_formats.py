"""The formats of host state on the CPU, against an independent reference in numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ghoffload.kernels import adam, formats, pool
from ghoffload.kernels.formats import BLOCK

F32 = np.float32
SPECIALS = (
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7F8000, 0x7F7F7FFF,
    0x7F7F8000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x3F800000, 0x3F808000,
    0x3F807FFF, 0xBF818000, 0x00008000, 0x80008000, 0x00007FFF, 0x7F000000, 0x7EFFFFFF,
)  # fmt: skip


def as_tensor(bits: npt.NDArray[np.uint32]) -> Tensor:
    return torch.from_numpy(bits.view(np.int32)).view(torch.float32)


def bits_of(tensor: Tensor) -> npt.NDArray[np.uint32]:
    return tensor.contiguous().view(torch.int32).numpy().view(np.uint32)


def any_floats(count: int, seed: int, decades: float = 0) -> Tensor:
    """Uniform over bit patterns with special values among them, or normal over some decades."""
    random = np.random.default_rng(seed)
    if decades:
        values = random.standard_normal(count) * 10 ** (random.random(count) * decades - decades)
        return torch.from_numpy(values.astype(F32))
    bits = random.integers(0, 1 << 32, count, dtype=np.uint32)
    chosen = random.random(count) < 0.2
    bits[chosen] = random.choice(np.array(SPECIALS, dtype=np.uint32), chosen.sum())
    return as_tensor(bits)


# ---- split master ----


def test_every_pair_of_weight_and_rest_joins_by_the_rules() -> None:
    for rest in (0, 1, -1, 77, -77, 32767, -32768):
        weight = np.arange(1 << 16, dtype=np.int64)
        joined = (weight << 16) + rest
        magnitude = weight & 0x7FFF
        stale = (magnitude == 0) & (rest < 0) | (magnitude == 0x7F80) & (rest > 0)
        joined = np.where(stale, weight << 16, joined)
        got = formats.join(
            torch.from_numpy(weight.astype(np.uint16).view(np.int16)).view(torch.bfloat16),
            torch.full((1 << 16,), rest, dtype=torch.int16),
        )
        assert (bits_of(got) == joined.astype(np.uint32)).all()
        # What an edit can do to the number: at most half a bfloat16 unit, and never a NaN.
        was_nan = (weight & 0x7FFF) > 0x7F80
        assert (torch.isnan(got).numpy() == was_nan).all()
        assert (np.abs((joined & 0x7FFFFFFF) - (magnitude << 16)) <= 1 << 15)[~was_nan].all()


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), count=st.integers(0, 3000), threads=st.sampled_from([1, 3]))
def test_any_master_survives_splitting(seed: int, count: int, threads: int) -> None:
    master = any_floats(count, seed)
    with pool.threads(threads):
        weight, rest = formats.split(master)
    bits = np.where(np.isnan(master.numpy()), np.uint32(0x7FC00000), bits_of(master))
    assert (bits_of(formats.join(weight, rest)) == bits).all()
    assert (rest.numpy()[np.isnan(master.numpy())] == 0).all()
    half_up = (bits.astype(np.uint64) + 0x8000) >> 16
    assert (weight.view(torch.int16).numpy().view(np.uint16) == half_up).all()
    # The weight is torch's but for ties.
    tie = (bits & 0xFFFF) == 0x8000
    same = weight.view(torch.int16) == master.bfloat16().view(torch.int16)
    assert same.numpy()[~tie & ~np.isnan(master.numpy())].all()


def test_shapes_are_kept_and_wrong_tensors_are_refused() -> None:
    weight, rest = formats.split(torch.randn(3, 5).t())
    assert weight.shape == rest.shape == (5, 3)
    with pytest.raises(ValueError, match=r"master expects torch.float32 on cpu, got torch.float16"):
        formats.split(torch.zeros(4, dtype=torch.float16))
    with pytest.raises(ValueError, match="rest expects 4 elements as weight, got 3"):
        formats.join(torch.zeros(4).bfloat16(), torch.zeros(3, dtype=torch.int16))
    with pytest.raises(ValueError, match="exp_avg_scale expects 2 scales for 129 codes, got 1"):
        formats.decode(torch.zeros(129, dtype=torch.int8), torch.zeros(1))
    with pytest.raises(
        ValueError, match=r"codes expect torch.int8 or torch.uint8, got torch.int16"
    ):
        formats.decode(torch.zeros(4, dtype=torch.int16), torch.zeros(1))


# ---- stochastic rounding ----


def reference_random(key: int, index: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    x = [(int(i) ^ key ^ (int(i) >> 32) * 0x9E3779B9) & 0xFFFFFFFF for i in index]
    x = [((v ^ v >> 16) * 0x7FEB352D) & 0xFFFFFFFF for v in x]
    x = [((v ^ v >> 15) * 0x846CA68B) & 0xFFFFFFFF for v in x]
    return np.array([v ^ v >> 16 for v in x], dtype=np.uint32)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    key=st.integers(0, 2**32 - 1),
    start=st.sampled_from([0, 7, 2**32 - 3, 2**39 + 5]),
)
def test_stochastic_rounding_takes_a_neighbour(seed: int, key: int, start: int) -> None:
    values = any_floats(500, seed)
    got = formats.stochastic_bfloat16(values, key, start).view(torch.int16).numpy().view(np.uint16)
    random = reference_random(key, np.arange(start, start + 500, dtype=np.uint64)) & 0xFFFF
    for x, half, r in zip(bits_of(values).tolist(), got.tolist(), random.tolist(), strict=True):
        if x & 0x7FFFFFFF > 0x7F800000:
            assert half == 0x7FC0
        elif x & 0x7FFFFFFF >= 0x7F7F0000:  # the last bfloat16, or infinity: towards zero
            assert half == x >> 16
        else:
            assert half == (x >> 16) + (r > 0xFFFF - (x & 0xFFFF))


def test_the_mean_of_stochastic_rounding_is_the_number() -> None:
    count = 1 << 18
    for value in (1 + 2.0**-9, 3.1415926, -1e-39, 1e38):
        got = formats.stochastic_bfloat16(torch.full((count,), value), 0x12345678).double()
        low, high = got.min().item(), got.max().item()
        value = float(F32(value))
        part = (value - low) / (high - low)
        assert got.unique().numel() == 2
        deviation = (part * (1 - part) / count) ** 0.5 * (high - low)
        assert abs(got.mean().item() - value) < 4 * deviation


# ---- int8 moments ----

TOPS = {"exp_avg": 127, "exp_avg_sq": 255}


def reference_scale(greatest: np.float32, name: str) -> np.float32:
    if greatest <= (F32(2.0**-128) if name == "exp_avg" else 0):
        return F32(0)
    scaled = F32(greatest * F32(F32(1) / F32(TOPS[name] ** 2)))
    bits = (int(scaled.view(np.uint32)) + 8) & ~15
    least = F32(2.0**-126) if name == "exp_avg" else F32(2.0**-63)
    return max(np.uint32(bits).view(F32), least)


def reference_encode(
    name: str, values: npt.NDArray[np.float32], random: npt.NDArray[np.float32] | None = None
) -> tuple[list[int], np.float32]:
    """One block in exact integers: the code is found by search, not by a root."""
    with np.errstate(all="ignore"):
        sizes = np.abs(values) if name == "exp_avg" else np.sqrt(values)
        limit = F32(127**2 * 2.0**113) if name == "exp_avg" else F32(255**2 * 2.0**48)
        sizes = np.where(sizes <= limit, sizes, F32(0)).astype(F32)
        scale = reference_scale(sizes.max(), name)
        inverse = F32(0) if scale == 0 else F32(1) / scale
        x = sizes * inverse
    codes = []
    for i, at in enumerate(x):
        exact = float(at)
        if name == "exp_avg":
            code = next(c for c in range(129) if exact <= c * c + c + 0.25)
            codes.append(-code if values[i] < 0 else code)
            continue
        code = next(c for c in range(257) if exact < (c + 1) ** 2)
        part = F32(at - F32(code**2)) * F32(at + F32(code**2))
        whole = F32(2 * code + 1) * F32(2 * code * code + 2 * code + 1)
        code += bool(F32((F32(0.5) if random is None else random[i]) * whole) < part)
        codes.append(max(code, 1) if exact > 0 else code)
    return codes, scale


def reference_decode(name: str, codes: Tensor, scale: np.float32) -> npt.NDArray[np.float32]:
    c = codes.numpy().astype(np.int64)
    with np.errstate(all="ignore"):
        if name == "exp_avg":
            return scale * (c * np.abs(c)).astype(F32)
        root = scale * (c * c).astype(F32)
        return root * root


@settings(max_examples=60)
@given(
    name=st.sampled_from(["exp_avg", "exp_avg_sq"]),
    seed=st.integers(0, 2**31),
    count=st.integers(1, 400),
    decades=st.sampled_from([0, 1, 6, 40]),
    scale=st.sampled_from([1.0, 1e-38, 1e-20, 1e30]),
)
def test_codes_are_the_references(
    name: str, seed: int, count: int, decades: int, scale: float
) -> None:
    values = any_floats(count, seed, decades) * scale
    codes, scales = formats.encode(name, values)
    decoded = formats.decode(codes, scales)
    for b in range(-(-count // BLOCK)):
        here = slice(b * BLOCK, (b + 1) * BLOCK)
        expected, its_scale = reference_encode(name, values[here].numpy())
        assert codes[here].tolist() == expected
        assert scales[b].numpy().view(np.uint32) == its_scale.view(np.uint32)
        back = reference_decode(name, codes[here], its_scale)
        assert (bits_of(decoded[here]) == back.view(np.uint32)).all()
    assert torch.isfinite(decoded).all()
    again = formats.encode(name, decoded)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)


def test_the_error_is_within_the_stated_bounds() -> None:
    values = any_floats(BLOCK * 64, 5, decades=2)
    top = values.abs().view(-1, BLOCK).amax(1, keepdim=True).expand(-1, BLOCK).flatten()
    error = (formats.decode(*formats.encode("exp_avg", values)) - values).abs()
    # Between c^2 and (c + 1)^2, relative to 127^2.
    assert (error <= ((values.abs() / top).sqrt() / 127 + 0.3 / 127**2) * top).all()
    root = formats.decode(*formats.encode("exp_avg_sq", values.square())).sqrt()
    size, error = values.abs(), (root - values.abs()).abs()
    seen = size > top / 65025
    assert (error <= ((size / top).sqrt() / 255 + 1.0 / 65025) * top * 1.05)[seen].all()


def test_a_number_above_zero_never_becomes_zero_and_what_has_no_code_begins_again() -> None:
    second = torch.zeros(BLOCK)
    second[:5] = torch.tensor([1.0, 1e-30, 1e-45, torch.inf, torch.nan])
    codes, scales = formats.encode("exp_avg_sq", second)
    assert codes[:6].tolist() == [255, 1, 1, 0, 0, 0]
    first = torch.zeros(BLOCK)
    first[:5] = torch.tensor([1.0, -1e-30, 1.7e38, -torch.inf, torch.nan])
    codes, scales = formats.encode("exp_avg", first)
    assert codes[:5].tolist() == [127, 0, 0, 0, 0]
    assert formats.decode(codes, scales)[0].item() == pytest.approx(1.0, rel=1e-6)
    codes, scales = formats.encode("exp_avg", torch.zeros(BLOCK))
    assert scales.item() == 0
    assert not codes.any()


# ---- the update ----


def scalars_row(key: int) -> Tensor:
    scalars, steps = torch.zeros(1, adam.SCALARS), torch.full((1,), 9.0)
    hyper = adam.Hyper(1e-2, 0.9, 0.99, 1e-8, 0.1, False, False, True)
    for launch in adam.prepare(np.zeros(1, np.uint32), hyper, steps=steps, scalars=scalars):
        launch.run_on_host()
    bits_of(scalars)[0, 11] = key
    return scalars


def zeros(form: tuple[str, str], count: int) -> dict[str, Tensor]:
    master, moments = form
    kinds = {"fp32": (torch.float32,) * 2, "bf16": (torch.bfloat16,) * 2}
    first, second = kinds.get(moments, (torch.int8, torch.uint8))
    state = {
        "exp_avg": torch.zeros(count, dtype=first),
        "exp_avg_sq": torch.zeros(count, dtype=second),
    }
    if moments == "int8":
        blocks = -(-count // BLOCK)
        state |= {"exp_avg_scale": torch.zeros(blocks), "exp_avg_sq_scale": torch.zeros(blocks)}
    if master == "fp32":
        state["master"] = torch.zeros(count)
    if master == "split":
        state["rest"] = torch.zeros(count, dtype=torch.int16)
    return state


def step(
    weight: Tensor, grad: Tensor, state: dict[str, Tensor], scalars: Tensor, cuts: tuple[int, ...]
) -> None:
    ends = [*cuts, weight.numel()]
    rows = [(0, a, b - a, a, 0) for a, b in zip([0, *cuts], ends, strict=True)]
    table = adam.PieceTable(rows)
    adam.update(table, weights=[weight], grads=[grad], state=state, scalars=scalars).run_on_host()


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), wild=st.booleans(), count=st.integers(1, 1200))
def test_a_split_master_steps_as_an_fp32_one(seed: int, wild: bool, count: int) -> None:
    weight = any_floats(count, seed, 0 if wild else 3).bfloat16()
    weights = {"fp32": weight.clone(), "split": weight.clone()}
    states = {name: zeros((name, "fp32"), count) for name in weights}
    for number in range(3):
        grad = any_floats(count, seed + number + 1, 0 if wild and number == 1 else 4)
        for name, mine in weights.items():
            step(mine, grad, states[name], scalars_row(1), ())
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(*(bits_of_tensor(states[form][name]) for form in weights))
        joined = formats.join(weights["split"], states["split"]["rest"])
        assert torch.equal(bits_of_tensor(joined), bits_of_tensor(states["fp32"]["master"]))


def bits_of_tensor(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    wild=st.booleans(),
    count=st.integers(1, 900),
    moments=st.sampled_from(["bf16", "int8"]),
    key=st.integers(0, 2**32 - 1),
)
def test_coded_moments_are_the_formula_between_decoding_and_encoding(
    seed: int, wild: bool, count: int, moments: str, key: int
) -> None:
    """fp32 moments give what the coded ones are decoded from; the reference encodes it."""
    weight = any_floats(count, seed, 2)
    state, scalars = zeros(("none", moments), count), scalars_row(key)
    for number in range(2):
        plain = zeros(("none", "fp32"), count)
        for name in ("exp_avg", "exp_avg_sq"):
            held = state[name]
            plain[name] = (
                held.float() if moments == "bf16" else formats.decode(held, state[f"{name}_scale"])
            )
        grad = any_floats(count, seed + 1 + number, 0 if wild and number == 0 else 6)
        copy = weight.clone()
        step(copy, grad, plain, scalars, ())
        step(weight, grad, state, scalars, ())
        assert torch.equal(bits_of_tensor(weight), bits_of_tensor(copy))
        pairs = np.arange(count, dtype=np.uint64)
        if moments == "bf16":
            random = reference_random(key, pairs)
            for name, its in (("exp_avg", random & 0xFFFF), ("exp_avg_sq", random >> 16)):
                x = bits_of(plain[name])
                up = np.where((x & 0x7FFFFFFF) < 0x7F7F0000, its, 0).astype(np.uint64)
                half = ((x + up) >> np.uint64(16)).astype(np.uint16)
                half = np.where(np.isnan(plain[name].numpy()), np.uint16(0x7FC0), half)
                assert (state[name].view(torch.int16).numpy().view(np.uint16) == half).all()
            continue
        shared = reference_random(key, pairs >> np.uint64(1))
        half = np.where(pairs % 2 == 0, shared & 0xFFFF, shared >> 16)
        random = ((half >> 5).astype(F32) + F32(0.5)) / F32(2048)
        for name in ("exp_avg", "exp_avg_sq"):
            for b in range(-(-count // BLOCK)):
                here = slice(b * BLOCK, (b + 1) * BLOCK)
                codes, scale = reference_encode(name, plain[name][here].numpy(), random[here])
                assert state[name][here].tolist() == codes
                assert state[f"{name}_scale"][b].item() == float(scale)


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_any_cut_and_any_thread_count_gives_the_same_bits(moments: str) -> None:
    count, results = 70_000, []
    start, grad = torch.randn(count).bfloat16(), torch.randn(count).bfloat16()
    for cuts, threads in (((), 1), ((), 3), ((128, 256, 40_960), 2)):
        weight, state = start.clone(), zeros(("split", moments), count)
        with pool.threads(threads):
            for _ in range(2):
                step(weight, grad, state, scalars_row(77), cuts)
        results.append([bits_of_tensor(t) for t in (weight, *state.values())])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_the_second_moment_keeps_its_mean_where_rounding_to_nearest_stands_still() -> None:
    """With beta2 = 0.999 and no gradient, a step moves it by a fifteenth of a code's distance."""
    count, steps = 1 << 14, 300
    for moments, tolerance in (("int8", 0.01), ("bf16", 0.01)):
        state = zeros(("none", moments), count)
        start = torch.rand(count) * 0.9 + 0.1
        start[::BLOCK] = 1.0
        if moments == "int8":
            state["exp_avg_sq"], state["exp_avg_sq_scale"] = formats.encode("exp_avg_sq", start)
        else:
            state["exp_avg_sq"] = start.bfloat16()
        weight, zero = torch.zeros(count), torch.zeros(count)
        for number in range(steps):
            scalars = scalars_row(int(reference_random(5, np.array([number], np.uint64))[0]))
            scalars[0, 6], scalars[0, 7] = 0.999, 0.001
            step(weight, zero, state, scalars, ())
        held = state["exp_avg_sq"]
        now = held if moments == "bf16" else formats.decode(held, state["exp_avg_sq_scale"])
        ratio = (now.double() / start).mean().item()
        assert ratio == pytest.approx(0.999**steps, rel=tolerance)


def test_wrong_state_is_refused_before_anything_changes() -> None:
    good = {"weights": [torch.zeros(300).bfloat16()], "grads": [torch.zeros(300)],
            "scalars": torch.zeros(1, 16)}  # fmt: skip
    whole = adam.PieceTable([(0, 0, 300, 0, 0)])
    int8, split = zeros(("none", "int8"), 300), zeros(("split", "fp32"), 300)
    cases: list[tuple[adam.PieceTable, dict, str]] = [
        (whole, int8 | {"max_exp_avg_sq": torch.zeros(300)}, "int8 moments expects"),
        (whole, {k: int8[k] for k in ("exp_avg", "exp_avg_sq")}, "with exp_avg_scale"),
        (whole, int8 | {"exp_avg_scale": torch.zeros(2)}, "exp_avg_scale expects 3 scales"),
        (whole, int8 | {"exp_avg_sq": torch.zeros(300, dtype=torch.int8)}, "contiguous uint8"),
        (whole, split | {"rest": torch.zeros(300)}, "rest expects 1-D contiguous int16"),
        (whole, split | {"master": torch.zeros(300)}, "perhaps master or rest"),
        (adam.PieceTable([(0, 0, 100, 0, 0)]), int8, "whole blocks of 128, got elements 0 to 100"),
        (adam.PieceTable([(0, 128, 172, 64, 0)]), int8, "with state from 64"),
    ]
    for table, state, message in cases:
        with pytest.raises(ValueError, match=message):
            adam.update(table, state=state, **good)
    with pytest.raises(
        ValueError, match="weights with a split master expect bfloat16, got float16"
    ):
        adam.update(whole, state=split, **good | {"weights": [torch.zeros(300).half()]})
