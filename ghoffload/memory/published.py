"""The page a process publishes: what it holds, what it has been promised, how far it is.

Note [a page that vanishes]
    The page is an anonymous file (``memfd_create``): no directory has it, and it is gone with the
    process, however that ends. Others find it among ``/proc/*/fd``, where the kernel shows them
    the processes of the same user (root those of all). A forked child inherits it and drops it
    where Python hears of the fork; where it does not, the page still says whose it is (process id
    and start time), and a reader takes it from that process alone. It is open under a number that
    is in use nowhere else (``FILE_NUMBER``), so that a reader asks each process one question and
    not one for each of its files. The first use of the runtime makes the page; an import does not.
    Without memfd or ``/proc`` (not Linux) there is none, and nothing else changes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from ghoffload.machine.protocol import Machine
from ghoffload.memory.page_format import (
    BODY_AT,
    BODY_BYTES,
    COUNTERS,
    COUNTERS_AT,
    FILE_NUMBER,
    MAGIC,
    OWNER,
    OWNER_AT,
    PAGE_BYTES,
    RECORD,
    Claim,
    launch,
    page_name,
    start_time,
)

_MOST_CLAIMS = 64
_MFD_CLOEXEC, _MFD_NOEXEC_SEAL = 1, 8


class Page:
    """This process's page. Safe to use from several threads and from finalizers.

    Attributes:
        held: gives what is held, as (memory kind, owner, bytes); the ledger says it.
        on_fork: called in a forked child, for which nothing of its parent's counts.
    """

    _at: float  # of the last step
    _process: int

    def __init__(self) -> None:
        self.held: Callable[[], Iterable[tuple[str, str, int]]] = tuple
        self.on_fork: list[Callable[[], None]] = []
        self._watches_forks = False
        self._reset()

    def refresh(self, *, wait: bool = False) -> None:
        """Publish what is held and promised now, making the page if there is none.

        Args:
            wait: return only when it is published. Otherwise a write that is under way is left to
                go round again: a finalizer may come here with any lock held.
        """
        self._stale = True
        while self._writing.acquire(blocking=wait):
            try:
                self._stale = False
                if self._opened() and self._map is not None:
                    self._put(self._map, BODY_AT, self._body())
            finally:
                self._writing.release()
            if not self._stale:
                return
            wait = False

    def promise(self, claim: Claim) -> int:
        """Publish a claim; a number for ``amend`` and ``drop``."""
        number = next(self._numbers)
        self._claims[number] = claim
        self.refresh(wait=True)
        return number

    def amend(self, number: int, *, held: int | None = None, passing: bool | None = None) -> None:
        """Publish what has changed of a claim; one that is gone is left alone."""
        claim = self._claims.get(number)
        if claim is None:
            return
        new = claim._replace(
            held=claim.held if held is None else held,
            passing=claim.passing if passing is None else passing,
        )
        if new != claim:
            self._claims[number] = new
            self.refresh(wait=True)

    def drop(self, number: int) -> None:
        """Take a claim back. A second call, or one in a forked child, does nothing."""
        if self._claims.pop(number, None) is not None:
            self.refresh()

    def claims(self) -> dict[int, Claim]:
        """What this process has been promised, by number."""
        return self._claims.copy()

    def stepped(self, machine: Machine | None, parameters: int) -> None:
        """Count one optimizer step, and what the machine has moved and launched since the last.

        Args:
            machine: whose traffic it was; ``None`` for a step on the CPU.
            parameters: how many it updated.
        """
        now = time.monotonic()
        with self._lock:
            sums = self._sums
            if sums[0]:
                sums[6] = int((now - self._at) * 1e9)
            self._at = now
            sums[0] += 1
            sums[1] += parameters
            known = bool(self._devices) if machine is None else machine in self._machines
            if machine is not None:
                traffic = machine.traffic
                counts = (traffic.h2d_bytes, traffic.d2h_bytes, traffic.copies, traffic.launches)
                seen = self._machines.get(machine, (0, 0, 0, 0))
                self._machines[machine] = counts
                for k in range(4):
                    # Less than before: the machine's counts were reset.
                    moved = counts[k] - seen[k]
                    sums[2 + k] += moved if moved >= 0 else counts[k]
            if self._map is not None and self._process == os.getpid():
                self._put(self._map, COUNTERS_AT, COUNTERS.pack(*sums, now))
        if not known:
            self._meet(machine)

    # -- inner workings

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._stale = False
        self._map: mmap.mmap | None = None
        self._file = -1
        self._refused = False
        self._sequence = {BODY_AT: 0, COUNTERS_AT: 0}
        self._claims: dict[int, Claim] = {}
        self._numbers = itertools.count()
        self._machines: weakref.WeakKeyDictionary[Machine, tuple[int, int, int, int]]
        self._machines = weakref.WeakKeyDictionary()
        self._devices: list[tuple[str, str]] = []
        self._sums = [0] * 7
        self._at = 0.0
        self._process = os.getpid()

    def _forked(self) -> None:
        inherited, file = self._map, self._file
        self._reset()  # the locks, too: another thread may have held them
        if inherited is not None:
            with contextlib.suppress(OSError, ValueError):
                inherited.close()
            with contextlib.suppress(OSError):
                os.close(file)
        for forget in self.on_fork:
            forget()

    def _opened(self) -> bool:
        if self._map is not None:
            return self._process == os.getpid()  # else a fork that Python was not told of
        if self._refused:
            return False
        if not self._watches_forks and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)
            self._watches_forks = True
        self._process = os.getpid()
        try:
            started = start_time(self._process)
            self._file = _anonymous_file(page_name())
            made = mmap.mmap(self._file, PAGE_BYTES)
        except (AttributeError, ImportError, OSError, ValueError):
            self._refused = True
            return False
        OWNER.pack_into(made, OWNER_AT, MAGIC, self._process, started)
        self._put(made, COUNTERS_AT, COUNTERS.pack(*self._sums, self._at))
        self._map = made  # from here on ``stepped`` writes there
        return True

    def _put(self, page: mmap.mmap, at: int, payload: bytes) -> None:
        """Write a record: Note [no torn page] in page_format.py."""
        self._sequence[at] = number = self._sequence[at] + 2
        start = at + RECORD.size
        RECORD.pack_into(page, at, number - 1, 0, 0)
        page[start : start + len(payload)] = payload
        RECORD.pack_into(page, at, number, len(payload), zlib.crc32(payload))

    def _body(self) -> bytes:
        held = list(self.held())
        body = self._encoded(held)
        if len(body) > BODY_BYTES:  # hundreds of owners: a reader gets the sums
            sums: dict[str, int] = {}
            for kind, _, nbytes in held:
                sums[kind] = sums.get(kind, 0) + nbytes
            body = self._encoded([(kind, "all owners", nbytes) for kind, nbytes in sums.items()])
        return body

    def _encoded(self, held: Iterable[tuple[str, str, int]]) -> bytes:
        claims = list(self.claims().values())
        if len(claims) > _MOST_CLAIMS:
            # What others must not take is in the sum, whoever it is for.
            rest = claims[_MOST_CLAIMS:]
            sum_of_rest = sum(claim.outstanding for claim in rest)
            passing = any(claim.passing for claim in rest)
            claims = claims[:_MOST_CLAIMS]
            claims.append(Claim("host", "other owners", sum_of_rest, 0, passing))
        values = {
            "devices": self._devices,
            "launch": launch(),
            "held": [(kind, owner[:80], nbytes) for kind, owner, nbytes in held],
            "claims": [claim._replace(owner=claim.owner[:80]) for claim in claims],
        }
        return json.dumps(values).encode()

    def _meet(self, machine: Machine | None) -> None:
        """Publish the device of a machine that is new."""
        if machine is None:
            device = ("cpu", "")
        elif machine.kind == "cuda":
            device = (str(machine.device), _bus_id(machine))
        else:
            device = (f"{machine.kind} machine", "")
        if device not in self._devices:
            self._devices.append(device)
            self.refresh()


page = Page()
"""This process's page."""


def _anonymous_file(name: str) -> int:
    import fcntl

    try:
        # Some systems allow no others.
        file = os.memfd_create(name, _MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError:  # a kernel before 6.3
        file = os.memfd_create(name, _MFD_CLOEXEC)
    try:
        os.ftruncate(file, PAGE_BYTES)
        return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, FILE_NUMBER)
    finally:
        os.close(file)


def _bus_id(machine: Machine) -> str:
    """Where NVML finds the device, as ``0000:1b:00.0``; empty if unknown."""
    import torch

    try:
        found: Any = torch.cuda.get_device_properties(machine.device)
        domain = getattr(found, "pci_domain_id", 0)
        return f"{domain:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except Exception:  # a name less on a display
        return ""
