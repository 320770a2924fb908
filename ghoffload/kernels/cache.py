"""Where compiled kernels are kept between processes, or that they are not.

In order: ``GHOFFLOAD_CACHE_DIR``, the user's cache directory, a private directory under the
temporary one. None of them being writable is not an error: everything is then compiled anew in each
process. Compiled code is code, so a directory that another user could write to is used only where
the variable names it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

ENVIRONMENT_VARIABLE = "GHOFFLOAD_CACHE_DIR"

_thread_locks: dict[str, threading.Lock] = {}
_POLL_SECONDS = 0.02


def _candidates() -> Iterator[Path]:
    explicit = os.environ.get(ENVIRONMENT_VARIABLE)
    if explicit:
        yield Path(explicit)
    if sys.platform == "win32":
        if os.environ.get("LOCALAPPDATA"):
            yield Path(os.environ["LOCALAPPDATA"]) / "ghoffload" / "cache"
    else:
        xdg = os.environ.get("XDG_CACHE_HOME")
        if xdg and os.path.isabs(xdg):
            yield Path(xdg) / "ghoffload"
        home = os.path.expanduser("~")
        if os.path.isabs(home):
            yield Path(home) / ".cache" / "ghoffload"
    user = os.getuid() if hasattr(os, "getuid") else "user"
    try:
        yield Path(tempfile.gettempdir()) / f"ghoffload-{user}"
    except FileNotFoundError:
        pass  # no usable temporary directory at all


def _usable(directory: Path) -> bool:
    """Make the directory if need be; whether it takes files and is ours alone, or was asked for."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if hasattr(os, "getuid") and str(directory) != os.environ.get(ENVIRONMENT_VARIABLE):
            status = directory.stat()
            if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return False
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


@lru_cache(None)
def _first_usable(candidates: tuple[Path, ...]) -> Path | None:
    return next(filter(_usable, candidates), None)


def directory() -> Path | None:
    """The cache directory, made if it was missing; ``None`` where nothing is writable."""
    return _first_usable(tuple(_candidates()))


def digest(*parts: bytes | str) -> str:
    """sha256 of the parts, each with its length so that no two lists collide."""
    sha = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)
    return sha.hexdigest()


def read(name: str) -> bytes | None:
    """The bytes stored under ``name``, or ``None`` where they are missing or damaged."""
    root = directory()
    if root is None:
        return None
    try:
        data = (root / name).read_bytes()
    except OSError:
        return None
    head, payload = data[:64], data[64:]
    return payload if head == hashlib.sha256(payload).hexdigest().encode() else None


def write(name: str, payload: bytes) -> None:
    """Store bytes under ``name`` for other processes, all or nothing; failing is not an error."""
    root = directory()
    if root is None:
        return
    try:
        handle, temporary = tempfile.mkstemp(dir=root, prefix=f".{name}.")
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(payload).hexdigest().encode() + payload)
        os.replace(temporary, root / name)
    except OSError:
        try:
            os.unlink(temporary)
        except OSError:
            pass


@contextmanager
def locked(name: str, *, timeout: float | None = None) -> Iterator[bool]:
    """One thread of one process at a time per name, so that eight ranks compile once.

    Args:
        name: of the lock, a file name.
        timeout: seconds after which to go on without it; ``None`` waits for it.

    Yields:
        Whether the lock is held. A file system without locks counts: at worst work is done twice.
    """
    lock = _thread_locks.setdefault(name, threading.Lock())
    deadline = None if timeout is None else time.monotonic() + timeout
    mine = held = lock.acquire(timeout=-1 if timeout is None else timeout)
    file = None
    root = directory()
    try:
        if mine and root is not None and fcntl is not None:
            try:
                file = open(root / f"{name}.lock", "wb")  # noqa: SIM115
                held = _lock_file(file, deadline)
            except OSError:
                pass
        yield held
    finally:
        if file is not None:
            file.close()
        if mine:
            lock.release()


def _lock_file(file: IO[bytes], deadline: float | None) -> bool:
    """Lock an open file; ``False`` once ``deadline`` (of the monotonic clock) has passed."""
    if deadline is None:
        fcntl.flock(file, fcntl.LOCK_EX)
        return True
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
