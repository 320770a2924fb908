"""The ledger: bytes the runtime holds, by memory kind and owner."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from ghoffload.memory.published import page


class LedgerRow(NamedTuple):
    """Bytes of one memory kind held by one owner."""

    kind: str
    owner: str
    nbytes: int


class Ledger:
    """Adds up bytes by (memory kind, owner). Safe to use from several threads.

    It knows only what it is told: whoever takes memory adds it and removes it again.

    Args:
        changed: called after every change.
    """

    # A finalizer may come in at any allocation or call, in a thread that holds the lock. Hence a
    # lock that lets it in, changes that are one operation, and copies of what is iterated over.

    def __init__(self, changed: Callable[[], None] | None = None) -> None:
        self._changed = changed
        self.forget()

    def forget(self) -> None:
        """Start anew, the lock, too: in a forked child, where all of it is the parent's."""
        self._lock = threading.RLock()
        self._held: defaultdict[tuple[str, str], int] = defaultdict(int)

    def add(self, kind: str, owner: str, nbytes: int) -> None:
        """Note that ``owner`` now holds ``nbytes`` more bytes of memory kind ``kind``."""
        if nbytes < 0:
            raise ValueError(f"nbytes expects 0 or more, got {nbytes}")
        if nbytes == 0:
            return
        key = (kind, owner)
        with self._lock:
            self._held[key] += nbytes
        self._tell()

    def remove(self, kind: str, owner: str, nbytes: int) -> None:
        """Note that ``owner`` gave back ``nbytes`` bytes of memory kind ``kind``.

        Raises:
            AssertionError: more than was added: the runtime lost count, an internal error.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes expects 0 or more, got {nbytes}")
        key = (kind, owner)
        with self._lock:
            self._held[key] -= nbytes
            if self._held[key] < 0:
                self._held[key] += nbytes
                raise AssertionError(
                    f"internal error: {owner!r} gives back {nbytes:,} bytes of {kind} memory "
                    f"but holds {self._held[key]:,}"
                )
            if self._held[key] == 0:
                del self._held[key]
        self._tell()

    def total(self, kind: str | None = None, owner: str | None = None) -> int:
        """Bytes held; of one memory kind, of one owner, or of both together where given."""
        with self._lock:
            return sum(
                nbytes
                for (row_kind, row_owner), nbytes in self._held.copy().items()
                if kind in (None, row_kind) and owner in (None, row_owner)
            )

    def rows(self) -> list[LedgerRow]:
        """What is held, sorted by kind and owner; rows of 0 bytes are left out."""
        with self._lock:
            held = self._held.copy()
        rows = (LedgerRow(kind, owner, nbytes) for (kind, owner), nbytes in held.items())
        return sorted(rows)

    def reset(self) -> None:
        """Forget everything. For tests, when nothing that was added is still alive."""
        with self._lock:
            self._held.clear()
        self._tell()

    def _tell(self) -> None:
        if self._changed is not None:
            self._changed()


ledger = Ledger(changed=page.refresh)
"""What this process holds."""

page.held = ledger.rows
page.on_fork.append(ledger.forget)
