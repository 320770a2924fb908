"""Which parameters move together: pure planning, no tensor is touched.

Note [spaces and buckets]
    A *space* holds the parameters whose state has the same format. Each of its arrays is one
    contiguous array over all of them, so a parameter's ``exp_avg`` is one piece of memory
    whatever the bucket size. A *bucket* is an element range of a space: what is transferred and
    stepped together. Parameters larger than a bucket are split over several, small ones share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ghoffload.optim.formats import Format

PARAMETER_ALIGNMENT = 8  # elements: keeps 16-byte accesses aligned for 2-byte weights, too
SPLIT_ALIGNMENT = 1024  # elements: where a parameter may be cut between two buckets


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What planning needs to know of one parameter: its elements and the format of its state."""

    count: int
    format: Format

    @property
    def state_bytes(self) -> int:
        return self.format.nbytes(self.count)


@dataclass(frozen=True, slots=True)
class Piece:
    """``count`` elements of a parameter from ``start`` on, at ``offset`` of the bucket's arrays."""

    parameter: int
    start: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements ``[start, stop)`` of a space, and the pieces of parameters in them."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def elements(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Space:
    """Parameters with the same state arrays, laid out one behind the other.

    Attributes:
        format: what arrays there are.
        resident: the state stays in HBM and is never moved.
        elements: of all its parameters, with padding.
        offsets: first element of each parameter (by its index).
        buckets: its cut.
    """

    format: Format
    resident: bool
    elements: int
    offsets: dict[int, int]
    buckets: tuple[Bucket, ...]

    @property
    def state_bytes(self) -> int:
        return self.format.nbytes(self.elements)


def plan(
    specs: Sequence[ParameterSpec],
    *,
    bucket_bytes: int,
    max_pieces: int,
    resident_bytes: int = 0,
    min_offload_bytes: int = 0,
) -> tuple[Space, ...]:
    """Lay out the state of ``specs`` and cut it into buckets.

    Args:
        bucket_bytes: host-state bytes of a bucket, at most (at least 1,024 elements are taken).
        max_pieces: most pieces of a bucket.
        resident_bytes: state that may stay in HBM; parameters are taken in order while they fit.
        min_offload_bytes: parameters with less state than this stay in HBM, beyond that budget.
    """
    members: dict[tuple[Format, bool], list[int]] = {}
    for index, spec in enumerate(specs):
        resident = spec.state_bytes < min_offload_bytes
        if not resident and 0 < spec.state_bytes <= resident_bytes:
            resident = True
            resident_bytes -= spec.state_bytes
        members.setdefault((spec.format, resident), []).append(index)
    spaces = []
    for (form, resident), indices in members.items():
        alignment = max(PARAMETER_ALIGNMENT, form.block)
        offsets, end = {}, 0
        for index in indices:
            offsets[index] = end
            end += -(-specs[index].count // alignment) * alignment
        if resident:  # state that does not move is cut by the number of pieces alone
            capacity = end + SPLIT_ALIGNMENT
        else:
            capacity = bucket_bytes * SPLIT_ALIGNMENT // form.nbytes(SPLIT_ALIGNMENT)
            capacity = max(capacity // SPLIT_ALIGNMENT, 1) * SPLIT_ALIGNMENT
        counts = {index: specs[index].count for index in indices}
        buckets = _cut(
            counts, offsets, capacity=capacity, max_pieces=max_pieces, alignment=alignment
        )
        spaces.append(Space(form, resident, end, offsets, buckets))
    return tuple(spaces)


def _cut(
    counts: dict[int, int],
    offsets: dict[int, int],
    *,
    capacity: int,
    max_pieces: int,
    alignment: int,
) -> tuple[Bucket, ...]:
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    first = 0  # where the open bucket starts in the space

    def close(stop: int) -> None:
        nonlocal first
        if pieces:
            buckets.append(Bucket(first, stop, tuple(pieces)))
            pieces.clear()
        first = stop

    for index, count in counts.items():
        done = 0
        while done < count:
            position = offsets[index] + done
            room = (capacity - (position - first)) // SPLIT_ALIGNMENT * SPLIT_ALIGNMENT
            fits = count - done <= capacity - (position - first)
            if len(pieces) == max_pieces or (not fits and room <= 0):
                close(position)
                continue
            take = count - done if fits else room
            pieces.append(Piece(index, done, take, position - first))
            done += take
    if pieces:
        last = pieces[-1]
        close(first + last.offset + -(-last.count // alignment) * alignment)
    return tuple(buckets)
