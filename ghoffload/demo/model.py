"""The model of the demo: a GPT on bytes, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


class Linear(nn.Linear):
    """A linear layer without bias whose weight may be narrower than what it computes in."""

    def __init__(self, inputs: int, outputs: int, *, std: float) -> None:
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.RMSNorm):
    """RMSNorm whose weight may be narrower than what it computes in."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class Block(nn.Module):
    """Causal attention and a feed-forward, each behind a norm and beside a residual."""

    def __init__(self, hidden: int, heads: int, *, residual: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = Norm(hidden, eps=1e-5)
        self.qkv = Linear(hidden, 3 * hidden, std=hidden**-0.5)
        self.out = Linear(hidden, hidden, std=residual * hidden**-0.5)
        self.norm2 = Norm(hidden, eps=1e-5)
        self.up = Linear(hidden, 4 * hidden, std=hidden**-0.5)
        self.down = Linear(4 * hidden, hidden, std=residual * (4 * hidden) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.down(F.gelu(self.up(self.norm2(x))))
        return x + y


class GPT(nn.Module):
    """Maps tokens to the mean loss of predicting each from those before it.

    Args:
        hidden, layers, heads: its shape.
        context: longest sequence.
        compute: dtype of the activations. Weights are cast to it where they are used, so bf16
            weights also train where bf16 arithmetic is slow.
    """

    def __init__(
        self, *, hidden: int, layers: int, heads: int, context: int, compute: torch.dtype
    ) -> None:
        super().__init__()
        self.compute = compute
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.position = nn.Embedding(context, hidden)
        residual = (2 * layers) ** -0.5  # so that the sum of all branches is about one
        self.blocks = nn.ModuleList(Block(hidden, heads, residual=residual) for _ in range(layers))
        self.norm = Norm(hidden, eps=1e-5)
        self.output = Linear(hidden, VOCABULARY, std=0.02)
        nn.init.normal_(self.embedding.weight, std=1.0)
        nn.init.normal_(self.position.weight, std=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss (0-dim, fp32) of ``tokens``, int64 ``[batch, sequence + 1]``."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embedding(inputs) + self.position.weight[: inputs.shape[1]]
        x = x.to(self.compute)
        for block in self.blocks:
            x = block(x)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
