"""SimulatedMachine: the machine protocol on a clock, with prices from a profile and no numbers.

Note [clocks]
    The host has a clock of its own: each call costs it what the profile says, and a wait of the
    host takes it to the end of what it waited for. Streams are those of fluid.py. What is queued
    runs in the order in which it would on the machine, in no time of ours.

Note [who needs what]
    A copy needs the link (both directions' sum), host memory and HBM; a kernel the multiprocessors,
    HBM by its bytes and, where it reads or writes host memory in place, the link and that memory.
    The CPU's steps need host memory. So a CPU step and copies share the host's memory, copies both
    ways the link, and a kernel of the runtime and one of the model the multiprocessors.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ghoffload.machine.protocol import Event, Launch, Machine, Stamp, Stream
from ghoffload.machine.simulated.fluid import Fluid, Task, Work
from ghoffload.machine.simulated.live import Live
from ghoffload.machine.simulated.profile import Profile, load_profile
from ghoffload.machine.traffic import Traffic

LINK, HOST, HBM, SM = "link", "host memory", "HBM", "multiprocessors"


class Did(NamedTuple):
    """What a task was.

    Attributes:
        what: ``"model"`` for torch's own kernels, ``"runtime"`` for the runtime's, ``"h2d"``,
            ``"d2h"``, ``"hbm"`` (a copy within it), ``"cpu"``.
        nbytes: of the copy, or that cross the link or go to HBM.
    """

    what: str
    nbytes: int


_IN_PLACE_SHARE = 4 / 132
"""Of the multiprocessors, for a kernel that works on host memory: 4 of a Hopper's fill the link."""


class SimulatedStream(Stream):
    """A stream by name."""

    def __init__(self, name: str) -> None:
        self.name = name


class SimulatedEvent(Event):
    """Where a stream was when it was recorded."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.recorded = False
        self.mark: Task | None = None


class _Moment(Stamp):
    def __init__(self, machine: SimulatedMachine, task: Task) -> None:
        self._machine, self._task = machine, task

    def seconds_to(self, later: Stamp) -> float:
        assert isinstance(later, _Moment)
        return self._machine.fluid.run(later._task) - self._machine.fluid.run(self._task)


class SimulatedMachine(Machine):
    """The machine protocol without a machine: times and bytes as a profile has them.

    Tensors in HBM are on ``meta``. Enter it with ``ghoffload.use_machine``, so that what torch does
    on ``meta`` is priced, too: prices.py. Single-threaded; the same program takes the same time.

    Args:
        profile: a name of ``profiles()``, a TOML file, or a profile.

    Attributes:
        profile: as loaded.
        fluid: streams and tasks; times in seconds.
        live: what is in HBM.
        host_seconds: the host's clock.
    """

    kind: ClassVar[str] = "simulated"
    imaginary = True

    def __init__(self, profile: str | Path | Profile = "gh200-480") -> None:
        self.profile = profile if isinstance(profile, Profile) else load_profile(profile)
        self.device = torch.device("meta")
        self.debug = False
        self.traffic = Traffic()
        p = self.profile
        both = max(p["both_engine"], p["both_kernel"])
        self.fluid = Fluid({LINK: both, HOST: p["host_read_write"], HBM: p["hbm"], SM: 1.0})
        self.host_seconds = 0.0
        self.host_bytes = 0
        self.live = Live(p.hbm_bytes, lambda: self.host_seconds)
        self.h2d = SimulatedStream("h2d")
        self.d2h = (SimulatedStream("d2h 0"), SimulatedStream("d2h 1"))
        self._compute = SimulatedStream("compute")
        self._hosts: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<SimulatedMachine {self.profile.name}, {self.host_seconds:.6f} s>"

    @property
    def memory_kinds(self) -> frozenset[str]:
        return frozenset(("device", "pinned", "managed", "system"))

    # -- the clock

    def elapsed(self) -> float:
        """Seconds until everything that was queued is over; the host has waited for it then."""
        self.synchronize_all()
        return self.host_seconds

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """Within it, torch's operations on meta tensors are the compute stream's."""
        # Its operators are registered with torch when it is imported: for those who simulate alone.
        from ghoffload.machine.simulated.prices import Priced, fused

        priced = Priced(self.profile, self.live, self._eager, self._answered)
        with fused(), priced:
            yield

    def _eager(self, name: str, seconds: float, nbytes: int) -> None:
        self._call("eager_call")
        self._kernel(name, self._compute, seconds, Did("model", nbytes))

    def _answered(self) -> None:
        self._call("eager_call")
        self._wait_for(self.fluid.last(self._compute.name))

    def _call(self, what: str) -> None:
        self.host_seconds += self.profile[what]

    def _wait_for(self, task: Task | None) -> None:
        if task is not None:
            self.host_seconds = max(self.host_seconds, self.fluid.run(task))

    def _queue(
        self,
        name: str,
        stream: Stream,
        work: Work,
        after: Sequence[Task] = (),
        did: Did | None = None,
    ) -> Task:
        return self.fluid.queue(name, stream.name, work, at=self.host_seconds, after=after, tag=did)

    def _kernel(self, name: str, stream: Stream, seconds: float, did: Did) -> None:
        demands = {SM: 1.0, HBM: min(did.nbytes / seconds, self.profile["hbm"])}
        self._queue(name, stream, Work(seconds, demands), did=did)

    # -- streams and events

    def current_stream(self) -> Stream:
        return self._compute

    def event(self, name: str) -> Event:
        return SimulatedEvent(name)

    def record(self, event: Event, stream: Stream) -> None:
        assert isinstance(event, SimulatedEvent)
        event.recorded, event.mark = True, self.fluid.last(stream.name)

    def wait(self, stream: Stream, event: Event, *, label: str) -> None:
        mark = self._mark(event, f"{label!r} on stream {stream.name!r}")
        if mark is not None and not mark.done and mark.stream != stream.name:
            self._queue(label, stream, Work(0.0), (mark,))

    def synchronize(self, event: Event, *, label: str) -> None:
        self._wait_for(self._mark(event, f"{label!r} on the host"))

    def synchronize_all(self) -> None:
        self.host_seconds = max(self.host_seconds, self.fluid.run())

    def _mark(self, event: Event, what: str) -> Task | None:
        assert isinstance(event, SimulatedEvent)
        if not event.recorded:
            raise RuntimeError(f"{what} waits for event {event.name!r}, which was never recorded")
        return event.mark

    def stamp(self, stream: Stream) -> Stamp:
        return _Moment(self, self._queue("stamp", stream, Work(0.0)))

    # -- work

    def copy(self, destination: Tensor, source: Tensor, *, stream: Stream) -> None:
        nbytes = destination.numel() * destination.element_size()
        if nbytes != source.numel() * source.element_size():
            raise ValueError(
                f"copy expects as many bytes on both sides, got {source.numel()} x {source.dtype} "
                f"for {destination.numel()} x {destination.dtype}"
            )
        if not (destination.is_meta or source.is_meta):
            raise ValueError("copy expects one side in HBM, got two host tensors")
        if nbytes == 0:
            return
        self._call("copy_call")
        self.traffic.copies += 1
        p = self.profile
        if destination.is_meta and source.is_meta:
            seconds, demands, way = 2 * nbytes / p["hbm"], {HBM: p["hbm"]}, "hbm"
        else:
            way = "h2d" if destination.is_meta else "d2h"
            rate = p[f"{way}_engine"]
            seconds, demands = nbytes / rate, {LINK: rate, HOST: rate, HBM: rate}
            if destination.is_meta:
                self.traffic.h2d_bytes += nbytes
            else:
                self.traffic.d2h_bytes += nbytes
        work = Work(seconds, demands, latency=p["copy_device"])
        self._queue(f"copy on {stream.name}", stream, work, did=Did(way, nbytes))

    def launch(self, launch: Launch, *, stream: Stream) -> None:
        self._call("launch_call")
        self.traffic.launches += 1
        p = self.profile
        reads = (*launch.reads, *launch.writes)  # what is updated in place is written alone
        hbm = sum(launch.touched_bytes(t) for t in (*reads, *launch.writes) if t.is_meta)
        into = sum(launch.touched_bytes(t) for t in reads if not t.is_meta)
        out = sum(launch.touched_bytes(t) for t in launch.writes if not t.is_meta)
        if not (into or out):
            seconds = max(hbm / p["hbm"], p["launch_device"])
            self._kernel(launch.name, stream, seconds, Did("runtime", hbm))
            return
        ways = (into / p["h2d_kernel"], out / p["d2h_kernel"], (into + out) / p["both_kernel"])
        seconds = max(*ways, hbm / p["hbm"], p["launch_device"])
        crossing = (into + out) / seconds
        demands = {LINK: crossing, HOST: crossing, HBM: hbm / seconds, SM: _IN_PLACE_SHARE}
        did = Did("runtime", into + out)
        self._queue(launch.name, stream, Work(seconds, demands), did=did)

    def run_on_host(self, launch: Launch) -> None:
        touched = (*launch.reads, *launch.writes, *launch.writes)
        nbytes = sum(map(launch.touched_bytes, touched))
        rate = min(self.profile["cpu_read_write"], self.profile["host_read_write"])
        work = Work(nbytes / rate, {HOST: rate} if nbytes else {})
        did = Did("cpu", nbytes)
        self._wait_for(self._queue(launch.name, SimulatedStream("CPU"), work, did=did))

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        pass  # meta tensors have no memory that could be used again

    # -- memory

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self.live.see(tensor)
        return tensor

    def free(self, tensor: Tensor) -> None:
        if tensor.numel():
            self.live.drop(tensor)

    def register_host(
        self, address: int, nbytes: int, *, pin: bool, node: int | None = None
    ) -> bool:
        if self.host_bytes + nbytes > self.profile.host_bytes:
            raise torch.OutOfMemoryError(
                f"{nbytes:,} more bytes do not fit into the {self.profile.host_bytes:,} of the "
                f"simulated host: {self.host_bytes:,} are in use"
            )
        self._hosts[address] = nbytes
        self.host_bytes += nbytes
        return pin

    def unregister_host(self, address: int) -> None:
        nbytes = self._hosts.pop(address, None)
        if nbytes is None:
            raise ValueError(f"unregister_host expects a registered address, got {address:#x}")
        self.host_bytes -= nbytes

    def admit(self, address: int, nbytes: int, *, node: int | None = None) -> None:
        self.register_host(address, nbytes, pin=False, node=node)

    def dismiss(self, address: int) -> None:
        self.unregister_host(address)

    def memory_allocated(self) -> int:
        self.live.sweep()
        return self.live.allocated

    def memory_peak(self) -> int:
        return self.live.peak

    def reset_peak(self) -> None:
        self.live.sweep()
        self.live.peak = self.live.allocated

    def memory_limit(self) -> int | None:
        return math.floor(self.live.limit)
