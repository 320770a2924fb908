"""What is measured, decided before anything is: sizes, block counts, threads, repeats."""

from __future__ import annotations

from dataclasses import dataclass

from ghoffload.measure.link import BLOCKS

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30

COPY_SIZES = tuple(4 * KB << (2 * k) for k in range(10))
"""Bytes of the copies by engine: 4 KB, 16 KB, ... 1 GB."""

_MOST_IN_A_SAMPLE = 64 * MB
_MOST_CALLS = 16


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of everything.

    Attributes:
        sizes: bytes of one copy by engine, growing.
        blocks: block counts of copies by kernel, growing.
        kernel_bytes: bytes of one copy by kernel.
        managed_bytes: bytes of each of the two managed buffers; 0: there is no room for them.
        hbm_bytes: bytes of one pass over HBM.
        host_bytes: bytes of each of the three arrays of the host memory passes.
        threads: thread counts of those, growing.
        repeats: samples of each figure, after one that is not counted.
    """

    sizes: tuple[int, ...]
    blocks: tuple[int, ...]
    kernel_bytes: int
    managed_bytes: int
    hbm_bytes: int
    host_bytes: int
    threads: tuple[int, ...]
    repeats: int

    @property
    def buffer_bytes(self) -> int:
        """Bytes of each buffer that copies go between."""
        return max(*self.sizes, self.kernel_bytes)


def make_plan(
    *, quick: bool, cpus: int, host_free: int | None, hbm_free: int = 0, hbm_total: int = 0
) -> Plan:
    """The plan for a machine.

    Args:
        quick: fewer sizes, counts and samples.
        cpus: CPUs this process may use.
        host_free: bytes of host memory it may take; ``None`` if unknown.
        hbm_free: bytes free on the card, 0 without one.
        hbm_total: bytes of the card. Managed memory takes no more than a quarter of it, and never
            more than 1 GB: it reports no shortage, the system just gets slow.
    """
    free = 16 * GB if host_free is None else host_free
    # Two pinned buffers at once, or three arrays, in a quarter of what is free at the most.
    host_room = _power_of_two(free // 12)
    room = min(host_room, _power_of_two(hbm_free // 8)) if hbm_total else host_room
    largest = max(4 * KB, min(room, 256 * MB if quick else GB))
    sizes = tuple(size for size in COPY_SIZES if size < largest)
    if quick:
        sizes = tuple(size for size in (4 * KB, 256 * KB, 4 * MB, 64 * MB) if size < largest)
    # Two buffers: half of what all of it may be.
    managed_room = min(GB, _power_of_two(hbm_total // 4)) // 2
    return Plan(
        sizes=(*sizes, largest),
        blocks=(2, 8, 32) if quick else BLOCKS,
        kernel_bytes=min(largest, 64 * MB if quick else 256 * MB),
        managed_bytes=min(managed_room, host_room, 64 * MB if quick else 256 * MB),
        hbm_bytes=largest,
        host_bytes=max(MB, min(host_room, 128 * MB if quick else 512 * MB)),
        threads=_thread_counts(cpus, quick),
        repeats=3 if quick else 5,
    )


def calls_in_a_sample(nbytes: int) -> int:
    """How many copies of a size stand behind one another in one sample.

    A single small copy is over before the clock has ticked twice.
    """
    return max(1, min(_MOST_CALLS, _MOST_IN_A_SAMPLE // nbytes))


def _thread_counts(cpus: int, quick: bool) -> tuple[int, ...]:
    if cpus < 1:
        raise ValueError(f"cpus expects 1 or more, got {cpus}")
    counts = [1]
    while not quick and counts[-1] * 2 < cpus:
        counts.append(counts[-1] * 2)
    return (*counts, cpus) if cpus > 1 else tuple(counts)


def _power_of_two(value: int) -> int:
    """The largest power of two that is no more than ``value``; 0 for less than 1."""
    return 1 << (value.bit_length() - 1) if value > 0 else 0
