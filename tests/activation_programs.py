"""Small forwards whose gradients are known: with activations offloaded they must be the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ghoffload
from ghoffload.activations.mover import mover_of, release
from ghoffload.machine import use_machine
from ghoffload.machine.virtual import VirtualMachine

SMALL: dict[str, Any] = {
    "min_offload_bytes": 64, "window_bytes": 4096, "ahead_bytes": 4096
}  # fmt: skip


class Block(nn.Module):
    """Attention on views of one product, a gated MLP, norms and two residuals."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.first(x)).chunk(3, dim=-1)
        )
        mixed = (q @ k.transpose(-1, -2) / 3).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Inplace(nn.Module):
    """Operations in place where autograd allows them, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 32))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x), inplace=True) * self.scale
        return self.second(F.dropout(y, 0.25)).sigmoid_()


class Convolutions(nn.Module):
    """Convolutions, batch norm, pooling; channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        image = x.reshape(-1, 3, 8, 8).to(memory_format=torch.channels_last)
        return self.layers(image)


class Tied(nn.Module):
    """Embedding and head share a weight; slices and expansions are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 16)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[..., :8].abs() * 40).long().clamp(max=47).reshape(-1, 8)
        h = self.block(self.embedding(tokens))
        h = h * h[:, :1].expand_as(h) + h[:, ::2].repeat_interleave(2, dim=1)
        return h @ self.embedding.weight.t()


class Checkpointed(nn.Module):
    """Blocks that are recomputed: only their inputs are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _sequence() -> Tensor:
    return torch.randn(2, 6, 16)


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "blocks": (lambda: nn.Sequential(*(Block() for _ in range(3))), _sequence),
    "in place": (Inplace, _sequence),
    "convolutions": (Convolutions, lambda: torch.randn(2, 192)),
    "tied": (Tied, _sequence),
    "checkpointed": (Checkpointed, _sequence),
}


def gradients(
    name: str,
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    *,
    steps: int = 2,
) -> list[Tensor]:
    """Outputs and gradients of a few steps; nothing is updated."""
    make, inputs = PROGRAMS[name]
    torch.manual_seed(3)
    model, found = make(), []
    for _ in range(steps):
        x = inputs().requires_grad_()
        with context():
            loss = model(x).float().square().mean()
        loss.backward()
        found += [loss.detach().clone(), x.grad, *(p.grad for p in model.parameters())]
        found = [t.clone() for t in found if t is not None]
        model.zero_grad()
    return found


@contextlib.contextmanager
def machine_of(**options: Any) -> Iterator[VirtualMachine]:
    """A virtual machine that ends with nothing left behind."""
    machine = VirtualMachine(**options)
    with use_machine(machine):
        yield machine
        assert mover_of(machine).slabs.used_bytes == 0
        release(machine)


def offloaded(name: str, *, steps: int = 2, **options: Any) -> list[Tensor]:
    """``gradients`` with everything offloaded, on the active machine."""
    return gradients(name, lambda: ghoffload.offload_activations(**(SMALL | options)), steps=steps)
