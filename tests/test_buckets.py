"""Planning: every element in exactly one piece, and nothing larger than it may be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ghoffload.optim.buckets import (
    PARAMETER_ALIGNMENT,
    SPLIT_ALIGNMENT,
    ParameterSpec,
    plan,
)
from ghoffload.optim.formats import Format

specs = st.lists(
    st.builds(
        ParameterSpec,
        count=st.one_of(st.integers(0, 40), st.integers(0, 30_000)),
        format=st.sampled_from(
            [
                Format(),
                Format(amsgrad=True),
                Format(master="fp32"),
                Format(master="split", moments="bf16"),
                Format(master="split", moments="int8"),
            ]
        ),
    ),
    max_size=40,
)


@given(
    specs,
    st.integers(4096, 200_000),
    st.integers(1, 9),
    st.integers(0, 300_000),
    st.integers(0, 5_000),
)
def test_every_element_is_in_one_piece(
    parameters: list[ParameterSpec],
    bucket_bytes: int,
    max_pieces: int,
    resident_bytes: int,
    min_offload_bytes: int,
) -> None:
    spaces = plan(
        parameters,
        bucket_bytes=bucket_bytes,
        max_pieces=max_pieces,
        resident_bytes=resident_bytes,
        min_offload_bytes=min_offload_bytes,
    )
    covered: dict[int, list[tuple[int, int]]] = {i: [] for i in range(len(parameters))}
    kept = 0
    for space in spaces:
        stop = 0
        for bucket in space.buckets:
            assert stop <= bucket.start < bucket.stop <= space.elements
            stop = bucket.stop
            assert len(bucket.pieces) <= max_pieces
            end = 0
            for piece in bucket.pieces:
                assert piece.count > 0
                assert piece.offset >= end
                end = piece.offset + piece.count
                assert piece.offset % max(PARAMETER_ALIGNMENT, space.format.block) == 0
                assert piece.start % SPLIT_ALIGNMENT == 0
                assert bucket.start + piece.offset == space.offsets[piece.parameter] + piece.start
                covered[piece.parameter].append((piece.start, piece.start + piece.count))
            assert end <= bucket.elements
            if not space.resident:
                limit = max(bucket_bytes, space.format.nbytes(SPLIT_ALIGNMENT))
                assert space.format.nbytes(bucket.elements) <= limit
        for index in space.offsets:
            assert parameters[index].format == space.format
            if space.resident and parameters[index].state_bytes >= min_offload_bytes:
                kept += parameters[index].state_bytes
    assert kept <= resident_bytes
    for index, spec in enumerate(parameters):
        position = 0
        for start, stop in sorted(covered[index]):
            assert start == position
            position = stop
        assert position == spec.count


def test_small_tensors_share_launches() -> None:
    """2,000 tensors of 1 KB are stepped by the bucket, not by the tensor."""
    (space,) = plan(
        [ParameterSpec(count=256, format=Format())] * 2000,
        bucket_bytes=48 << 20,
        max_pieces=640,
    )
    assert len(space.buckets) == 4
    assert space.state_bytes == 2000 * 256 * 8


def test_bytes_of_each_format() -> None:
    formats = {
        Format(): 8,
        Format(amsgrad=True): 12,
        Format(master="fp32"): 12,
        Format(master="split"): 10,
        Format(master="split", moments="bf16"): 6,
        Format(master="split", moments="int8"): 4 + 8 / 128,
    }
    for form, each in formats.items():
        assert form.nbytes(1 << 20) == each * (1 << 20)
    assert Format(moments="int8").nbytes(1) == 2 + 8
