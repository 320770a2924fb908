"""Managed memory, and pageable memory that the device reaches by itself ("system").

cuda-bindings 12.9 and 13 differ in the signatures of advice and prefetch. This is the one place
that knows: 12.9 has those with a location under the names with ``_v2``, 13 has no others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

from ghoffload.bandwidth.link import Bench, by_kernel
from ghoffload.bandwidth.results import Row, rate
from ghoffload.kernels import pool
from ghoffload.machine.cuda import CudaStream
from ghoffload.memory import HostArena

_ATTACH_GLOBAL = 1  # CU_MEM_ATTACH_GLOBAL
_TOUCH_BYTES = 16 << 20


class Driver:
    """The driver's calls on managed memory, for one device whose context is current.

    Args:
        index: of the device.
    """

    def __init__(self, index: int) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._advise = getattr(driver, "cuMemAdvise_v2", None) or driver.cuMemAdvise
        self._prefetch = getattr(driver, "cuMemPrefetchAsync_v2", None) or driver.cuMemPrefetchAsync
        kinds = driver.CUmemLocationType
        self._here = self._location(kinds.CU_MEM_LOCATION_TYPE_DEVICE, index)
        self._host = self._location(kinds.CU_MEM_LOCATION_TYPE_HOST, 0)
        self._device = self._call("finding the device", driver.cuDeviceGet(index))

    def attribute(self, name: str) -> int:
        """``CU_DEVICE_ATTRIBUTE_<name>``."""
        attribute = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        asked = self._driver.cuDeviceGetAttribute(attribute, self._device)
        return int(self._call(f"asking for {name}", asked))

    def allocate(self, nbytes: int) -> int:
        """The address of fresh managed memory."""
        allocated = self._driver.cuMemAllocManaged(nbytes, _ATTACH_GLOBAL)
        return int(self._call(f"allocating {nbytes:,} bytes of managed memory", allocated))

    def free(self, address: int) -> None:
        """Give it back."""
        self._call("freeing managed memory", self._driver.cuMemFree(address))

    def stay_on_host(self, address: int, nbytes: int) -> None:
        """Advise: preferred location host, accessed by the device."""
        advice = self._driver.CUmem_advise
        for which, location in (
            (advice.CU_MEM_ADVISE_SET_PREFERRED_LOCATION, self._host),
            (advice.CU_MEM_ADVISE_SET_ACCESSED_BY, self._here),
        ):
            self._call(which.name, self._advise(address, nbytes, which, location))

    def prefetch(self, address: int, nbytes: int, *, to_device: bool, stream: int) -> None:
        """Queue a migration."""
        location = self._here if to_device else self._host
        self._call("a prefetch", self._prefetch(address, nbytes, location, 0, stream))

    def _location(self, kind: Any, number: int) -> Any:
        location = self._driver.CUmemLocation()
        location.type, location.id = kind, number
        return location

    def _call(self, what: str, result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise RuntimeError(f"{what} failed: {getattr(result[0], 'name', result[0])}")
        return result[1] if len(result) > 1 else None


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
