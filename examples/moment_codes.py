"""What int8 moments cost in accuracy: our code beside bitsandbytes' and FlashOptim's.

    python examples/moment_codes.py             # three seeds, under 4 minutes on 2 CPUs
    python examples/moment_codes.py --quick     # one seed, a few steps

A small GPT is trained on the source files of Python's standard library and some of its gradients
are kept. Adam's moments then follow these gradients, once in fp32 and once coded after every step,
and the updates are compared: ours is what ``OffloadAdam(moments="int8")`` does, the other two are
numpy written down from their publications (bitsandbytes' dynamic map in blocks of 256, Dettmers et
al., arXiv:2110.02861; FlashOptim's companding in groups of 32 with fp16 scales, arXiv:2602.23349).
A relative error is the root mean square of the difference over that of the fp32 run's value; the
median of the seeds stands in the table, and their range behind it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table

import ghoffload
from ghoffload.demo.model import GPT
from ghoffload.demo.text import Batches, read_text

Array = npt.NDArray[Any]
EPS = 1e-8
CONTEXT, BATCH, PIECE = 128, 8, 256


def gradients(seed: int, steps: int, after: int) -> Array:
    """Gradients ``[steps, elements]``: pieces of all weights of a GPT, from step ``after`` on."""
    torch.manual_seed(seed)
    model = GPT(hidden=128, layers=4, heads=4, context=CONTEXT, compute=torch.float32)
    batches = Batches(read_text(context=CONTEXT).train, batch=BATCH, context=CONTEXT, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    weights = [p for p in model.parameters() if p.numel() >= 4096]
    found = []
    for _ in range(after + steps):
        model(torch.as_tensor(batches.draw())).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        kept = []
        for p in weights:
            assert p.grad is not None
            flat, stride = p.grad.view(-1), max(p.numel() // 4, PIECE) // PIECE * PIECE
            kept += [flat[at : at + PIECE] for at in range(0, p.numel() - PIECE + 1, stride)]
        found.append(torch.cat(kept).numpy().copy())
        optimizer.step()
        optimizer.zero_grad()
    return np.stack(found[after:])


def dynamic_map(signed: bool) -> Array:
    """The 8-bit numbers of bitsandbytes: a decimal exponent, and a fraction in the other bits."""
    numbers = [0.0, 1.0]
    for exponent in range(7):
        edges = np.linspace(0.1, 1, 2**exponent + 1 if signed else 2 ** (exponent + 1) + 1)
        middles = 10.0 ** (exponent - 6) * (edges[1:] + edges[:-1]) / 2
        numbers += [*middles, *(-middles if signed else ())]
    return np.sort(np.array(numbers, dtype=np.float32))


def dynamic(values: Array, numbers: Array) -> Array:
    blocks = values.reshape(-1, 256)
    scale = np.abs(blocks).max(1, keepdims=True)
    scale = np.where(scale == 0, 1, scale)
    nearest = np.searchsorted((numbers[1:] + numbers[:-1]) / 2, blocks / scale)
    return (numbers[nearest] * scale).ravel().astype(np.float32)


def companded_first(values: Array) -> Array:
    groups = values.reshape(-1, 32)
    scale = np.abs(groups).max(1, keepdims=True).astype(np.float16).astype(np.float32)
    scale = np.where(scale == 0, np.float32(1e-12), scale)
    ratio = np.clip(groups / scale, -1, 1)
    code = np.rint(2 * ratio / (1 + np.abs(ratio)) * 127) / 127
    return (code / (2 - np.abs(code)) * scale).ravel().astype(np.float32)


def companded_second(values: Array) -> Array:
    roots = np.sqrt(values.reshape(-1, 32))
    scale = roots.max(1, keepdims=True)
    scale = np.where(scale == 0, np.float32(1e-30), scale)
    return ((np.rint(roots / scale * 255) / 255 * scale) ** 2).ravel().astype(np.float32)


FIRST, SECOND = dynamic_map(True), dynamic_map(False)
PEERS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "bitsandbytes dynamic, blocks of 256": (
        lambda m: dynamic(m, FIRST),
        lambda v: dynamic(v, SECOND),
    ),
    "FlashOptim companding, groups of 32": (companded_first, companded_second),
}
OURS = "ghoffload int8, blocks of 128"


def follow(
    given: Array, betas: tuple[float, float], codes: tuple[Callable[..., Array], ...] | None
) -> tuple[Array, Array, Array]:
    """Adam's moments over ``given``: the root of v, the last update, the sum of the updates."""
    b1, b2 = map(np.float32, betas)
    m, v = np.zeros((2, given.shape[1]), dtype=np.float32)
    total = np.zeros(given.shape[1])
    update = total
    for t, g in enumerate(given, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        update = m / (1 - betas[0] ** t) / (np.sqrt(v / (1 - betas[1] ** t)) + EPS)
        total = total + update
        if codes is not None:
            m, v = codes[0](m), codes[1](v)
    return np.sqrt(v), update, total


def follow_ours(given: Array, betas: tuple[float, float]) -> tuple[Array, Array, Array]:
    """The same by the optimizer itself: with a rate of 1, a weight is the sum of its updates."""
    weight = torch.nn.Parameter(torch.zeros(given.shape[1]))
    config = {"moments": "int8", "moments_fp32_below": 0}
    optimizer = ghoffload.OffloadAdam(
        [weight], lr=1.0, betas=betas, eps=EPS, config=config, machine="cpu"
    )
    before = weight.detach().numpy().copy()
    for g in given:
        before = weight.detach().numpy().copy()
        weight.grad = torch.from_numpy(g)
        optimizer.step()
    root = optimizer.state[weight]["exp_avg_sq"].sqrt().numpy()
    after = weight.detach().numpy()
    return root, before - after, -after


def relative(found: Array, exact: Array) -> float:
    difference = np.sqrt(np.mean((found.astype(np.float64) - exact) ** 2))
    return float(difference / np.sqrt(np.mean(exact.astype(np.float64) ** 2)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps")
    quick = parser.parse_args().quick
    seeds, recorded, after, long = (1, 10, 5, 20) if quick else (3, 300, 100, 2100)
    cases = {
        f"{recorded} steps in order, beta2 = 0.999": (recorded, 0.999, False),
        f"{long:,} steps, shuffled, beta2 = 0.999": (long, 0.999, True),
        f"{long:,} steps, shuffled, beta2 = 0.95": (long, 0.95, True),
    }
    names = [*PEERS, OURS]
    errors: dict[tuple[str, str], list[list[float]]] = {(c, n): [] for c in cases for n in names}
    elements = 0
    for seed in range(seeds):
        recordings = gradients(seed, recorded, after)
        elements = recordings.shape[1]
        order = np.random.default_rng(seed)
        for case, (steps, beta2, shuffled) in cases.items():
            given = recordings
            if shuffled:
                rounds = -(-steps // recorded)
                given = np.concatenate(
                    [recordings[order.permutation(recorded)] for _ in range(rounds)]
                )[:steps]
            exact = follow(given, (0.9, beta2), None)
            for name in names:
                if name == OURS:
                    found = follow_ours(given, (0.9, beta2))
                else:
                    found = follow(given, (0.9, beta2), PEERS[name])
                pairs = zip(found, exact, strict=True)
                errors[case, name].append([relative(mine, right) for mine, right in pairs])
    table = Table(title=f"Relative errors, {seeds} seeds, {elements:,} elements each")
    for column in ("gradients", "code", "root of v", "last update", "sum of updates"):
        table.add_column(column, justify="left" if column in ("gradients", "code") else "right")
    for case in cases:
        for name in names:
            cells = []
            for values in zip(*errors[case, name], strict=True):
                low, middle, high = min(values), statistics.median(values), max(values)
                cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
            table.add_row(case if name == names[0] else "", name, *cells)
        table.add_section()
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
