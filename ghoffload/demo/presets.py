"""The sizes the demo comes in. Plain values: importing this module loads nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"
STATE_BYTES = 12  # of a bf16 parameter: fp32 master, exp_avg and exp_avg_sq


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model, its batches and its run.

    Attributes:
        hidden, layers, heads: the shape of the GPT.
        context: bytes of text in a sequence.
        batch: sequences in a step.
        steps: steps of each run unless the caller says otherwise.
        lr: highest learning rate.
        config: what ``OffloadConfig`` should have other than its defaults.
        hbm_bytes, host_bytes: capacities of the virtual machine, where there is no GPU.
    """

    hidden: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int
    lr: float
    config: dict[str, Any] = field(default_factory=dict)
    hbm_bytes: int = 64 << 30
    host_bytes: int = 64 << 30

    @property
    def tokens(self) -> int:
        """Tokens (bytes of text) of a step."""
        return self.batch * self.context

    @property
    def parameters(self) -> int:
        """Parameters of the model: ``GPT`` counts the same."""
        embeddings = (256 + self.context) * self.hidden
        block = 12 * self.hidden**2 + 2 * self.hidden
        return embeddings + self.layers * block + self.hidden


# Small models get small buckets, so that staging buffers are small beside the state they stream.
PRESETS = {
    "tiny": Preset(
        hidden=64,
        layers=2,
        heads=2,
        context=64,
        batch=8,
        steps=20,
        lr=3e-3,
        config={"bucket_bytes": 128 << 10},
        hbm_bytes=64 << 20,
        host_bytes=8 << 20,
    ),
    "laptop": Preset(
        hidden=192,
        layers=6,
        heads=6,
        context=128,
        batch=8,
        steps=150,
        lr=2e-3,
        config={"bucket_bytes": 1 << 20},
        hbm_bytes=512 << 20,
        host_bytes=128 << 20,
    ),
    "1b": Preset(hidden=2048, layers=22, heads=16, context=1024, batch=8, steps=200, lr=3e-4),
    "3b": Preset(hidden=3072, layers=27, heads=24, context=1024, batch=8, steps=100, lr=2e-4),
}
