"""VirtualMachine: the machine protocol on CPU tensors, for tests, sweeps and machines without GPU.

"HBM" is ordinary CPU memory and registered host arenas are the host. The runtime above cannot tell
the difference, except that what it queues on other streams may run in any order the rules allow
(virtual_queue.py), that both memories have capacities (virtual_memory.py), and that with checks on
every access that nothing orders is an error (checking.py).
The caller's own operations are torch's; Note [eager] in virtual_dispatch.py says how they are seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ghoffload.machine.checking import Checker
from ghoffload.machine.clocks import HOST
from ghoffload.machine.host_ranges import HostRange, HostRanges, debug_wanted
from ghoffload.machine.protocol import Event, Launch, Machine, Stamp, Stream
from ghoffload.machine.traffic import Traffic
from ghoffload.machine.virtual_dispatch import EagerMode
from ghoffload.machine.virtual_memory import Memory, Region
from ghoffload.machine.virtual_queue import (
    Operation,
    Order,
    Queues,
    VirtualEvent,
    VirtualStream,
    own_event,
    own_stream,
    recorded,
)
from ghoffload.machine.virtual_refs import POISON, TensorRef


class _HostStamp(Stamp):
    """The host's clock: eager operations run at once."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def seconds_to(self, later: Stamp) -> float:
        assert isinstance(later, _HostStamp)
        return later._at - self._at


class VirtualMachine(Machine):
    """The machine protocol on CPU tensors. Single-threaded.

    Args:
        hbm_bytes: capacity of the "HBM"; ``None`` for no limit. Memory from ``empty`` counts, and
            while the machine is entered with ``use_machine`` every tensor that torch touches.
        host_bytes: capacity for registered host memory; ``None`` for no limit.
        order: when operations on other streams than the current one run: ``"earliest"`` (when they
            are queued), ``"latest"`` (when something needs them) or ``"adversarial"`` (seeded).
        seed: of the adversarial order. The same program and seed run in the same order.
        check: raise ``OrderingError`` for accesses that nothing orders.
        memory_kinds: what its kernels reach; a machine without coherent memory has no ``"system"``.

    Attributes:
        dropped_waits: labels of waits and synchronizations that are ignored, to prove that each is
            needed.
        labels: how often each label was seen.
        traffic: bytes and operations queued.
    """

    kind: ClassVar[str] = "virtual"

    def __init__(
        self,
        *,
        hbm_bytes: int | None = None,
        host_bytes: int | None = None,
        order: Order = "earliest",
        seed: int = 0,
        check: bool = False,
        memory_kinds: Iterable[str] = ("device", "pinned", "managed", "system"),
    ) -> None:
        self._memory_kinds = frozenset(memory_kinds)
        self.debug = debug_wanted()
        self._host = HostRanges()
        self.device = torch.device("cpu")
        self.dropped_waits: set[str] = set()
        self.labels: Counter[str] = Counter()
        self.traffic = Traffic()
        self._queues = Queues(order, seed)
        self._memory = Memory(hbm_bytes, host_bytes)
        self._checker = Checker(self._queues, self._memory) if check else None
        if self._checker is not None:
            self._memory.on_death = self._checker.died
        self.h2d: VirtualStream = self.stream("h2d")
        self.d2h = (self.stream("d2h 0"), self.stream("d2h 1"))

    def __repr__(self) -> str:
        checks = "on" if self._checker else "off"
        return f"<VirtualMachine, order {self._queues.order}, checks {checks}>"

    @property
    def memory_kinds(self) -> frozenset[str]:
        return self._memory_kinds

    # -- streams and events

    def current_stream(self) -> Stream:
        return self._queues.current

    def stream(self, name: str) -> VirtualStream:
        """A new stream."""
        return self._queues.stream(name)

    @contextlib.contextmanager
    def use_stream(self, stream: Stream) -> Iterator[None]:
        """Make ``stream`` the current one, as ``torch.cuda.stream`` does."""
        outer = self._queues.current
        self._switch(own_stream(stream))
        try:
            yield
        finally:
            self._switch(outer)

    def event(self, name: str) -> Event:
        return VirtualEvent(name)

    def record(self, event: Event, stream: Stream) -> None:
        self._enter()
        event, stream = own_event(event), own_stream(stream)
        if self._checker is not None:
            self._checker.record(event, stream)
        event.mark = Operation(f"record {event.name!r}", stream)
        self._queues.add(event.mark)

    def wait(self, stream: Stream, event: Event, *, label: str) -> None:
        self._enter()
        stream = own_stream(stream)
        event = recorded(event, f"wait {label!r} on stream {stream.name!r}")
        self.labels[label] += 1
        if label in self.dropped_waits:
            return
        if self._checker is not None:
            self._checker.wait(stream, event)
        self._queues.add(Operation(f"wait {label!r}", stream, after=event.mark))

    def synchronize(self, event: Event, *, label: str) -> None:
        self._enter()
        event = recorded(event, f"synchronize {label!r}")
        self.labels[label] += 1
        if label in self.dropped_waits:
            return
        self._queues.force(event.mark)
        if self._checker is not None:
            self._checker.synchronize(event.clock)

    def synchronize_all(self) -> None:
        """Block the host until everything has run, as ``torch.cuda.synchronize``."""
        self._enter()
        self.run_pending()
        if self._checker is not None:
            for stream in self._queues.streams:
                self._checker.synchronize(stream.clock)

    def run_pending(self) -> None:
        """Run everything that is queued; nothing is ordered by that."""
        self._queues.run_all()

    # -- operations

    def copy(self, destination: Tensor, source: Tensor, *, stream: Stream) -> None:
        self._enter()
        stream = own_stream(stream)
        nbytes = destination.numel() * destination.element_size()
        source_bytes = source.numel() * source.element_size()
        if nbytes != source_bytes:
            raise ValueError(
                f"copy expects as many bytes on both sides, got {source_bytes} from "
                f"{_form(source)} and {nbytes} into {_form(destination)}"
            )
        for tensor in (destination, source):
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                raise ValueError(f"copy expects contiguous CPU tensors, got {_form(tensor)}")
        if nbytes == 0:
            return
        if all(self._memory.arena_at(t.data_ptr()) for t in (destination, source)):
            raise ValueError("copy expects one side in HBM, got two tensors in host arenas")
        if self.debug:
            for tensor in (destination, source):
                if self._memory.arena_at(tensor.data_ptr()):
                    self._host.check_copy(tensor, self.host_node, f"copy on stream {stream.name!r}")
        self._check("copy", stream, (source,), (destination,))
        self.traffic.copies += 1
        self.traffic.h2d_bytes += nbytes if stream is self.h2d else 0
        self.traffic.d2h_bytes += nbytes if stream in self.d2h else 0
        name = f"copy on {stream.name}"
        into, out_of = self._refs(stream, (destination, source))

        def run() -> None:
            to, of = into.resolve(), out_of.resolve()
            if to is None:
                self._too_late(name)
            elif of is None:
                ctypes.memset(to.data_ptr(), POISON, nbytes)
            else:
                ctypes.memmove(to.data_ptr(), of.data_ptr(), nbytes)

        self._queues.add(Operation(name, stream, run, uses=(into, out_of)))

    def launch(self, launch: Launch, *, stream: Stream) -> None:
        self._enter()
        stream = own_stream(stream)
        for tensor in (*launch.reads, *launch.writes):
            if tensor.device.type != "cpu":
                raise ValueError(
                    f"{launch.name} expects CPU tensors on the virtual machine, got {_form(tensor)}"
                )
            if self._memory.arena_at(tensor.data_ptr()) is not None:
                self._host.check_kernel(
                    tensor,
                    self.memory_kinds,
                    self.host_node,
                    f"kernel {launch.name!r}",
                    debug=self.debug,
                )
        self.traffic.launches += 1
        self._check(launch.name, stream, launch.reads, launch.writes)
        reads, writes = self._refs(stream, launch.reads), self._refs(stream, launch.writes)
        name, host = launch.name, launch.host  # not the launch: it holds the tensors

        def run() -> None:
            with torch.no_grad():
                host(
                    [self._resolved(ref, name, writes=False) for ref in reads],
                    [self._resolved(ref, name, writes=True) for ref in writes],
                )

        self._queues.add(Operation(name, stream, run, uses=(*reads, *writes)))

    def run_on_host(self, launch: Launch) -> None:
        self._enter()
        if self._checker is not None:
            # The rest of a host step's tensors are the host's own and no stream sees them.
            reads, writes = (
                [tensor for tensor in tensors if self._memory.arena_at(tensor.data_ptr())]
                for tensors in (launch.reads, launch.writes)
            )
            clock = self._checker.issue_on_host()
            self._checker.access(launch.name, HOST, clock, reads=reads, writes=writes)
        launch.run_on_host()

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        self._enter()
        stream = own_stream(stream)
        region = self._memory.region(tensor, self._queues.current.thread)
        if region is None or region.arena:  # arenas are safe: unregister_host comes after all use
            return
        if self._checker is not None:
            time = self._checker.issue(stream)[stream.thread]
            region.recorded[stream.thread] = time
        if stream.queue:
            hold = TensorRef(tensor, strong=True)
            self._queues.add(Operation("record_stream", stream, uses=(hold,)))

    # -- memory

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self._enter()
        self._memory.reserve(math.prod(shape) * dtype.itemsize)
        with self._queues.own_work():
            tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        region = self._memory.region(tensor, self._queues.current.thread)
        if region is not None:
            region.owned = True
            if self._checker is not None or self._queues.order != "earliest":
                _poison(region)
            self._check("allocation", self._queues.current, (), (tensor,))
        return tensor

    def free(self, tensor: Tensor) -> None:
        self._enter()
        region = self._memory.find(tensor)
        if tensor.numel() == 0:
            return
        if region is None or not region.owned or region.freed:
            was = "memory that was freed before" if region and region.freed else "other memory"
            raise ValueError(f"free expects memory from empty(), got {was}: {_form(tensor)}")
        if self._checker is not None:
            self._checker.unused(region, "free()")
        self._finish(region)
        _poison(region)
        self._memory.release(region)

    def register_host(
        self, address: int, nbytes: int, *, pin: bool, node: int | None = None
    ) -> bool:
        self._enter()
        if nbytes <= 0:
            raise ValueError(f"register_host expects a positive number of bytes, got {nbytes}")
        self._memory.register(address, nbytes)
        self._host.add(HostRange(address, nbytes, "pinned" if pin else "system", node))
        return pin

    def unregister_host(self, address: int) -> None:
        self._enter()
        arena = self._memory.arena_at(address)
        if arena is None or arena.start != address:
            raise ValueError(f"unregister_host expects a registered address, got {address:#x}")
        if self._checker is not None:
            self._checker.unused(arena, "unregister_host()")
        self._finish(arena)
        self._memory.unregister(arena)  # unregistered, not freed: tensors may still hold it
        self._host.remove(address)

    def admit(self, address: int, nbytes: int, *, node: int | None = None) -> None:
        """Managed memory: as ``register_host``, of another kind."""
        self.register_host(address, nbytes, pin=False)
        self._host.add(HostRange(address, nbytes, "managed", node))

    def dismiss(self, address: int) -> None:
        self.unregister_host(address)

    def memory_allocated(self) -> int:
        self._memory.sweep()
        return self._memory.allocated

    def memory_peak(self) -> int:
        return self._memory.peak

    def memory_limit(self) -> int | None:
        return self._memory.hbm_bytes

    def reset_peak(self) -> None:
        self._memory.sweep()
        self._memory.peak = self._memory.allocated

    def stamp(self, stream: Stream) -> Stamp:
        return _HostStamp()

    # -- eager operations

    def eager_mode(self) -> EagerMode | None:
        """What shows this machine the caller's eager operations; ``None`` where it need not know.

        ``use_machine`` enters it.
        """
        unlimited = self._memory.hbm_bytes is None
        if unlimited and self._checker is None and self._queues.order == "earliest":
            return None
        return EagerMode(self._queues, self._memory, self._checker)

    def finish_checks(self) -> None:
        """Report what died in flight since the last call; ``use_machine`` does it at its end.

        Raises:
            OrderingError: something did, and no error was reported before.
        """
        if self._checker is not None and not self._checker.reported:
            self._memory.sweep_watched()

    # -- inner workings

    def _enter(self) -> None:
        """At each call: what has died since the last, then a step of the adversary."""
        if self._checker is not None:
            self._memory.sweep_watched()
        self._queues.disturb()

    def _switch(self, stream: VirtualStream) -> None:
        self._enter()
        self._queues.current = stream
        self._queues.settle()

    def _refs(self, stream: VirtualStream, tensors: Sequence[Tensor]) -> list[TensorRef]:
        """References to hold in a queue: weak, except to arenas, which outlive their storages."""
        now = self._queues.immediate(stream)
        arena_at = self._memory.arena_at
        return [TensorRef(t, strong=now or arena_at(t.data_ptr()) is not None) for t in tensors]

    def _resolved(self, ref: TensorRef, name: str, *, writes: bool) -> Tensor:
        tensor = ref.resolve()
        if tensor is None:
            if writes:
                self._too_late(name)
            tensor = ref.poisoned()
        return tensor

    def _too_late(self, name: str) -> None:
        if self._checker is not None:
            raise self._checker.report(f"{name!r} writes a tensor that was freed before it ran")

    def _check(
        self, name: str, stream: VirtualStream, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> None:
        if self._checker is not None:
            clock = self._checker.issue(stream)
            self._checker.access(name, stream.thread, clock, reads=reads, writes=writes)

    def _finish(self, region: Region) -> None:
        """Run what is queued on the bytes of a region that is given back."""
        for operation in self._queues.using(region.start, region.end):
            self._queues.force(operation)


def _form(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}"


def _poison(region: Region) -> None:
    ctypes.memset(region.start, POISON, region.end - region.start)
