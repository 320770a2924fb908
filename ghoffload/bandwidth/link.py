"""Copies between the host and the device, by copy engine and by kernel.

Note [both ways]
    By engine: two copies at once, one in each direction, on two streams. By kernel: one kernel that
    reads host memory and writes other host memory, as an update in place does. Either way the rate
    is of both directions together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ghoffload.bandwidth.clock import DeviceClock, Work
from ghoffload.bandwidth.plan import Plan, calls_in_a_sample
from ghoffload.bandwidth.results import Row, rate
from ghoffload.kernels import bandwidth
from ghoffload.machine.cuda import CudaStream
from ghoffload.memory import HostArena

DIRECTIONS = ("h2d", "d2h", "both")
KERNELS = ("words", "bulk")


@dataclass(frozen=True)
class Bench:
    """What the measurements of a device share.

    Attributes:
        clock: times them.
        plan: how much.
        hbm: two buffers of ``plan.buffer_bytes`` on the device.
        kernels: those of ``KERNELS`` that this device can run.
    """

    clock: DeviceClock
    plan: Plan
    hbm: tuple[Tensor, Tensor]
    kernels: tuple[str, ...]


def by_engine(bench: Bench, host: Sequence[Tensor], memory: str) -> Iterator[Row]:
    """Copies by engine between the device and two pinned buffers, by size."""
    for nbytes in bench.plan.sizes:
        calls = calls_in_a_sample(nbytes)
        for direction in DIRECTIONS:
            lanes = 2 if direction == "both" else 1
            seconds = bench.clock.samples(
                _engine_work(bench, host, direction, nbytes, calls),
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
        host = arena.carve(nbytes, torch.uint8)
        for direction in ("h2d", "d2h"):
            yield rate(
                bench.clock.wall_samples(
                    _engine_work(bench, (host, host), direction, nbytes, 1),
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
                    _kernel_work(bench, host, direction, nbytes, kernel == "bulk", blocks),
                    repeats=bench.plan.repeats,
                    calls=1,
                )
                yield rate(
                    seconds,
                    nbytes * (2 if direction == "both" else 1),
                    what="copy",
                    memory=memory,
                    direction=direction,
                    by=kernel,
                    nbytes=nbytes,
                    blocks=blocks,
                )


def _engine_work(
    bench: Bench, host: Sequence[Tensor], direction: str, nbytes: int, calls: int
) -> Work:
    machine = bench.clock.machine
    up = (bench.hbm[0][:nbytes], host[0][:nbytes])
    down = (host[1][:nbytes], bench.hbm[1][:nbytes])
    pairs = {"h2d": (up,), "d2h": (down,), "both": (up, down)}[direction]

    def work(streams: Sequence[CudaStream]) -> None:
        for _ in range(calls):
            for (destination, source), stream in zip(pairs, streams, strict=True):
                machine.copy(destination, source, stream=stream)

    return work


def _kernel_work(
    bench: Bench, host: Sequence[int], direction: str, nbytes: int, bulk: bool, blocks: int
) -> Work:
    destination, source = {
        "h2d": (bench.hbm[0].data_ptr(), host[0]),
        "d2h": (host[1], bench.hbm[1].data_ptr()),
        "both": (host[1], host[0]),
    }[direction]

    def work(streams: Sequence[CudaStream]) -> None:
        bandwidth.copy(
            destination,
            source,
            nbytes,
            bulk=bulk,
            blocks=blocks,
            device=bench.clock.index,
            stream=streams[0].handle,
        )

    return work
