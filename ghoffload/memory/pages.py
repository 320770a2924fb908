"""Pages: anonymous mappings, huge where that helps, touched by several threads at once.

Note [first touch]
    A page is allocated and zeroed when it is first touched, one thread at about 3 to 15 GB/s. A
    pin touches what is left, in one thread. So all threads touch disjoint ranges first: measured
    on an H200's host with 16 threads, 24 to 29 GB/s with huge pages until pinned (15 without)
    against 2.0 for torch's allocator. ``MADV_POPULATE_WRITE`` reached half of that there.

Note [fork]
    Linux copies pinned pages for the child *at fork*, so each forked data-loader worker would cost
    as much memory as the whole pinned arena. ``MADV_WIPEONFORK`` prevents that: a child finds
    zeros there. ``MADV_DONTFORK`` would do so, too, but a child that touches the range (or unmaps
    it at exit, when something else lives there by then) crashes. Pageable mappings are left to
    copy-on-write: a child sees the values at the fork, as with any tensor.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ghoffload.machine.topology import huge_page_size

# Python leaves out names that its build machine's headers did not have.
_MADV_HUGEPAGE = 14
_MADV_WIPEONFORK = 18
_MAP_NORESERVE = 0x4000 if sys.platform.startswith("linux") else 0

_LEAST_TASK_BYTES = 4 << 20
"""Below this a thread costs more than it saves."""


def reserve(nbytes: int, *, backed: bool = True) -> mmap.mmap:
    """A private anonymous mapping of ``nbytes`` (1 or more), zero, huge pages asked for.

    ``backed``: ``False`` for addresses alone, more than there is memory, that nobody writes to.

    Raises:
        MemoryError: the kernel refuses to map it.
    """
    try:
        if hasattr(mmap, "MAP_PRIVATE"):
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0 if backed else _MAP_NORESERVE)
            mapping = mmap.mmap(-1, nbytes, flags=flags)
        else:
            mapping = mmap.mmap(-1, nbytes)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"mapping it failed: {error}") from error
    huge = huge_page_size()
    if not backed:
        return mapping
    # A huge page is used only where a whole one fits, so smaller mappings have nothing to gain.
    if huge is not None and nbytes >= huge:
        advise(mapping, _MADV_HUGEPAGE)
    return mapping


def advise(mapping: mmap.mmap, advice: int) -> bool:
    """``madvise`` on a whole mapping; whether the kernel took it."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mapping.madvise(advice)
    except OSError:
        return False
    return True


def wipe_on_fork(mapping: mmap.mmap) -> bool:
    """Keep forked children from inheriting the mapping: Note [fork]. Whether it took effect."""
    return advise(mapping, _MADV_WIPEONFORK)


def address_of(mapping: mmap.mmap) -> int:
    """The address of the mapping's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def populate(mapping: mmap.mmap, *, threads: int) -> None:
    """Allocate every page of a fresh mapping, with ``threads`` threads: Note [first touch].

    Args:
        mapping: the mapping, fresh: some of its bytes are set to zero.
        threads: most threads to use, 1 or more.
    """
    address, nbytes = address_of(mapping), len(mapping)
    pages = np.frombuffer(mapping, dtype=np.uint8)

    def work(bounds: tuple[int, int]) -> None:
        # Fresh pages read as zero already; the store is what allocates. It releases the GIL.
        pages[bounds[0] : bounds[1] : mmap.PAGESIZE] = 0

    ranges = _ranges(address, nbytes, threads)
    if len(ranges) == 1:
        work(ranges[0])
        return
    with ThreadPoolExecutor(min(threads, len(ranges)), "ghoffload-touch") as executor:
        list(executor.map(work, ranges))


def _ranges(address: int, nbytes: int, threads: int) -> list[tuple[int, int]]:
    """Offsets that split a mapping where pages (huge ones where it has any) begin."""
    huge = huge_page_size()
    granule = huge if huge is not None and nbytes >= huge else mmap.PAGESIZE
    # Several ranges a thread, so that one slow thread does not hold up all.
    size = max(nbytes // (4 * threads), _LEAST_TASK_BYTES, granule)
    size -= size % granule
    first = -address % granule
    cuts = [0, *range(first + size, nbytes, size), nbytes] if threads > 1 else [0, nbytes]
    return [(start, stop) for start, stop in itertools.pairwise(cuts) if start < stop]
