"""Moves spills: to the host behind the forward, and back ahead of backward.

Note [the window]
    Copies to the host run behind compute. What is leaving still has its HBM, so there is a window:
    where more bytes than that are leaving, the current stream waits for the oldest copy and lets go
    of its bytes. The wait is in stream order, the host goes on, and the allocator may hand the
    memory out at once, because what uses it next is behind the wait.

Note [ahead]
    Whoever asks for a spill has the next ones reloaded, too, up to so many bytes. A reload takes
    its HBM from the current stream, so it begins when that has come to where it was asked for;
    ``ahead`` bytes are what hides it.

Note [letting go]
    Memory that another stream may still use is given back with ``record_stream``: from any thread,
    and without waiting. A block of host memory is given back with the event of its last reader,
    which the next copy into it waits for.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ghoffload.activations.blocks import RATE, Blocks, Learning
from ghoffload.activations.passes import Learned, Pass
from ghoffload.activations.payload import decoded, payload_of
from ghoffload.activations.policy import Options, Plan, plan_for
from ghoffload.activations.slabs import Slabs
from ghoffload.activations.spill import Extent, Moved, Spill, State, version_of
from ghoffload.activations.usage import budget_left
from ghoffload.machine.protocol import Machine
from ghoffload.measure import rates_of
from ghoffload.transfer import Reload, WriteBack, chunked

OWNER = "activations"
_LEARNED = 16  # options whose last pass is remembered


class Mover:
    """What all contexts of one machine share: host memory, the two directions, what was learned.

    Args:
        machine: whose memory the activations are in.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.slabs = Slabs(machine, owner=OWNER)
        self.leaving_bytes = self.coming_bytes = 0
        self._learned: OrderedDict[Options, Learned] = OrderedDict()
        self._plans: dict[Options, tuple[int | None, Plan]] = {}
        self._lock = threading.Lock()
        self._exclusive = _Exclusive(self._lock, self._bury_forgotten)
        self._forgotten: deque[tuple[Pass, Spill | None, bool]] = deque()
        self._leaving: deque[Spill] = deque()
        self._by_storage: dict[int, list[Spill]] = {}
        self.blocks: OrderedDict[tuple[Options, tuple[int, ...]], Learning] = OrderedDict()
        self._reload, self._write_back = Reload(machine), WriteBack(machine)
        self._now = machine.event("a reload may begin")

    # -- one at a time

    def exclusive(self) -> _Exclusive:
        """Around every use, as forwards and backwards may run in several threads."""
        return self._exclusive

    def forget(self, home: Pass, spill: Spill | None = None, *, served: bool = True) -> None:
        """A handle is gone: by whichever thread, and in the middle of anything."""
        self._forgotten.append((home, spill, served))
        self._bury_forgotten()

    def _bury_forgotten(self) -> None:
        # Whoever holds the lock comes here when it has let go of it, so nothing stays behind.
        while self._forgotten and self._lock.acquire(blocking=False):
            try:
                while self._forgotten:
                    home, spill, served = self._forgotten.popleft()
                    if spill is not None:
                        self._forget(spill, served=served)
                    home.gone()
            finally:
                self._lock.release()

    # -- what was learned

    def expected(self, options: Options, budget: int | None) -> tuple[Learned | None, Plan | None]:
        """What the last pass with these options found, and what is to be done in one like it."""
        learned = self._learned.get(options)
        if learned is None or not learned.measured:
            return learned, None
        before = self._plans.get(options)
        left = budget
        if budget is not None:
            grown = self.in_use() - learned.base
            left = budget_left(budget, grown, None if before is None else before[0])
        if before is None or before[0] != left:
            before = self._plans[options] = left, plan_for(options, learned, left)
        return learned, before[1]

    def learn(self, options: Options, learned: Learned) -> None:
        """A pass is over."""
        self._learned[options] = learned
        self._learned.move_to_end(options)
        self._plans.pop(options, None)
        while len(self._learned) > _LEARNED:
            self._plans.pop(self._learned.popitem(last=False)[0], None)

    def learning(self, options: Options, blocks: Blocks) -> Learning:
        """What is known of these blocks, under these options."""
        key = (options, tuple(map(id, blocks.modules)))
        found = self.blocks.pop(key, None)
        if found is None or not found.of(blocks):
            found = Learning(blocks)
        self.blocks[key] = found
        while len(self.blocks) > _LEARNED:
            self.blocks.popitem(last=False)
        return found

    def rates(self) -> tuple[float, float]:
        """Bytes a second to the host and back, as measured on this machine."""
        found = rates_of(self.machine)
        if found is None or not found.d2h or not found.h2d:
            return RATE, RATE
        return found.d2h, found.h2d

    # -- to the host

    def find(self, tensor: Tensor, extent: Extent) -> Spill | None:
        """The spill that has a tensor's bytes already, if there is one."""
        for spill in self._by_storage.get(tensor.untyped_storage()._cdata, ()):
            coded = spill.coded is not None and spill.coded != tensor.dtype
            if (
                spill.extent.covers(extent)
                and spill.version == version_of(tensor)
                and not coded
                and not spill.storage.expired()
            ):
                return spill
        return None

    def leave(self, tensor: Tensor, extent: Extent, home: Pass, index: int, *, code: bool) -> Spill:
        """Begin to offload a tensor's bytes; what leaves beyond the window is waited for.

        Raises:
            torch.OutOfMemoryError: the host has no room. Nothing was moved.
        """
        machine = self.machine
        storage = tensor.untyped_storage()
        held = holders(storage)
        payload = payload_of(tensor, extent, machine, code=code)
        held = holders(storage) - held  # by the payload
        block = self.slabs.take(payload.memory.numel())
        spill = Spill(
            extent,
            source=payload.memory,
            nbytes=payload.nbytes,
            coded=payload.coded,
            storage=StorageWeakRef(storage),
            version=version_of(tensor),
            block=block,
            left=machine.event("activation offloaded"),
            arrived=machine.event("activation reloaded"),
            own_holders=held,
            home=home,
            index=index,
        )
        self._write_back.copy(
            chunked([(block.memory, payload.memory)]),
            after=machine.current_stream(),
            done=spill.left,
            read=block.after,
        )
        self._leaving.append(spill)
        self.leaving_bytes += spill.moved_bytes
        self._by_storage.setdefault(storage._cdata, []).append(spill)
        home.add(spill)
        return spill

    def on_its_way(self) -> int:
        """Bytes in HBM that nobody but the copies need."""
        leaving = sum(
            spill.moved_bytes
            for spill in self._leaving
            if spill.own_holders == 0 or _alive_holders(spill) == spill.own_holders
        )
        return leaving + self.coming_bytes

    def in_use(self) -> int:
        """Bytes in HBM beside those."""
        return self.machine.memory_allocated() - self.on_its_way()

    def retire(self, window: int) -> None:
        """Have the current stream wait until at most ``window`` bytes are leaving."""
        while self._leaving and self.leaving_bytes > window:
            spill = self._leaving[0]
            self.machine.wait(
                self.machine.current_stream(), spill.left, label="forward waits for an offload"
            )
            self._left(spill)

    def _left(self, spill: Spill) -> None:
        """The source may go."""
        self._leaving.remove(spill)
        self.leaving_bytes -= spill.moved_bytes
        spill.source = None
        spill.state = State.AWAY
        if spill.holders == 0:
            self._bury(spill)

    def _release_source(self, spill: Spill) -> None:
        """As ``_left``, while the copy may still read it: Note [letting go]."""
        assert spill.source is not None
        for stream in self.machine.d2h:
            self.machine.record_stream(spill.source, stream)
        self._left(spill)

    # -- and back

    def serve(self, handle: Moved) -> Tensor:
        """The saved tensor of a handle, ready for the current stream; others are sent for."""
        spill, home = handle.spill, handle.home
        home.asked(spill.index)
        if spill.state is State.LEAVING:
            tensor = self._from(handle, spill.source)
            self._served(handle)
            if spill.unserved == 0:
                self._release_source(spill)
        elif (storage := _alive(spill)) is not None:
            home.in_vain.add(spill.index)
            tensor = handle.of_original(storage)
            self._served(handle)
        else:
            if spill.state is State.AWAY:
                self._come(spill)
            self._arrive(spill)
            assert spill.back is not None
            tensor = handle.of(spill.back)
            self._served(handle)
            if spill.unserved == 0:
                self._rest(spill)
        self.reload_ahead(home)
        return tensor

    def reload_ahead(self, home: Pass) -> None:
        """Send for what backward will ask for next: Note [ahead]."""
        room = home.room_back
        if room is not None:
            self.retire(max(room - self.coming_bytes, 0))
        most = home.ahead_bytes if room is None else room
        while (spill := home.coming_next()) is not None:
            # What is still leaving is needed before it, and is here.
            under_way = self.coming_bytes + self.leaving_bytes
            if under_way + spill.nbytes > most and (under_way or room is not None):
                return
            if _alive(spill) is not None:
                home.skip()
            else:
                self._come(spill)

    def _come(self, spill: Spill) -> None:
        machine = self.machine
        back = torch.empty(spill.moved_bytes, dtype=torch.uint8, device=machine.device)
        spill.stream = machine.current_stream()
        machine.record(self._now, spill.stream)
        machine.wait(machine.h2d, spill.left, label="reload waits for the offload")
        pairs = [(hbm, host) for host, hbm in chunked([(spill.block.memory, back)])]
        self._reload.copy(pairs, after=self._now, done=spill.arrived)
        spill.back = back
        spill.state = State.COMING
        spill.reloaded = True
        spill.home.reloaded_bytes += spill.moved_bytes
        self.coming_bytes += spill.nbytes

    def _arrive(self, spill: Spill) -> None:
        """Have the current stream wait for what comes."""
        machine, stream = self.machine, self.machine.current_stream()
        machine.wait(stream, spill.arrived, label="backward waits for a reload")
        assert spill.back is not None
        if stream != spill.stream:
            machine.record_stream(spill.back, stream)
        if spill.state is State.BACK:
            return
        self.coming_bytes -= spill.nbytes
        spill.state = State.BACK
        if spill.coded is not None:
            spill.back = decoded(spill.back, spill.nbytes, spill.coded, machine)
            spill.stream = stream
            machine.record(spill.arrived, stream)  # what the next to ask waits for

    def _from(self, handle: Moved, source: Tensor | None) -> Tensor:
        assert source is not None
        spill = handle.spill
        if spill.coded is None:
            return handle.of(source)
        return handle.of(decoded(source, spill.nbytes, spill.coded, self.machine))

    def _served(self, handle: Moved) -> None:
        if not handle.served:
            handle.served = True
            handle.spill.unserved -= 1

    def _rest(self, spill: Spill) -> None:
        """All were served: what came back is theirs, and a second backward reloads it."""
        spill.back = None
        spill.state = State.AWAY

    # -- ends

    def _forget(self, spill: Spill, *, served: bool) -> None:
        """With its last handle a spill ends."""
        spill.holders -= 1
        spill.unserved -= 0 if served else 1
        if spill.holders:
            if spill.unserved == 0 and spill.state is State.BACK:
                self._rest(spill)
        elif spill.state is State.LEAVING:
            self._release_source(spill)
        else:
            self._bury(spill)

    def _bury(self, spill: Spill) -> None:
        if spill.state is State.COMING:
            self.coming_bytes -= spill.nbytes
            assert spill.back is not None
            self.machine.record_stream(spill.back, self.machine.h2d)
        spill.back = None
        spill.state = State.DEAD
        spill.block.free_after = spill.arrived if spill.reloaded else None
        self.slabs.give(spill.block)
        same = self._by_storage.get(spill.storage.cdata)
        if same is not None:
            same.remove(spill)
            if not same:
                del self._by_storage[spill.storage.cdata]

    def close(self) -> None:
        """Give all host memory back; what is away is lost."""
        with self.exclusive():
            self.machine.synchronize_all()
            self._leaving.clear()
            self.slabs.close()


class _Exclusive:
    """Holds a lock; what came up meanwhile is done when it is let go."""

    __slots__ = ("_after", "_lock")

    def __init__(self, lock: threading.Lock, after: Callable[[], None]) -> None:
        self._lock, self._after = lock, after

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        self._lock.release()
        if kind is None:
            self._after()


def holders(storage: torch.UntypedStorage) -> int:
    """How many tensors look at a storage."""
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # and the storage's own object


def _alive_holders(spill: Spill) -> int:
    storage = _alive(spill)
    return 0 if storage is None else holders(storage)


def _alive(spill: Spill) -> torch.UntypedStorage | None:
    """The storage that was saved, where somebody else holds it still."""
    if spill.storage.expired():
        return None
    return torch.UntypedStorage._new_with_weak_ptr(spill.storage.cdata)


_movers: dict[Machine, Mover] = {}
_movers_lock = threading.Lock()


def mover_of(machine: Machine) -> Mover:
    """The mover of a machine, made at the first call."""
    with _movers_lock:
        if machine not in _movers:
            _movers[machine] = Mover(machine)
        return _movers[machine]


def release(machine: Machine) -> None:
    """Give back the host memory that activations on a machine were offloaded to.

    It is kept for the next forward otherwise. Nothing must be away.
    """
    with _movers_lock:
        mover = _movers.pop(machine, None)
    if mover is not None:
        mover.close()
