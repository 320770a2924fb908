"""Llama and Qwen shapes in plain PyTorch: RMSNorm, rotary positions, grouped keys, gated MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ghoffload.sweeping.loss import next_token_loss


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """Sizes of a model.

    Attributes:
        heads, kv_heads: of queries, and of keys and values.
        tied: whether the output's weights are the embedding's.
        biases: whether queries, keys and values have them, as in Qwen2.5.
    """

    hidden: int
    layers: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False
    biases: bool = False


class Llama(nn.Module):
    """Maps tokens ``[batch, sequence + 1]`` to the mean loss of predicting the next.

    Attributes:
        layers: what may be recomputed or offloaded one by one.
        vocabulary: tokens are below it.
    """

    def __init__(self, shape: LlamaShape, **factory: Any) -> None:
        super().__init__()
        self.vocabulary, self._head = shape.vocabulary, shape.hidden // shape.heads
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden, **factory)
        self.layers = nn.ModuleList(_Layer(shape, **factory) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5, **factory)
        self.output = nn.Linear(shape.hidden, shape.vocabulary, bias=False, **factory)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if shape.tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        cos, sin = self._rotary(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return next_token_loss(self.output(self.norm(x)), tokens)

    def _rotary(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rates = 10000.0 ** (-torch.arange(0, self._head, 2, device=x.device).float() / self._head)
        angles = torch.outer(torch.arange(x.shape[1], device=x.device).float(), rates)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class _Layer(nn.Module):
    def __init__(self, shape: LlamaShape, **factory: Any) -> None:
        super().__init__()
        self.head = shape.hidden // shape.heads
        keys, biases = shape.kv_heads * self.head, shape.biases
        self.norm1 = nn.RMSNorm(shape.hidden, eps=1e-5, **factory)
        self.query = nn.Linear(shape.hidden, shape.hidden, bias=biases, **factory)
        self.key = nn.Linear(shape.hidden, keys, bias=biases, **factory)
        self.value = nn.Linear(shape.hidden, keys, bias=biases, **factory)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False, **factory)
        self.norm2 = nn.RMSNorm(shape.hidden, eps=1e-5, **factory)
        self.gate = nn.Linear(shape.hidden, shape.feed_forward, bias=False, **factory)
        self.up = nn.Linear(shape.hidden, shape.feed_forward, bias=False, **factory)
        self.down = nn.Linear(shape.feed_forward, shape.hidden, bias=False, **factory)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.out(self._attention(self.norm1(x), cos, sin))
        y = self.norm2(x)
        mixed: Tensor = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + mixed

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(
            _rotated(query, cos, sin),
            _rotated(key, cos, sin),
            value,
            is_causal=True,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return y.transpose(1, 2).flatten(2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
