"""Packing and unpacking: the bytes named, and no others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ghoffload.kernels import adam, pack


@settings(max_examples=30)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
    pieces=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 5), st.sampled_from([0, 1, 7, 4000]),
                  st.integers(0, 3)),
        min_size=1, max_size=8,
    ),
)  # fmt: skip
def test_round_trip(dtype: torch.dtype, pieces: list[tuple[int, int, int, int]]) -> None:
    rows, offset = [], 0
    for tensor, start, count, gap in pieces:
        offset += gap
        rows.append((tensor, start, count, offset, 0))
        offset += count
    sources = [torch.randint(1, 255, (4005,)).to(dtype) for _ in range(4)]
    table = adam.PieceTable(rows)
    packed = torch.zeros(offset + 3, dtype=dtype)
    expected = packed.clone()
    for tensor, start, count, at, _ in rows:
        expected[at : at + count] = sources[tensor][start : start + count]
    pack.pack(table, sources=sources, packed=packed).run_on_host()
    assert torch.equal(packed, expected)

    back = [torch.zeros_like(source) for source in sources]
    wanted = [tensor.clone() for tensor in back]
    for tensor, start, count, at, _ in rows:
        wanted[tensor][start : start + count] = packed[at : at + count]
    pack.unpack(table, packed=packed, destinations=back).run_on_host()
    assert all(torch.equal(a, b) for a, b in zip(back, wanted, strict=True))


def test_large_copies_are_cut_into_tasks_and_come_out_whole() -> None:
    source = torch.arange(1_500_001, dtype=torch.int32)
    packed = torch.empty(6_000_004, dtype=torch.uint8)  # of another dtype: offsets are its elements
    table = adam.PieceTable([(0, 0, 1_500_001, 0, 0)])
    pack.pack(table, sources=[source], packed=packed).run_on_host()
    assert torch.equal(packed.view(torch.int32), source)


def test_pieces_outside_are_refused() -> None:
    table = adam.PieceTable([(0, 4, 8, 2, 0)])
    with pytest.raises(ValueError, match=r"sources\[0\] expects 12 elements or more, got 11"):
        pack.pack(table, sources=[torch.ones(11)], packed=torch.ones(10))
    with pytest.raises(ValueError, match="packed expects 40 bytes or more, got 36"):
        pack.pack(table, sources=[torch.ones(12)], packed=torch.ones(9))
    with pytest.raises(ValueError, match="expects a contiguous tensor"):
        pack.unpack(table, packed=torch.ones(20)[::2], destinations=[torch.ones(12)])
    with pytest.raises(ValueError, match=r"destinations\[0\] expects to be on cpu"):
        pack.unpack(table, packed=torch.ones(10), destinations=[torch.ones(12, device="meta")])
