from __future__ import annotations

import threading

import pytest

from ghoffload.memory import Ledger


def test_totals_by_kind_and_owner() -> None:
    ledger = Ledger()
    ledger.add("pinned", "a", 10)
    ledger.add("pinned", "b", 20)
    ledger.add("device", "a", 5)
    ledger.add("pinned", "a", 1)
    assert ledger.total() == 36
    assert ledger.total("pinned") == 31
    assert ledger.total(owner="a") == 16
    assert ledger.total("pinned", "a") == 11
    assert ledger.total("managed") == 0
    assert ledger.rows() == [("device", "a", 5), ("pinned", "a", 11), ("pinned", "b", 20)]


def test_what_is_given_back_is_forgotten() -> None:
    ledger = Ledger()
    ledger.add("pinned", "a", 10)
    ledger.remove("pinned", "a", 4)
    assert ledger.rows() == [("pinned", "a", 6)]
    ledger.remove("pinned", "a", 6)
    assert ledger.rows() == []
    ledger.add("pinned", "a", 0)
    assert ledger.rows() == []
    ledger.add("pinned", "a", 3)
    ledger.reset()
    assert ledger.total() == 0


def test_removing_more_than_was_added_is_an_internal_error() -> None:
    ledger = Ledger()
    ledger.add("pinned", "a", 10)
    with pytest.raises(AssertionError, match=r"'a' gives back 11 bytes of pinned memory.*holds 10"):
        ledger.remove("pinned", "a", 11)
    with pytest.raises(AssertionError, match="holds 0"):
        ledger.remove("device", "a", 1)
    assert ledger.total() == 10


def test_negative_sizes_are_refused() -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match="expects 0 or more, got -1"):
        ledger.add("pinned", "a", -1)
    with pytest.raises(ValueError, match="expects 0 or more, got -1"):
        ledger.remove("pinned", "a", -1)


def test_threads_lose_no_count() -> None:
    ledger = Ledger()

    def work() -> None:
        for _ in range(2000):
            ledger.add("pinned", "a", 3)
            ledger.remove("pinned", "a", 2)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.total() == 4 * 2000
