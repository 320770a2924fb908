"""numba's ``njit`` as the CPU kernels need it, with a cache that follows the sources.

numba's own ``cache=True`` fails at import where no directory is writable and judges a source by its
time stamp; its cache is used here with our directory and a hash of our sources instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from numba import njit

from ghoffload.kernels import cache


@lru_cache(None)
def _source_digest() -> str:
    """Of every Python source of this directory: a kernel may call into several of them."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return cache.digest(*(part for path in sources for part in (path.name, path.read_bytes())))


def compiled(function: Callable[..., Any]) -> Any:
    """A compiled function that releases the GIL, divides as IEEE does and contracts nothing."""
    dispatcher: Any = njit(nogil=True, error_model="numpy")(function)
    if cache.directory() is not None:
        try:
            dispatcher._cache = _function_cache_class()(function)
        except Exception:
            pass  # another numba's insides: compile without a cache
    return dispatcher


@lru_cache(None)
def _function_cache_class() -> Any:
    # Names of numba's inside: where one is missing, the caller does without a cache.
    from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

    class Locator(_CacheLocator):
        def __init__(self, py_func: Any, py_file: str) -> None:
            self._line = py_func.__code__.co_firstlineno

        def get_cache_path(self) -> str:
            return str(cache.directory() / "numba" / _source_digest()[:16])  # type: ignore[operator]

        def get_source_stamp(self) -> str:
            return _source_digest()

        def get_disambiguator(self) -> str:
            return str(self._line)

        @classmethod
        def from_function(cls, py_func: Any, py_file: str) -> Any:
            self = cls(py_func, py_file)
            self.ensure_cache_path()
            return self

    class Implementation(CompileResultCacheImpl):
        _locator_classes = [Locator]  # noqa: RUF012 - numba's own attribute

    class Cache(FunctionCache):
        _impl_class = Implementation

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            try:
                return super().load_overload(sig, target_context)
            except Exception:
                return None  # damaged, or from a machine that is not this one: compile

        def save_overload(self, sig: Any, data: Any) -> None:
            try:
                super().save_overload(sig, data)
            except Exception:
                pass  # a full disk costs the next process a compilation, not this one its step

    return Cache
