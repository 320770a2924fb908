"""The model the benchmark trains: a Llama shape in plain PyTorch, about 1.1 billion parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama: the defaults have 1,100,048,384 parameters."""

    hidden: int = 2048
    layers: int = 22
    feed_forward: int = 5632
    vocabulary: int = 32000
    heads: int = 32
    kv_heads: int = 4


SHAPES = {
    "1.1b": Shape(),
    "tiny": Shape(hidden=64, layers=2, feed_forward=160, vocabulary=256, heads=4, kv_heads=2),
}


class Attention(nn.Module):
    """Causal attention with grouped keys and values and rotary positions."""

    def __init__(self, shape: Shape, **factory: Any) -> None:
        super().__init__()
        self.head = shape.hidden // shape.heads
        keys = shape.kv_heads * self.head
        self.q = nn.Linear(shape.hidden, shape.hidden, bias=False, **factory)
        self.k = nn.Linear(shape.hidden, keys, bias=False, **factory)
        self.v = nn.Linear(shape.hidden, keys, bias=False, **factory)
        self.o = nn.Linear(shape.hidden, shape.hidden, bias=False, **factory)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(
            _rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a gated feed-forward, each behind a norm and beside a residual."""

    def __init__(self, shape: Shape, **factory: Any) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(shape.hidden, eps=1e-5, **factory)
        self.attention = Attention(shape, **factory)
        self.norm2 = nn.RMSNorm(shape.hidden, eps=1e-5, **factory)
        self.gate = nn.Linear(shape.hidden, shape.feed_forward, bias=False, **factory)
        self.up = nn.Linear(shape.hidden, shape.feed_forward, bias=False, **factory)
        self.down = nn.Linear(shape.feed_forward, shape.hidden, bias=False, **factory)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Maps tokens to the loss of predicting each from those before it.

    Attributes:
        given: gradients, one a parameter. While set, ``forward`` computes nothing: it returns a
            loss whose backward hands these over, through the same hooks as any other gradient.
    """

    def __init__(self, shape: Shape, **factory: Any) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden, **factory)
        self.blocks = nn.ModuleList(Block(shape, **factory) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5, **factory)
        self.output = nn.Linear(shape.hidden, shape.vocabulary, bias=False, **factory)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.given: list[Tensor] | None = None
        self._angles: tuple[int, Tensor, Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean loss of ``tokens`` ``[batch, sequence + 1]``, int64."""
        if self.given is not None:
            return _HandOver.apply(self.given, *self.parameters())
        x = self.embedding(tokens[:, :-1])
        cos, sin = self._rotary(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def _rotary(self, x: Tensor) -> tuple[Tensor, Tensor]:
        length, head = x.shape[1], self.shape.hidden // self.shape.heads
        if self._angles is None or self._angles[0] != length:
            rates = 10000.0 ** (-torch.arange(0, head, 2, device=x.device).float() / head)
            angles = torch.outer(torch.arange(length, device=x.device).float(), rates)
            self._angles = length, angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return self._angles[1:]


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.gradients


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
