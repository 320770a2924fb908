"""What a segment of the tensor manager lies on, one class a way to get memory.

Note [life of a backing]
    made -> closed, by ``close()``, by the manager's end or by the interpreter's exit. Tensors hold
    ``keep``, so the bytes stay where they are until the last tensor over them has died: host
    memory of a closed backing is pageable from then on, managed memory is freed with that tensor.
    At exit, managed memory under a living tensor is left to the end of the process, which frees it.
"""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from typing import Any, Protocol

import torch

from ghoffload.errors import PinWarning
from ghoffload.machine.managed import Driver
from ghoffload.machine.protocol import Machine
from ghoffload.machine.topology import cpu_count
from ghoffload.memory import numa, pages
from ghoffload.memory.arena import HostArena, _reserve
from ghoffload.memory.ledger import ledger
from ghoffload.memory.limits import available_host_bytes, memlock_limit
from ghoffload.memory.shares import taking


class Backing(Protocol):
    """Bytes at ``address``; whoever looks at them holds ``keep``."""

    address: int
    nbytes: int
    keep: Any

    def close(self) -> None:
        """Give it back, as far as nobody holds ``keep``. A second call does nothing."""


def back(
    kind: str, nbytes: int, *, machine: Machine | None, owner: str, node: int | None
) -> Backing:
    """Memory of a kind from the system, entered in the ledger.

    Raises:
        torch.OutOfMemoryError: it does not fit, or cannot be pinned.
        RuntimeError: it cannot be bound to ``node``.

    Warns:
        RuntimeWarning: some of it is not on ``node``; with the figures.
    """
    if kind == "managed":
        assert machine is not None, "refused before"
        if machine.kind == "cuda":
            with taking(nbytes, "managed", owner):
                return _Managed(nbytes, machine, owner, node)
        return _VirtualManaged(nbytes, machine, owner)
    return _Host(kind, nbytes, machine, owner, node)


class _Host:
    """Pinned or pageable memory."""

    def __init__(
        self, kind: str, nbytes: int, machine: Machine | None, owner: str, node: int | None
    ) -> None:
        pin = kind == "pinned"
        # Where there is one node, all memory is there.
        bound = node if len(numa.memory_nodes()) > 1 else None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PinWarning)  # an error below: a kind is a promise
                self._arena = HostArena(nbytes, machine=machine, owner=owner, pin=pin, node=bound)
        except OSError as error:
            raise RuntimeError(
                f"binding memory to NUMA node {node} is refused here ({error}); numa=None leaves "
                "its place to the system"
            ) from error
        if pin and not self._arena.pinned:
            self._arena.close()
            reason = getattr(machine, "pin_refusal", None)
            limit = memlock_limit()
            raise torch.OutOfMemoryError(
                f"{owner}: pinning {nbytes:,} bytes was refused ({reason or 'no reason given'}; "
                f"RLIMIT_MEMLOCK is {'unlimited' if limit is None else f'{limit:,} bytes'})"
            )
        self.address, self.nbytes = self._arena.address, nbytes
        self.keep: Any = self._arena._buffer

    def close(self) -> None:
        self._arena.close()
        self.keep = None


class _VirtualManaged:
    """Managed memory of the virtual machine: a registered host mapping."""

    def __init__(self, nbytes: int, machine: Machine, owner: str) -> None:
        mapping = _reserve(nbytes, owner, cpu_count())
        self.address, self.nbytes = pages.address_of(mapping), nbytes
        self.keep: Any = mapping
        machine.admit(self.address, nbytes)
        ledger.add("managed", owner, nbytes)
        self._finalizer = weakref.finalize(
            self, _release_virtual, mapping, machine, self.address, nbytes, owner, os.getpid()
        )

    def close(self) -> None:
        self._finalizer()
        self.keep = None


class _Managed:
    """Managed memory of a CUDA device, staying on the host and read there by the device."""

    def __init__(self, nbytes: int, machine: Machine, owner: str, node: int | None) -> None:
        driver = Driver.of(machine)  # type: ignore[arg-type]
        node = machine.host_node if node is None else node
        try:
            self.address = driver.allocate(nbytes)
        except torch.OutOfMemoryError as error:
            room = available_host_bytes()
            raise torch.OutOfMemoryError(
                f"{owner}: {error} ({'unknown' if room is None else f'{room:,}'} bytes available)"
            ) from error
        self.nbytes = nbytes
        ledger.add("managed", owner, nbytes)
        self.keep: Any = _ManagedMemory(self.address, nbytes, machine, owner, driver)
        driver.stay_on_host(self.address, nbytes, node)
        # Pages come now, not at the first access: faults are several times slower.
        stream = machine.current_stream()
        driver.prefetch(
            self.address,
            nbytes,
            to_device=False,
            stream=stream.handle,  # type: ignore[attr-defined]
            node=node,
        )
        placed = machine.event("managed memory placed")
        machine.record(placed, stream)
        machine.synchronize(placed, label="managed memory placed")
        if node is not None and driver.is_on_node(self.address, nbytes, node) is False:
            warnings.warn(
                f"{owner}: expected {nbytes:,} bytes of managed memory on NUMA node {node}, but "
                "the driver says that some are elsewhere",
                RuntimeWarning,
                stacklevel=2,
            )
        machine.admit(self.address, nbytes, node=node)

    def close(self) -> None:
        self.keep = None


class _ManagedMemory:
    """Frees managed memory when nobody holds it any more."""

    def __init__(
        self, address: int, nbytes: int, machine: Machine, owner: str, driver: Driver
    ) -> None:
        release = weakref.finalize(
            self, _release_managed, driver, machine, address, nbytes, owner, os.getpid()
        )
        release.atexit = False  # a tensor may look at it until the very end


def _release_virtual(
    mapping: mmap.mmap, machine: Machine, address: int, nbytes: int, owner: str, process: int
) -> None:
    if os.getpid() != process:
        return
    try:
        machine.dismiss(address)
    finally:
        ledger.remove("managed", owner, nbytes)


def _release_managed(
    driver: Driver, machine: Machine, address: int, nbytes: int, owner: str, process: int
) -> None:
    if os.getpid() != process:
        return
    machine.dismiss(address)
    try:
        machine.synchronize_all()
        driver.free(address)
    except RuntimeError:
        # The error of an earlier kernel, which torch reports to whoever asks next, or a driver
        # that is shutting down: in both cases the context takes the memory with it.
        pass
    finally:
        ledger.remove("managed", owner, nbytes)
