"""The smallest honest use of ghoffload: a small model whose optimizer state is offloaded.

Runs on a GPU (weights in HBM, state in pinned host memory) and on the CPU (everything in system
memory, the same update). Run it with ``python examples/train_offload.py``.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import ghoffload

CONTEXT, BATCH, HIDDEN = 64, 8, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)

    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.tensor(list(b"".join(path.read_bytes() for path in sources[:40])))

    embedding = nn.Embedding(256, HIDDEN)
    layer = nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, dropout=0.0, batch_first=True)
    blocks = nn.TransformerEncoder(layer, 2)
    model = nn.ModuleList([embedding, blocks, nn.Linear(HIDDEN, 256)]).to(device, dtype)
    mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=device, dtype=dtype)

    # The only line that differs from training without offloading.
    optimizer = ghoffload.OffloadAdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - CONTEXT, (BATCH,)).tolist()
        tokens = torch.stack([text[at : at + CONTEXT + 1] for at in starts]).to(device)
        x = model[1](model[0](tokens[:, :-1]), mask=mask, is_causal=True)
        loss = F.cross_entropy(model[2](x).float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % 10 == 0:
            print(f"step {step:3}  loss {loss.item():.3f}")
    print(optimizer.report())


if __name__ == "__main__":
    main()
