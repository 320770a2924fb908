"""Single facts of the host: small files under ``/proc`` and ``/sys``, pages, cgroups, CPUs.

The root of the file system is an argument, so that tests can make machines up. Nothing raises: a
file that cannot be read is a fact less.
"""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from typing import Literal

ROOT = Path("/")


def read_text(path: Path) -> str | None:
    """A small file's text, ``None`` where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None


def page_size() -> int:
    """Bytes of an ordinary page: 4 KiB on x86, 4 or 64 KiB on aarch64."""
    return mmap.PAGESIZE


def huge_page_size(root: Path = ROOT) -> int | None:
    """Bytes of a transparent huge page (2 MiB, or 512 MiB with 64 KiB pages), ``None`` if off."""
    folder = root / "sys/kernel/mm/transparent_hugepage"
    text = (read_text(folder / "hpage_pmd_size") or "").strip()
    if not text.isdigit() or "[never]" in (read_text(folder / "enabled") or "[never]"):
        return None
    return int(text) or None


def cgroup_directories(
    controller: str, root: Path = ROOT, process: int | Literal["self"] = "self"
) -> list[Path]:
    """The directories of a process's cgroup and those above it for ``controller``, v1 and v2.

    A limit in any of them holds. Directories that this process cannot see are left out.
    """
    found: dict[Path, None] = {}
    for line in (read_text(root / f"proc/{process}/cgroup") or "").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        # Inside a container the path may be the host's, of which only the mount's root is seen.
        parts = [part for part in path.split("/") if part]
        if ".." in parts:
            parts = []
        for depth in range(len(parts), -1, -1):
            directory = base.joinpath(*parts[:depth])
            if directory.is_dir():
                found[directory] = None
    return list(found)


def cgroup_memory(root: Path = ROOT) -> tuple[int | None, int | None]:
    """The tightest memory limit of this process's cgroups and the least room below any, in bytes.

    ``None`` each where there is no limit.
    """
    levels = cgroup_memory_levels(root).values()
    limits, rooms = [limit for limit, _ in levels], [room for _, room in levels]
    return min(limits, default=None), min(rooms, default=None)


def cgroup_memory_levels(root: Path = ROOT) -> dict[Path, tuple[int, int]]:
    """Each of this process's cgroups that has a memory limit: the limit and the room below it.

    Page cache of files counts as room: the kernel gives it up first.
    """
    levels = {}
    for directory in cgroup_directories("memory", root):
        for limit_name, usage_name, prefix in (
            ("memory.max", "memory.current", ""),  # v2
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),  # v1
        ):
            limit, usage = integer(directory / limit_name), integer(directory / usage_name)
            # Without a limit, v2 says "max" and v1 the largest multiple of a page.
            if limit is None or usage is None or limit >= 2**62:
                continue
            stat = fields(directory / "memory.stat")
            cache = sum(stat.get(f"{prefix}{name}_file", 0) for name in ("active", "inactive"))
            levels[directory] = (limit, max(0, min(limit, limit - usage + cache)))
    return levels


def cpu_count(root: Path = ROOT, affinity: int | None = None) -> int:
    """CPUs this process may use: its affinity, and no more than its cgroup's quota pays for.

    Args:
        root: the file system to read, for tests.
        affinity: CPUs in the affinity mask, for tests; asked from the system when ``None``.
    """
    if affinity is None:
        try:
            affinity = len(os.sched_getaffinity(0))
        except (AttributeError, OSError):  # not Linux
            affinity = os.cpu_count() or 1
    count = affinity
    for directory in cgroup_directories("cpu", root):
        words = (read_text(directory / "cpu.max") or "").split()  # v2: "max 100000"
        if len(words) != 2:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")  # v1: -1 is no quota
            words = [(read_text(directory / name) or "").strip() for name in names]
        if all(word.isdigit() and int(word) > 0 for word in words):
            count = min(count, math.ceil(int(words[0]) / int(words[1])))
    return max(1, count)


def names(directory: Path) -> list[str]:
    """What a directory holds, sorted; nothing where it cannot be read."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def integer(path: Path) -> int | None:
    """The number that a file holds, ``None`` where it is not one or cannot be read."""
    try:
        return int(read_text(path) or "")
    except ValueError:
        return None


def fields(path: Path) -> dict[str, int]:
    """``name: value ...`` lines as a dict; lines of any other form are left out."""
    rows = (line.replace(":", " ").split() for line in (read_text(path) or "").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def number_list(text: str) -> frozenset[int]:
    """The numbers of a kernel's list such as ``0-3,8``; an unreadable list is empty."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            continue
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
