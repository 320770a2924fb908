"""The driver's calls on managed memory: one place that knows their signatures.

cuda-bindings 12.9 and 13 differ in those of advice and prefetch: 12.9 has the ones with a location
under the names with ``_v2``, 13 has no others. Batched prefetch and discard came with CUDA 13.0.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ghoffload.machine.cuda import CudaMachine

ADVICE = (
    "preferred_location",
    "unset_preferred_location",
    "accessed_by",
    "unset_accessed_by",
    "read_mostly",
    "unset_read_mostly",
)

_ATTACH_GLOBAL = 1  # CU_MEM_ATTACH_GLOBAL
_OUT_OF_MEMORY = 2
_BATCHED = 13000  # the first driver version with batched prefetch and discard


class Driver:
    """The calls, for one device.

    A location is the device (``to_device``), or the host, or there the NUMA node ``node``.

    Args:
        index: of the device.
        context: entered around each call; ``None`` where the device's context is current.
    """

    def __init__(
        self, index: int, context: contextlib.AbstractContextManager[Any] | None = None
    ) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._context = context if context is not None else contextlib.nullcontext()
        self._index = index
        self._advise = getattr(driver, "cuMemAdvise_v2", None) or driver.cuMemAdvise
        self._prefetch = getattr(driver, "cuMemPrefetchAsync_v2", None) or driver.cuMemPrefetchAsync
        self._device = self._call("finding the device", driver.cuDeviceGet, index)

    @classmethod
    def of(cls, machine: CudaMachine) -> Driver:
        """The calls in the context of ``machine``, from any thread; made at the first call."""
        with _drivers_lock:
            if machine.device.index not in _drivers:
                _drivers[machine.device.index] = cls(machine.device.index, machine.context)
            return _drivers[machine.device.index]

    @property
    def batched(self) -> bool:
        """Whether bindings and driver both have batched prefetch and discard."""
        if not hasattr(self._driver, "cuMemDiscardBatchAsync"):
            return False
        asked = self._call("asking the driver's version", self._driver.cuDriverGetVersion)
        return int(asked) >= _BATCHED

    def attribute(self, name: str) -> int:
        """``CU_DEVICE_ATTRIBUTE_<name>``."""
        attribute = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        call = self._driver.cuDeviceGetAttribute
        return int(self._call(f"asking for {name}", call, attribute, self._device))

    def allocate(self, nbytes: int) -> int:
        """The address of fresh managed memory.

        Raises:
            torch.OutOfMemoryError: the driver says so. It seldom does: pages come at first touch.
        """
        what = f"allocating {nbytes:,} bytes of managed memory"
        return int(self._call(what, self._driver.cuMemAllocManaged, nbytes, _ATTACH_GLOBAL))

    def free(self, address: int) -> None:
        """Give it back."""
        self._call("freeing managed memory", self._driver.cuMemFree, address)

    def advise(
        self, address: int, nbytes: int, advice: str, *, to_device: bool, node: int | None = None
    ) -> None:
        """Give one of ``ADVICE``; it holds for the pages that the range touches."""
        which = getattr(
            self._driver.CUmem_advise,
            "CU_MEM_ADVISE_" + (advice if advice.startswith("unset_") else f"set_{advice}").upper(),
        )
        location = self._location(to_device, node)
        self._call(f"the advice {advice}", self._advise, address, nbytes, which, location)

    def stay_on_host(self, address: int, nbytes: int, node: int | None = None) -> None:
        """Advise: preferred location host, accessed by the device."""
        self.advise(address, nbytes, "preferred_location", to_device=False, node=node)
        self.advise(address, nbytes, "accessed_by", to_device=True)

    def prefetch(
        self, address: int, nbytes: int, *, to_device: bool, stream: int, node: int | None = None
    ) -> None:
        """Queue a migration."""
        location = self._location(to_device, node)
        self._call("a prefetch", self._prefetch, address, nbytes, location, 0, stream)

    def is_on_node(self, address: int, nbytes: int, node: int) -> bool | None:
        """Whether a whole range was last prefetched to a NUMA node of the host, by the driver.

        ``None`` where the bindings or the driver cannot say.
        """
        attribute = getattr(self._driver, "CUmem_range_attribute", None)
        name = "CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_"
        if not hasattr(attribute, name + "TYPE"):
            return None
        there = self._range_attribute(getattr(attribute, name + "TYPE"), address, nbytes)
        number = self._range_attribute(getattr(attribute, name + "ID"), address, nbytes)
        if there is None or number is None:
            return None
        wanted = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
        return there == int(wanted) and number == node

    def _range_attribute(self, which: Any, address: int, nbytes: int) -> int | None:
        """A number that the driver keeps of a range.

        By ctypes: the bindings (13.3) list these attributes and refuse to ask for them.
        """
        answer = ctypes.c_int32()
        try:
            ask = ctypes.CDLL("libcuda.so.1").cuMemRangeGetAttribute
        except (OSError, AttributeError):
            return None
        ask.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int) + (ctypes.c_size_t,) * 2
        with self._context:
            status = ask(ctypes.byref(answer), 4, int(which), address, nbytes)
        return answer.value if status == 0 else None

    def prefetch_batch(
        self,
        ranges: Sequence[tuple[int, int]],
        *,
        to_device: bool,
        stream: int,
        node: int | None = None,
    ) -> None:
        """Queue the migration of several (address, bytes), in no order among themselves.

        One call where ``batched``; the legacy default stream (handle 0) takes none.
        """
        if len(ranges) < 2 or stream == 0 or not self.batched:
            for address, nbytes in ranges:
                self.prefetch(address, nbytes, to_device=to_device, stream=stream, node=node)
            return
        locations = [self._location(to_device, node)]
        call = self._driver.cuMemPrefetchBatchAsync
        what = f"a prefetch of {len(ranges)} ranges"
        self._call(what, call, *self._split(ranges), locations, [0], 1, 0, stream)

    def discard_batch(self, ranges: Sequence[tuple[int, int]], *, stream: int) -> None:
        """Queue the forgetting of several (address, bytes); ``batched`` only, never on stream 0."""
        call = self._driver.cuMemDiscardBatchAsync
        self._call("a discard", call, *self._split(ranges), 0, stream)

    def _split(self, ranges: Sequence[tuple[int, int]]) -> tuple[list[Any], list[int], int]:
        pointers = [self._driver.CUdeviceptr(address) for address, _ in ranges]
        return pointers, [nbytes for _, nbytes in ranges], len(ranges)

    def _location(self, to_device: bool, node: int | None) -> Any:
        kinds = self._driver.CUmemLocationType
        location = self._driver.CUmemLocation()
        if to_device:
            location.type, location.id = kinds.CU_MEM_LOCATION_TYPE_DEVICE, self._index
        elif node is None:
            location.type, location.id = kinds.CU_MEM_LOCATION_TYPE_HOST, 0
        else:
            location.type, location.id = kinds.CU_MEM_LOCATION_TYPE_HOST_NUMA, node
        return location

    def _call(self, what: str, function: Any, *arguments: Any) -> Any:
        with self._context:
            result = function(*arguments)
        if int(result[0]) != 0:
            message = f"{what} failed: {getattr(result[0], 'name', result[0])}"
            if int(result[0]) == _OUT_OF_MEMORY:
                raise torch.OutOfMemoryError(message)
            raise RuntimeError(message)
        return result[1] if len(result) > 1 else None


_drivers: dict[int, Driver] = {}
_drivers_lock = threading.Lock()
