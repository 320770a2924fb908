"""offload_activations on a real GPU: bits, memory, no waiting on the host, capture."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from activation_programs import PROGRAMS, Block
from torch import Tensor, nn

import ghoffload
from ghoffload.activations.mover import mover_of, release
from ghoffload.check.programs import same_bits
from ghoffload.machine.cuda import CudaMachine

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SMALL: dict[str, Any] = {"min_offload_bytes": 1024, "window_bytes": 4 * MIB, "ahead_bytes": 4 * MIB}


@pytest.fixture
def machine() -> Iterator[CudaMachine]:
    machine = CudaMachine.of("cuda")
    yield machine
    gc.collect()
    assert mover_of(machine).slabs.used_bytes == 0
    release(machine)


class Sines(nn.Module):
    """Saves one tensor a layer, beside its input."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.layers):
            x = x.sin()
        return x.sum()


def steps(
    make: Callable[[], nn.Module], inputs: Callable[[], Tensor], context: Any, count: int = 3
) -> list[Tensor]:
    torch.manual_seed(3)
    model, found = make().cuda(), []
    for _ in range(count):
        x = inputs().cuda().requires_grad_()
        torch.manual_seed(4)
        with context():
            loss = model(x).float().square().mean()
        loss.backward()
        found += [loss.detach(), x.grad, *(p.grad for p in model.parameters())]
        found = [t.clone() for t in found if t is not None]
        model.zero_grad()
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_the_same(machine: CudaMachine, name: str) -> None:
    make, inputs = PROGRAMS[name]
    torch.backends.cudnn.deterministic = True
    try:
        expected = steps(make, inputs, contextlib.nullcontext)
        moved = machine.traffic.d2h_bytes
        small = SMALL | {"min_offload_bytes": 64}
        found = steps(make, inputs, lambda: ghoffload.offload_activations(**small))
    finally:
        torch.backends.cudnn.deterministic = False
    assert same_bits([t.cpu() for t in found], [t.cpu() for t in expected])
    assert machine.traffic.d2h_bytes > moved


def wide() -> nn.Module:
    return nn.Sequential(*(Block(512, 8) for _ in range(6))).bfloat16()


def batch() -> Tensor:
    return torch.randn(8, 512, 512).bfloat16()


@pytest.mark.parametrize("budget", [None, 0.3, 0.6])
def test_megabytes_that_overlap_have_the_same_bits(
    machine: CudaMachine, budget: float | None
) -> None:
    expected = steps(wide, batch, contextlib.nullcontext)
    torch.cuda.reset_peak_memory_stats()
    steps(wide, batch, contextlib.nullcontext, 1)
    peak = torch.cuda.max_memory_allocated()
    more = {} if budget is None else {"budget_bytes": int(budget * peak)}
    found = steps(wide, batch, lambda: ghoffload.offload_activations(**(SMALL | more)))
    assert same_bits([t.cpu() for t in found], [t.cpu() for t in expected])


@pytest.mark.parametrize("share", [0.4, 0.7, 1.2])
def test_blocks_have_the_same_bits_within_the_budget(machine: CudaMachine, share: float) -> None:
    def run(context: Any) -> tuple[list[Tensor], list[int]]:
        torch.manual_seed(3)
        model, found, peaks = wide().cuda(), [], []
        for _ in range(7):
            x = batch().cuda().requires_grad_()
            with context(model):
                loss = model(x).float().square().mean()
            loss.backward()
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            del x, loss
        return [t.cpu() for t in found], peaks

    expected, peaks = run(lambda model: contextlib.nullcontext())
    budget = int(share * peaks[-1])

    def context(model: nn.Sequential) -> Any:
        return ghoffload.offload_activations(blocks=model, budget_bytes=budget, **SMALL)

    found, under = run(context)
    assert same_bits(found, expected)
    (learning,) = mover_of(machine).blocks.values()
    assert learning.choice is not None
    if learning.choice.fits:
        assert max(under[4:]) <= 1.02 * budget, (under, budget, learning.choice)


def test_the_peak_is_lower_by_what_is_away(machine: CudaMachine) -> None:
    layers, size = 32, 16 * MIB

    def peak(context: Any) -> int:
        for _ in range(2):
            x = torch.randn(size // 4, device="cuda", requires_grad=True)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with context():
                loss = Sines(layers)(x)
            loss.backward()
            torch.cuda.synchronize()
            found = torch.cuda.max_memory_allocated() - before
            del x, loss
        return found

    small = {"window_bytes": 2 * size, "ahead_bytes": 2 * size}
    without = peak(contextlib.nullcontext)
    with_it = peak(lambda: ghoffload.offload_activations(**small))
    assert without >= layers * size
    assert with_it <= 10 * size


def test_nothing_grows_and_nothing_waits(machine: CudaMachine) -> None:
    model = wide().cuda()
    x = batch().cuda()
    readings = []

    def step() -> None:
        with ghoffload.offload_activations(**SMALL):
            loss = model(x).float().square().mean()
        loss.backward()
        model.zero_grad(set_to_none=True)

    for _ in range(5):
        step()
    slabs = mover_of(machine).slabs
    made = slabs.allocations
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            step()
            readings.append((torch.cuda.memory_allocated(), slabs.reserved_bytes))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(set(readings)) == 1
    assert slabs.allocations == made > 0


def test_a_small_copy_does_not_wait_for_the_queue(machine: CudaMachine) -> None:
    layers, size = 48, 64 * MIB
    x = torch.randn(size // 4, device="cuda", requires_grad=True)
    small = torch.ones(1, device="cuda")
    other = torch.cuda.Stream()

    def forward() -> Tensor:
        with ghoffload.offload_activations(window_bytes=4 << 30):
            return Sines(layers)(x)

    loss = forward()  # host memory is taken
    del loss
    torch.cuda.synchronize()
    start = time.perf_counter()
    loss = forward()
    with torch.cuda.stream(other):
        small.item()
    item = time.perf_counter() - start
    torch.cuda.synchronize()
    everything = time.perf_counter() - start
    del loss
    assert item < everything / 2


def test_frozen_weights_under_autocast_stay(machine: CudaMachine) -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).cuda()
    for layer in (model[0], model[2]):
        layer.requires_grad_(False)
    x = torch.randn(512, 1024, device="cuda", requires_grad=True)
    moved = []
    for known in (None, model):
        before = machine.traffic.d2h_bytes
        with (
            ghoffload.offload_activations(model=known, **SMALL),
            torch.autocast("cuda", dtype=torch.bfloat16),
        ):
            loss = model(x).float().sum()
        loss.backward()
        moved.append(machine.traffic.d2h_bytes - before)
        del loss
        x.grad = None
    assert moved[0] - moved[1] == 2 * 1024 * 1024 * 2


def test_backward_on_another_stream(machine: CudaMachine) -> None:
    def run(context: Any, stream: torch.cuda.Stream) -> Tensor:
        x = torch.linspace(0, 1, 4 * MIB, device="cuda").requires_grad_()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            with context():
                loss = Sines(12)(x)
            loss.backward()
        torch.cuda.current_stream().wait_stream(stream)
        assert x.grad is not None
        return x.grad.cpu()

    expected = run(contextlib.nullcontext, torch.cuda.Stream())
    for _ in range(3):
        found = run(
            lambda: ghoffload.offload_activations(**(SMALL | {"window_bytes": 0})),
            torch.cuda.Stream(),
        )
        assert torch.equal(found, expected)


def test_captured_forwards_pass_through(machine: CudaMachine) -> None:
    x = torch.randn(4 * MIB, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        Sines(4)(x).backward()
    torch.cuda.current_stream().wait_stream(side)
    assert x.grad is not None
    expected = x.grad.clone()
    x.grad = None
    copies = machine.traffic.copies
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with ghoffload.offload_activations(**SMALL):
            loss = Sines(4)(x)
        loss.backward()
    assert machine.traffic.copies == copies
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(x.grad, expected)


def test_compiled_models_have_the_same_bits(machine: CudaMachine) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(2048, 512, device="cuda")
    compiled(x).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    before = machine.traffic.d2h_bytes
    with ghoffload.offload_activations(**SMALL):
        loss = compiled(x).square().mean()
    loss.backward()
    assert same_bits([p.grad.cpu() for p in model.parameters()], [t.cpu() for t in expected])
    assert machine.traffic.d2h_bytes > before
    del loss


def test_fp8_is_near(machine: CudaMachine) -> None:
    expected = steps(wide, batch, contextlib.nullcontext, 1)
    before = machine.traffic.d2h_bytes
    steps(wide, batch, lambda: ghoffload.offload_activations(**SMALL), 1)
    plain = machine.traffic.d2h_bytes - before
    found = steps(wide, batch, lambda: ghoffload.offload_activations(compress="fp8", **SMALL), 1)
    assert machine.traffic.d2h_bytes - before - plain < 0.6 * plain
    for one, other in zip(found[1:], expected[1:], strict=True):
        error = (one.float() - other.float()).norm() / other.float().norm()
        assert error < 0.1
