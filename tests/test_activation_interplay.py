"""offload_activations beside what people use with it: the bits are those without."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from activation_programs import SMALL, Block, machine_of
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import ghoffload
from ghoffload.activations.mover import release
from ghoffload.check.programs import same_bits


def offload(**more: Any) -> ghoffload.offload_activations:
    return ghoffload.offload_activations(**(SMALL | more))


def blocks() -> nn.ModuleList:
    torch.manual_seed(6)
    return nn.ModuleList(Block() for _ in range(4))


def _keeps_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    if operator in products:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def plain(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def selective(layers: nn.ModuleList, x: Tensor) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, _keeps_products)
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
    return x


def reentrant(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=True)
    return x


def in_segments(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return checkpoint_sequential(list(layers), 2, x, use_reentrant=False)


def offloads_within(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """A context within what is recomputed: it is entered again then."""

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        with offload():
            return layer(x)

    for layer in layers:
        x = checkpoint(run, layer, x, use_reentrant=False)
    return x


def gradients(forward: Any, context: Any, steps: int = 3) -> list[Tensor]:
    layers, found = blocks(), []
    for _ in range(steps):
        layers.zero_grad()
        x = torch.randn(2, 8, 16, requires_grad=True)
        with context():
            loss = forward(layers, x).square().mean()
        loss.backward()
        found += [loss.detach(), x.grad, *(p.grad for p in layers.parameters())]
        found = [t.clone() for t in found if t is not None]
        del x, loss
    return found


@pytest.mark.parametrize("forward", [selective, reentrant, in_segments, offloads_within])
def test_checkpointing_of_every_kind(forward: Any) -> None:
    expected = gradients(plain, contextlib.nullcontext)
    for order, seed in (("latest", 0), ("adversarial", 1), ("adversarial", 2)):
        with machine_of(order=order, seed=seed, check=True) as machine:
            assert same_bits(gradients(forward, offload), expected)
            assert machine.traffic.d2h_bytes > 0


def train(context: Any, *, swapped: bool) -> list[Tensor]:
    """Two micro-batches in flight, and an optimizer whose step goes on under the next forward."""
    torch.manual_seed(3)
    model = nn.Sequential(*(Block() for _ in range(3)))
    optimizer = ghoffload.OffloadAdamW(model.parameters(), lr=1e-2, config={"bucket_bytes": 4096})
    for _ in range(4):
        losses = []
        for _ in range(2):
            with context():
                losses.append(model(torch.randn(2, 8, 16)).square().mean())
        for loss in reversed(losses) if swapped else losses:
            loss.backward()
        del losses, loss
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("more", [{}, {"budget_bytes": 200_000}])
def test_micro_batches_in_flight_beside_an_optimizer(swapped: bool, more: dict[str, Any]) -> None:
    with machine_of(hbm_bytes=1 << 30):
        expected = train(contextlib.nullcontext, swapped=swapped)
    for seed in range(3):
        with machine_of(order="adversarial", seed=seed, check=True, hbm_bytes=1 << 30):
            assert same_bits(train(lambda: offload(**more), swapped=swapped), expected)


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(context: Any, *, reshard: bool) -> list[Tensor]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(6)
    model = nn.Sequential(*(Block() for _ in range(3)))
    for layer in model:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    found = []
    for _ in range(3):
        model.zero_grad()
        with context():
            loss = model(torch.randn(2, 8, 16)).square().mean()
        loss.backward()
        found += [loss.detach().clone()]
        found += [p.grad.full_tensor().clone() for p in model.parameters() if p.grad is not None]
        del loss
    return found


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.skipif(os.name != "posix", reason="gloo over a local port")
@pytest.mark.parametrize("reshard", [True, False])
def test_fully_sharded_models(reshard: bool) -> None:
    with one_process():
        expected = sharded(contextlib.nullcontext, reshard=reshard)
        machine = ghoffload.VirtualMachine(order="latest", check=True)
        found = sharded(lambda: offload(machine=machine), reshard=reshard)
    assert same_bits(found, expected)
    assert machine.traffic.d2h_bytes > 0
    machine.synchronize_all()
    release(machine)
