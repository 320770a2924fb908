"""The loop: look, show, wait."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.live import Live

from ghoffload.memory.limits import available_host_bytes
from ghoffload.memory.neighbours import Published, neighbours, published
from ghoffload.watch.frame import Frame, History
from ghoffload.watch.gpus import Gpus
from ghoffload.watch.page import page


def watch(
    pid: int | None,
    *,
    interval: float,
    once: bool = False,
    as_json: bool = False,
    console: Console | None = None,
    nvml: Any = None,
) -> int:
    """Show processes until they end; 0, or 1 if there was none.

    Args:
        pid: the process; ``None`` for all.
        interval: seconds between looks.
        once: show the second look alone, the first that can tell rates.
        as_json: print a line a look instead of a page.
        console: what to print on.
        nvml: what stands in for the module ``pynvml``, for tests.
    """
    console = console or Console(highlight=False)
    looked = False
    with contextlib.ExitStack() as stack:
        gpus = stack.enter_context(Gpus(nvml or _nvml()))
        live: Live | None = None
        for looks, frame in enumerate(_frames(pid, interval, gpus)):
            looked = True
            if once and looks == 0:
                continue
            if as_json:
                print(json.dumps(frame.to_dict()), flush=True)
            elif once or not console.is_terminal:
                console.print(page(frame, console.width, None))
            else:
                if live is None:
                    live = stack.enter_context(Live(console=console, auto_refresh=False))
                live.update(page(frame, console.width, console.height), refresh=True)
            if once:
                return 0
    # For people; whoever reads JSON reads it from the end of the lines.
    print(_end(pid, looked), file=sys.stderr if as_json else console.file)
    return 0 if looked and not once else 1


def _nvml() -> Any:
    try:
        import pynvml
    except Exception:  # not installed, or not for this system: no GPUs to show
        return None
    return pynvml


def _frames(pid: int | None, interval: float, gpus: Gpus) -> Iterator[Frame]:
    """Looks, until nothing is left to look at."""
    history = History()
    began: int | None = None
    while True:
        pages = _pages(pid)
        if pid is not None and pages:
            began = pages[0].started if began is None else began
            pages = [page for page in pages if page.started == began]  # its number may be reused
        if not pages:
            return
        bus_ids = {bus_id for page in pages for _, bus_id in page.devices if bus_id}
        now = gpus.now(bus_ids)
        yield Frame(
            processes=history.look(pages, now, now=time.monotonic()),
            gpus=tuple(now),
            host_available=available_host_bytes(),
        )
        time.sleep(interval)


def _pages(pid: int | None) -> list[Published]:
    if pid is None:
        return neighbours()
    found = published(pid)
    return [] if found is None else [found]


def _end(pid: int | None, ended: bool) -> str:
    if ended:
        return "Every process has ended." if pid is None else f"Process {pid} has ended."
    if pid is None:
        return "No process of this user uses ghoffload now: there is nothing to watch."
    return (
        f"Process {pid} says nothing: it is not there, belongs to another user, or has not used "
        "ghoffload yet."
    )
