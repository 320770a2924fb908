"""The two optimizers of the demo, behind the same three methods."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ghoffload

HYPERPARAMETERS: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Held(NamedTuple):
    """Bytes of one thing in one memory kind."""

    what: str
    memory_kind: str
    nbytes: int


class Offloaded:
    """``ghoffload.OffloadAdamW``: master and moments in host memory."""

    name = "OffloadAdamW"

    def __init__(self, model: nn.Module, lr: float, config: dict[str, Any]) -> None:
        self.optimizer = ghoffload.OffloadAdamW(
            model.parameters(), lr=lr, **HYPERPARAMETERS, config=config
        )
        self.config = self.optimizer.config.to_dict()

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def held(self) -> list[Held]:
        """Where the bytes are, while the gradients are there."""
        rows = self.optimizer.report().rows
        return [Held(row.what, row.memory_kind, row.nbytes) for row in rows]


class InHbm:
    """``torch.optim.AdamW`` on fp32 masters of the bf16 weights: everything in HBM."""

    name = "torch AdamW"

    def __init__(self, model: nn.Module, lr: float, config: dict[str, Any]) -> None:
        self.weights = list(model.parameters())
        self.masters = [nn.Parameter(w.detach().to(torch.float32, copy=True)) for w in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr, **HYPERPARAMETERS, fused=True)
        self.config: dict[str, Any] = {}

    @torch.no_grad()
    def step(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            assert weight.grad is not None, "every parameter of the demo's model is used"
            master.grad = weight.grad.float()
        self.optimizer.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)
            master.grad = None

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.grad = None

    def held(self) -> list[Held]:
        """Where the bytes are, while the gradients are there."""
        state = self.optimizer.state.values()
        tensors: dict[str, list[Tensor]] = {
            "weights": [*self.weights],
            "gradients": [w.grad for w in self.weights if w.grad is not None],
            "master": [*self.masters],
            "exp_avg": [entries["exp_avg"] for entries in state],
            "exp_avg_sq": [entries["exp_avg_sq"] for entries in state],
            "step counters": [entries["step"] for entries in state],
        }
        return [Held(what, "device", sum(t.nbytes for t in ts)) for what, ts in tensors.items()]
