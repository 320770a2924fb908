"""Every code of host state, at many scales: the CUDA kernels against the CPU's, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ghoffload.kernels import adam
from ghoffload.kernels.formats import BLOCK

pytestmark = pytest.mark.gpu


def numbers(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of six decades, or any integers."""
    random = np.random.default_rng(seed)
    if not dtype.is_floating_point:
        raw = random.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(raw).view(dtype)
    size = 10 ** (random.random(count) * 6 - 4)
    return torch.from_numpy(random.standard_normal(count) * size).to(dtype)


def run(launches: list[adam.Launch], device: str) -> None:
    for launch in launches:
        if device == "cpu":
            launch.run_on_host()
        else:
            launch.device(torch.cuda.current_stream().cuda_stream)


def same(got: Tensor, expected: Tensor) -> bool:
    return torch.equal(got.cpu().contiguous().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_all_codes_at_many_scales(moments: str) -> None:
    """Every pair of a first and a second moment's byte, beside gradients of many sizes."""
    count = 1 << 16
    for exponent in (-149, -127, -100, -64, -30, 0, 30, 60, 100):
        results = []
        for device in ("cpu", "cuda"):
            state = {"rest": numbers(count, torch.int16, 7)}
            if moments == "bf16":
                state["exp_avg"] = numbers(count, torch.bfloat16, 1)
                state["exp_avg_sq"] = numbers(count, torch.bfloat16, 2).abs()
            else:
                pairs = torch.arange(count)
                state["exp_avg"] = (pairs % 256 - 128).to(torch.int8)
                state["exp_avg_sq"] = (pairs // 256).to(torch.uint8)
                blocks = torch.arange(count // BLOCK, dtype=torch.float64)
                state["exp_avg_scale"] = (2.0**exponent * (1 + blocks / 512)).float()
                state["exp_avg_sq_scale"] = (2.0 ** (exponent / 2) * (1 + blocks / 512)).float()
            state = {name: array.to(device) for name, array in state.items()}
            grad = numbers(count, torch.float32, 7).double() * 2.0**exponent
            weight = numbers(count, torch.bfloat16, 8).to(device)
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
