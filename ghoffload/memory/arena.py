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

import contextlib
import mmap
import os
import warnings
import weakref
from collections.abc import Iterable

import torch

from ghoffload.errors import PinWarning
from ghoffload.machine.protocol import Machine
from ghoffload.machine.topology import cpu_count
from ghoffload.memory import numa, pages
from ghoffload.memory.carving import ALIGNMENT, Carved, align
from ghoffload.memory.ledger import ledger
from ghoffload.memory.limits import available_host_bytes, memlock_limit
from ghoffload.memory.shares import taking


def carved_bytes(pieces: Iterable[tuple[int, torch.dtype]], alignment: int = ALIGNMENT) -> int:
    """Bytes an arena needs for these (count, dtype) carved one after the other."""
    end = 0
    for count, dtype in pieces:
        end = align(end, alignment) + count * dtype.itemsize
    return end


class HostArena(Carved):
    """Host memory reserved in one piece, from which tensors are carved.

    Args:
        nbytes: size in bytes; 0 is allowed. Nothing is rounded up beyond a page.
        machine: told about the memory (and asked to pin it); ``None`` for CPU-only use.
        owner: who holds it, for the ledger and messages.
        pin: whether to ask the machine to pin it.
        threads: threads that touch the pages; 0 takes the CPUs this process may run on.
        node: the NUMA node it is bound to. ``None`` prefers the one nearest to the machine's
            device where there are several, and warns of what came to lie elsewhere.

    Attributes:
        nbytes: size in bytes.
        owner: as given.
        address: of the first byte; 0 when ``nbytes`` is 0.
        pinned: whether the memory is pinned now.

    Raises:
        ValueError: a bad size or thread count.
        torch.OutOfMemoryError: it does not fit; nothing was reserved.
        OSError: the system refuses to bind it to ``node``.

    Warns:
        PinWarning: pinning was asked for and refused; the arena is pageable.
        RuntimeWarning: some of it is not on the node; with the figures.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        machine: Machine | None,
        owner: str,
        pin: bool = True,
        threads: int = 0,
        node: int | None = None,
    ) -> None:
        if threads < 0:
            raise ValueError(f"threads expects 0 or more, got {threads}")
        super().__init__(nbytes, owner)
        self.pinned = False
        self._buffer: mmap.mmap | None = None
        if nbytes > 0:
            near = machine.host_node if node is None and machine is not None else None
            with numa.placed_on(node), numa.preferring(near):
                if machine is not None and machine.imaginary:
                    self._buffer = pages.reserve(nbytes, backed=False)
                else:
                    self._buffer = _reserve(nbytes, owner, threads or cpu_count())
            self.address = pages.address_of(self._buffer)
            if node is not None:
                with contextlib.suppress(OSError):  # ``confirm`` tells what came of it
                    numa.bind(self.address, nbytes, node)
            if machine is not None:
                self.pinned = machine.register_host(self.address, nbytes, pin=pin, node=node)
                if self.pinned:
                    pages.wipe_on_fork(self._buffer)
            # The default is a preference: that it cannot be confirmed is no news to anyone.
            wanted = near if node is None else node
            if wanted is not None:
                numa.confirm(self.address, nbytes, wanted, owner, quiet=node is None)
        ledger.add(self.kind, owner, nbytes)
        self._finalizer = weakref.finalize(
            self,
            _release,
            # The mapping must outlive its registration.
            self._buffer,
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
        return not self._finalizer.alive

    @property
    def _survives_fork(self) -> bool:
        return not self.pinned  # Note [fork] in pages.py

    def close(self) -> None:
        self._finalizer()
        self._buffer = None
        self.pinned = False


def _reserve(nbytes: int, owner: str, threads: int) -> mmap.mmap:
    with taking(nbytes, "system", owner):
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
