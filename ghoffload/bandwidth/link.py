"""Copies between the host and the device, by copy engine and by kernel: a row for each figure.

What "both ways" means: Note [both ways] in measure/link.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ghoffload.bandwidth.plan import Plan, calls_in_a_sample
from ghoffload.bandwidth.results import Row, rate
from ghoffload.measure import link
from ghoffload.measure.clock import DeviceClock
from ghoffload.measure.link import DIRECTIONS, Direction, Ends
from ghoffload.measure.raw import Raw
from ghoffload.memory import HostArena


@dataclass(frozen=True)
class Bench:
    """What the measurements of a device share.

    Attributes:
        clock: times them.
        raw: queues copies by engine.
        plan: how much.
        hbm: two buffers of ``plan.buffer_bytes`` on the device.
        kernels: those that this device can run.
    """

    clock: DeviceClock
    raw: Raw
    plan: Plan
    hbm: tuple[Tensor, Tensor]
    kernels: tuple[str, ...]

    def ends(self, host: Sequence[int]) -> Ends:
        """Its own buffers and two of the host's, by address."""
        return Ends(hbm=(self.hbm[0].data_ptr(), self.hbm[1].data_ptr()), host=(host[0], host[1]))


def by_engine(bench: Bench, host: Sequence[int], memory: str) -> Iterator[Row]:
    """Copies by engine between the device and pinned buffers at two addresses, by size."""
    for nbytes in bench.plan.sizes:
        calls = calls_in_a_sample(nbytes)
        for direction in DIRECTIONS:
            lanes = link.lanes(direction)
            seconds = bench.clock.samples(
                link.by_engine(bench.raw, bench.ends(host), direction, nbytes, calls),
                repeats=bench.plan.repeats,
                calls=calls * lanes,
                lanes=lanes,
            )
            yield rate(
                seconds,
                nbytes * calls * lanes,
                what="copy",
                memory=memory,
                direction=direction,
                by="engine",
                nbytes=nbytes,
            )


def pageable(bench: Bench) -> Iterator[Row]:
    """Copies of pageable memory: they block the host, so its clock times them, both ways in turn.

    The driver copies through a pinned buffer of its own where the device cannot reach the memory.
    """
    nbytes = bench.plan.kernel_bytes
    arena = HostArena(nbytes, machine=None, owner="ghoffload bandwidth", pin=False)
    try:
        ends = bench.ends((arena.address, arena.address))
        ways: tuple[Direction, ...] = ("h2d", "d2h")
        for direction in ways:
            yield rate(
                bench.clock.wall_samples(
                    link.by_engine(bench.raw, ends, direction, nbytes),
                    repeats=bench.plan.repeats,
                ),
                nbytes,
                what="copy",
                memory="pageable",
                direction=direction,
                by="engine",
                nbytes=nbytes,
            )
    finally:
        bench.clock.machine.synchronize_all()
        arena.close()


def by_kernel(bench: Bench, host: Sequence[int], nbytes: int, memory: str) -> Iterator[Row]:
    """Copies by kernel between the device and two host buffers, by number of blocks.

    Args:
        bench: as said there.
        host: addresses of two buffers that the device can read and write.
        nbytes: bytes of one copy.
        memory: their kind, for the rows.
    """
    for kernel in bench.kernels:
        for blocks in bench.plan.blocks:
            for direction in DIRECTIONS:
                seconds = bench.clock.samples(
                    link.by_kernel(
                        bench.ends(host),
                        direction,
                        nbytes,
                        kernel=kernel,
                        blocks=blocks,
                        device=bench.clock.index,
                    ),
                    repeats=bench.plan.repeats,
                    calls=1,
                )
                yield rate(
                    seconds,
                    nbytes * link.lanes(direction),
                    what="copy",
                    memory=memory,
                    direction=direction,
                    by=kernel,
                    nbytes=nbytes,
                    blocks=blocks,
                )
