"""Several processes in one memory: what they are promised never adds up to more than is there.

Note [budgets add up]
    *Room* is what the system says may still be taken: below each memory limit of a cgroup, which
    is firm, and on the host (``MemAvailable``), which is a guess and refuses nobody but those who
    ask to be held to it: Note [which figure refuses] in limits.py.
    A *claim* is a promise of bytes; its *outstanding* part has not been taken yet. Claims are an
    explicit budget of a TensorManager, while that lives, and every reservation, from before its
    first page is touched until after its last (then it is *passing*).
    The rule: n bytes are claimed only if n and all that is outstanding fit into the room, of those
    claims that share it (processes in the same cgroup or below it, this one too; all for the
    host's). Looking and claiming are done under one lock for the node, and what is looked at is in
    pages that vanish with their processes: Note [a page that vanishes] in published.py.
    So what is outstanding never exceeds the room, unless strangers take memory: a claim is
    granted only where that holds after it; taking claimed pages lowers both alike; so does giving
    them back raise both, and the end of a claim or of a process lowers what is outstanding or
    raises the room. What is held and what is outstanding together, which is the sum of all budgets
    in force, then never exceed what is there.
    Pages that are being touched have left the room and are still outstanding: counted twice, so
    that nobody gets too much, and whoever would be refused for it waits until nothing is passing.
    A budget that nobody gave promises nothing: it is a ceiling, and each growth is claimed anew.
    Processes of other users, and those in containers of their own, are not seen; what they hold
    has left the room, what they were promised has not.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ghoffload.machine.topology import cgroup_directories
from ghoffload.memory import limits
from ghoffload.memory.ledger import ledger
from ghoffload.memory.neighbours import Published, neighbours
from ghoffload.memory.node_lock import alone
from ghoffload.memory.page_format import Claim, launch, ranks
from ghoffload.memory.published import page

_PASSING_SECONDS = 60.0

_HOST_KINDS = ("managed", "pinned", "system")

_covered: contextvars.ContextVar[bool] = contextvars.ContextVar("covered", default=False)


class Promise:
    """A claim that lasts: the budget of one memory kind. ``drop`` ends it, once or more often.

    Raises:
        torch.OutOfMemoryError: it does not fit beside what others were promised.
    """

    def __init__(self, kind: str, owner: str, nbytes: int) -> None:
        self.nbytes = nbytes
        what = f"{owner}: a budget of {nbytes:,} bytes of {kind} memory does not fit"
        self._number = _claim(Claim(kind, owner, nbytes), what, guess=False)
        self._process = os.getpid()

    def hold(self, nbytes: int) -> None:
        """Say how much of it is taken now: after it was taken, before it is given back."""
        if os.getpid() != self._process:
            return
        with alone():  # not between somebody's look at what is outstanding and that at the room
            page.amend(self._number, held=nbytes)

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """Around taking some of it."""
        page.amend(self._number, passing=True)
        covered = _covered.set(True)
        try:
            yield
        finally:
            _covered.reset(covered)
            page.amend(self._number, passing=False)

    def drop(self) -> None:
        """Promise nothing any more."""
        if os.getpid() == self._process:
            page.drop(self._number)


@contextlib.contextmanager
def taking(nbytes: int, kind: str, owner: str, *, guess: bool = False) -> Iterator[None]:
    """Around reserving and touching host memory: claims it first. Within another one it only looks.

    Args:
        nbytes: how much.
        kind: memory kind.
        owner: who takes it.
        guess: whether the host's guess (``MemAvailable``) refuses, too, and not limits alone.

    Raises:
        torch.OutOfMemoryError: it does not fit beside what others were promised.
    """
    what = f"{owner} needs {nbytes:,} bytes of host memory"
    if _covered.get():
        for bound, room in _rooms(guess=False).items():
            if nbytes > room:
                raise torch.OutOfMemoryError(f"{what}; {_bound(bound)} leaves {room:,}")
        yield
        return
    number = _claim(Claim(kind, owner, nbytes, passing=True), what, guess=guess)
    covered = _covered.set(True)
    try:
        yield
    finally:
        _covered.reset(covered)
        page.drop(number)


def available_bytes() -> int | None:
    """Bytes of host memory that nobody holds and nobody was promised; ``None`` if unknown."""
    view = _look(guess=True)
    return None if view is None else max(0, view.left)


def fair_share() -> int | None:
    """Bytes of host memory that this process may take where no budget says it; ``None`` if unknown.

    All that is available; of several ranks launched together on a node (``LOCAL_WORLD_SIZE``),
    each gets an equal part of what they hold and what is available, less what it holds.
    """
    view = _look(guess=True)
    if view is None:
        return None
    count = ranks()
    if count == 1:
        return max(0, view.left)
    own = sum(ledger.total(kind) for kind in _HOST_KINDS)
    promised = sum(claim.outstanding for claim in page.claims().values())
    ranks_pages = [other for other in view.sharing if other.launch == launch()]
    held = sum(row.nbytes for other in ranks_pages for row in other.held if _on_host(row.kind))
    outstanding = sum(other.outstanding for other in ranks_pages)
    all_of_it = view.left + promised + outstanding + held + own
    return max(0, min(view.left, all_of_it // count - own - promised))


@dataclass
class _View:
    """The tightest room and the claims in it.

    Attributes:
        bound: what bounds it: a cgroup's directory, or ``None`` for the host.
        room: what the system leaves.
        left: what claims leave of it; below 0 while pages are being touched.
        sharing: the other processes in it.
    """

    bound: Path | None
    room: int
    left: int
    sharing: list[Published]

    @property
    def passing(self) -> bool:
        """Whether somebody is taking memory at this moment."""
        own = page.claims().values()
        others = (claim for other in self.sharing for claim in other.claims)
        return any(claim.passing for claims in (own, others) for claim in claims)


def _claim(claim: Claim, what: str, *, guess: bool) -> int:
    deadline = time.monotonic() + _PASSING_SECONDS
    while True:
        # Without a limit there is nothing to look at, and a claim harms nobody.
        with alone() if _rooms(guess) else contextlib.nullcontext():
            view = _look(guess)
            if view is None or claim.nbytes <= view.left:
                return page.promise(claim)
        if not view.passing or time.monotonic() > deadline:
            raise torch.OutOfMemoryError(f"{what}; {_explained(view)}")
        time.sleep(0.02)


def _rooms(guess: bool) -> dict[Path | None, int]:
    rooms = limits.host_rooms()
    if not guess:
        rooms.pop(None, None)
    return rooms


def _look(guess: bool) -> _View | None:
    """The tightest room; ``None`` where nothing bounds it."""
    # The pages first: what was claimed and is taken meanwhile is then counted twice, not never.
    everybody, own = neighbours(), sum(claim.outstanding for claim in page.claims().values())
    views = []
    for bound, room in _rooms(guess).items():
        sharing = everybody if bound is None else [p for p in everybody if _is_in(p.pid, bound)]
        left = room - own - sum(other.outstanding for other in sharing)
        views.append(_View(bound, room, left, sharing))
    return min(views, key=lambda view: view.left, default=None)


def _is_in(process: int, cgroup: Path) -> bool:
    return cgroup in cgroup_directories("memory", process=process)


def _on_host(kind: str) -> bool:
    return kind in _HOST_KINDS


def _bound(bound: Path | None) -> str:
    return "the host" if bound is None else "the memory limit of this process's cgroup"


def _explained(view: _View) -> str:
    promised = [("this process", claim) for claim in page.claims().values()]
    promised += [(_named(other), claim) for other in view.sharing for claim in other.claims]
    lines = [
        f"{who}: {claim.outstanding:,} bytes of {claim.kind} memory to {claim.owner!r}"
        for who, claim in promised
        if claim.outstanding
    ]
    text = f"{_bound(view.bound)} leaves {view.room:,}"
    if lines:
        text += f", of which {view.room - view.left:,} are promised ({'; '.join(lines)})"
    holders = [
        f"{_named(other)}: {held:,}"
        for other in view.sharing
        if (held := sum(row.nbytes for row in other.held if _on_host(row.kind)))
    ]
    return text + (f". Held by others: {'; '.join(holders)}" if holders else "")


def _named(other: Published) -> str:
    command = other.command if len(other.command) <= 60 else other.command[:57] + "..."
    return f"process {other.pid} ({command})"
