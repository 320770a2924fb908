"""GPT shapes in plain PyTorch: LayerNorm, learned positions, GELU, a tied output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ghoffload.sweeping.loss import next_token_loss


@dataclass(frozen=True, kw_only=True)
class GPTShape:
    """Sizes of a model.

    Attributes:
        positions: the longest sequence.
    """

    hidden: int
    layers: int
    heads: int
    vocabulary: int = 50257
    positions: int = 2048


class GPT(nn.Module):
    """Maps tokens ``[batch, sequence + 1]`` to the mean loss of predicting the next.

    Attributes:
        layers: what may be recomputed or offloaded one by one.
        vocabulary: tokens are below it.
    """

    def __init__(self, shape: GPTShape, **factory: Any) -> None:
        super().__init__()
        self.vocabulary = shape.vocabulary
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden, **factory)
        self.positions = nn.Embedding(shape.positions, shape.hidden, **factory)
        self.layers = nn.ModuleList(_Layer(shape, **factory) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden, **factory)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        x = self.embedding(tokens[:, :-1]) + self.positions(at)
        for layer in self.layers:
            x = layer(x)
        return next_token_loss(F.linear(self.norm(x), self.embedding.weight), tokens)


class _Layer(nn.Module):
    def __init__(self, shape: GPTShape, **factory: Any) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(shape.hidden, **factory)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, **factory)
        self.out = nn.Linear(shape.hidden, shape.hidden, **factory)
        self.norm2 = nn.LayerNorm(shape.hidden, **factory)
        self.up = nn.Linear(shape.hidden, 4 * shape.hidden, **factory)
        self.down = nn.Linear(4 * shape.hidden, shape.hidden, **factory)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        mixed: Tensor = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + mixed
