"""CudaMachine: the machine protocol on a real GPU.

Streams, events and device memory are torch's, so that the caching allocator and the user's own
streams see them; copies and pinning are driver calls on the raw stream handle (a copy costs 3 us
instead of the 8 us of ``Tensor.copy_``). Importing this module needs no GPU, driver or
cuda-bindings; making a ``CudaMachine`` does.

Note [current context]
    A driver call acts on the calling thread's current context. A fresh thread has none, and
    torch's device guard does nothing there for device 0, nor does it suffice that another device
    is current. So every driver call and launch runs with this device's primary context pushed.
    Driver calls leave no sticky "last error" behind that torch would find and report as its own,
    as those of the runtime API do; their result is the first element of a tuple, always checked.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor

from ghoffload.errors import MachineUnavailableError
from ghoffload.machine.host_ranges import HostRange, HostRanges, debug_wanted
from ghoffload.machine.managed import Driver as ManagedDriver
from ghoffload.machine.protocol import Event, Launch, Machine, Stamp, Stream
from ghoffload.machine.topology import probe, unusable_gpu
from ghoffload.machine.traffic import Traffic

# Results by value: the names are CUresult's, the same in every version of the bindings.
_OUT_OF_MEMORY = 2
_REFUSED_PIN = {
    1: "CUDA_ERROR_INVALID_VALUE",
    _OUT_OF_MEMORY: "CUDA_ERROR_OUT_OF_MEMORY",
    304: "CUDA_ERROR_OPERATING_SYSTEM",
    800: "CUDA_ERROR_NOT_PERMITTED",
    801: "CUDA_ERROR_NOT_SUPPORTED",
}
_CAPTURE_ACTIVE = 1
_MEMHOSTREGISTER_PORTABLE = 1  # pinned for every device's context, not for this one's alone


class CudaStream(Stream):
    """A stream of torch's, or of the user's, by name."""

    __slots__ = ("handle", "name", "torch_stream")

    def __init__(self, name: str, torch_stream: torch.cuda.Stream) -> None:
        self.name = name
        self.torch_stream = torch_stream
        self.handle = int(torch_stream.cuda_stream)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and self.torch_stream == other.torch_stream

    def __hash__(self) -> int:
        return hash(self.torch_stream)

    def __repr__(self) -> str:
        return f"<CudaStream {self.name} {self.handle:#x}>"


class CudaEvent(Event):
    """A CUDA event without timing; torch creates it when it is first recorded."""

    __slots__ = ("capture", "name", "recorded", "torch_event")

    def __init__(self, name: str) -> None:
        self.name = name
        self.capture = 0  # the graph capture it was recorded in
        self.torch_event = torch.cuda.Event()
        self.recorded = False

    def __repr__(self) -> str:
        return f"<CudaEvent {self.name}{'' if self.recorded else ', not recorded'}>"


class _EventStamp(Stamp):
    """An event that has the time."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def seconds_to(self, later: Stamp) -> float:
        assert isinstance(later, _EventStamp)
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event)) / 1e3


class CudaMachine(Machine):
    """One CUDA device and its host. Use ``CudaMachine.of``: one machine a device is enough.

    Args:
        device: a CUDA device; without an index, the current one.

    Attributes:
        device: with its index.
        h2d: the stream that brings host state to HBM.
        d2h: the two streams that bring it back, by turns.
        traffic: what was copied and launched.
        pin_refusal: the driver's answer to the last pin that it refused.

    Raises:
        ValueError: not a CUDA device.
        MachineUnavailableError: it cannot be used; the message says why.
    """

    kind: ClassVar[str] = "cuda"

    def __init__(self, device: torch.device | str | int = "cuda") -> None:
        self.device = _usable(device)
        self._driver = _driver()
        self._context = _Context(self._driver, self.device.index)
        # Host state of the next buckets comes in while the kernel updates this one (and later
        # while backward runs): it overlaps compute and both d2h streams.
        self.h2d = CudaStream("h2d", torch.cuda.Stream(self.device))
        # Updated state goes back while the kernel updates the next bucket and under the next
        # forward. The two never run at once; why there are two: Note [streams] in protocol.py.
        self.d2h = (
            CudaStream("d2h 0", torch.cuda.Stream(self.device)),
            CudaStream("d2h 1", torch.cuda.Stream(self.device)),
        )
        self.traffic = Traffic()
        self.pin_refusal: str | None = None
        self.debug = debug_wanted()
        self._host = HostRanges()
        self._streams: dict[int, CudaStream] = {}

    @classmethod
    def of(cls, device: torch.device | str | int = "cuda") -> CudaMachine:
        """The machine of ``device``, made at the first call."""
        index = _usable(device).index
        with _machines_lock:
            if index not in _machines:
                _machines[index] = cls(index)
            return _machines[index]

    @functools.cached_property
    def memory_kinds(self) -> frozenset[str]:
        """Kinds that kernels of this device reach: Note [pointers] in host_ranges.py."""
        kinds = {"device", "pinned"}
        attributes = {"managed": "CONCURRENT_MANAGED_ACCESS", "system": "PAGEABLE_MEMORY_ACCESS"}
        driver = ManagedDriver.of(self)
        kinds.update(kind for kind, name in attributes.items() if driver.attribute(name))
        return frozenset(kinds)

    @functools.cached_property
    def compute_capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability(self.device)

    @functools.cached_property
    def host_node(self) -> int | None:
        topology = probe()
        with_memory = [node for node in topology.host.cpu_nodes if node.total_bytes]
        if len(with_memory) < 2:
            return None
        index = self.device.index
        return next((gpu.near_node for gpu in topology.gpus if gpu.index == index), None)

    @property
    def capturing(self) -> bool:
        return self._capture() != 0

    def _capture(self) -> int:
        """The number of the capture that the current stream is in; 0 for none."""
        if not torch.cuda.is_current_stream_capturing():
            return 0
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with self._context:
            # Bindings differ in what follows, not in these three.
            code, status, number, *_ = self._driver.cuStreamGetCaptureInfo(stream)
            _check((code,), "asking a stream for its graph capture")
        return int(number) if int(status) == _CAPTURE_ACTIVE else 0

    def current_stream(self) -> CudaStream:
        handle = torch._C._cuda_getCurrentRawStream(self.device.index)
        found = self._streams.get(handle)
        if found is None:
            found = CudaStream("compute", torch.cuda.current_stream(self.device))
            self._streams[handle] = found
        return found

    def event(self, name: str) -> CudaEvent:
        return CudaEvent(name)

    def record(self, event: Event, stream: Stream) -> None:
        ours = _own_event(event)
        ours.torch_event.record(_own_stream(stream).torch_stream)
        ours.recorded = True
        ours.capture = self._capture()

    def wait(self, stream: Stream, event: Event, *, label: str) -> None:
        ours = _own_event(event)
        if not ours.recorded:
            raise _never_recorded(ours, f"{label!r} on stream {stream.name!r}")
        self._bring_over(ours)
        _own_stream(stream).torch_stream.wait_event(ours.torch_event)

    def synchronize(self, event: Event, *, label: str) -> None:
        ours = _own_event(event)
        if not ours.recorded:
            raise _never_recorded(ours, f"{label!r} on the host")
        if self.capturing:
            raise RuntimeError(
                f"{label!r} blocks the host, which a CUDA graph capture does not allow; capture "
                "steps of the GPU alone"
            )
        self._bring_over(ours)
        ours.torch_event.synchronize()

    def _bring_over(self, event: CudaEvent) -> None:
        """Record an event anew if it is on the other side of a capture: Note [capture]."""
        if event.capture != self._capture():
            self.record(event, self.current_stream())

    def synchronize_all(self) -> None:
        torch.cuda.synchronize(self.device)

    def copy(self, destination: Tensor, source: Tensor, *, stream: Stream) -> None:
        handle = _own_stream(stream).handle
        nbytes = destination.nbytes
        if nbytes != source.nbytes:
            raise ValueError(
                f"copy expects as many bytes on both sides, got {source.nbytes:,} for a "
                f"destination of {nbytes:,}"
            )
        if not (destination.is_contiguous() and source.is_contiguous()):
            raise ValueError("copy expects contiguous tensors, got one that is not")
        to_device = self._in_hbm(destination)
        from_device = self._in_hbm(source)
        if not (to_device or from_device):
            # The driver would copy at once, in the calling thread.
            raise ValueError(f"copy expects one side on {self.device}, got two host tensors")
        if nbytes == 0:
            return
        if self.debug and not (to_device and from_device):
            host = source if to_device else destination
            self._host.check_copy(host, self.host_node, f"copy on stream {stream.name!r}")
        with self._context:
            _check(
                self._driver.cuMemcpyAsync(
                    destination.data_ptr(), source.data_ptr(), nbytes, handle
                ),
                f"copy of {nbytes:,} bytes on stream {stream.name!r}",
            )
        self.traffic.copies += 1
        if not from_device:
            self.traffic.h2d_bytes += nbytes
        elif not to_device:
            self.traffic.d2h_bytes += nbytes

    def launch(self, launch: Launch, *, stream: Stream) -> None:
        handle = _own_stream(stream).handle
        vetted = launch.vetted
        if vetted is None or self.debug:
            self._vet(launch.name, (*launch.reads, *launch.writes))
        elif vetted.by is not self._host.state:
            state = self._host.state
            self._vet(launch.name, vetted.tensors)
            vetted.by = state
        launch.device(handle)  # in the context of its own: kernels/cuda.py
        self.traffic.launches += 1

    def _vet(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Refuse tensors that a kernel of this device must not get."""
        index = self.device.index
        for tensor in tensors:
            if tensor.numel() and tensor.get_device() != index:
                who = f"kernel {name!r} on {self.device}"
                if not tensor.is_cpu:
                    raise ValueError(f"{who} expects its own tensors, got one on {tensor.device}")
                self._host.check_kernel(
                    tensor,
                    self.memory_kinds,
                    self.host_node if self.debug else None,
                    who,
                    debug=self.debug,
                )

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        if self._in_hbm(tensor):
            tensor.record_stream(_own_stream(stream).torch_stream)
        # Registered host memory is safe without: unregister_host waits for all queued work.
        elif self._host.of(tensor) is None:
            raise ValueError(
                f"record_stream expects a tensor on {self.device} or in registered host memory, "
                "got another host tensor"
            )

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def free(self, tensor: Tensor) -> None:
        if not self._in_hbm(tensor):
            raise ValueError(f"free expects a tensor on {self.device}, got a host tensor")
        # The block goes back to the caching allocator when the caller's references go. It knows
        # only the stream that the tensor was made on; the lanes may still use it.
        for stream in (self.h2d, *self.d2h, self.current_stream()):
            tensor.record_stream(_own_stream(stream).torch_stream)

    def register_host(
        self, address: int, nbytes: int, *, pin: bool, node: int | None = None
    ) -> bool:
        if address in self._host:
            raise ValueError(f"host memory at {address:#x} is registered already")
        pinned = False
        if pin:
            with self._context:
                (result,) = self._driver.cuMemHostRegister(
                    address, nbytes, _MEMHOSTREGISTER_PORTABLE
                )
            if int(result) in _REFUSED_PIN:
                self.pin_refusal = _REFUSED_PIN[int(result)]
            else:
                _check((result,), f"pinning {nbytes:,} bytes of host memory")
                pinned = True
        self._host.add(HostRange(address, nbytes, "pinned" if pinned else "system", node))
        return pinned

    def unregister_host(self, address: int) -> None:
        found = self._host.remove(address)
        if found is None:
            raise ValueError(f"no host memory is registered at {address:#x}")
        try:
            with self._context:
                # Pageable memory, too: where the GPU reads it in place, copies are asynchronous.
                (idle,) = self._driver.cuCtxSynchronize()
                if found.kind == "pinned":
                    result = self._driver.cuMemHostUnregister(address)
                    if int(idle) == 0:
                        _check(result, f"unpinning host memory at {address:#x}")
        except _ContextLostError:
            return  # the driver is shutting down, pins and queued work went with the context
        # A failed synchronisation is an earlier kernel's error, which torch reports to whoever
        # asks next; with it the context is lost, and no queued work is left that could run.

    @property
    def context(self) -> AbstractContextManager[None]:
        """What a driver call on this device is made in: Note [current context]."""
        return self._context

    def admit(self, address: int, nbytes: int, *, node: int | None = None) -> None:
        self._host.add(HostRange(address, nbytes, "managed", node))

    def dismiss(self, address: int) -> None:
        self._host.remove(address)

    def memory_allocated(self) -> int:
        return self._allocated("current")

    def memory_peak(self) -> int:
        return self._allocated("peak")

    def _allocated(self, which: str) -> int:
        # What torch.cuda.memory_allocated and max_memory_allocated look up, without all the rest.
        found = torch.cuda.memory_stats_as_nested_dict(self.device)
        return int(found["allocated_bytes"]["all"][which]) if found else 0

    def memory_limit(self) -> int | None:
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def stamp(self, stream: Stream) -> Stamp:
        event = torch.cuda.Event(enable_timing=True)
        event.record(_own_stream(stream).torch_stream)
        return _EventStamp(event)

    def _in_hbm(self, tensor: Tensor) -> bool:
        if tensor.is_cpu:
            return False
        if tensor.get_device() != self.device.index:
            raise ValueError(f"expected a tensor on {self.device} or the CPU, got {tensor.device}")
        return True


_machines: dict[int, CudaMachine] = {}
_machines_lock = threading.Lock()


class _ContextLostError(RuntimeError):
    """The primary context is gone: the process is ending."""


class _Context:
    """Makes a device's primary context the thread's current one: Note [current context]."""

    def __init__(self, driver: Any, index: int) -> None:
        self._push = driver.cuCtxPushCurrent
        self._pop = driver.cuCtxPopCurrent
        _check(driver.cuInit(0), "starting the CUDA driver")
        device = _check(driver.cuDeviceGet(index), f"finding device {index}")
        # Never released: torch holds it for the life of the process, too.
        self._context = _check(driver.cuDevicePrimaryCtxRetain(device), "making a CUDA context")

    def __enter__(self) -> None:
        (result,) = self._push(self._context)
        if int(result) != 0:
            raise _ContextLostError(f"the CUDA context cannot be made current: {_name(result)}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pop()


def _usable(device: torch.device | str | int) -> torch.device:
    """``device`` with its index, once it is known that it can be used."""
    wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if wanted.type != "cuda":
        raise ValueError(f"device expects a CUDA device, got {str(wanted)!r}")
    if torch.version.hip is not None:
        raise MachineUnavailableError(
            f"the CUDA machine needs a CUDA build of torch, got one for ROCm {torch.version.hip}"
        )
    if not torch.cuda.is_available():
        reason = unusable_gpu()
        if reason is None:
            reason = f"torch {torch.__version__} finds no CUDA GPU on this machine"
        raise MachineUnavailableError(f"the CUDA machine cannot be used: {reason}")
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    if index >= torch.cuda.device_count():
        raise MachineUnavailableError(
            f"expected a device below cuda:{torch.cuda.device_count()}, the number of GPUs that "
            f"torch sees, got cuda:{index}"
        )
    _driver()
    return torch.device("cuda", index)


@functools.cache
def _driver() -> Any:
    """The driver bindings, checked to reach a driver."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise MachineUnavailableError(
            f"the CUDA machine needs cuda-bindings ({error}): pip install 'cuda-bindings>=12.9,<14'"
        ) from error
    try:
        _check(driver.cuDriverGetVersion(), "asking the CUDA driver for its version")
    except Exception as error:  # the bindings raise their own kinds where there is no libcuda
        raise MachineUnavailableError(f"the CUDA driver cannot be reached: {error}") from error
    return driver


def _check(result: tuple[Any, ...], what: str) -> Any:
    """The value in a (code, value) tuple of the bindings; an error where the code is one."""
    code, *values = result
    if int(code) == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{what} failed: {_name(code)}")
    if int(code) != 0:
        raise RuntimeError(f"{what} failed: {_name(code)}")
    return values[0] if values else None


def _name(code: Any) -> str:
    return f"{getattr(code, 'name', 'CUDA error')} ({int(code)})"


def _own_stream(stream: Stream) -> CudaStream:
    if not isinstance(stream, CudaStream):
        raise TypeError(f"expected a stream of a CUDA machine, got {type(stream).__name__}")
    return stream


def _own_event(event: Event) -> CudaEvent:
    if not isinstance(event, CudaEvent):
        raise TypeError(f"expected an event of a CUDA machine, got {type(event).__name__}")
    return event


def _never_recorded(event: Event, waiter: str) -> RuntimeError:
    """CUDA itself would let the waiter pass."""
    return RuntimeError(f"event {event.name!r} was never recorded; it is awaited by {waiter}")
