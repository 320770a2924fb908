"""The thread pool of the CPU kernels.

Our own, because numba's layers abort in forked children or with concurrent Python threads. No
thread exists before the first parallel call; a forked child starts its own. The calling thread
always takes part, so n threads are n - 1 workers and a call never waits for a worker to be free.

Threads inherit flush-to-zero from whoever made them (``torch.set_flush_denormal(True)``, libraries
built with -Ofast), which would change results. So every task runs in the default floating-point
environment, and the caller's own is restored afterwards.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

_default_threads = 0
_local_threads: ContextVar[int] = ContextVar("ghoffload_cpu_threads", default=0)
_executor: ThreadPoolExecutor | None = None
_lock = threading.Lock()


def available_cpus() -> int:
    """CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def _checked(count: int) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"the number of threads expects an int of 0 or more, got {count!r}")
    return count


def set_threads(count: int) -> None:
    """Threads of CPU kernels in this process; 0 takes the CPUs this process may run on."""
    global _default_threads
    _default_threads = _checked(count)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Within this context and this thread, CPU kernels use ``count`` threads (0: the default)."""
    token = _local_threads.set(_checked(count))
    try:
        yield
    finally:
        _local_threads.reset(token)


def get_threads() -> int:
    """The number of threads a CPU kernel called here would use."""
    return _local_threads.get() or _default_threads or available_cpus()


def run(function: Callable[[T], Any], items: Sequence[T], *, count: int = 0) -> None:
    """Call ``function`` once on every item, in any order, and return when all are done.

    Args:
        function: must be safe to call from several threads at once.
        items: the tasks; each should be worth tens of microseconds or more.
        count: threads to use; 0 is ``get_threads()``.

    Raises:
        The first exception a task raised, after the tasks already running have ended; tasks not
        yet begun are then left out.
    """
    helpers = min(_checked(count) or get_threads(), len(items)) - 1
    numbers = itertools.count()  # next() is one bytecode-free C call, so threads can share it
    errors: list[BaseException] = []

    def work() -> None:
        with default_float_environment():
            while not errors:
                number = next(numbers)
                if number >= len(items):
                    return
                try:
                    function(items[number])
                except BaseException as error:
                    errors.append(error)

    futures: list[Future[None]] = []
    if helpers > 0:
        try:
            pool = _get_executor()
            futures = [pool.submit(work) for _ in range(helpers)]
        except RuntimeError:
            pass  # no new threads (interpreter shutdown, thread limit): this thread does it all
    work()
    for future in futures:
        if not future.cancel():  # one that has not begun by now has nothing left to do
            future.result()
    if errors:
        raise errors[0]


def _get_executor() -> ThreadPoolExecutor:
    global _executor
    with _lock:
        if _executor is None:
            # Workers are started on demand, one per waiting task, so the maximum costs nothing.
            _executor = ThreadPoolExecutor(1024, thread_name_prefix="ghoffload-cpu")
        return _executor


def _forget_executor() -> None:
    """In a forked child: the parent's workers do not exist here, and its lock may be held."""
    global _executor, _lock
    _executor = None
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_executor)


class _FloatEnvironment:
    """fegetenv and fesetenv of the C library, with its way of naming FE_DFL_ENV."""

    def __init__(self) -> None:
        if sys.platform == "win32":
            raise OSError("the C library's FE_DFL_ENV is not known on this platform")
        libm = ctypes.util.find_library("m") if sys.platform == "darwin" else "libm.so.6"
        try:
            library = ctypes.CDLL(libm)
        except OSError:
            library = ctypes.CDLL(None)  # musl keeps libm in libc
        # PyDLL-style calls are not needed: the environment belongs to the OS thread, and releasing
        # the GIL around a call does not move us to another one.
        self.get, self.set = library.fegetenv, library.fesetenv
        for function in (self.get, self.set):
            function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int
        if sys.platform == "darwin":
            self.default: Any = ctypes.addressof(ctypes.c_char.in_dll(library, "_FE_DFL_ENV"))
        else:
            self.default = ctypes.c_void_p(-1)


_environment: _FloatEnvironment | None = None
_environment_known = False


@contextmanager
def default_float_environment() -> Iterator[None]:
    """Run in the default floating-point environment: round to nearest, subnormals kept."""
    global _environment, _environment_known
    if not _environment_known:
        try:
            _environment = _FloatEnvironment()
        except (OSError, AttributeError, ValueError):
            _environment = (
                None  # then the caller's environment counts; it is the default nearly always
            )
        _environment_known = True
    environment = _environment
    if environment is None:
        yield
        return
    saved = ctypes.create_string_buffer(512)  # fenv_t is 8 to 32 bytes on the platforms we know
    environment.get(saved)
    environment.set(environment.default)
    try:
        yield
    finally:
        environment.set(saved)
