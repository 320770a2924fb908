"""What a forward moved and kept, for a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from ghoffload.activations.blocks import BlockLog
from ghoffload.activations.passes import Pass

REASONS = {
    "parameter": "parameters, their views and casts",
    "buffer": "buffers",
    "small": "smaller than min_offload_bytes",
    "subclass": "tensor subclasses",
    "device": "on another device",
    "layout": "sparse, conjugated or without memory of their own",
    "in vain": "held by something else, so moving them freed nothing",
    "no peak": "as the peak is the same with it",
    "within the budget": "for which the budget has room",
    "chosen": "as chosen for their block",
    "as asked": "as policy or fraction say",
}


def page(passes: Mapping[torch.device, Pass]) -> str:
    """A few lines for each device; empty before the first forward."""
    return "\n".join(_of(device, home) for device, home in passes.items())


def _of(device: torch.device, home: Pass) -> str:
    slabs = home.mover.slabs
    coded = home.moved_bytes - home.link_bytes
    lines = [
        f"{device}: {_size(home.moved_bytes)} of what the forward saved was offloaded"
        + (f", as {_size(home.link_bytes)}" if coded else "")
        + f"; {_size(home.reloaded_bytes)} came back so far",
        f"  host memory for activations: {_size(slabs.reserved_bytes)} pinned, "
        f"{_size(slabs.used_bytes)} in use, {_size(slabs.peak_bytes)} at most",
    ]
    if home.log is not None:
        lines += _of_blocks(home.log)
    for reason, nbytes in sorted(home.kept.items(), key=lambda row: -row[1]):
        lines.append(f"  stayed in HBM: {_size(nbytes)} {REASONS.get(reason, reason)}")
    return "\n".join(lines)


def _of_blocks(log: BlockLog) -> list[str]:
    if log.choice is None:
        return [f"  learning of the blocks: {log.stage.value}"]
    counts = Counter(mode.value for mode in log.choice.modes)
    modes = ", ".join(f"{mode} {count} blocks" for mode, count in counts.items())
    expected = f"{1e3 * log.choice.seconds:.1f} ms and {_size(log.choice.peak)} in HBM expected"
    lines = [f"  chosen: {modes}; {expected}"]
    if not log.choice.fits:
        lines.append("  the budget is less than any choice needs: this one needs least")
    return lines


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes} B"
