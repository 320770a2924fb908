"""Managed memory, and pageable memory that the device reaches by itself ("system")."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

from ghoffload.bandwidth.link import Bench, by_kernel
from ghoffload.bandwidth.results import Row, rate
from ghoffload.kernels import pool
from ghoffload.machine.cuda import CudaStream
from ghoffload.machine.managed import Driver
from ghoffload.memory import HostArena

_TOUCH_BYTES = 16 << 20


def managed(bench: Bench, driver: Driver) -> Iterator[Row]:
    """Prefetch both ways, then copies by kernel with the memory staying on the host.

    Never by copy engine: from managed memory that is a slow path.
    """
    clock, nbytes = bench.clock, bench.plan.managed_bytes
    base = driver.allocate(2 * nbytes)
    try:
        _touch(base, 2 * nbytes)
        # Settled on the host before the first sample, which is one to the device.
        driver.prefetch(base, nbytes, to_device=False, stream=clock.main.handle)
        seconds: dict[str, list[float]] = {"h2d": [], "d2h": []}
        for sample in range(bench.plan.repeats + 1):
            for direction, taken in seconds.items():

                def move(
                    streams: Sequence[CudaStream], to_device: bool = direction == "h2d"
                ) -> None:
                    driver.prefetch(base, nbytes, to_device=to_device, stream=streams[0].handle)

                once = clock.wall_once(move)
                if sample:  # the first is a warm-up
                    taken.append(once)
        for direction, taken in seconds.items():
            yield rate(
                taken,
                nbytes,
                what="prefetch",
                memory="managed",
                direction=direction,
                by="driver",
                nbytes=nbytes,
            )
        driver.stay_on_host(base, 2 * nbytes)
        driver.prefetch(base, 2 * nbytes, to_device=False, stream=clock.main.handle)
        clock.machine.synchronize_all()
        yield from by_kernel(bench, (base, base + nbytes), nbytes, "managed")
    finally:
        clock.machine.synchronize_all()
        driver.free(base)


def system(bench: Bench, driver: Driver) -> Iterator[Row]:
    """Copies by kernel of memory from ``mmap``, where the device reaches it by itself."""
    nbytes = bench.plan.managed_bytes
    arena = HostArena(2 * nbytes, machine=None, owner="ghoffload bandwidth", pin=False)
    try:
        try:
            driver.stay_on_host(arena.address, 2 * nbytes)
        except RuntimeError:
            pass  # then it is where the system leaves it, which is what a user would see, too
        yield from by_kernel(bench, (arena.address, arena.address + nbytes), nbytes, "system")
    finally:
        bench.clock.machine.synchronize_all()
        arena.close()


def _touch(address: int, nbytes: int) -> None:
    """Place every page on the host, by all threads."""

    def task(first: int) -> None:
        ctypes.memset(address + first, 1, min(_TOUCH_BYTES, nbytes - first))

    pool.run(task, range(0, nbytes, _TOUCH_BYTES))
