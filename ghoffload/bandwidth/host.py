"""Host memory by CPU threads."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ghoffload.bandwidth.plan import Plan
from ghoffload.bandwidth.results import Row, rate
from ghoffload.kernels import bandwidth_host
from ghoffload.measure.clock import host_samples
from ghoffload.memory import HostArena, carved_bytes


def measure(plan: Plan) -> Iterator[Row]:
    """Copy, triad and update in place, by each number of threads."""
    count = plan.host_bytes // 4
    size = carved_bytes([(count, torch.float32)] * 3)
    arena = HostArena(size, machine=None, owner="ghoffload bandwidth", pin=False)
    try:
        a, b, c = (arena.carve(count, torch.float32).fill_(1).numpy() for _ in range(3))
        for name, bytes_per_element in bandwidth_host.BYTES_PER_ELEMENT.items():
            for threads in plan.threads:

                def once(name: str = name, threads: int = threads) -> None:
                    bandwidth_host.run(name, a, b, c, threads=threads)

                yield rate(
                    host_samples(once, repeats=plan.repeats),
                    count * bytes_per_element,
                    what="host",
                    direction=name,
                    by="cpu",
                    nbytes=plan.host_bytes,
                    threads=threads,
                )
    finally:
        arena.close()
