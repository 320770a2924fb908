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


def test_thousands_of_small_tensors_take_several_launches() -> None:
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.uint8, torch.bfloat16, torch.float32, torch.bool, torch.int64)
    sizes = torch.randint(0, 40, (5000,), generator=generator).tolist()
    sources = [
        torch.randint(0, 2, (size,), generator=generator).to(dtypes[k % 5])
        for k, size in enumerate(sizes)
    ]
    packed = torch.full((pack.packed_bytes(sources) + 3,), 99, dtype=torch.uint8)
    launches = pack.pack_whole(sources, packed)
    assert len(launches) == 8
    assert [len(launch.reads) for launch in launches] == [640] * 7 + [520]
    back = [torch.full_like(source, 1) for source in sources]
    for launch in (*launches, *pack.unpack_whole(packed, back)):
        launch.run_on_host()
    assert all(torch.equal(a, b) for a, b in zip(sources, back, strict=True))
    begin = 0
    for source in sources:  # each from a multiple of 16, and nothing between or behind them
        end = begin + source.nbytes
        assert torch.equal(packed[begin:end], source.view(torch.uint8))
        begin = -(-end // 16) * 16
        assert (packed[end:begin] == 99).all()
    assert begin == len(packed) - 3
    assert (packed[begin:] == 99).all()
    assert pack.pack_whole([], packed) == []
    assert pack.packed_bytes([]) == 0
    with pytest.raises(
        ValueError, match=r"packed expects elements of one byte, got torch\.float32"
    ):
        pack.pack_whole(sources, packed.float())
    with pytest.raises(ValueError, match=r"packed expects \d+ bytes or more"):
        pack.pack_whole(sources, packed[:-20])


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
