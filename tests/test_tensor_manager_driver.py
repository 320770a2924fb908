"""The tensor manager on a CUDA machine and a driver made up here: which calls, in which order."""

from __future__ import annotations

import ctypes
import gc
import mmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ghoffload import TensorManager, VirtualMachine
from ghoffload.machine.cuda import CudaStream
from ghoffload.machine.managed import Driver
from ghoffload.memory import ledger, manager_pool

PAGE = mmap.PAGESIZE
MIB = 1 << 20


class Location:
    type = id = None


class Bindings:
    """As much of cuda.bindings.driver as managed memory needs; memory is Python's own."""

    CUmemLocation = Location
    CUmemLocationType = SimpleNamespace(
        CU_MEM_LOCATION_TYPE_DEVICE="device",
        CU_MEM_LOCATION_TYPE_HOST="host",
        CU_MEM_LOCATION_TYPE_HOST_NUMA="node",
    )
    CUmem_advise = SimpleNamespace(
        CU_MEM_ADVISE_SET_PREFERRED_LOCATION="prefer",
        CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION="unprefer",
        CU_MEM_ADVISE_SET_ACCESSED_BY="accessed",
        CU_MEM_ADVISE_UNSET_READ_MOSTLY="unmostly",
        CU_MEM_ADVISE_SET_READ_MOSTLY="mostly",
    )
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS="concurrent",
        CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS="pageable",
    )
    CUdeviceptr = int

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls
        self.attributes = {"concurrent": 1, "pageable": 0}
        self.version = 13000
        self.refuse = 0
        self.memory: dict[int, mmap.mmap] = {}

    def note(self, name: str, *arguments: Any) -> tuple[int]:
        plain = [(a.type, a.id) if isinstance(a, Location) else a for a in arguments]
        self.calls.append((name, *plain))
        return (0,)

    def cuDeviceGet(self, index: int) -> tuple[int, int]:
        return 0, index

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return 0, self.version

    def cuDeviceGetAttribute(self, name: str, device: int) -> tuple[int, int]:
        return 0, self.attributes[name]

    def cuMemAllocManaged(self, nbytes: int, flags: int) -> tuple[int, int]:
        if self.refuse:
            return self.refuse, 0
        memory = mmap.mmap(-1, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.memory[address] = memory
        self.note("allocate", nbytes)
        return 0, address

    def cuMemFree(self, address: int) -> tuple[int]:
        del self.memory[address]
        return self.note("free")

    def cuMemAdvise(self, address: int, nbytes: int, advice: str, where: Location) -> tuple[int]:
        return self.note("advise", nbytes, advice, where)

    def cuMemPrefetchAsync(
        self, address: int, nbytes: int, where: Location, flags: int, stream: int
    ) -> tuple[int]:
        return self.note("prefetch", nbytes, where, stream)

    def cuMemPrefetchBatchAsync(
        self,
        pointers: list[int],
        sizes: list[int],
        count: int,
        where: list[Location],
        indices: list[int],
        locations: int,
        flags: int,
        stream: int,
    ) -> tuple[int]:
        assert (len(pointers), indices, locations, flags) == (count, [0], 1, 0)
        return self.note("prefetch batch", sizes, where[0], stream)

    def cuMemDiscardBatchAsync(
        self, pointers: list[int], sizes: list[int], count: int, flags: int, stream: int
    ) -> tuple[int]:
        assert (len(pointers), flags) == (count, 0)
        return self.note("discard", sizes, stream)


class Cuda(VirtualMachine):
    """A virtual machine that says it is a CUDA one and notes what it is asked."""

    kind = "cuda"

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self.calls = calls
        self.h2d = named("h2d", 5)  # type: ignore[assignment]
        self.stream_now = named("compute", 0)
        self.admitted: dict[int, int] = {}

    def current_stream(self) -> Any:
        return self.stream_now

    def event(self, name: str) -> Any:
        return name

    def record(self, event: Any, stream: Any) -> None:
        self.calls.append(("record", stream.handle))

    def wait(self, stream: Any, event: Any, *, label: str) -> None:
        self.calls.append(("wait", stream.handle))

    def synchronize(self, event: Any, *, label: str) -> None:
        self.calls.append(("synchronize",))

    def synchronize_all(self) -> None:
        self.calls.append(("synchronize all",))

    def admit(self, address: int, nbytes: int, *, node: int | None = None) -> None:
        self.admitted[address] = nbytes

    def dismiss(self, address: int) -> None:
        self.admitted.pop(address, None)


def named(name: str, handle: int) -> CudaStream:
    return CudaStream(name, SimpleNamespace(cuda_stream=handle))  # type: ignore[arg-type]


@pytest.fixture
def calls() -> list[tuple[Any, ...]]:
    return []


@pytest.fixture
def bindings(calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> Bindings:
    import cuda.bindings

    fake = Bindings(calls)
    monkeypatch.setattr(cuda.bindings, "driver", fake, raising=False)
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.driver", fake)
    driver = Driver(3)
    monkeypatch.setattr(Driver, "of", lambda machine: driver)
    monkeypatch.setattr(manager_pool, "SEGMENT_BYTES", MIB)
    return fake


@pytest.fixture
def machine(calls: list[tuple[Any, ...]]) -> Cuda:
    return Cuda(calls)


SETTLED = [("advise", "prefer", ("host", 0)), ("advise", "accessed", ("device", 3))]


def settled(nbytes: int) -> list[tuple[Any, ...]]:
    return [(name, nbytes, *rest) for name, *rest in SETTLED]


def test_managed_memory_is_made_placed_and_freed_after_all_work(
    bindings: Bindings, machine: Cuda, calls: list[tuple[Any, ...]]
) -> None:
    manager = TensorManager(machine, owner="m")
    tensor = manager.empty((2, 3), torch.float32, "managed").fill_(4)
    assert calls == [
        ("allocate", MIB),
        *settled(MIB),
        ("prefetch", MIB, ("host", 0), 0),
        ("record", 0),
        ("synchronize",),
    ]
    assert machine.admitted == {tensor.data_ptr(): MIB}
    assert ledger.total("managed", "m") == MIB
    calls.clear()
    manager.close()
    assert "free" not in dict.fromkeys(call[0] for call in calls)
    assert tensor.eq(4).all()
    calls.clear()
    del tensor
    gc.collect()
    assert calls == [("synchronize all",), ("free",)]
    assert machine.admitted == {}
    assert ledger.total(owner="m") == 0


def test_a_node_is_the_preferred_location(
    bindings: Bindings, machine: Cuda, calls: list[tuple[Any, ...]]
) -> None:
    manager = TensorManager(machine)
    manager.empty(1, torch.float32, "managed", numa=0)
    assert calls[1] == ("advise", MIB, "prefer", ("node", 0))
    manager.close()


def test_advice_ends_with_its_tensor(
    bindings: Bindings, machine: Cuda, calls: list[tuple[Any, ...]]
) -> None:
    manager = TensorManager(machine)
    tensor = manager.empty(10, torch.float32, "managed")
    calls.clear()
    manager.advise(tensor, "read_mostly", "device")
    manager.advise(tensor[2:], "unset_preferred_location", "host:1")
    assert calls == [
        ("advise", 40, "mostly", ("device", 3)),
        ("advise", 32, "unprefer", ("node", 1)),
    ]
    calls.clear()
    del tensor
    manager.statistics()
    unset = [("advise", 40, advice, ("device", 3)) for advice in ("unmostly", "unprefer")]
    assert calls == [*unset, *settled(40)]
    manager.close()


def test_prefetches_go_in_one_call_where_the_driver_takes_it(
    bindings: Bindings, machine: Cuda, calls: list[tuple[Any, ...]]
) -> None:
    manager = TensorManager(machine)
    pair = [manager.empty(count, torch.float32, "managed") for count in (10, 20)]
    side, default = named("side", 7), machine.current_stream()
    singles = [("prefetch", 40, ("device", 3)), ("prefetch", 80, ("device", 3))]
    calls.clear()
    manager.prefetch(pair, "device", stream=side)
    assert calls == [("prefetch batch", [40, 80], ("device", 3), 7)]
    calls.clear()
    manager.prefetch(pair, "device", stream=default)  # the legacy default stream takes no batch
    assert calls == [(*single, 0) for single in singles]
    calls.clear()
    bindings.version = 12090
    manager.prefetch(pair, "device", stream=side)
    manager.prefetch(pair[0], "host", stream=side)
    assert calls == [*((*single, 7) for single in singles), ("prefetch", 40, ("host", 0), 7)]
    manager.close()


def test_a_discard_goes_by_another_stream_than_the_default_one(
    bindings: Bindings, machine: Cuda, calls: list[tuple[Any, ...]]
) -> None:
    manager = TensorManager(machine)
    pair = [manager.empty(count, torch.float32, "managed") for count in (10, 20)]
    calls.clear()
    manager.discard(pair, stream=named("side", 7))
    assert calls == [("discard", [40, 80], 7)]
    calls.clear()
    manager.discard(pair[0], stream=machine.current_stream())
    assert calls == [("record", 0), ("wait", 5), ("discard", [40], 5), ("record", 5), ("wait", 0)]
    bindings.version = 12090
    with pytest.raises(RuntimeError, match=r"discard needs .* CUDA 13\.0 or later"):
        manager.discard(pair[0], stream=machine.current_stream())
    manager.close()


def test_what_the_machine_does_not_have_is_refused(bindings: Bindings, machine: Cuda) -> None:
    manager = TensorManager(machine, owner="m")
    bindings.refuse = 2
    with pytest.raises(torch.OutOfMemoryError, match=r"m: allocating 4,096 bytes of managed"):
        manager.empty(PAGE, torch.uint8, "managed")
    bindings.attributes["concurrent"] = 0
    with pytest.raises(ValueError, match="'managed' needs ConcurrentManagedAccess"):
        manager.empty(1, torch.uint8, "managed")
    assert ledger.total(owner="m") == 0
    system = manager.empty(1, torch.uint8, "system")
    assert machine.admitted == {}
    with pytest.raises(ValueError, match="prefetch expects managed memory, got system"):
        manager.prefetch(system, "device", stream=machine.current_stream())
    manager.close()


def test_system_memory_is_reached_where_the_machine_does_so(
    bindings: Bindings, machine: Cuda, calls: list[tuple[Any, ...]]
) -> None:
    bindings.attributes["pageable"] = 1
    manager = TensorManager(machine)
    system = manager.empty(8, torch.float32, "system")
    manager.prefetch(system, "device", stream=machine.current_stream())
    assert calls == [("prefetch", 32, ("device", 3), 0)]
    with pytest.raises(ValueError, match="discard expects managed memory, got system"):
        manager.discard(system, stream=machine.current_stream())
    manager.close()


@pytest.mark.parametrize("there", [(5, 1), (5, 0), (2, 1)])
def test_a_node_is_confirmed_by_the_driver(
    bindings: Bindings, machine: Cuda, monkeypatch: pytest.MonkeyPatch, there: tuple[int, int]
) -> None:
    kind, number = there
    answers = {7: kind, 8: number}
    found = SimpleNamespace(
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE=7,
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID=8,
    )
    monkeypatch.setattr(bindings, "CUmem_range_attribute", found, raising=False)

    def ask(answer: Any, size: int, which: int, address: int, nbytes: int) -> int:
        assert (size, nbytes) == (4, 1 << 20)
        answer._obj.value = answers[which]
        return 0

    library = SimpleNamespace(cuMemRangeGetAttribute=ask)
    monkeypatch.setattr("ghoffload.machine.managed.ctypes.CDLL", lambda name: library)
    kinds = SimpleNamespace(
        CU_MEM_LOCATION_TYPE_HOST_NUMA=5,
        CU_MEM_LOCATION_TYPE_HOST=2,
        CU_MEM_LOCATION_TYPE_DEVICE=1,
    )
    monkeypatch.setattr(bindings, "CUmemLocationType", kinds)
    monkeypatch.setattr("ghoffload.memory.numa.memory_nodes", lambda: (0, 1))
    manager = TensorManager(machine)
    if there == (5, 1):
        manager.empty(8, torch.float32, "managed", numa=1)
    else:
        with pytest.warns(RuntimeWarning, match="managed memory on NUMA node 1, but the"):
            manager.empty(8, torch.float32, "managed", numa=1)
    manager.close()
