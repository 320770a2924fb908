"""NUMA nodes by system call: where pages are placed, and where they are. No libnuma needed.

Note [binding]
    Pages go where the policy of the thread that touches them first says, and threads begin with
    the policy of the one that starts them. So ``placed_on`` sets this thread's policy while a
    segment is reserved and touched; ``bind`` then fixes the range itself, so that pages the kernel
    moves later stay on the node. ``preferring`` is for a default: a full node is no error then.
    Where containers forbid these calls, memory goes where it goes, and ``confirm`` tells how much
    of it went elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from ghoffload.machine.topology import read_text
from ghoffload.machine.topology.files import number_list

_NUMBERS = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239, "move_pages": 279},
    "aarch64": {"mbind": 235, "get_mempolicy": 236, "set_mempolicy": 237, "move_pages": 239},
}
_MPOL_PREFERRED, _MPOL_BIND = 1, 2
_MASK_WORDS = 16  # 1,024 nodes
_SAMPLES = 4096


def memory_nodes(root: Path = Path("/")) -> tuple[int, ...]:
    """NUMA nodes that have memory, by number; ``(0,)`` where the system tells of none."""
    text = read_text(root / "sys/devices/system/node/has_memory")
    return tuple(sorted(number_list(text or ""))) or (0,)


@contextlib.contextmanager
def placed_on(node: int | None) -> Iterator[None]:
    """Have this thread, and those it starts, touch fresh pages on ``node``; ``None``: anywhere.

    Raises:
        OSError: the system refuses.
    """
    if node is None:
        yield
        return
    outer = _set_policy(_MPOL_BIND, node)
    try:
        yield
    finally:
        _restore_policy(outer)


@contextlib.contextmanager
def preferring(node: int | None) -> Iterator[None]:
    """As ``placed_on``, but elsewhere where the node is full or the system refuses."""
    outer = None
    if node is not None:
        with contextlib.suppress(OSError):
            outer = _set_policy(_MPOL_PREFERRED, node)
    try:
        yield
    finally:
        if outer is not None:
            _restore_policy(outer)


def bind(address: int, nbytes: int, node: int) -> None:
    """Let the pages of a range be on ``node`` alone from now on; pages already there stay.

    Raises:
        OSError: the system refuses.
    """
    where, length = _pages(address, nbytes)
    bits = ctypes.c_ulong(64 * _MASK_WORDS)
    _call(
        "mbind",
        ctypes.c_void_p(where),
        ctypes.c_ulong(length),
        ctypes.c_long(_MPOL_BIND),
        _mask(node),
        bits,
        ctypes.c_ulong(0),
    )


def off_node(address: int, nbytes: int, node: int) -> tuple[int, int]:
    """(pages elsewhere than on ``node``, pages looked at): up to 4,096, evenly spread.

    Raises:
        OSError: the system refuses.
    """
    where, length = _pages(address, nbytes)
    total = length // mmap.PAGESIZE
    count = min(total, _SAMPLES)
    addresses = (ctypes.c_void_p * count)(
        *(where + (index * total // count) * mmap.PAGESIZE for index in range(count))
    )
    status = (ctypes.c_int * count)()
    # Without a list of nodes, move_pages moves nothing and tells where each page is.
    _call(
        "move_pages",
        ctypes.c_long(0),
        ctypes.c_ulong(count),
        addresses,
        None,
        status,
        ctypes.c_long(0),
    )
    return sum(found != node for found in status), count


def confirm(address: int, nbytes: int, node: int, owner: str, *, quiet: bool = False) -> None:
    """Warn of pages that are not on ``node``, and (unless ``quiet``) that nobody can tell.

    Warns:
        RuntimeWarning: with the figures.
    """
    try:
        elsewhere, looked_at = off_node(address, nbytes, node)
    except OSError as error:
        if quiet:
            return
        text = f"{owner}: whether memory is on NUMA node {node} cannot be confirmed: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return
    if elsewhere:
        warnings.warn(
            f"{owner}: expected {nbytes:,} bytes on NUMA node {node}, but {elsewhere:,} of "
            f"{looked_at:,} pages looked at are elsewhere",
            RuntimeWarning,
            stacklevel=2,
        )


_Policy = tuple[int, "ctypes.Array[ctypes.c_ulong]"]


def _set_policy(mode: int, node: int) -> _Policy:
    """Set this thread's policy; the one before."""
    old, outer = ctypes.c_int(), (ctypes.c_ulong * _MASK_WORDS)()
    bits = ctypes.c_ulong(64 * _MASK_WORDS)
    _call("get_mempolicy", ctypes.byref(old), outer, bits, None, ctypes.c_ulong(0))
    _call("set_mempolicy", ctypes.c_long(mode), _mask(node), bits)
    return old.value, outer


def _restore_policy(policy: _Policy) -> None:
    mode, nodes = policy
    bits = ctypes.c_ulong(64 * _MASK_WORDS)
    _call("set_mempolicy", ctypes.c_long(mode), nodes if any(nodes) else None, bits)


def _pages(address: int, nbytes: int) -> tuple[int, int]:
    start = address - address % mmap.PAGESIZE
    return start, -(-(address + nbytes - start) // mmap.PAGESIZE) * mmap.PAGESIZE


def _mask(node: int) -> ctypes.Array[ctypes.c_ulong]:
    if not 0 <= node < 64 * _MASK_WORDS:
        raise ValueError(f"expected a NUMA node from 0 to {64 * _MASK_WORDS - 1}, got {node}")
    mask = (ctypes.c_ulong * _MASK_WORDS)()
    mask[node // 64] = 1 << node % 64
    return mask


def _call(name: str, *arguments: object) -> None:
    number = _NUMBERS.get(platform.machine(), {}).get(name)
    if number is None or not sys.platform.startswith("linux"):
        raise OSError(f"{name} is not known on {sys.platform} {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    if libc.syscall(ctypes.c_long(number), *arguments) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
