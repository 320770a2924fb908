"""How a published page is laid out, and what is in it: for its writer and its readers.

Note [no torn page]
    A record is written as: sequence number odd, payload, sequence number even with length and
    CRC. A reader takes a payload whose CRC fits and before and after which the same even number
    stood. The numbers alone would do where stores become visible in order; the CRC stands in for
    the barriers that Python does not have on other machines.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

GROUP_VARIABLE = "GHOFFLOAD_GROUP"
"""Processes with another value do not see each other's pages: a test run sees its own alone."""

FILE_NUMBER = 900
"""Below the usual limit of 1,024 and above what programs use; the next free one if it is taken."""

PAGE_BYTES = 64 << 10
OWNER = struct.Struct("8sqq")  # magic, process id, start time
RECORD = struct.Struct("QII")  # sequence number, bytes, CRC
COUNTERS = struct.Struct("7qd")
OWNER_AT, COUNTERS_AT, BODY_AT = 0, 64, 256
BODY_BYTES = PAGE_BYTES - BODY_AT - RECORD.size
MAGIC = b"ghoffl01"  # the layout; a reader leaves other layouts alone


class Claim(NamedTuple):
    """Bytes promised to an owner.

    Attributes:
        kind: memory kind.
        owner: who may take them.
        nbytes: promised.
        held: of them, taken already.
        passing: whether they are being taken right now, after which the promise ends.
    """

    kind: str
    owner: str
    nbytes: int
    held: int = 0
    passing: bool = False

    @property
    def outstanding(self) -> int:
        """Bytes that are still to come."""
        return max(0, self.nbytes - self.held)


class Counters(NamedTuple):
    """Running sums of a process since it began.

    Attributes:
        steps: optimizer steps queued.
        parameters: parameters updated by them, a parameter once a step.
        h2d_bytes, d2h_bytes, copies, launches: as in ``Traffic``, of all machines.
        step_ns: nanoseconds between the last two steps.
        at: ``time.monotonic()`` of the last step.
    """

    steps: int = 0
    parameters: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    copies: int = 0
    launches: int = 0
    step_ns: int = 0
    at: float = 0.0


def page_name() -> str:
    """The name of pages, by which processes find each other."""
    return f"ghoffload-page{os.environ.get(GROUP_VARIABLE, '')[:80]}"


def launch() -> str:
    """What the ranks of one launch on this node have in common; empty for a process by itself."""
    if ranks() == 1:
        return ""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    return " ".join(os.environ.get(name, "-")[:80] for name in names)


def ranks() -> int:
    """Processes launched together on this node: ``LOCAL_WORLD_SIZE``, as torchrun sets it."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isascii() and text.isdigit() else 1


def start_time(process: int) -> int:
    """When a process began, in the kernel's clock ticks: with its number, what names it for good.

    Raises:
        OSError, ValueError: it is gone, or there is no ``/proc``.
    """
    text = read_text_or_raise(f"/proc/{process}/stat")
    # The second field, the command in parentheses, may hold anything.
    return int(text.rpartition(")")[2].split()[19])


def read_text_or_raise(path: str) -> str:
    """A small file's text."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
