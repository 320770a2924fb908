"""Work to be timed: copies between the host and the device, by copy engine and by kernel.

Note [both ways]
    By engine: two copies at once, one in each direction, on two streams. By kernel: one kernel that
    reads host memory and writes other host memory, as an update in place does. Either way the rate
    is of both directions together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ghoffload.kernels import bandwidth
from ghoffload.kernels.build import BULK_COPIES
from ghoffload.machine.cuda import CudaStream
from ghoffload.measure.clock import Work
from ghoffload.measure.raw import Raw

Direction = Literal["h2d", "d2h", "both"]

DIRECTIONS: tuple[Direction, ...] = ("h2d", "d2h", "both")
KERNELS = ("words", "bulk")
"""Copy kernels: loads and stores; bulk copies, from compute capability 9.0 on."""
BLOCKS = (1, 2, 4, 8, 16, 32)
"""Numbers of blocks (CTAs) that a kernel is tried with."""
BLOCKS_PER_SM = 8
"""For passes over HBM: more than fit at once, so that no SM ends long before the others."""
FILLS = 0.97
"""Share of the best rate at which a number of blocks counts as filling the link: more of them bring
nothing, but take SMs from whoever else computes."""


@dataclass(frozen=True)
class Ends:
    """Addresses that copies go between: two on the device, two on the host."""

    hbm: tuple[int, int]
    host: tuple[int, int]


def kernels_for(capability: tuple[int, int]) -> tuple[str, ...]:
    """Those of ``KERNELS`` that a device of this compute capability runs."""
    return KERNELS if capability >= BULK_COPIES else KERNELS[:1]


def lanes(direction: Direction) -> int:
    """How many streams copies by engine take: Note [both ways]."""
    return 2 if direction == "both" else 1


def by_engine(raw: Raw, ends: Ends, direction: Direction, nbytes: int, calls: int = 1) -> Work:
    """``calls`` copies by engine of ``nbytes`` each, in each direction that is meant."""
    up, down = (ends.hbm[0], ends.host[0]), (ends.host[1], ends.hbm[1])
    pairs = {"h2d": (up,), "d2h": (down,), "both": (up, down)}[direction]

    def work(streams: Sequence[CudaStream]) -> None:
        for _ in range(calls):
            for (destination, source), stream in zip(pairs, streams, strict=True):
                raw.copy(destination, source, nbytes, stream=stream.handle)

    return work


def by_kernel(
    ends: Ends, direction: Direction, nbytes: int, *, kernel: str, blocks: int, device: int
) -> Work:
    """A copy of ``nbytes`` by one kernel."""
    destination, source = {
        "h2d": (ends.hbm[0], ends.host[0]),
        "d2h": (ends.host[1], ends.hbm[1]),
        "both": (ends.host[1], ends.host[0]),
    }[direction]

    def work(streams: Sequence[CudaStream]) -> None:
        bandwidth.copy(
            destination,
            source,
            nbytes,
            bulk=kernel == "bulk",
            blocks=blocks,
            device=device,
            stream=streams[0].handle,
        )

    return work
