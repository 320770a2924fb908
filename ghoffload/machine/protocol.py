"""The machine protocol: everything the runtime asks of the hardware, and nothing more.

Two implementations: ``CudaMachine`` (real streams, events and memory) and ``VirtualMachine`` (the
same on CPU tensors with capacities, orders and checks). The runtime is written against this page.

Note [streams]
    ``current_stream()`` is where forward, backward and the update run (*compute*).
    ``h2d`` carries host state to HBM. ``d2h`` is a pair: large write-backs alternate between the
    two, each chunk waiting for the one before, so the copy engine has to look at other streams
    between chunks and a user's ``loss.item()`` is served within one chunk instead of behind the
    whole queue. Measured on an H200 with 4 GB on their way back: 0.4 ms instead of 77 ms, at
    54.8 GB/s instead of 49.5.

Note [ownership]
    A queued operation does not keep its tensors alive (CUDA's semantics, too): whoever queues it
    holds them until the current stream has waited for the operation, or calls ``record_stream``.

Note [waits]
    Every wait the runtime's correctness rests on goes through ``wait`` or ``synchronize`` with a
    ``label`` that names it.

Note [capture]
    While a CUDA graph is captured nothing runs, and what was queued before cannot be waited for
    from inside, nor what was captured from outside. An event that was recorded on the other side
    of that boundary therefore stands for the present end of the current stream: whoever waits for
    it waits for that. A capture begins when the device is idle (``torch.cuda.graph`` sees to it)
    and a replay is work of the stream it is started on, so nothing is lost by it as long as steps
    and replays are started on one stream, or on streams that the caller orders.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ghoffload.machine.traffic import Traffic


class Stream(abc.ABC):
    """A queue of operations that run in the order they were queued."""

    name: str


class Event(abc.ABC):
    """A point in a stream that other streams, or the host, can wait for. Reusable."""

    name: str


class Stamp(abc.ABC):
    """A point in a stream's time."""

    @abc.abstractmethod
    def seconds_to(self, later: Stamp) -> float:
        """From here to a later one; waits until that has happened."""


class Vetted:
    """What stands for the tensors of a launch that is made anew, nearly the same, at each step.

    Attributes:
        tensors: those a machine has to look at. The maker of the launch has found the others on
            the device of the first.
        by: a machine's note that it has looked at them; valid while it is the very same object.
    """

    __slots__ = ("by", "tensors")

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors
        self.by: object = None


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch, ready to be queued on a machine.

    Attributes:
        name: the kernel's name, for messages and traces.
        reads: tensors the kernel reads.
        writes: tensors it writes (those it updates in place stand here only).
        device: enqueues the CUDA kernel on a raw ``CUstream`` handle.
        host: the same arithmetic on the CPU, given the tensors of ``reads`` and of ``writes`` in
            order. Bit for bit what ``device`` computes.
        vetted: the same object in each launch of one prepared kernel; ``None`` where every tensor
            has to be looked at.
        elements: of each tensor no more are touched; ``None`` where all of them are.
    """

    name: str
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    device: Callable[[int], None]
    host: Callable[[Sequence[Tensor], Sequence[Tensor]], None]
    vetted: Vetted | None = None
    elements: int | None = None

    def touched_bytes(self, tensor: Tensor) -> int:
        """Bytes that it touches of one of its tensors, at the most."""
        count = tensor.numel()
        if self.elements is not None:
            count = min(count, self.elements)
        return count * tensor.element_size()

    def run_on_host(self) -> None:
        """Run now, in the calling thread, on tensors in host memory."""
        self.host(self.reads, self.writes)


class Machine(abc.ABC):
    """Streams, events, copies, launches and memory of one device and its host."""

    kind: ClassVar[str]
    device: torch.device
    h2d: Stream
    d2h: tuple[Stream, Stream]
    traffic: Traffic
    imaginary: ClassVar[bool] = False
    """Whether nothing is ever written to its memories: host memory is then reserved alone."""
    debug: bool
    """Whether every pointer is looked up: Note [pointers] in host_ranges.py."""

    @property
    @abc.abstractmethod
    def memory_kinds(self) -> frozenset[str]:
        """Kinds that kernels of this device read and write.

        ``"device"`` and ``"pinned"`` always, ``"managed"`` and ``"system"`` where its capabilities
        say so.
        """

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Of the GPU whose kernels run here; a virtual machine stands for a Hopper."""
        return 9, 0

    @property
    def host_node(self) -> int | None:
        """The NUMA node that host memory belongs on, where there are several; else ``None``."""
        return None

    @property
    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph: Note [capture]."""
        return False

    @abc.abstractmethod
    def current_stream(self) -> Stream:
        """The stream the caller's own operations run on."""

    @abc.abstractmethod
    def event(self, name: str) -> Event:
        """A new event that has not been recorded."""

    @abc.abstractmethod
    def record(self, event: Event, stream: Stream) -> None:
        """Mark the present end of ``stream``; recording again moves the mark."""

    @abc.abstractmethod
    def wait(self, stream: Stream, event: Event, *, label: str) -> None:
        """What is queued on ``stream`` from now on runs after ``event``. Does not block the host.

        Raises:
            RuntimeError: ``event`` was never recorded.
        """

    @abc.abstractmethod
    def synchronize(self, event: Event, *, label: str) -> None:
        """Block the host until ``event`` has happened.

        Raises:
            RuntimeError: ``event`` was never recorded.
        """

    @abc.abstractmethod
    def synchronize_all(self) -> None:
        """Block the host until everything queued so far has run: for giving memory back."""

    @abc.abstractmethod
    def copy(self, destination: Tensor, source: Tensor, *, stream: Stream) -> None:
        """Queue a copy between two contiguous tensors of the same number of bytes.

        Host tensors must be in memory this machine registered, or the copy may block the host.
        """

    @abc.abstractmethod
    def launch(self, launch: Launch, *, stream: Stream) -> None:
        """Queue a kernel."""

    def run_on_host(self, launch: Launch) -> None:
        """Run a kernel's arithmetic now, in the calling thread, on tensors in host memory."""
        launch.run_on_host()

    @abc.abstractmethod
    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Keep the tensor's memory from reuse until what is queued on ``stream`` now has run."""

    @abc.abstractmethod
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised runtime-owned memory in HBM; give it back with ``free``.

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """

    @abc.abstractmethod
    def free(self, tensor: Tensor) -> None:
        """Give back memory from ``empty`` once the work queued on any stream no longer needs it."""

    @abc.abstractmethod
    def register_host(
        self, address: int, nbytes: int, *, pin: bool, node: int | None = None
    ) -> bool:
        """Make host memory at ``address`` known to the machine, pinned where ``pin`` is set.

        Args:
            address: of the first byte.
            nbytes: 1 or more.
            pin: whether to pin it.
            node: the NUMA node it is bound to.

        Returns:
            Whether the memory is pinned now. ``False`` where pinning was refused or not asked for.

        Raises:
            torch.OutOfMemoryError: the (virtual) host has no room for it.
        """

    @abc.abstractmethod
    def unregister_host(self, address: int) -> None:
        """Undo ``register_host``, after all queued work that uses the memory has finished."""

    @abc.abstractmethod
    def admit(self, address: int, nbytes: int, *, node: int | None = None) -> None:
        """Make managed memory known to the machine: kernels may have it, copies should not."""

    @abc.abstractmethod
    def dismiss(self, address: int) -> None:
        """Undo ``admit``. What is queued may still use the memory: the driver frees it later."""

    @abc.abstractmethod
    def memory_allocated(self) -> int:
        """Bytes in HBM held by live tensors, as far as this machine sees them."""

    @abc.abstractmethod
    def memory_peak(self) -> int:
        """The most that ``memory_allocated`` ever was, or since its statistics were reset."""

    @abc.abstractmethod
    def reset_peak(self) -> None:
        """Have ``memory_peak`` begin anew; on a GPU these are torch's own statistics."""

    @abc.abstractmethod
    def stamp(self, stream: Stream) -> Stamp:
        """The time at which ``stream`` comes to where it is now."""

    @abc.abstractmethod
    def memory_limit(self) -> int | None:
        """What ``memory_allocated`` can come to, as far as is known now."""
