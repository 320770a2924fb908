"""How much host memory this process may still take, and what bounds it.

Note [which figure refuses]
    ``MemAvailable`` is no ground for a refusal: some hosts grow ``MemTotal`` as memory is used
    (one read 31 GiB at the start and 255 GiB later), so it may say far less than there is. A
    cgroup's limit is firm: going beyond it gets the process killed without a message. So a
    reservation is refused in advance on the cgroup's figures alone, and otherwise when the kernel
    itself refuses to map or to populate it. Swap is not counted: optimizer state that swaps is of
    no use, and pinned memory cannot.
"""

from __future__ import annotations

from pathlib import Path

from ghoffload.machine.topology.files import cgroup_memory, cgroup_memory_levels, fields

_PROC_MEMINFO = "proc/meminfo"


def cgroup_available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes below the tightest memory limit of this process's cgroups; ``None`` without a limit.

    Page cache of files counts as available, the kernel gives it up first.

    Args:
        root: the file system to read, for tests.
    """
    return cgroup_memory(root)[1]


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of host memory this process can take as things look now; ``None`` if unknown.

    The lesser of ``MemAvailable`` and the room in the cgroup. For reports and plans: see
    Note [which figure refuses] for why a small figure is not a refusal.

    Args:
        root: the file system to read, for tests.
    """
    return min(host_rooms(root).values(), default=None)


def host_rooms(root: Path = Path("/")) -> dict[Path | None, int]:
    """Bytes that may still be taken, by what bounds them.

    That is the directory of each cgroup that has a limit, and ``None`` for the host itself
    (``MemAvailable``).

    Args:
        root: the file system to read, for tests.
    """
    rooms: dict[Path | None, int] = {
        directory: room for directory, (_, room) in cgroup_memory_levels(root).items()
    }
    kilobytes = fields(root / _PROC_MEMINFO).get("MemAvailable")
    if kilobytes is not None:
        rooms[None] = kilobytes * 1024
    elif not (root / _PROC_MEMINFO).exists() and root == Path("/"):  # not Linux
        available = _psutil_available()
        if available is not None:
            rooms[None] = available
    return rooms


def memlock_limit() -> int | None:
    """The soft ``RLIMIT_MEMLOCK`` in bytes; ``None`` where there is none."""
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _psutil_available() -> int | None:
    try:
        import psutil

        return int(psutil.virtual_memory().available)
    except Exception:  # a figure for a report is not worth a crash
        return None
