"""HostArena: one slab of host memory, pinned where it can be, carved to size.

Note [life of an arena]
    reserved (mapped, every page touched, registered with the machine, in the ledger) -> closed
    (unregistered, out of the ledger). ``close()``, the arena's death and the interpreter's exit
    all lead there, whichever comes first. Tensors keep the mapping itself alive: one that outlives
    its arena stays readable and writable, in pageable memory, until it dies, too.
    A forked child never closes an arena of its parent's, and cannot use a pinned one: Note [fork]
    in pages.py.
"""

from __future__ import annotations

import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from ghoffload.errors import PinWarning
from ghoffload.machine.protocol import Machine
from ghoffload.machine.topology import cpu_count
from ghoffload.memory import pages
from ghoffload.memory.ledger import ledger
from ghoffload.memory.limits import available_host_bytes, cgroup_available_bytes, memlock_limit

ALIGNMENT = 256
"""Bytes; enough for bulk copies and vector loads, and what torch's CUDA allocator never misses."""


def carved_bytes(pieces: Iterable[tuple[int, torch.dtype]], alignment: int = ALIGNMENT) -> int:
    """Bytes an arena needs for these (count, dtype) carved one after the other."""
    end = 0
    for count, dtype in pieces:
        end = _align(end, alignment) + count * dtype.itemsize
    return end


class HostArena:
    """Host memory reserved in one piece, from which tensors are carved.

    Args:
        nbytes: size in bytes; 0 is allowed. Nothing is rounded up beyond a page.
        machine: told about the memory (and asked to pin it); ``None`` for CPU-only use.
        owner: who holds it, for the ledger and messages.
        pin: whether to ask the machine to pin it.
        threads: threads that touch the pages; 0 takes the CPUs this process may run on.

    Attributes:
        nbytes: size in bytes.
        owner: as given.
        address: of the first byte; 0 when ``nbytes`` is 0.
        pinned: whether the memory is pinned now.

    Raises:
        ValueError: a bad size or thread count.
        torch.OutOfMemoryError: it does not fit; nothing was reserved.

    Warns:
        PinWarning: pinning was asked for and refused; the arena is pageable.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        machine: Machine | None,
        owner: str,
        pin: bool = True,
        threads: int = 0,
    ) -> None:
        if nbytes < 0:
            raise ValueError(f"nbytes expects 0 or more, got {nbytes}")
        if threads < 0:
            raise ValueError(f"threads expects 0 or more, got {threads}")
        self.nbytes = nbytes
        self.owner = owner
        self.address = 0
        self.pinned = False
        self._lock = threading.Lock()
        self._used = 0
        self._process = os.getpid()
        self._mapping: mmap.mmap | None = None
        if nbytes > 0:
            self._mapping = _reserve(nbytes, owner, threads or cpu_count())
            self.address = pages.address_of(self._mapping)
            if machine is not None:
                self.pinned = machine.register_host(self.address, nbytes, pin=pin)
                if self.pinned:
                    pages.wipe_on_fork(self._mapping)
        ledger.add(self.kind, owner, nbytes)
        self._finalizer = weakref.finalize(
            self,
            _release,
            # The mapping must outlive its registration.
            self._mapping,
            machine if nbytes > 0 else None,
            self.address,
            (self.kind, owner, nbytes),
            self._process,
        )
        if pin and machine is not None and nbytes > 0 and not self.pinned:
            try:
                warnings.warn(_refused_pin(nbytes, owner, machine), PinWarning, stacklevel=2)
            except PinWarning:  # warnings are errors here
                self.close()
                raise

    @property
    def kind(self) -> str:
        """The memory kind: ``"pinned"``, or ``"system"`` for pageable memory."""
        return "pinned" if self.pinned else "system"

    @property
    def closed(self) -> bool:
        """Whether the memory was given back."""
        return not self._finalizer.alive

    @property
    def remaining(self) -> int:
        """Bytes not carved yet; an aligned piece may have a few less."""
        return self.nbytes - self._used

    def carve(self, count: int, dtype: torch.dtype, alignment: int = ALIGNMENT) -> Tensor:
        """The next ``count`` elements as a zero-filled 1-D tensor with a storage of its own.

        Args:
            count: elements, 0 or more.
            dtype: of the tensor.
            alignment: of its first byte, a power of two up to a page.

        Raises:
            ValueError: a bad argument, or the arena has no room left for it.
        """
        if alignment < dtype.itemsize or alignment & (alignment - 1) or alignment > mmap.PAGESIZE:
            raise ValueError(
                f"alignment expects a power of two from {dtype.itemsize} to {mmap.PAGESIZE}, "
                f"got {alignment}"
            )
        with self._lock:
            offset = _align(self._used, alignment)
            tensor = self.tensor(offset if count else 0, count, dtype)
            if count:
                self._used = offset + count * dtype.itemsize
        return tensor

    def tensor(self, offset_bytes: int, count: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor over ``count`` elements at ``offset_bytes``, whatever was carved there.

        It has a storage of its own, so ``torch.save`` writes its bytes alone.

        Raises:
            ValueError: it does not lie within the arena or is not aligned to its elements.
            RuntimeError: the arena was closed, or belongs to the process this one was forked from.
        """
        if self.closed:
            raise RuntimeError(f"the host arena of {self.owner!r} is closed")
        if self.pinned and self._process != os.getpid():
            raise RuntimeError(
                f"the pinned host arena of {self.owner!r} belongs to process {self._process}; "
                "a forked child does not inherit its contents"
            )
        end = offset_bytes + count * dtype.itemsize
        if offset_bytes < 0 or count < 0 or end > self.nbytes:
            raise ValueError(
                f"expected a range within the {self.nbytes:,} bytes of the host arena of "
                f"{self.owner!r}, got {count:,} elements of {dtype} at byte {offset_bytes:,}"
            )
        if offset_bytes % dtype.itemsize:
            raise ValueError(f"expected an offset aligned for {dtype}, got byte {offset_bytes:,}")
        if count == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        assert self._mapping is not None
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=offset_bytes)

    def close(self) -> None:
        """Give the memory back; tensors carved from it stay valid. A second call does nothing."""
        self._finalizer()
        self._mapping = None
        self.pinned = False


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _reserve(nbytes: int, owner: str, threads: int) -> mmap.mmap:
    room = cgroup_available_bytes()
    if room is not None and nbytes > room:
        raise torch.OutOfMemoryError(
            f"{owner} needs {nbytes:,} bytes of host memory; the memory limit of this process's "
            f"cgroup leaves {room:,}"
        )
    try:
        mapping = pages.reserve(nbytes)
        pages.populate(mapping, threads=threads)
    except MemoryError as error:
        available = available_host_bytes()
        figure = "an unknown number of" if available is None else f"{available:,}"
        raise torch.OutOfMemoryError(
            f"{owner} needs {nbytes:,} bytes of host memory: {error} ({figure} bytes available)"
        ) from error
    return mapping


def _release(
    mapping: mmap.mmap | None,
    machine: Machine | None,
    address: int,
    entry: tuple[str, str, int],
    process: int,
) -> None:
    if os.getpid() != process:
        return  # a forked child: registration and ledger are the parent's
    try:
        if machine is not None:
            machine.unregister_host(address)
    finally:
        ledger.remove(*entry)


def _refused_pin(nbytes: int, owner: str, machine: Machine) -> str:
    reason = getattr(machine, "pin_refusal", None)
    limit = memlock_limit()
    if limit is not None and limit < nbytes:
        cause = (
            f"RLIMIT_MEMLOCK is {limit:,} bytes: raise it ('ulimit -l unlimited', memlock in "
            "/etc/security/limits.conf, '--ulimit memlock=-1' for a container)"
        )
    else:
        cause = "the driver could lock no more memory: free some, or ask for less host state"
    return (
        f"pinning {nbytes:,} bytes of host memory for {owner} was refused"
        f"{f' ({reason})' if reason else ''}. Likely cause: {cause}. Going on with pageable "
        "memory, which is slower and lets copies block the host; pin_memory=False asks for that "
        "without this warning"
    )
