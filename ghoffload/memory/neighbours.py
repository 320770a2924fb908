"""The pages of other processes: Note [a page that vanishes] in published.py."""

from __future__ import annotations

import json
import os
import re
import stat
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ghoffload.memory.ledger import LedgerRow
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
    Counters,
    page_name,
    read_text_or_raise,
    start_time,
)

_ATTEMPTS = 50
_PAUSE_SECONDS = 0.002  # a writer is interrupted for longer than it writes


@dataclass(frozen=True, kw_only=True)
class Published:
    """What a process says of itself.

    Attributes:
        pid: its number, as this process sees it.
        started: when it began, in the kernel's clock ticks.
        counters: see there.
        command: its command line.
        devices: names and bus ids (empty for none) of the devices that it steps with.
        launch: what it has in common with those launched together with it.
        held: what it holds, by memory kind and owner.
        claims: what it was promised.
    """

    pid: int
    started: int
    counters: Counters
    command: str = ""
    devices: tuple[tuple[str, str], ...] = ()
    launch: str = ""
    held: tuple[LedgerRow, ...] = ()
    claims: tuple[Claim, ...] = ()

    @property
    def outstanding(self) -> int:
        """Bytes of host memory promised to it that are still to come."""
        return sum(claim.outstanding for claim in self.claims)


def neighbours() -> list[Published]:
    """Every process but this one whose page can be read, by number."""
    own = os.getpid()
    found = (published(number) for number in _processes() if number != own)
    return sorted((page for page in found if page is not None), key=lambda page: page.pid)


def published(process: int) -> Published | None:
    """What a process says of itself; ``None`` where it says nothing or may not be asked."""
    try:
        for file in _candidates(process):
            page = _read(process, file)
            if page is not None:
                return page
    except (OSError, ValueError):  # it ended meanwhile, or belongs to somebody else
        pass
    return None


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _candidates(process: int) -> Iterator[str]:
    wanted = f"/memfd:{page_name()} (deleted)"
    folder = f"/proc/{process}/fd"
    if os.readlink(f"{folder}/{FILE_NUMBER}") == wanted:  # the rule; without that file no page
        yield f"{folder}/{FILE_NUMBER}"
    for name in os.listdir(folder):
        try:
            if os.readlink(f"{folder}/{name}") == wanted:
                yield f"{folder}/{name}"
        except OSError:  # closed meanwhile
            continue


def _read(process: int, path: str) -> Published | None:
    # By now the number may stand for any other file, so opening must neither wait nor act.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or about.st_size != PAGE_BYTES:
            return None
        magic, owner, started = OWNER.unpack(os.pread(file, OWNER.size, OWNER_AT))
        if magic != MAGIC or started != start_time(process) or owner != _own_number(process):
            return None  # inherited from the process it belongs to
        counters = _record(file, COUNTERS_AT, COUNTERS.size)
        body = _record(file, BODY_AT, BODY_BYTES)
    finally:
        os.close(file)
    if counters is None or body is None:
        return None
    return _parsed(process, started, Counters(*COUNTERS.unpack(counters)), body)


def _record(file: int, at: int, limit: int) -> bytes | None:
    """A record's payload, whole; ``None`` if it is not to be had in a tenth of a second."""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_SECONDS)
        head = os.pread(file, RECORD.size, at)
        number, nbytes, crc = RECORD.unpack(head)
        if number == 0 or number % 2 or nbytes > limit:
            continue
        payload = os.pread(file, nbytes, at + RECORD.size)
        if zlib.crc32(payload) == crc and os.pread(file, RECORD.size, at) == head:
            return payload
    return None


def _parsed(process: int, started: int, counters: Counters, body: bytes) -> Published | None:
    try:
        values: dict[str, Any] = json.loads(body)
        return Published(
            pid=process,
            started=started,
            command=_command(process),
            devices=tuple((str(name), str(bus)) for name, bus in values["devices"]),
            launch=str(values["launch"]),
            held=tuple(LedgerRow(str(k), str(o), max(0, int(n))) for k, o, n in values["held"]),
            claims=tuple(
                Claim(str(kind), str(owner), int(nbytes), int(held), bool(passing))
                for kind, owner, nbytes, held, passing in values["claims"]
            ),
            counters=counters,
        )
    except (ValueError, TypeError, KeyError):  # somebody else's idea of a page
        return None


def _own_number(process: int) -> int:
    """A process's number as it knows it itself, which in a container is another."""
    found = re.search(
        r"^NSpid:.*?(\d+)\s*$", read_text_or_raise(f"/proc/{process}/status"), re.MULTILINE
    )
    return int(found[1]) if found else process


def _command(process: int) -> str:
    try:
        words = read_text_or_raise(f"/proc/{process}/cmdline").rstrip("\0").split("\0")
    except OSError:
        return ""
    text = " ".join(" ".join(words).split())
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:500]
