"""The thread pool: who runs what, what happens to exceptions, and after a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ghoffload.kernels import pool

ROOT = Path(__file__).resolve().parents[1]


def script(text: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", text]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_item_is_done_once_by_at_most_so_many_threads(count: int) -> None:
    done: list[int] = []
    threads = set()

    def task(item: int) -> None:
        threads.add(threading.get_ident())
        time.sleep(1e-3)
        done.append(item)

    pool.run(task, range(40), count=count)
    assert sorted(done) == list(range(40))
    assert len(threads) <= count
    assert count == 1 or len(threads) > 1
    assert threading.get_ident() in threads


def test_the_first_exception_comes_out_and_the_rest_is_left() -> None:
    done = []

    def task(item: int) -> None:
        if item == 3:
            raise KeyError("three")
        time.sleep(1e-3)
        done.append(item)

    with pytest.raises(KeyError, match="three"):
        pool.run(task, range(1000), count=2)
    assert len(done) < 20
    pool.run(done.append, [1, 2, 3], count=2)  # and the pool still works


def test_calls_from_tasks_and_from_several_threads_do_not_block_one_another() -> None:
    total: list[int] = []

    def outer(_: int) -> None:
        pool.run(total.append, range(10), count=4)

    callers = [
        threading.Thread(target=pool.run, args=(outer, range(20)), kwargs={"count": 4})
        for _ in range(3)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert len(total) == 600


def test_the_number_of_threads_comes_from_the_nearest_setting() -> None:
    assert pool.get_threads() == pool.available_cpus() >= 1
    try:
        pool.set_threads(3)
        assert pool.get_threads() == 3
        with pool.threads(5):
            assert pool.get_threads() == 5
            with pool.threads(0):
                assert pool.get_threads() == 3
        assert pool.get_threads() == 3
    finally:
        pool.set_threads(0)
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match="expects an int of 0 or more"):
            pool.set_threads(wrong)  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
def test_the_default_follows_the_affinity() -> None:
    text = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from ghoffload.kernels import pool
print(pool.get_threads())
"""
    assert script(text) == "1"


def test_importing_starts_no_thread_and_loads_no_compiler() -> None:
    text = """
import sys, threading
import torch
theirs = set(sys.modules)
from ghoffload.kernels import adam, build, cuda, golden, pack, pool
ours = set(sys.modules) - theirs
print(threading.active_count(), "numba" in ours, "cuda.bindings.driver" in ours)
"""
    assert script(text) == "1 False False"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kernels_run_in_a_forked_child_and_then_in_the_parent() -> None:
    text = """
import os, threading, time
from ghoffload.kernels import golden, pool
pool.set_threads(3)
def threads():
    seen = set()
    pool.run(lambda _: (time.sleep(0.01), seen.add(threading.get_ident())), range(20))
    return len(seen)
name = "adam fp32 weight, fp32 gradient"
expected = golden.expected()[name]
assert golden.run("cpu", only=[name])[name] == expected
assert threads() == 3
child = os.fork()
if child == 0:
    if threads() != 3:
        os._exit(4)
    os._exit(0 if golden.run("cpu", only=[name])[name] == expected else 3)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert golden.run("cpu", only=[name])[name] == expected
print("both")
"""
    assert script(text) == "both"
