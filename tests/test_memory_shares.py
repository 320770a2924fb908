"""Budgets of several processes add up, and pages vanish with their processes. Real processes."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ghoffload import TensorManager
from ghoffload.memory import HostArena, ledger, limits, neighbours, node_lock, shares
from ghoffload.memory.page_format import FILE_NUMBER, Claim, Counters
from ghoffload.memory.published import Page, page

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
LIMIT = 64 * MIB
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs memfd, /proc")

# A made-up cgroup of LIMIT bytes in which all processes of the test are. Pages are charged to it
# when they are touched, as by the kernel, and none is given back before its process ends.
MADE_UP = f"""
import os, sys, time, torch
from pathlib import Path
from ghoffload import TensorManager, VirtualMachine
from ghoffload.memory import HostArena, ledger, limits, neighbours, pages, shares
from ghoffload.memory.published import page

def populate(mapping, *, threads, populate=pages.populate):
    populate(mapping, threads=threads)
    ledger.add("touched", "kernel", len(mapping))

def rooms():
    rows = [row for other in neighbours.neighbours() for row in other.held] + ledger.rows()
    touched = sum(row.nbytes for row in rows if row.kind == "touched")
    return {{Path("/made/up"): {LIMIT} - touched}}

pages.populate = populate

limits.host_rooms = rooms
shares.cgroup_directories = lambda controller, process: [Path("/made/up")]

def say(*words):
    print(*words, flush=True)
"""


class Process:
    """A script in a process of its own, with lines in and out."""

    def __init__(self, script: str, **environment: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-c", MADE_UP + textwrap.dedent(script)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.child.pid

    def line(self) -> str:
        assert self.child.stdout is not None
        text = self.child.stdout.readline().strip()
        if not text:
            assert self.child.stderr is not None
            pytest.fail(f"the process ended: {self.child.stderr.read()}")
        return text

    def go(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()

    def end(self) -> None:
        self.child.kill()
        self.child.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Starts processes, which end with the test."""
    processes = []

    def start(script: str, **environment: str) -> Process:
        processes.append(Process(script, **environment))
        return processes[-1]

    yield start
    for process in processes:
        process.end()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def said(pid: int) -> neighbours.Published | None:
    return neighbours.published(pid)


# --- races ---

RACE = {
    "budgets": 'manager = TensorManager(budgets={{"system": {n}}}, owner="racer")',
    "arenas": 'arena = HostArena({n}, machine=None, owner="racer", pin=False)',
    "managers": 'm = TensorManager(owner="racer"); t = m.empty({n}, torch.uint8, "system")',
}


@pytest.mark.parametrize("what", RACE)
def test_of_two_that_want_60_percent_each_one_gets_it(
    start: Callable[..., Process], what: str
) -> None:
    nbytes = 40 * MIB
    racers = [
        start(
            f"""
            say("ready")
            sys.stdin.readline()
            try:
                {RACE[what].format(n=nbytes)}
                say("got it")
            except torch.OutOfMemoryError as error:
                say("refused:", error)
            sys.stdin.readline()
            """
        )
        for _ in range(2)
    ]
    for racer in racers:
        assert racer.line() == "ready"
    for racer in racers:
        racer.go()
    answers = {racer.pid: racer.line() for racer in racers}
    assert sorted(answer.split(":")[0] for answer in answers.values()) == ["got it", "refused"]
    (winner,) = (pid for pid, answer in answers.items() if answer == "got it")
    (refusal,) = (answer for answer in answers.values() if answer != "got it")
    assert f"process {winner} (" in refusal
    assert f"{nbytes:,}" in refusal
    assert "the memory limit of this process's cgroup leaves" in refusal


def test_a_killed_process_frees_its_claim_at_once(start: Callable[..., Process]) -> None:
    script = f"""
        try:
            manager = TensorManager(budgets={{"pinned": {LIMIT * 6 // 10}}}, owner="holder")
            say("got it")
        except torch.OutOfMemoryError as error:
            say(error)
        sys.stdin.readline()
        """
    first = start(script)
    assert first.line() == "got it"
    refusal = start(script).line()
    assert f"holder: a budget of {LIMIT * 6 // 10:,} bytes of pinned memory does not fit" in refusal
    assert f"{LIMIT * 6 // 10:,} bytes of pinned memory to 'holder'" in refusal
    first.child.send_signal(signal.SIGKILL)
    first.child.wait()
    assert said(first.pid) is None
    assert start(script).line() == "got it"


def test_a_forked_child_claims_nothing_and_leaves_nothing(start: Callable[..., Process]) -> None:
    parent = start(
        f"""
        manager = TensorManager(budgets={{"system": {LIMIT // 2}}}, owner="parent")
        held = manager.empty(1000, torch.uint8, "system")
        child = os.fork()
        if child == 0:
            assert not os.path.exists("/proc/self/fd/{FILE_NUMBER}"), "inherited"
            assert ledger.rows() == [] and page.claims() == {{}}
            manager.close()
            say(os.getpid())
            sys.stdin.readline()
            own = HostArena(4096, machine=None, owner="child", pin=False)
            say("more")
            time.sleep(60)
        time.sleep(60)
        """
    )
    child = int(parent.line())
    assert said(child) is None
    (claim,) = said(parent.pid).claims  # type: ignore[union-attr]
    assert (claim.owner, claim.nbytes, claim.held) == ("parent", LIMIT // 2, 32 * MIB)
    parent.go()
    assert parent.line() == "more"
    of_child = said(child)
    assert of_child is not None
    assert ("system", "child", 4096) in of_child.held
    assert of_child.claims == ()
    os.kill(parent.pid, signal.SIGKILL)
    parent.child.wait()
    assert said(parent.pid) is None
    assert said(child) is not None
    os.kill(child, signal.SIGKILL)
    until(lambda: said(child) is None)


def test_a_fork_python_is_not_told_of_takes_no_part(start: Callable[..., Process]) -> None:
    parent = start(
        """
        import ctypes
        arena = HostArena(4096, machine=None, owner="parent", pin=False)
        child = ctypes.PyDLL(None).fork()
        if child == 0:
            ledger.add("system", "child", 1)
            page.stepped(None, 1)
        answer = f"{os.getpid()} {neighbours.published(os.getpid()) is not None}\\n"
        os.write(1, answer.encode())  # at once: the two write at the same time
        sys.stdin.readline()
        if child:
            os.kill(child, 9)
        """
    )
    shown = dict(parent.line().split() for _ in range(2))
    assert shown.pop(str(parent.pid)) == "True"
    assert list(shown.values()) == ["False"]
    page_of_parent = said(parent.pid)
    assert page_of_parent is not None
    assert {row.owner for row in page_of_parent.held} == {"kernel", "parent"}
    assert page_of_parent.counters.steps == 0


def test_ranks_of_one_launch_get_equal_shares(start: Callable[..., Process]) -> None:
    script = """
        limits.host_rooms = lambda: {None: next(iter(rooms().values()))}
        machine = VirtualMachine()
        manager = TensorManager(machine, owner="rank")
        small = manager.empty(1000, torch.uint8, "managed")
        say(manager.statistics()["managed"].budget, shares.available_bytes())
        sys.stdin.readline()
        """
    launched = {"LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "1"}
    budgets = []
    for _ in range(4):
        budget, available = map(int, start(script, **launched).line().split())
        budgets.append(budget)
    assert budgets == [LIMIT // 4] * 4
    assert available == 0  # each took its share, a segment of 32 MiB being more than that
    assert sum(budgets) <= LIMIT


# --- the rule, in one process ---


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The room of a made-up cgroup, to be set."""
    left = [LIMIT]
    monkeypatch.setattr(limits, "host_rooms", lambda: {Path("/made/up"): left[0]})
    return left


def test_an_explicit_budget_is_a_promise_while_the_manager_lives(room: list[int]) -> None:
    with TensorManager(budgets={"system": 48 * MIB}, owner="first") as manager:
        with pytest.raises(torch.OutOfMemoryError, match=r"this process: 50,331,648 .* 'first'"):
            TensorManager(budgets={"pinned": 17 * MIB})
        with pytest.raises(torch.OutOfMemoryError, match="are promised"):
            HostArena(17 * MIB, machine=None, owner="x", pin=False)
        HostArena(16 * MIB, machine=None, owner="x", pin=False).close()
        held = manager.empty(40 * MIB, torch.uint8, "system")
        (claim,) = page.claims().values()
        assert (claim.held, claim.outstanding, claim.passing) == (40 * MIB, 8 * MIB, False)
        room[0] = LIMIT - 40 * MIB
        del held
        assert manager.trim() == 40 * MIB
        assert next(iter(page.claims().values())).held == 0
    assert page.claims() == {}
    room[0] = LIMIT
    TensorManager(budgets={"pinned": LIMIT}).close()
    assert page.claims() == {}


def test_a_budget_that_nobody_gave_promises_nothing(room: list[int]) -> None:
    with TensorManager() as manager:
        held = manager.empty(1000, torch.uint8, "system")
        assert page.claims() == {}
        HostArena(LIMIT, machine=None, owner="x", pin=False).close()
        del held


def test_a_refused_budget_leaves_nothing(room: list[int]) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        TensorManager(budgets={"system": MIB, "pinned": LIMIT})
    assert page.claims() == {}


def test_a_failed_reservation_is_no_longer_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def full(nbytes: int) -> None:
        seen.extend(page.claims().values())
        raise MemoryError("no pages")

    monkeypatch.setattr("ghoffload.memory.pages.reserve", full)
    with pytest.raises(torch.OutOfMemoryError, match="no pages"):
        HostArena(4096, machine=None, owner="x", pin=False)
    assert seen == [Claim("system", "x", 4096, passing=True)]
    assert page.claims() == {}


def test_whoever_is_refused_for_pages_being_touched_waits(
    room: list[int], start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "_is_in", lambda process, cgroup: True)
    passing = start(
        f"""
        with shares.taking({LIMIT}, "system", "slow"):
            say("passing")
            sys.stdin.readline()
        say("done")
        sys.stdin.readline()
        """
    )
    assert passing.line() == "passing"
    timer = threading.Timer(0.3, passing.go)
    timer.start()
    began = time.monotonic()
    HostArena(MIB, machine=None, owner="x", pin=False).close()
    assert time.monotonic() - began > 0.2
    monkeypatch.setattr(shares, "_PASSING_SECONDS", 0.1)
    with (
        shares.taking(LIMIT - MIB, "system", "mine"),
        ThreadResult(lambda: HostArena(2 * MIB, machine=None, owner="x", pin=False)) as result,
    ):
        assert isinstance(result.wait(), torch.OutOfMemoryError)


class ThreadResult:
    """What a call in another thread raises."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,))

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> ThreadResult:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join()

    def wait(self) -> BaseException | None:
        self._thread.join()
        return self._error


def test_only_those_in_the_cgroup_share_it(tmp_path: Path) -> None:
    from ghoffload.machine.topology import cgroup_directories

    for folder in ("a/b", "a/c", "d"):
        (tmp_path / "sys/fs/cgroup" / folder).mkdir(parents=True)
    for pid, path in ((1, "/a/b"), (2, "/a/c"), (3, "/d")):
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/cgroup").write_text(f"0::{path}\n")
    limited = tmp_path / "sys/fs/cgroup/a"
    inside = [limited in cgroup_directories("memory", tmp_path, pid) for pid in (1, 2, 3, 4)]
    assert inside == [True, True, False, False]


# --- the lock and the page ---


def test_a_lock_that_is_not_to_be_had_warns_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_lock, "SECONDS", 0.05)
    with (
        node_lock.alone(),
        pytest.warns(RuntimeWarning, match="going on without"),
        node_lock.alone(),
    ):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with node_lock.alone():  # the failed one has not kept it
            pass
    monkeypatch.setattr(node_lock, "DIRECTORIES", ("/does/not/exist",))
    with node_lock.alone(), node_lock.alone():
        pass


def test_a_page_says_what_was_published(start: Callable[..., Process]) -> None:
    other = start(
        """
        ledger.add("pinned", "a", 10)
        ledger.add("device", "b", 20)
        ledger.remove("pinned", "a", 4)
        machine = VirtualMachine()
        machine.traffic.h2d_bytes, machine.traffic.copies = 100, 2
        page.stepped(machine, 7)
        machine.traffic.reset()
        machine.traffic.h2d_bytes = 5
        page.stepped(machine, 7)
        say("there")
        sys.stdin.readline()
        """
    )
    other.line()
    (found,) = neighbours.neighbours()
    assert found.pid == other.pid
    assert found.held == (("device", "b", 20), ("pinned", "a", 6))
    assert found.devices == (("virtual machine", ""),)
    assert found.command.startswith(sys.executable)
    counters = found.counters
    assert counters[:6] == (2, 14, 105, 0, 2, 0)
    assert 0 < counters.step_ns < 10e9
    assert 0 < time.monotonic() - counters.at < 60


def test_a_reader_never_takes_a_torn_page(start: Callable[..., Process]) -> None:
    writer = start(
        """
        from ghoffload.memory.page_format import BODY_AT
        page.refresh()
        bodies = [page._encoded([("system", str(k), n) for k in range(1500)]) for n in (1, 2)]
        say("there")
        while True:
            for body in bodies:
                page._put(page._map, BODY_AT, body)
                time.sleep(0.0001)
        """
    )
    writer.line()
    looks = [said(writer.pid) for _ in range(400)]
    whole = [[row.nbytes for row in look.held] for look in looks if look is not None and look.held]
    assert len(whole) > 200
    assert all(len(row) == 1500 and len(set(row)) == 1 for row in whole)
    assert {row[0] for row in whole} == {1, 2}


def test_a_page_with_too_much_gives_sums() -> None:
    many = Page()
    many.held = lambda: [("pinned", f"owner {k} " + "x" * 80, 2) for k in range(2000)]
    for k in range(100):
        many.promise(Claim("system", f"owner {k}", 10, 3))
    body = ast.literal_eval(many._body().decode().replace("false", "False"))
    assert body["held"] == [["pinned", "all owners", 4000]]
    assert sum(max(0, claim[2] - claim[3]) for claim in body["claims"]) == 700


def test_without_memfd_everything_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    without = Page()
    number = without.promise(Claim("system", "x", 1))
    without.stepped(None, 1)
    without.amend(number, held=1)
    assert without.claims()[number].held == 1
    without.drop(number)
    assert without._map is None


def test_an_import_makes_no_page(start: Callable[..., Process]) -> None:
    process = start("say(page._map is None, os.path.exists('/proc/self/fd/900'))")
    assert process.line() == "True False"


def test_a_step_costs_microseconds() -> None:
    own = Page()
    own.stepped(None, 1)
    costs = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(1000):
            own.stepped(None, 1)
        costs.append((time.perf_counter() - began) / 1000)
    assert min(costs) < 20e-6  # 2 us where nothing else runs
    assert Counters(*own._sums, own._at).steps == 5001


def test_a_finalizer_may_come_in_while_the_ledger_is_held() -> None:
    with ledger._lock:
        ledger.add("system", "finalizer", 5)  # as from a garbage collection in this very thread
    assert ledger.total(owner="finalizer") == 5
    ledger.remove("system", "finalizer", 5)
