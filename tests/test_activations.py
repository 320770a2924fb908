"""offload_activations: the same bits in any order, needed waits, memory that comes back."""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import Any

import pytest
import torch
from activation_programs import PROGRAMS, SMALL, gradients, machine_of, offloaded
from torch import Tensor, nn

import ghoffload
from ghoffload.activations.mover import mover_of, release
from ghoffload.check.programs import same_bits
from ghoffload.errors import OrderingError
from ghoffload.machine.virtual import VirtualMachine
from ghoffload.transfer import link


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("order", ["earliest", "latest"])
def test_gradients_are_the_same(name: str, order: str) -> None:
    expected = gradients(name)
    with machine_of(order=order, check=True) as machine:
        assert same_bits(offloaded(name), expected)
        assert machine.traffic.d2h_bytes > 0
        assert name == "checkpointed" or machine.traffic.h2d_bytes > 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_any_order_the_bits_are_the_same(name: str) -> None:
    expected = gradients(name)
    for seed in range(40):
        with machine_of(order="adversarial", seed=seed, check=True):
            assert same_bits(offloaded(name), expected), seed


LABELS = (
    "write-back waits for its source",
    "write-back keeps its order",
    "forward waits for an offload",
    "reload waits for a free buffer",
    "backward waits for a reload",
)


def broken(label: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a run without these waits is caught, or differs."""
    expected = gradients("blocks")
    unraisable: list[object] = []  # errors in finalizers
    monkeypatch.setattr(link, "CHUNK_BYTES", 512)  # tensors in several chunks
    monkeypatch.setattr(sys, "unraisablehook", lambda found: unraisable.append(found.exc_type))
    machine = VirtualMachine(check=True, order="latest")
    machine.dropped_waits.add(label)
    try:
        with ghoffload.use_machine(machine):
            differs = not same_bits(offloaded("blocks"), expected)
    except OrderingError:
        return True
    finally:
        assert machine.labels[label] > 0, f"{label} was never waited for"
        machine.dropped_waits.clear()
        machine._checker = None  # it has seen enough
        release(machine)
    return differs or OrderingError in unraisable


@pytest.mark.parametrize("label", LABELS)
def test_each_wait_is_needed(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert broken(label, monkeypatch)


def test_no_host_memory_is_taken_after_the_first_steps() -> None:
    with machine_of() as machine:
        offloaded("blocks", steps=2)
        slabs = mover_of(machine).slabs
        before = slabs.allocations
        offloaded("blocks", steps=20)
        assert slabs.allocations == before > 0


def test_memory_is_flat_over_200_steps() -> None:
    with machine_of(hbm_bytes=1 << 30) as machine:
        model = PROGRAMS["blocks"][0]()
        readings = []
        for _ in range(200):
            with ghoffload.offload_activations(**SMALL):
                loss = model(torch.randn(2, 6, 16)).square().mean()
            loss.backward()
            del loss
            readings.append((machine.memory_allocated(), mover_of(machine).slabs.reserved_bytes))
        assert len(set(readings[5:])) == 1


def peak(context: Any, layers: int = 8) -> int:
    """Peak of the virtual HBM in a deep MLP, where every layer saves two tensors of 64 KiB."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(layers)))
    with machine_of(hbm_bytes=1 << 30) as machine:
        for _ in range(3):
            with context():
                loss = model(torch.randn(256, 64)).sum()
            loss.backward()
        return machine.memory_peak()


def test_the_peak_is_lower_by_what_is_away() -> None:
    def offload() -> Any:
        return ghoffload.offload_activations(
            min_offload_bytes=1024, window_bytes=1 << 16, ahead_bytes=1 << 16
        )

    without, with_it = peak(contextlib.nullcontext), peak(offload)
    saved = 8 * 2 * (1 << 16)
    assert without - with_it > saved - 6 * (1 << 16)


def square_of_changed(size: int) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    y = x * 2
    z = y[:size] * y[:size]
    y.add_(1)
    z.sum().backward()


@pytest.mark.parametrize("size", [64, 1])
def test_a_saved_tensor_that_was_changed_in_place_still_raises(size: int) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square_of_changed(size)
    with machine_of():  # the smaller one stays in HBM
        with (
            ghoffload.offload_activations(min_offload_bytes=1024),
            pytest.raises(RuntimeError, match="changed in place"),
        ):
            square_of_changed(size)
        gc.collect()


def test_retained_graphs_and_second_derivatives() -> None:
    def twice() -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.randn(32, 32, requires_grad=True)
        y = (x.sin() * x).exp().sum()
        first = torch.autograd.grad(y, x, retain_graph=True)[0]
        second = torch.autograd.grad(y, x, retain_graph=True)[0]
        (third,) = torch.autograd.grad(y, x, create_graph=True)
        return [first, second, third.detach(), torch.autograd.grad(third.sum(), x)[0]]

    expected = twice()
    for seed in range(20):
        with (
            machine_of(order="adversarial", seed=seed, check=True),
            ghoffload.offload_activations(**SMALL),
        ):
            assert same_bits(twice(), expected)


def test_a_dropped_graph_and_a_failed_forward_leave_nothing() -> None:
    expected = gradients("blocks")
    for seed in range(20):
        with machine_of(order="adversarial", seed=seed, check=True) as machine:
            block = PROGRAMS["blocks"][0]()
            with ghoffload.offload_activations(**SMALL):
                out = block(torch.randn(2, 6, 16))
            del out
            with (
                contextlib.suppress(ZeroDivisionError),
                ghoffload.offload_activations(**SMALL),
            ):
                block(torch.randn(2, 6, 16)).sum() / (1 // 0)
            gc.collect()
            assert mover_of(machine).slabs.used_bytes == 0
            assert same_bits(offloaded("blocks"), expected)


def test_micro_batches_in_flight() -> None:
    def several(context: Any) -> list[Tensor]:
        torch.manual_seed(2)
        block = PROGRAMS["blocks"][0]()
        losses = []
        for _ in range(3):
            with context():
                losses.append(block(torch.randn(2, 6, 16)).square().mean())
        for loss in (losses[0], losses[2], losses[1]):
            loss.backward()
        return [p.grad for p in block.parameters()]

    expected = several(contextlib.nullcontext)
    for seed in range(20):
        with machine_of(order="adversarial", seed=seed, check=True):
            assert same_bits(several(lambda: ghoffload.offload_activations(**SMALL)), expected)


def test_nested_contexts_and_decorators() -> None:
    with machine_of() as machine:
        calls = []

        def nothing(saved: ghoffload.activations.Saved) -> str:
            calls.append(saved)
            return "keep"

        @ghoffload.offload_activations(**SMALL)
        def forward(x: Tensor, depth: int = 2) -> Tensor:
            y = (x * 2).sin()
            return y if depth == 0 else forward(y, depth - 1)

        x = torch.randn(64, 64, requires_grad=True)
        with ghoffload.offload_activations(policy=nothing, **SMALL):
            x.sin().cos().sum().backward()
            moved = machine.traffic.d2h_bytes
            assert moved == 0
            assert [saved.operator for saved in calls] == ["SinBackward0"]
            forward(x).sum().backward()
        assert machine.traffic.d2h_bytes > 0
