"""A lock for all processes of a node, of which nothing stays.

It is the kernel's lock (``flock``) on a directory that is there anyway: nothing is made, and the
kernel ends it with the process that holds it. It is held for milliseconds. Whoever waits for long
waits for a process that was stopped, or for a program that locks the directory for purposes of its
own, and then goes on without: that two processes take memory at the same moment is a risk, that a
training run hangs would be a certainty.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

DIRECTORIES = ("/dev/shm", "/tmp")
SECONDS = 10.0


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Within it no other process or thread is, as far as they use it, too.

    Warns:
        RuntimeWarning: it was not to be had in ``SECONDS``.
    """
    try:
        import fcntl
    except ImportError:  # not a Unix
        yield
        return
    file = _locked(fcntl)
    try:
        yield
    finally:
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_UN)  # a child forked meanwhile has the file open, too
            os.close(file)


def _locked(fcntl: Any) -> int | None:
    """The locked directory's open file, ``None`` without a lock."""
    for directory in DIRECTORIES:
        try:
            file = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            _lock(fcntl, file)
        except TimeoutError:
            os.close(file)
            warnings.warn(
                f"the lock on {directory} was not to be had in {SECONDS:.0f} s; going on without: "
                "processes that take memory at this moment may take more than is there together",
                RuntimeWarning,
                stacklevel=5,
            )
            return None
        except OSError:  # a file system without locks
            os.close(file)
            continue
        return file
    return None


def _lock(fcntl: Any, file: int) -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(0.002)
