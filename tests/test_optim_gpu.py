"""The optimizers on a real GPU: bits, streams, memory, and no waiting on the host."""

from __future__ import annotations

import copy
import gc
import io
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import ghoffload
from ghoffload.check.programs import result, same_bits, synthetic
from ghoffload.machine.cuda import CudaMachine
from ghoffload.memory import ledger

pytestmark = pytest.mark.gpu

SMALL = {"bucket_bytes": 1 << 20, "staging_buffers": 2}


def mlp(dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 64)).to(device, dtype)


def fill_grads(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        grad = torch.randn(parameter.shape, generator=generator)
        parameter.grad = grad.to(parameter.device, parameter.dtype)


@contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("step_device", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("master", ["auto", "none"])
def test_the_bits_are_the_cpus(step_device: str, dtype: torch.dtype, master: str) -> None:
    config = {"bucket_bytes": 20_000, "step_device": step_device, "master": master}
    expected = synthetic("cpu", {"master": master}, dtype=dtype)
    assert same_bits(synthetic("cuda", config, dtype=dtype), expected)


def test_hbm_resident_and_mixed_state_give_the_same_bits() -> None:
    expected = synthetic("cpu", {})
    reached = CudaMachine.of("cuda").memory_kinds
    for config in (
        {"memory_kind": "device"},
        {"transfer": "kernel", "bucket_bytes": 16384},
        {"transfer": "kernel", "hbm_state_bytes": 200_000},
        {"transfer": "kernel", "ctas": 3},
        *({"memory_kind": kind} for kind in ("managed", "system") if kind in reached),
        {"hbm_state_bytes": 200_000, "bucket_bytes": 16384},
        {"min_offload_bytes": 5_000, "bucket_bytes": 16384},
        {"pin_memory": False, "bucket_bytes": 16384},
    ):
        assert same_bits(synthetic("cuda", config), expected), config


def test_step_neither_waits_nor_allocates() -> None:
    model = mlp()
    optimizer = ghoffload.OffloadAdamW(model.parameters(), lr=1e-3, config=SMALL)
    inputs = torch.randn(32, 256, device="cuda", dtype=torch.bfloat16)
    for step in range(6):
        optimizer.zero_grad()
        model(inputs).float().square().mean().backward()
        if step >= 1:
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            with no_sync():
                optimizer.step()
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        else:
            optimizer.step()


def test_step_returns_while_the_gpu_is_still_busy() -> None:
    model = mlp()
    optimizer = ghoffload.OffloadAdamW(model.parameters(), config=SMALL)
    fill_grads(model, 0)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    optimizer.step()
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


def test_another_current_stream() -> None:
    plain = mlp(device="cpu")
    reference = ghoffload.OffloadAdamW(plain.parameters(), lr=1e-2)
    model = mlp()
    optimizer = ghoffload.OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL)
    streams = [torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.Stream()]
    previous = torch.cuda.current_stream()
    for step in range(6):
        stream = streams[step % 3]
        stream.wait_stream(previous)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            fill_grads(model, step)
            optimizer.step()
        previous = stream
        fill_grads(plain, step)
        reference.step()
    torch.cuda.current_stream().wait_stream(previous)
    ours, theirs = (
        result(o, list(m.parameters())) for o, m in ((optimizer, model), (reference, plain))
    )
    assert same_bits(ours, theirs)


def test_grad_scaler_skips_on_the_device() -> None:
    model = mlp(torch.float16)
    optimizer = ghoffload.OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    scaler.scale(torch.ones((), device="cuda"))  # the scaler makes its tensors here
    fill_grads(model, 0)
    scaler.step(optimizer)
    scaler.update()
    before = result(optimizer, list(model.parameters()))
    fill_grads(model, 1)
    next(iter(model.parameters())).grad[0, 0] = float("inf")  # type: ignore[index]
    with no_sync():
        scaler.step(optimizer)
    scaler.update()
    assert same_bits(result(optimizer, list(model.parameters())), before)
    assert scaler.get_scale() == 512.0
    fill_grads(model, 2)
    scaler.step(optimizer)
    after = optimizer.state_dict()["state"]
    assert {entries["step"].item() for entries in after.values()} == {2.0}
    assert not same_bits(result(optimizer, list(model.parameters())), before)


def test_scaled_gradients_are_unscaled() -> None:
    models = [mlp(torch.float16), mlp(torch.float16)]
    plain, scaled = (ghoffload.OffloadAdamW(m.parameters(), lr=1e-2, config=SMALL) for m in models)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    scaler.scale(torch.ones((), device="cuda"))
    for model in models:
        fill_grads(model, 0)
    for parameter in models[1].parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(256)
    plain.step()
    scaler.step(scaled)
    assert same_bits(
        result(plain, list(models[0].parameters())), result(scaled, list(models[1].parameters()))
    )


def test_learning_rate_and_betas_on_the_device() -> None:
    lr = torch.tensor(1e-2, device="cuda")
    betas = (torch.tensor(0.9, device="cuda"), torch.tensor(0.99, device="cuda"))
    models = [mlp(), mlp()]
    ours = ghoffload.OffloadAdamW(models[0].parameters(), lr=lr, betas=betas, config=SMALL)
    floats = ghoffload.OffloadAdamW(
        models[1].parameters(),
        lr=lr.item(),
        betas=(betas[0].item(), betas[1].item()),
        config=SMALL,
    )
    for step in range(4):
        for model in models:
            fill_grads(model, step)
        with no_sync():
            ours.step()
        floats.step()
        lr.mul_(0.5)
        floats.param_groups[0]["lr"] *= 0.5
    assert same_bits(
        result(ours, list(models[0].parameters())), result(floats, list(models[1].parameters()))
    )


def test_layouts_other_than_dense() -> None:
    def build(device: str) -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(3)
        base = torch.randn(40, 64, generator=generator).to(device)
        image = torch.randn(8, 4, 3, 3, generator=generator).to(device)
        return [
            nn.Parameter(base[:, ::2]),
            nn.Parameter(base[:, :32].clone().t()),
            nn.Parameter(image.to(memory_format=torch.channels_last)),
        ]

    def run(device: str) -> list[Tensor]:
        parameters = build(device)
        optimizer = ghoffload.OffloadAdamW(parameters, lr=1e-2, config={"bucket_bytes": 8192})
        generator = torch.Generator().manual_seed(4)
        for step in range(3):
            for p in parameters:
                grad = torch.randn(p.shape, generator=generator).to(device)
                p.grad = grad.mT.contiguous().mT if step % 2 else grad
            optimizer.step()
        return result(optimizer, parameters)

    assert same_bits(run("cuda"), run("cpu"))


def test_wrapping_takes_over_a_training_run() -> None:
    model = mlp(torch.float32)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    fill_grads(model, 0)
    inner.step()
    moments = {p: s["exp_avg"].cpu() for p, s in inner.state.items()}
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    outer = ghoffload.OffloadAdam(inner, config=SMALL)
    for parameter, moment in moments.items():
        assert torch.equal(outer.state[parameter]["exp_avg"], moment)
        assert outer.state[parameter]["step"].item() == 1
    fill_grads(model, 1)
    outer.step()
    scheduler.step()
    assert outer.param_groups[0]["lr"] == 5e-3
    with pytest.raises(RuntimeError, match="wrapped"):
        inner.step()


def test_resume_and_copies_give_the_same_bits() -> None:
    def continued(optimizer: ghoffload.OffloadAdamW, model: nn.Module) -> list[Tensor]:
        for step in range(3, 6):
            fill_grads(model, step)
            optimizer.step()
        return result(optimizer, list(model.parameters()))

    model = mlp()
    optimizer = ghoffload.OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL)
    for step in range(3):
        fill_grads(model, step)
        optimizer.step()
    saved = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict(native=True)), saved)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    expected = continued(optimizer, model)
    assert same_bits(continued(twin_optimizer, twin), expected)
    saved.seek(0)
    weights, state = torch.load(saved, weights_only=True)
    other = mlp()
    other.load_state_dict(weights)
    resumed = ghoffload.OffloadAdamW(other.parameters(), lr=1.0, config=SMALL)
    allocated = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    resumed.load_state_dict(state)
    assert torch.cuda.max_memory_allocated() - allocated < 4096  # no copy of the state in HBM
    assert same_bits(continued(resumed, other), expected)


def test_state_read_right_after_a_step_is_complete() -> None:
    model = mlp()
    optimizer = ghoffload.OffloadAdamW(model.parameters(), lr=1e-2, config=SMALL)
    fill_grads(model, 0)
    torch.cuda._sleep(200_000_000)
    optimizer.step()
    for parameter in model.parameters():
        grad = parameter.grad
        assert grad is not None
        expected = (1 - torch.tensor(0.9, dtype=torch.float64)).float() * grad.cpu().float()
        torch.testing.assert_close(
            optimizer.state[parameter]["exp_avg"], expected, rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("step_device", ["cuda", "cpu"])
def test_everything_is_freed(step_device: str) -> None:
    def cycle() -> None:
        model = mlp()
        config = SMALL | {"step_device": step_device}
        optimizer = ghoffload.OffloadAdamW(model.parameters(), config=config)
        for step in range(2):
            fill_grads(model, step)
            optimizer.step()

    cycle()
    gc.collect()
    torch.cuda.synchronize()
    allocated, host = torch.cuda.memory_allocated(), ledger.total()
    for _ in range(5):
        cycle()
        gc.collect()
    torch.cuda.synchronize()
    assert ledger.total() == host
    assert torch.cuda.memory_allocated() == allocated


def test_staging_that_does_not_fit_leaves_nothing_behind() -> None:
    # In a process of its own: what other tests left in torch's cache would be room.
    script = """
        import gc
        import torch
        import ghoffload
        from ghoffload.memory import ledger
        parameter = torch.nn.Parameter(torch.zeros(1 << 28, device="cuda", dtype=torch.bfloat16))
        host, allocated = ledger.total(), torch.cuda.memory_allocated()
        room = torch.cuda.memory_reserved() + (400 << 20)
        torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
        config = {"bucket_bytes": 600 << 20, "transfer": "copy_engine"}
        try:
            ghoffload.OffloadAdamW([parameter], config=config)
        except torch.OutOfMemoryError:
            print("refused")
        torch.cuda.set_per_process_memory_fraction(1.0)
        gc.collect()
        print(ledger.total() - host, torch.cuda.memory_allocated() - allocated)
        ghoffload.OffloadAdamW([parameter])
        print("made")
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert run.stdout.splitlines() == ["refused", "0 0", "made"], run.stdout + run.stderr


def test_parameters_on_another_gpu_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(0):
        found = synthetic("cuda:1", {"bucket_bytes": 16384})
        hosted = synthetic("cuda:1", {"bucket_bytes": 16384, "step_device": "cpu"})
    expected = synthetic("cpu", {})
    assert same_bits(found, expected)
    assert same_bits(hosted, expected)


def test_two_optimizers_on_one_model() -> None:
    model = mlp()
    first, second = model[0], model[2]  # type: ignore[index]
    one = ghoffload.OffloadAdamW(first.parameters(), lr=1e-2, config=SMALL)
    two = ghoffload.OffloadAdam(second.parameters(), lr=1e-3, config=SMALL)
    for step in range(3):
        fill_grads(model, step)
        one.step()
        two.step()
    assert len(one.state) == len(two.state) == 2
