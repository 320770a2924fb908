"""The CUDA kernels of every format of host state against the CPU's, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ghoffload.kernels import adam
from ghoffload.kernels.formats import BLOCK

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = [
    (master, moments, amsgrad)
    for master in ("none", "fp32", "split")
    for moments, amsgrad in (("fp32", False), ("fp32", True), ("bf16", False), ("int8", False))
]


def any_values(count: int, dtype: torch.dtype, seed: int, wild: bool) -> Tensor:
    """Any bit patterns (NaNs, infinities and subnormals are common), or ordinary numbers."""
    random = np.random.default_rng(seed)
    if wild or not dtype.is_floating_point:
        raw = random.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(raw).view(dtype)
    size = 10 ** (random.random(count) * 6 - 4)
    return torch.from_numpy(random.standard_normal(count) * size).to(dtype)


def state_of(form: tuple[str, str, bool], end: int, seed: int, wild: bool) -> dict[str, Tensor]:
    master, moments, amsgrad = form
    kinds = {"fp32": (torch.float32,) * 2, "bf16": (torch.bfloat16,) * 2}
    first, second = kinds.get(moments, (torch.int8, torch.uint8))
    state = {
        "exp_avg": any_values(end, first, seed, wild),
        "exp_avg_sq": any_values(end, second, seed + 1, wild),
    }
    if moments == "int8":
        blocks = -(-end // BLOCK)
        state["exp_avg_scale"] = any_values(blocks, torch.float32, seed + 2, wild)
        state["exp_avg_sq_scale"] = any_values(blocks, torch.float32, seed + 3, wild)
    elif not wild:
        state["exp_avg_sq"].abs_()
    if amsgrad:
        state["max_exp_avg_sq"] = any_values(end, torch.float32, seed + 4, wild)
    if master == "fp32":
        state["master"] = any_values(end, torch.float32, seed + 5, wild)
    if master == "split":
        state["rest"] = any_values(end, torch.int16, seed + 6, wild)
    return state


def place(tensor: Tensor, before: int, device: str) -> Tensor:
    """A copy that begins ``before`` elements after an aligned address."""
    there = torch.empty(before + tensor.numel(), dtype=tensor.dtype, device=device)[before:]
    there.copy_(tensor)
    return there


def run(launches: list[adam.Launch], device: str) -> None:
    for launch in launches:
        if device == "cpu":
            launch.run_on_host()
        else:
            launch.device(torch.cuda.current_stream().cuda_stream)


def same(got: Tensor, expected: Tensor) -> bool:
    return torch.equal(got.cpu().contiguous().view(torch.uint8), expected.view(torch.uint8))


@settings(max_examples=400)
@given(
    seed=st.integers(0, 2**31),
    form=st.sampled_from(FORMS),
    weight_dtype=st.sampled_from(DTYPES),
    grad_dtype=st.sampled_from(DTYPES),
    pieces=st.lists(
        st.tuples(
            st.integers(0, 9),  # start, in blocks with int8 moments
            st.one_of(st.integers(0, 300), st.integers(2000, 9000)),  # count
            st.integers(0, 5),  # gap before it in the state
        ),
        min_size=1,
        max_size=5,
    ),
    cut=st.sampled_from([128, 256, 2048, 1 << 30]),
    before=st.sampled_from([0, 0, 1, 4]),
    first=st.sampled_from([0, 0, 2**32 - 1024, 2**39]),
    wild=st.booleans(),
)
def test_every_format_is_bit_identical(
    seed: int,
    form: tuple[str, str, bool],
    weight_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    pieces: list[tuple[int, int, int]],
    cut: int,
    before: int,
    first: int,
    wild: bool,
) -> None:
    master, moments, _ = form
    if master == "split":
        weight_dtype = torch.bfloat16
    if master == "fp32" and weight_dtype == torch.float32:
        weight_dtype = torch.float16
    unit = BLOCK if moments == "int8" else 1
    rows, sizes, offset = [], [], 0
    for index, (begin, count, gap) in enumerate(pieces):
        begin, offset = begin * unit, offset + gap * unit
        rows += [
            (
                index,
                begin + done,
                min(cut, count - done),
                offset + done,
                index,
                first + begin + done,
            )
            for done in range(0, max(count, 1), cut)
        ]
        sizes.append(begin + count)
        offset += -(-count // unit) * unit
    host = state_of(form, offset + unit, seed, wild)
    weights = [any_values(n, weight_dtype, seed + 10 + k, wild) for k, n in enumerate(sizes)]
    hyper = adam.Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, form[2], bool(seed % 2), bool(seed % 3))
    results = []
    for device in ("cpu", "cuda"):
        steps = torch.arange(len(pieces), dtype=torch.float32, device=device)
        scalars = torch.zeros(len(pieces), adam.SCALARS, device=device)
        state = {name: array.to(device, copy=True) for name, array in host.items()}
        here = [place(weight, before, device) for weight in weights]
        for number in range(2):
            grads = [
                place(any_values(n, grad_dtype, seed + 99 * number + k, wild), before, device)
                for k, n in enumerate(sizes)
            ]
            indices = np.arange(len(pieces), dtype=np.uint32)
            launches = [
                *adam.prepare(indices, hyper, steps=steps, scalars=scalars, seed=seed),
                *(
                    adam.update(
                        adam.PieceTable(rows[part : part + adam.MAX_PIECES]),
                        weights=here, grads=grads, state=state, scalars=scalars,
                    )
                    for part in range(0, len(rows), adam.MAX_PIECES)
                ),
            ]  # fmt: skip
            run(launches, device)
        results.append({f"weight {k}": w for k, w in enumerate(here)} | state)
    for name, expected in results[0].items():
        assert same(results[1][name], expected), name


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_all_codes_at_many_scales(moments: str) -> None:
    """Every pair of a first and a second moment's byte, beside gradients of many sizes."""
    count = 1 << 16
    for exponent in (-149, -127, -100, -64, -30, 0, 30, 60, 100):
        results = []
        for device in ("cpu", "cuda"):
            state = state_of(("split", moments, False), count, 1, wild=False)
            if moments == "int8":
                pairs = torch.arange(count)
                state["exp_avg"] = (pairs % 256 - 128).to(torch.int8)
                state["exp_avg_sq"] = (pairs // 256).to(torch.uint8)
                blocks = torch.arange(count // BLOCK, dtype=torch.float64)
                state["exp_avg_scale"] = (2.0**exponent * (1 + blocks / 512)).float()
                state["exp_avg_sq_scale"] = (2.0 ** (exponent / 2) * (1 + blocks / 512)).float()
            state = {name: array.to(device) for name, array in state.items()}
            grad = any_values(count, torch.float32, 7, wild=False).double() * 2.0**exponent
            weight = any_values(count, torch.bfloat16, 8, wild=False).to(device)
            steps, scalars = torch.zeros(1, device=device), torch.zeros(1, 16, device=device)
            hyper = adam.Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, False, False, True)
            indices = np.zeros(1, np.uint32)
            launches = [
                *adam.prepare(indices, hyper, steps=steps, scalars=scalars, seed=3),
                adam.update(
                    adam.PieceTable([(0, 0, count, 0, 0)]), weights=[weight],
                    grads=[grad.float().to(device)], state=state, scalars=scalars,
                ),
            ]  # fmt: skip
            run(launches, device)
            results.append([weight, *state.values()])
        for expected, got in zip(*results, strict=True):
            assert same(got, expected)
