"""The ledger: bytes the runtime holds, by memory kind and owner."""

from __future__ import annotations

import threading
from typing import NamedTuple


class LedgerRow(NamedTuple):
    """Bytes of one memory kind held by one owner."""

    kind: str
    owner: str
    nbytes: int


class Ledger:
    """Adds up bytes by (memory kind, owner). Safe to use from several threads.

    It knows only what it is told: whoever takes memory adds it and removes it again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str], int] = {}

    def add(self, kind: str, owner: str, nbytes: int) -> None:
        """Note that ``owner`` now holds ``nbytes`` more bytes of memory kind ``kind``."""
        if nbytes < 0:
            raise ValueError(f"nbytes expects 0 or more, got {nbytes}")
        if nbytes == 0:
            return
        with self._lock:
            self._held[kind, owner] = self._held.get((kind, owner), 0) + nbytes

    def remove(self, kind: str, owner: str, nbytes: int) -> None:
        """Note that ``owner`` gave back ``nbytes`` bytes of memory kind ``kind``.

        Raises:
            AssertionError: more than was added: the runtime lost count, an internal error.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes expects 0 or more, got {nbytes}")
        with self._lock:
            held = self._held.get((kind, owner), 0)
            if nbytes > held:
                raise AssertionError(
                    f"internal error: {owner!r} gives back {nbytes:,} bytes of {kind} memory "
                    f"but holds {held:,}"
                )
            if nbytes == held:
                self._held.pop((kind, owner), None)
            else:
                self._held[kind, owner] = held - nbytes

    def total(self, kind: str | None = None, owner: str | None = None) -> int:
        """Bytes held; of one memory kind, of one owner, or of both together where given."""
        with self._lock:
            return sum(
                nbytes
                for (row_kind, row_owner), nbytes in self._held.items()
                if kind in (None, row_kind) and owner in (None, row_owner)
            )

    def rows(self) -> list[LedgerRow]:
        """What is held, sorted by kind and owner; rows of 0 bytes are left out."""
        with self._lock:
            held = sorted(self._held.items())
        return [LedgerRow(kind, owner, nbytes) for (kind, owner), nbytes in held]

    def reset(self) -> None:
        """Forget everything. For tests, when nothing that was added is still alive."""
        with self._lock:
            self._held.clear()


ledger = Ledger()
"""What this process holds."""
