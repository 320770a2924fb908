"""The norm and the clipped step on a real GPU: the CPU's bits, and no waiting on the host."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels_norm import (
    NORMS,
    ORDERS,
    RESULTS,
    bits,
    exact,
    gradients,
    mixed,
    norm,
    ordered,
)
from test_optim_gpu import SMALL, fill_grads, mlp, no_sync
from torch import Tensor

import ghoffload
from ghoffload.check.programs import result, same_bits
from ghoffload.kernels import norm as norms
from ghoffload.kernels import norm_cuda
from ghoffload.kernels.adam import SCALARS, Hyper, prepare

pytestmark = pytest.mark.gpu


def norm_on_gpu(grads: list[Tensor], **options: object) -> dict[str, Tensor]:
    results = {name: torch.full((), 7.0, device="cuda") for name in RESULTS}
    partials = torch.full(
        (norms.partials_needed(grads),), torch.nan, dtype=torch.float64, device="cuda"
    )
    stream = torch.cuda.current_stream().cuda_stream
    for launch in norms.norm(grads, partials=partials, **results, **options):  # type: ignore[arg-type]
        launch.device(stream)
    return {name: tensor.cpu() for name, tensor in (results | {"partials": partials}).items()}


def placed(grads: list[Tensor]) -> list[Tensor]:
    """On the GPU, as far from an aligned address as on the CPU."""
    there = []
    for grad in grads:
        shift = grad.data_ptr() % 16 // grad.element_size()
        room = torch.empty(grad.numel() + shift, dtype=grad.dtype, device="cuda")
        there.append(room[shift:].copy_(grad))
    return there


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("scale", [None, 3.0])
@pytest.mark.parametrize("most", [3, 1280])
def test_the_bits_are_the_cpus(
    most: int, scale: float | None, norm_type: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "MAX_TENSORS", most)
    grads = [*mixed(), torch.randn(3_000_001).bfloat16(), *(torch.randn(9) for _ in range(1500))]
    options: dict = {"norm_type": norm_type, "max_norm": 1.0}
    here, there = dict(options), dict(options)
    if scale is not None:
        here["grad_scale"] = torch.tensor(scale)
        there["grad_scale"] = here["grad_scale"].cuda()
    assert bits(norm_on_gpu(placed(grads), **there)) == bits(norm(grads, **here))


@settings(max_examples=400)
@given(
    grads=gradients(),
    norm_type=st.sampled_from(NORMS),
    max_norm=st.sampled_from([0.0, 1e-3, 1.0, math.inf]),
)
def test_any_sizes_alignments_and_values(
    grads: list[Tensor], norm_type: float, max_norm: float
) -> None:
    options = {"norm_type": norm_type, "max_norm": max_norm}
    assert bits(norm_on_gpu(placed(grads), **options)) == bits(norm(grads, **options))


@pytest.mark.parametrize(("places", "expected"), ORDERS)
def test_the_order_in_which_partials_are_added(places: tuple[int, ...], expected: float) -> None:
    results = {name: torch.empty((), device="cuda") for name in RESULTS}
    stream = torch.cuda.current_stream().cuda_stream
    norm_cuda.finish(ordered(places).cuda(), 5000, 1.0, 1.0, None, results, False, stream)
    assert results["total_norm"].item() == expected


def test_more_than_two_to_the_31_elements() -> None:
    count = (1 << 31) + 70_001
    free, _ = torch.cuda.mem_get_info()
    if free < 3 * count:
        pytest.skip(f"needs {3 * count} bytes of HBM, has {free} free")
    grad = torch.zeros(count, dtype=torch.bfloat16, device="cuda")
    grad[-70_001:] = torch.randn(70_001, device="cuda")
    total = norm_on_gpu([grad])["total_norm"].item()
    assert total == pytest.approx(exact([grad[-70_001:].cpu()]), rel=2**-23)
    grad[-1] = math.nan
    assert norm_on_gpu([grad])["found_inf"] == 1.0


def test_prepare_with_clip_and_seed_has_the_cpus_bits() -> None:
    hyper = Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, False, True, True)
    for clip, scale, seed in ((0.3, 3.0, 2**63 + 1), (math.nan, 1.0, -1), (1e-30, 65536.0, 7)):
        results = []
        for device in ("cpu", "cuda"):
            steps = torch.arange(300.0).to(device)
            scalars = torch.zeros(300, SCALARS, device=device)
            launches = prepare(
                np.arange(300, dtype=np.uint32),
                hyper,
                steps=steps,
                scalars=scalars,
                clip=torch.tensor(clip, device=device),
                grad_scale=torch.tensor(scale, device=device),
                seed=seed,
            )
            for launch in launches:
                if device == "cpu":
                    launch.run_on_host()
                else:
                    launch.device(torch.cuda.current_stream().cuda_stream)
            results.append(scalars.cpu().view(torch.int32))
        assert torch.equal(*results)


@pytest.mark.parametrize("step_device", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_clipped_steps_have_the_cpus_bits(dtype: torch.dtype, step_device: str) -> None:
    results, all_norms = [], []
    for device in ("cpu", "cuda"):
        model = mlp(dtype, device)
        config = SMALL | ({"step_device": step_device} if device == "cuda" else {})
        optimizer = ghoffload.OffloadAdamW(model.parameters(), lr=1e-2, config=config)
        norms_seen = []
        for step in range(3):
            fill_grads(model, step)
            norms_seen.append(optimizer.clip_grad_norm_(1.0).cpu())
            optimizer.step()
        results.append(result(optimizer, list(model.parameters())))
        all_norms.append(norms_seen)
    assert same_bits(*results)
    assert same_bits(*all_norms)
    assert min(n.item() for n in all_norms[0]) > 1.0


@pytest.mark.parametrize("scaled", [False, True])
def test_clip_and_step_do_not_wait(scaled: bool) -> None:
    model = mlp(torch.float16 if scaled else torch.bfloat16)
    optimizer = ghoffload.OffloadAdamW(model.parameters(), lr=1e-3, config=SMALL)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, enabled=scaled)
    scaler.scale(torch.ones((), device="cuda"))
    for step in range(3):
        fill_grads(model, step)
        if step == 0:
            optimizer.clip_grad_norm_(1.0, scaler=scaler)
            scaler.step(optimizer)
        else:
            torch.cuda.synchronize()
            torch.cuda._sleep(400_000_000)
            with no_sync():
                total = optimizer.clip_grad_norm_(1.0, scaler=scaler)
                scaler.step(optimizer)
            assert not torch.cuda.current_stream().query()
            expected = torch.nn.utils.get_total_norm([p.grad.float() for p in model.parameters()])  # type: ignore[union-attr]
            scale = 1024.0 if scaled else 1.0
            torch.testing.assert_close(total * scale, expected, rtol=1e-5, atol=0)
        scaler.update()


def test_a_bad_gradient_is_skipped_by_the_norms_own_flag() -> None:
    model = mlp(torch.float16)
    optimizer = ghoffload.OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    scaler.scale(torch.ones((), device="cuda"))
    fill_grads(model, 0)
    optimizer.clip_grad_norm_(1.0, scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    before = result(optimizer, list(model.parameters()))
    fill_grads(model, 1)
    next(iter(model.parameters())).grad[0, 0] = math.inf  # type: ignore[index]
    assert not optimizer.clip_grad_norm_(1.0, scaler=scaler).isfinite()
    scaler.step(optimizer)
    scaler.update()
    assert same_bits(result(optimizer, list(model.parameters())), before)
    assert scaler.get_scale() == 512.0


def test_clip_on_one_stream_and_step_on_another() -> None:
    plain, model = mlp(device="cpu"), mlp()
    reference = ghoffload.OffloadAdamW(plain.parameters(), lr=1e-2)
    optimizer = ghoffload.OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for step in range(4):
        fill_grads(plain, step)
        reference.clip_grad_norm_(0.5)
        reference.step()
        first.wait_stream(second)
        first.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(first):
            fill_grads(model, step)
            torch.cuda._sleep(1_000_000)
            optimizer.clip_grad_norm_(0.5)
        second.wait_stream(first)
        with torch.cuda.stream(second):
            torch.cuda._sleep(1_000_000)
            optimizer.step()
        optimizer.zero_grad()
        with torch.cuda.stream(first):  # who is given the factor's memory next
            torch.full((64,), 9.0, device="cuda")
        torch.cuda.synchronize()
    ours, theirs = (
        result(o, list(m.parameters())) for o, m in ((optimizer, model), (reference, plain))
    )
    assert same_bits(ours, theirs)
