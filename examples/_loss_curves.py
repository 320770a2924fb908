"""Training the demo's model twice, a rounding error apart: what loss curves do on their own.

Two runs that differ by one unit in the last place of their masters drift apart, and how far is the
noise beneath which no two optimizers can be told from one another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ghoffload.demo import presets
from ghoffload.demo.presets import Preset
from ghoffload.demo.steppers import InHbm, Offloaded

PRESETS = {
    "tiny": presets.PRESETS["tiny"],
    "25m": Preset(hidden=512, layers=8, heads=8, context=256, batch=32, steps=500, lr=1e-3),
    "1b": presets.PRESETS["1b"],
}


def perturbed_torch(seed: int) -> type[InHbm]:
    """Torch's AdamW whose masters begin one unit in the last place off, up or down."""

    class Perturbed(InHbm):
        name = f"torch AdamW, perturbed {seed}"

        def __init__(self, model: nn.Module, lr: float, config: dict[str, object]) -> None:
            super().__init__(model, lr, config)
            generator = torch.Generator(device=self.masters[0].device).manual_seed(seed)
            with torch.no_grad():
                for master in self.masters:
                    bits = master.view(torch.int32)
                    bits.add_(_one_unit(master, generator))

    return Perturbed


def perturbed_offloaded(seed: int) -> type[Offloaded]:
    """OffloadAdamW whose split masters begin one unit in the last place off, up or down."""

    class Perturbed(Offloaded):
        name = f"OffloadAdamW, perturbed {seed}"

        def __init__(self, model: nn.Module, lr: float, config: dict[str, object]) -> None:
            super().__init__(model, lr, config)
            weights = list(model.parameters())
            generator = torch.Generator(device=weights[0].device).manual_seed(seed)
            for weight in weights:
                # A master's bits are its bf16 weight's and 16 more, the rest: 1 is one unit.
                rest = _one_unit(weight.detach(), generator).to(torch.int16)
                self.optimizer.state[weight] = {"rest": rest}

    return Perturbed


def _one_unit(values: Tensor, generator: torch.Generator) -> Tensor:
    """At random 1 or -1 (int32) to add to the bits of each value; 0 for zeros."""
    noise = torch.randint(0, 2, values.shape, generator=generator, device=values.device)
    return torch.where(values == 0, 0, 2 * noise - 1).to(torch.int32)


def differences(base: Sequence[float], other: Sequence[float]) -> list[float]:
    """By how much the other curve's loss is higher, step for step."""
    return [b - a for a, b in zip(base, other, strict=True)]
