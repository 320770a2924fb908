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
    hbm_bytes: int = 80_000_000_000
    host_bytes: int = 80_000_000_000

    @property
    def tokens(self) -> int:
        """Tokens (bytes of text) of a step."""
        return self.batch * self.context

    @property
    def parameters(self) -> int:
        """Parameters of the model: ``GPT`` counts the same."""
        embeddings = (2 * 256 + self.context) * self.hidden  # 256 values of a byte, in and out
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
        hbm_bytes=32_000_000,
        host_bytes=4_000_000,
    ),
    "laptop": Preset(
        hidden=256,
        layers=4,
        heads=4,
        context=128,
        batch=8,
        steps=120,
        lr=2e-3,
        config={"bucket_bytes": 1 << 20},
        hbm_bytes=256_000_000,
        host_bytes=64_000_000,
    ),
    "1b": Preset(hidden=2048, layers=22, heads=16, context=1024, batch=8, steps=200, lr=3e-4),
    "3b": Preset(hidden=3072, layers=27, heads=24, context=1024, batch=8, steps=100, lr=2e-4),
}
