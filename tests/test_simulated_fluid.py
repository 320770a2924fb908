"""Tasks that share resources: times by arithmetic, and what holds of every program."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ghoffload.machine.simulated.fluid import Fluid, Task, Work


def fluid() -> Fluid:
    return Fluid({"link": 100.0, "memory": 120.0})


def test_alone_a_task_takes_its_seconds_and_its_latency() -> None:
    f = fluid()
    task = f.queue("copy", "a", Work(2.0, {"link": 50.0}, latency=0.5), at=1.0)
    assert f.run(task) == pytest.approx(3.5)
    assert task.begin == pytest.approx(1.0)


def test_a_stream_is_in_order_and_others_go_beside_it() -> None:
    f = fluid()
    first = f.queue("1", "a", Work(2.0), at=0.0)
    second = f.queue("2", "a", Work(1.0), at=0.0)
    beside = f.queue("3", "b", Work(2.5), at=0.0)
    f.run()
    assert (first.end, second.end, beside.end) == pytest.approx((2.0, 3.0, 2.5))
    assert [task.name for task in f.finished] == ["1", "3", "2"]


def test_two_that_want_more_than_there_is_share_it() -> None:
    """60 + 60 of 100: each at 5/6 of its speed until the shorter is over."""
    f = fluid()
    short = f.queue("short", "a", Work(1.0, {"link": 60.0}), at=0.0)
    long = f.queue("long", "b", Work(2.0, {"link": 60.0}), at=0.0)
    f.run()
    assert short.end == pytest.approx(1.2)
    assert long.end == pytest.approx(2.2)


def test_what_one_leaves_goes_to_the_others() -> None:
    """The link holds two of them back; the third has what memory they leave."""
    f = fluid()
    a, b = (f.queue(n, n, Work(1.0, {"link": 100.0, "memory": 50.0}), at=0.0) for n in "ab")
    c = f.queue("c", "c", Work(1.0, {"memory": 80.0}), at=0.0)
    f.run()
    assert c.end == pytest.approx(80.0 / (120.0 - 50.0))  # they use 25 each
    assert a.end == b.end == pytest.approx(2.0)


def test_waits_are_for_ends_and_for_the_host() -> None:
    f = fluid()
    slow = f.queue("slow", "a", Work(5.0), at=0.0)
    waits = f.queue("waits", "b", Work(1.0), at=0.0, after=[slow])
    nothing = f.queue("nothing", "b", Work(0.0), at=0.0)
    late = f.queue("late", "c", Work(1.0), at=9.0)
    assert f.run(nothing) == pytest.approx(6.0)
    assert not late.done  # time went no further
    assert waits.begin == pytest.approx(5.0)
    assert f.run() == pytest.approx(10.0)


def test_what_is_queued_later_does_not_begin_earlier() -> None:
    f = fluid()
    f.run(f.queue("1", "a", Work(4.0), at=0.0))
    assert f.run(f.queue("2", "b", Work(1.0), at=0.0)) == pytest.approx(5.0)


def test_errors() -> None:
    f = fluid()
    with pytest.raises(ValueError, match=r"expected one of .*, got 'HBM'"):
        f.queue("x", "a", Work(1.0, {"HBM": 1.0}), at=0.0)
    never = Task("never", "z", Work(1.0), (), 0.0)
    f.queue("waits", "a", Work(1.0), at=0.0, after=[never])
    with pytest.raises(RuntimeError, match="one that was never queued"):
        f.run()


_tasks = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.floats(0, 3),
        st.dictionaries(st.sampled_from(["link", "memory"]), st.floats(1, 150), max_size=2),
        st.sampled_from([0.0, 0.0, 0.25]),
        st.floats(0, 4),
        st.sets(st.integers(0, 12), max_size=2),
    ),
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(_tasks)
def test_whatever_the_program(rows: list[Any]) -> None:
    f = fluid()
    tasks: list[Task] = []
    for stream, seconds, demands, latency, at, after in rows:
        waits = [tasks[i] for i in after if i < len(tasks)]
        tasks.append(
            f.queue(str(len(tasks)), stream, Work(seconds, demands, latency), at=at, after=waits)
        )
    waited = [list(task.after) for task in tasks]
    end = f.run()
    assert end == max((task.end for task in tasks), default=0.0)
    last: dict[str, float] = {}
    for task, after in zip(tasks, waited, strict=True):
        alone = task.work.seconds + task.work.latency
        assert task.begin >= max([task.queued, last.get(task.stream, 0.0), *(t.end for t in after)])
        assert task.end - task.begin >= alone - 1e-9
        last[task.stream] = task.end
    # No resource gave more than it has.
    for resource, capacity in f.capacity.items():
        used = [t for t in tasks if t.work.demands.get(resource) and t.work.seconds]
        amount = math.fsum(t.work.demands[resource] * t.work.seconds for t in used)
        spans = sorted((t.begin, t.end) for t in used)
        busy, until = 0.0, 0.0
        for begin, stop in spans:
            busy += max(stop - max(begin, until), 0.0)
            until = max(until, stop)
        assert amount <= capacity * busy * (1 + 1e-6) + 1e-9


def test_little_is_left_after_many_seconds() -> None:
    """What is left of a task may be too little to change the time, and is over all the same."""
    f = Fluid({"link": 1.0})
    for number in range(40):
        at = 1e6 + number * 1e-10
        f.queue("a", "a", Work(1 / 3 * 1e-10, {"link": 0.7}, latency=1e-11), at=at)
        f.queue("b", "b", Work(1 / 7 * 1e-10, {"link": 0.9}), at=at)
    assert f.run() == pytest.approx(1e6)
    assert len(f.finished) == 80
