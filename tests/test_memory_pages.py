from __future__ import annotations

import itertools
import mmap
import re
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ghoffload.memory import pages

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
PAGE = mmap.PAGESIZE


def smaps(mapping: mmap.mmap) -> dict[str, str]:
    """The fields of /proc/self/smaps for the region that holds the mapping."""
    address, fields, found = pages.address_of(mapping), {}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            found = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif found:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
    return fields


def resident_pages(mapping: mmap.mmap) -> int:
    """Pages of the mapping that exist, from its bits in /proc/self/pagemap."""
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(pages.address_of(mapping) // PAGE * 8)
        bits = file.read(-(-len(mapping) // PAGE) * 8)
    return sum(entry >> 7 for entry in bits[7::8])


@linux
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("nbytes", [1, PAGE + 1, (33 << 20) + 5])
def test_every_page_is_there_and_zero(nbytes: int, threads: int) -> None:
    mapping = pages.reserve(nbytes)
    assert resident_pages(mapping) == 0
    pages.populate(mapping, threads=threads)
    assert resident_pages(mapping) == -(-nbytes // PAGE)
    assert mapping[:] == bytes(nbytes)


@linux
@pytest.mark.parametrize(("nbytes", "advised"), [(64 << 10, False), (2 << 20, True)])
def test_huge_pages_are_asked_for_where_one_fits(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, advised: bool
) -> None:
    monkeypatch.setattr(pages, "huge_page_size", lambda: 2 << 20)
    mapping = pages.reserve(nbytes)
    assert ("hg" in smaps(mapping)["VmFlags"].split()) == advised


def test_a_512_mib_huge_page_is_not_asked_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "huge_page_size", lambda: 512 << 20)
    monkeypatch.setattr(pages, "advise", lambda mapping, advice: pytest.fail("advised"))
    mapping = pages.reserve(64 << 20)
    pages.populate(mapping, threads=2)


@linux
def test_wipe_on_fork_is_on_the_mapping() -> None:
    mapping = pages.reserve(1 << 20)
    assert pages.wipe_on_fork(mapping)
    assert "wf" in smaps(mapping)["VmFlags"].split()


@given(
    address=st.integers(0, 1 << 20).map(lambda page: page * PAGE),
    nbytes=st.integers(1, 1 << 34),
    threads=st.integers(1, 72),
    huge=st.sampled_from([None, 2 << 20, 512 << 20]),
)
def test_ranges_cover_each_byte_once_and_split_no_page(
    address: int, nbytes: int, threads: int, huge: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "huge_page_size", lambda: huge)
        ranges = pages._ranges(address, nbytes, threads)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == nbytes
    granule = huge if huge is not None and nbytes >= huge else PAGE
    for (_, stop), (start, _) in itertools.pairwise(ranges):
        assert start == stop
        assert (address + start) % granule == 0
    assert all(start < stop for start, stop in ranges)
    assert len(ranges) <= 8 * threads + 1


def test_an_absurd_size_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="mapping it failed"):
        pages.reserve(1 << 62)
