"""The history of a region agrees with one that forgets nothing."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ghoffload.machine.clocks import Access, Clock, History, join, joined

THREADS, BYTES = 3, 12
steps = st.lists(
    st.tuples(
        st.integers(0, THREADS - 1),  # who acts
        st.sampled_from(["read", "write", "follow"]),
        st.integers(0, BYTES - 1),  # start, or whom to follow
        st.integers(1, BYTES),  # length
    ),
    max_size=40,
)


@given(steps)
def test_conflicts_are_those_of_the_whole_past(program: list[tuple[int, str, int, int]]) -> None:
    history = History()
    clocks: list[Clock] = [{} for _ in range(THREADS)]
    past: list[tuple[int, int, Access]] = []
    for thread, what, start, length in program:
        clock = clocks[thread]
        clock[thread] = clock.get(thread, 0) + 1
        if what == "follow":
            join(clock, clocks[start % THREADS])
            continue
        end = min(start + length, BYTES)
        by = Access(thread, clock[thread], what, what == "write", (1,), torch.uint8)
        expected = any(
            first < end and start < last and (by.writes or other.writes) and not other.before(clock)
            for first, last, other in past
        )
        found = history.conflict(start, end, by.writes, clock)
        assert (found is not None) == expected
        if found is None:
            history.enter(start, end, by, clock)
            past.append((start, end, by))
        assert history.starts == [segment.start for segment in history.segments]
        for left, right in zip(history.segments, history.segments[1:]):  # noqa: B905
            assert left.start < left.end <= right.start
        assert len(history.segments) <= BYTES
        everything = joined(*clocks)
        assert not list(history.unordered(everything))
        for other in history.unordered(clock):
            assert not other.before(clock)
    unordered = {access for _, _, access in past if not access.before(clocks[0])}
    assert bool(unordered) == any(history.unordered(clocks[0]))
