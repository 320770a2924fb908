"""What a check returns, and what it may look at beside the topology."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ghoffload.machine.topology import Topology


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
class Copies:
    """A quick measurement of copies between host memory and one GPU.

    Attributes:
        gpu: CUDA's index.
        nbytes: of one copy.
        pinned: whether the host memory could be pinned.
        refusal: what the driver said if not.
        h2d: bytes a second to the GPU, the median copy.
        d2h: bytes a second from it.
    """

    gpu: int
    nbytes: int
    pinned: bool
    refusal: str | None
    h2d: float
    d2h: float


@dataclass(frozen=True, kw_only=True)
class Readings:
    """What a check may know beside the topology. ``None``: it was not asked or not measured.

    Attributes:
        before: the topology before the copies ran; the one judged is from while they ran.
        copies: the measurement.
        copies_error: why there is none, though there was a GPU to measure.
        nvrtc: the version of the compiler that builds the kernels.
        nvrtc_error: why there is none.
    """

    before: Topology | None = None
    copies: Copies | None = None
    copies_error: str | None = None
    nvrtc: tuple[int, int] | None = None
    nvrtc_error: str | None = None
