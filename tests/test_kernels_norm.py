"""The norm's CPU kernels against exact sums and torch, and against themselves bit for bit."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import MIXTURES
from kernel_cases import pool as numbers
from torch import Tensor

from ghoffload.kernels import norm as norms
from ghoffload.kernels import pool
from ghoffload.kernels.adam import SCALARS, Hyper, prepare
from ghoffload.kernels.norm_host import finish
from ghoffload.kernels.prepare import FACTOR, KEY, SKIP, random_keys

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NORMS = (2.0, math.inf)
RESULTS = ("total_norm", "found_inf", "clip")


def norm(grads: Sequence[Tensor], **options: object) -> dict[str, Tensor]:
    """The three results, and the partials."""
    results = {name: torch.full((), 7.0) for name in RESULTS}
    partials = torch.full((norms.partials_needed(grads),), torch.nan, dtype=torch.float64)
    for launch in norms.norm(grads, partials=partials, **results, **options):  # type: ignore[arg-type]
        launch.run_on_host()
    return results | {"partials": partials}


def bits(results: dict[str, Tensor]) -> dict[str, bytes]:
    """The results' bits; a NaN among the partials, which are scratch, may have any payload."""
    found = {name: tensor.numpy().copy() for name, tensor in results.items()}
    found["partials"][np.isnan(found["partials"])] = np.nan
    return {name: array.tobytes() for name, array in found.items()}


def exact(grads: Sequence[Tensor], norm_type: float = 2.0) -> float:
    values = np.concatenate([np.abs(g.double().numpy().ravel()) for g in grads] or [np.zeros(0)])
    if norm_type == 2.0:
        return math.sqrt(math.fsum((values * values).tolist()))
    return float(values.max(initial=0.0))


def mixed(seed: int = 0) -> list[Tensor]:
    """Sizes around the lanes, the chunk and several chunks, in every dtype, some misaligned."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (1, 7, 0, 1023, 2049, 32767, 32768, 32769, 100_003, 5, 30_001, 9_003, 5_500)
    grads = []
    for number, size in enumerate(sizes):
        for dtype, start in ((DTYPES[number % 3], 0), (DTYPES[(number + 1) % 3], 1 + number % 3)):
            grad = torch.randn(size + 5, generator=generator) * 10.0 ** (number % 9 - 4)
            grads.append(grad.to(dtype)[start:][:size])
    return grads


@st.composite
def gradients(draw: Callable[[st.SearchStrategy[Any]], Any]) -> list[Tensor]:
    """Any sizes, alignments and values; those of every other case are finite."""
    finite = draw(st.booleans())
    grads = []
    for _ in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(DTYPES))
        size = draw(st.one_of(st.integers(0, 70), st.integers(30_000, 70_000)))
        start, first = draw(st.integers(0, 9)), draw(st.integers(0, 60_000))
        bits = numbers(dtype, draw(st.sampled_from(MIXTURES)))[first : first + start + size].copy()
        grad = torch.from_numpy(bits).view(dtype)
        if finite:
            grad[~grad.isfinite()] = 0
        grads.append(grad[start:])
    return grads


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 1024, 3000, 32768, 70_001])
def test_one_tensor(size: int, dtype: torch.dtype, norm_type: float) -> None:
    grads = [torch.randn(size).to(dtype)]
    results = norm(grads, norm_type=norm_type, max_norm=2.0)
    expected = exact(grads, norm_type)
    assert results["total_norm"].item() == pytest.approx(expected, rel=2**-24)
    assert results["clip"].item() == pytest.approx(min(1.0, 2.0 / (expected + 1e-6)), rel=2**-24)
    assert results["found_inf"].item() == 0.0


@pytest.mark.parametrize("norm_type", NORMS)
def test_mixed_dtypes_sizes_and_alignments(norm_type: float) -> None:
    grads = mixed()
    got = norm(grads, norm_type=norm_type)["total_norm"].item()
    assert got == pytest.approx(exact(grads, norm_type), rel=2**-24)


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("most", [1, 3, 1280])
def test_bits_do_not_depend_on_launches_and_threads(
    most: int, threads: int, norm_type: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    grads = [*mixed(), torch.randn(3_000_000).bfloat16()]
    once = bits(norm(grads, norm_type=norm_type, max_norm=1.0))
    monkeypatch.setattr(norms, "MAX_TENSORS", most)
    monkeypatch.setattr(norms, "_TASK_ELEMENTS", 1 << (15 + threads))
    with pool.threads(threads):
        assert bits(norm(grads, norm_type=norm_type, max_norm=1.0)) == once


@settings(max_examples=60)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 3, 2047, 40_000]), min_size=1, max_size=4),
    scale=st.sampled_from([1e-40, 1e-3, 1.0, 1e19, 3e38]),
    seed=st.integers(0, 1000),
    maximum=st.sampled_from(NORMS),
)
def test_the_size_of_the_numbers_does_not_matter(
    sizes: list[int], scale: float, seed: int, maximum: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.rand(size, generator=generator) * scale for size in sizes]
    expected = exact(grads, maximum)
    results = norm(grads, norm_type=maximum, max_norm=1e3)
    assert results["found_inf"].item() == 0.0
    total = results["total_norm"].item()
    if expected <= torch.finfo(torch.float32).max:
        assert total == pytest.approx(expected, rel=2**-23, abs=1e-44)
    else:  # a sum that fp32 would lose; the factor still comes from it
        assert total == math.inf
    clip = min(1.0, 1e3 / (expected + 1e-6))
    assert results["clip"].item() == pytest.approx(clip, rel=2**-23, abs=1e-44)


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 33_000, 40_007])
def test_one_bad_element_is_found(
    where: int, bad: float, dtype: torch.dtype, norm_type: float
) -> None:
    grads = [torch.randn(100), torch.randn(40_008).to(dtype), torch.randn(3)]
    grads[1][where] = bad
    grads[1][where - 1] = math.inf if math.isnan(bad) else 1.0
    results = norm(grads, norm_type=norm_type, max_norm=1.0)
    reference = torch.nn.utils.get_total_norm(grads, norm_type)
    assert results["found_inf"].item() == 1.0
    assert torch.equal(results["total_norm"].isnan(), reference.isnan())
    assert not results["total_norm"].isfinite()
    clip = torch.clamp(1.0 / (reference + 1e-6), max=1.0)
    torch.testing.assert_close(results["clip"], clip, equal_nan=True, rtol=0, atol=0)


def test_nothing_and_only_empty_tensors() -> None:
    for grads in ([], [torch.zeros(0), torch.zeros(0, dtype=torch.float16)]):
        results = norm(grads, max_norm=1.0)
        assert [results[name].item() for name in RESULTS] == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("scale", [1.0, 3.0, 65536.0])
def test_a_grad_scale_is_divided_out_when_the_launch_runs(scale: float) -> None:
    grads = mixed(3)
    tensor = torch.tensor(scale)
    results = norm(grads, grad_scale=tensor, max_norm=0.5)
    expected = exact(grads) / scale
    assert results["total_norm"].item() == pytest.approx(expected, rel=2**-24)
    assert results["clip"].item() == pytest.approx(min(1, 0.5 / (expected + 1e-6)), rel=2**-24)
    partials = torch.empty(norms.partials_needed(grads), dtype=torch.float64)
    outputs = {name: torch.empty(()) for name in RESULTS}
    late = torch.tensor(1.0)
    launches = norms.norm(grads, partials=partials, grad_scale=late, max_norm=0.5, **outputs)
    assert launches[-1].reads[1] is late
    late.fill_(scale)
    for launch in launches:
        launch.run_on_host()
    assert bits(outputs | {"partials": partials}) == bits(results)


@pytest.mark.parametrize("max_norm", [0.0, 1e-3, 1.0, 1e9, math.inf])
def test_the_factor_is_torchs(max_norm: float) -> None:
    grads = [torch.randn(1000), torch.randn(7)]
    copies = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for copy, grad in zip(copies, grads, strict=True):
        copy.grad = grad.clone()
    total = torch.nn.utils.clip_grad_norm_(copies, max_norm)
    results = norm(grads, max_norm=max_norm)
    torch.testing.assert_close(results["total_norm"], total, rtol=1e-6, atol=0)
    for copy, grad in zip(copies, grads, strict=True):
        torch.testing.assert_close(copy.grad, grad * results["clip"], rtol=1e-6, atol=1e-12)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="torch flushes on x86")
def test_flush_to_zero_in_the_caller_changes_nothing() -> None:
    grads = [torch.full((5000,), 1e-42)]
    expected = bits(norm(grads, max_norm=1e-44))
    assert torch.set_flush_denormal(True)
    try:
        got = norm(grads, max_norm=1e-44)
    finally:
        torch.set_flush_denormal(False)
    assert bits(got) == expected
    assert 0 < got["clip"].item() < 2**-126
    assert 0 < got["total_norm"].item() < 2**-126


def test_wrong_arguments_are_refused() -> None:
    outputs = {name: torch.empty(()) for name in RESULTS}
    partials = torch.empty(4, dtype=torch.float64)
    good: dict = {"partials": partials, **outputs}
    grads = [torch.ones(5), torch.ones(40_000)]
    cases: list[tuple[list[Tensor], dict, str]] = [
        (grads, {"norm_type": 1.0}, "norm_type expects 2 or inf, got 1.0"),
        (grads, {"max_norm": -1.0}, "max_norm expects a number of 0 or more, got -1.0"),
        (grads, {"max_norm": math.nan}, "max_norm expects"),
        (grads, {"partials": partials[:2]}, "partials expects 3 elements or more, got 2"),
        (grads, {"partials": partials.float()}, "partials expects 1-D contiguous float64"),
        (grads, {"clip": torch.empty(2)}, "clip expects one element of torch.float32"),
        (grads, {"found_inf": torch.empty((), dtype=torch.float64)}, "found_inf expects one"),
        (grads, {"grad_scale": torch.ones(2)}, "grad_scale expects one element"),
        ([torch.ones(2, dtype=torch.float64)], {}, "grads expects float32"),
        ([torch.ones(2, device="meta")], {}, "expects to be on cpu"),
    ]
    for its_grads, changes, message in cases:
        with pytest.raises(ValueError, match=message):
            norms.norm(its_grads, **good | changes)


# A sum of exactly TIE has a norm half-way between 1 and the next fp32 number, and goes down; four
# times TINY more make it go up, and only where they are added to each other first.
TIE, TINY = (1.0 + 2.0**-24) ** 2, 2.0**-53
ORDERS = (
    ((0, 4, 5, 6, 7), 1.0 + 2.0**-23),  # neighbours before others
    ((0, 1, 2, 4, 8), 1.0),  # each in a tree of its own
    ((0, 1024, 2048, 3072, 4096), 1.0),  # one lane after the other
    ((0, 1028, 1029, 1030, 1031), 1.0 + 2.0**-23),
    ((0, 512, 513, 514, 515), 1.0 + 2.0**-23),
    ((0, 128, 256, 512, 768), 1.0),
)


def ordered(places: Sequence[int]) -> Tensor:
    partials = torch.zeros(5000, dtype=torch.float64)
    partials[list(places)] = torch.tensor([TIE, *[TINY] * 4], dtype=torch.float64)
    return partials


@pytest.mark.parametrize(("places", "expected"), ORDERS)
def test_the_order_in_which_partials_are_added(places: Sequence[int], expected: float) -> None:
    total, *_ = finish(ordered(places).numpy(), False, 1.0, 1.0)
    assert total == np.float32(expected)


# ---- prepare's part


def prepared(
    count: int = 1, step: float = 0.0, maximize: bool = False, **options: object
) -> Tensor:
    hyper = Hyper(1e-2, 0.9, 0.999, 1e-8, 0.1, False, maximize, True)
    steps, scalars = torch.full((count,), step), torch.zeros(count, SCALARS)
    indices = np.arange(count, dtype=np.uint32)
    for launch in prepare(indices, hyper, steps=steps, scalars=scalars, **options):  # type: ignore[arg-type]
        launch.run_on_host()
    return scalars


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("scale", [None, 3.0, 65536.0])
@pytest.mark.parametrize("clip", [None, 1.0, 0.3, 0.0])
def test_the_factor_is_rounded_once(
    clip: float | None, scale: float | None, maximize: bool
) -> None:
    options = {
        name: torch.tensor(value)
        for name, value in (("clip", clip), ("grad_scale", scale))
        if value is not None
    }
    expected = np.float64(1.0)
    if scale is not None:
        expected = expected / np.float64(scale)
    if clip is not None:
        expected = expected * np.float64(np.float32(clip))
    expected = np.float32(-expected if maximize else expected)
    got = prepared(maximize=maximize, **options)[0, FACTOR].numpy()
    assert got.tobytes() == expected.tobytes()


def test_the_clip_is_read_when_the_launch_runs_and_nan_spreads() -> None:
    hyper = Hyper(1e-2, 0.9, 0.999, 1e-8, 0.1, False, False, True)
    steps, scalars, clip = torch.zeros(1), torch.zeros(1, SCALARS), torch.tensor([0.5])
    (launch,) = prepare(np.zeros(1, np.uint32), hyper, steps=steps, scalars=scalars, clip=clip)
    clip.fill_(torch.nan)
    launch.run_on_host()
    assert scalars[0, FACTOR].isnan()
    assert steps.item() == 1.0
    with pytest.raises(ValueError, match="clip expects one element of"):
        prepared(clip=torch.ones(2))


def splitmix(z: int) -> int:
    mask = (1 << 64) - 1
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return (z ^ z >> 31) >> 32


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 + 5, 2**64 + 7])
def test_keys_are_of_seed_index_and_step(seed: int) -> None:
    keys = prepared(5, step=41.0, seed=seed)[:, KEY].view(torch.int32)
    for index, key in enumerate(keys.tolist()):
        z = ((seed + index) * 0x9E3779B97F4A7C15 + 42) % 2**64
        assert key % 2**32 == splitmix(z)
    shifted = prepared(4, step=41.0, seed=seed + 1)[:, KEY].view(torch.int32)
    assert torch.equal(shifted, keys[1:])


def test_keys_are_spread_out() -> None:
    indices = np.arange(300, dtype=np.uint32)
    keys = np.concatenate([random_keys(0, indices, np.full(300, t)) for t in range(1, 301)])
    assert len(np.unique(keys)) > len(keys) - 10
    ones = np.unpackbits(keys.view(np.uint8)).mean()
    assert ones == pytest.approx(0.5, abs=0.002)


def test_a_skipped_step_has_no_key() -> None:
    scalars = prepared(found_inf=torch.ones(()), clip=torch.tensor(0.5))
    assert scalars[0, SKIP] == 1.0
    assert (scalars[0, 1:] == 0).all()
