"""What a check returns, and what it may look at beside the topology."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ghoffload.machine.topology import Topology
from ghoffload.measure.rates import Rates


class Severity(str, Enum):
    """How bad a finding is. A ``HURTS`` makes the command's exit code 1."""

    HURTS = "hurts"
    NOTE = "note"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong, with its mend.

    Attributes:
        check: the name of the check.
        severity: how bad it is.
        what: what is wrong, in a sentence without its full stop.
        mend: what to do about it, the same way.
    """

    check: str
    severity: Severity
    what: str
    mend: str


@dataclass(frozen=True, kw_only=True)
class Readings:
    """What a check may know beside the topology. ``None``: it was not asked or not measured.

    Attributes:
        before: the topology before the copies ran; the one judged is from while they ran.
        rates: the measurement of the link.
        gpu: CUDA's index of the GPU that it is of.
        age: seconds since it was made.
        copies_error: why there is none, though there was a GPU to measure.
        nvrtc: the version of the compiler that builds the kernels.
        nvrtc_error: why there is none.
        packaged: the version of the compiler of the installed package's kernels, which serve a
            Hopper; ``None`` where it brings none.
    """

    before: Topology | None = None
    rates: Rates | None = None
    gpu: int | None = None
    age: float | None = None
    copies_error: str | None = None
    nvrtc: tuple[int, int] | None = None
    nvrtc_error: str | None = None
    packaged: tuple[int, int] | None = None
