"""The memory of the parameters planned together: host state, counters, buckets.

A ``Section`` is made when an optimizer is built, for each parameter group added later, and when a
frozen parameter gets its first gradient. It reserves everything it will ever need.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ghoffload.kernels.adam import SCALARS, PieceTable, Update
from ghoffload.machine.protocol import Machine
from ghoffload.memory import Carved, ledger, state_arena
from ghoffload.optim.buckets import Bucket, ParameterSpec, Space
from ghoffload.optim.formats import Format
from ghoffload.optim.layout import Layout

ARENA_ALIGNMENT = 256
STEP = "step"


@dataclass(slots=True)
class SpaceState:
    """The state arrays of one space: 1-D tensors on the host, or in HBM where resident."""

    plan: Space
    arrays: dict[str, Tensor]

    def part(self, start: int, stop: int) -> dict[str, Tensor]:
        """What belongs to elements [start, stop); both begin a block of the format."""
        return {
            array.name: self.arrays[array.name][array.items(start) : array.items(stop)]
            for array in self.plan.format.arrays
        }


@dataclass(slots=True)
class LiveBucket:
    """A bucket with the tensors it works on.

    Attributes:
        slot: index in the order of all offloaded buckets; its staging buffer is slot modulo ring.
        host: its range of each state array.
        updates: prepared updates by the set of pieces that take part (all of them, nearly always).
            They hold the addresses of ``host`` or ``staged``: ``place`` forgets them.
        everything, members: all its pieces, and the parameter of each.
    """

    section: Section
    plan: Bucket
    host: dict[str, Tensor]
    resident: bool
    slot: int
    staged: dict[str, Tensor] = field(default_factory=dict)
    chunks: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (host, staged)
    reloads: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (staged, host)
    updates: dict[tuple[int, ...], Update] = field(default_factory=dict)
    everything: tuple[int, ...] = field(init=False)
    members: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.everything = tuple(range(len(self.plan.pieces)))
        self.members = tuple(piece.parameter for piece in self.plan.pieces)

    @property
    def state_bytes(self) -> int:
        return sum(array.numel() * array.element_size() for array in self.host.values())

    def place(self, staged: dict[str, Tensor]) -> None:
        """Have the state come through other staging memory, or through none."""
        self.staged = staged
        self.chunks, self.reloads = [], []
        self.updates.clear()

    def update(self, active: tuple[int, ...], ctas: int | None = None) -> Update:
        """The update of the pieces at ``active``; tensor k of a launch belongs to the k-th."""
        update = self.updates.get(active)
        if update is None:
            if len(self.updates) >= 8:  # gradients that come and go at random must not pile up
                self.updates.clear()
            pieces = [self.plan.pieces[index] for index in active]
            update = self.updates[active] = Update(
                PieceTable(
                    [(k, p.start, p.count, p.offset, p.parameter) for k, p in enumerate(pieces)]
                ),
                state=self.staged or self.host,
                scalars=self.section.scalars,
                ctas=ctas,
            )
        return update


class Section:
    """Parameters planned together, with their state.

    Attributes:
        parameters: the parameters; an index into them is what pieces and counters refer to.
        layouts: the order of each parameter's elements in its state arrays.
        dtypes: of each parameter when its state was planned.
        steps: fp32 step counters, one a parameter, on the device that steps.
        scalars: fp32 ``[parameters, SCALARS]``, what one step's update reads per parameter.
        started: whether a parameter has taken part in a step; until then it has no state, as in
            torch.
        seeds: of each parameter's random numbers, less its index here.
        extras: what a user put into ``state[p]`` beside the optimizer's own entries.
        scratch: dense stand-ins for parameters and gradients that lie otherwise; made once.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        specs: Sequence[ParameterSpec],
        spaces: Sequence[Space],
        *,
        machine: Machine | None,
        counters_on_host: bool,
        memory_kind: str,
        first_slot: int,
        owner: str,
    ) -> None:
        self.parameters = list(parameters)
        self.specs = list(specs)
        self._elements = sum(spec.count for spec in specs)
        self.layouts = [Layout.of(parameter) for parameter in parameters]
        self.dtypes = [parameter.dtype for parameter in parameters]
        self.started = [False] * len(self.parameters)
        self.seeds = [0] * len(self.parameters)
        self.extras: list[dict[Any, Any]] = [{} for _ in self.parameters]
        self.scratch: dict[tuple[int, str], Tensor] = {}
        self._machine, self._owner = machine, owner
        self._on_device: list[Tensor] = []
        self._closed = False
        self._views: dict[tuple[int, str], Tensor] = {}
        self._arena = self._reserve_host(spaces, memory_kind)
        count = len(self.parameters)
        if machine is None or counters_on_host:
            self.steps = torch.zeros(count, dtype=torch.float32, device="cpu")
            self.scalars = torch.zeros(count, SCALARS, dtype=torch.float32, device="cpu")
        else:
            self.steps = self._device_zeros((count,))
            self.scalars = self._device_zeros((count, SCALARS))
        self.spaces = [self._reserve_space(space) for space in spaces]
        self._space_of = {index: space for space in self.spaces for index in space.plan.offsets}
        slots = itertools.count(first_slot)
        self.buckets = [
            LiveBucket(
                section=self,
                plan=bucket,
                host=space.part(bucket.start, bucket.stop),
                resident=space.plan.resident,
                slot=-1 if space.plan.resident else next(slots),
            )
            for space in self.spaces
            for bucket in space.plan.buckets
        ]

    def _reserve_host(self, spaces: Sequence[Space], memory_kind: str) -> Carved | None:
        nbytes = 0
        for space in spaces:
            if not space.resident:
                sizes = (array.nbytes(space.elements) for array in space.format.arrays)
                nbytes += sum(-(-size // ARENA_ALIGNMENT) * ARENA_ALIGNMENT for size in sizes)
        if nbytes == 0:
            return None
        return state_arena(memory_kind, nbytes, machine=self._machine, owner=self._owner)

    def _reserve_space(self, plan: Space) -> SpaceState:
        arrays = {}
        for array in plan.format.arrays:
            items = array.items(plan.elements)
            if plan.resident:
                arrays[array.name] = self.keep_on_device((items,), array.dtype).zero_()
            elif self._arena is None:
                arrays[array.name] = torch.zeros(0, dtype=array.dtype, device="cpu")
            else:
                arrays[array.name] = self._arena.carve(items, array.dtype, ARENA_ALIGNMENT)
        return SpaceState(plan, arrays)

    def _device_zeros(self, shape: tuple[int, ...]) -> Tensor:
        return self.keep_on_device(shape, torch.float32).zero_()

    def keep_on_device(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Runtime-owned HBM that lives as long as the section."""
        machine = self._machine
        if machine is None:
            return torch.empty(shape, dtype=dtype, device="cpu")
        tensor = machine.empty(shape, dtype)
        self._on_device.append(tensor)
        ledger.add("device", self._owner, tensor.numel() * tensor.element_size())
        return tensor

    @property
    def host_kind(self) -> str | None:
        """The memory kind of the host state; ``None`` where there is none."""
        return None if self._arena is None else self._arena.kind

    def array(self, index: int, name: str) -> Tensor:
        """A parameter's part of a state array: 1-D, in the order of its layout, live.

        It is memory of its own extent (saving it writes its bytes alone). On the host it shows the
        new values once pending write-back is complete.
        """
        key = (index, name)
        if key not in self._views:
            space = self._space_of[index]
            form = next(array for array in space.plan.format.arrays if array.name == name)
            first = form.items(space.plan.offsets[index])
            count = form.items(self.specs[index].count)
            array = space.arrays[name]
            if space.plan.resident or self._arena is None or count == 0:
                self._views[key] = array[first : first + count]
            else:
                start = array.data_ptr() - self._arena.address + first * array.element_size()
                self._views[key] = self._arena.tensor(start, count, array.dtype)
        return self._views[key]

    def format(self, index: int) -> Format:
        """The format of a parameter's state."""
        return self.specs[index].format

    def elements(self, indices: Collection[int]) -> int:
        """Elements of these parameters together."""
        if len(indices) == len(self.specs):
            return self._elements
        return sum(self.specs[index].count for index in indices)

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is that of a state array."""
        address = tensor.data_ptr()
        arrays = (array for space in self.spaces for array in space.arrays.values())
        return any(
            array.data_ptr() <= address < array.data_ptr() + array.numel() * array.element_size()
            for array in arrays
        )

    def reset(self, index: int) -> None:
        """Forget a parameter's state, as before its first step. Pending work must be complete."""
        self.steps[index].zero_()
        for array in self.format(index).arrays:
            self.array(index, array.name).zero_()
        self.started[index] = False
        self.extras[index].clear()

    def close(self) -> None:
        """Give back all memory. Pending work on the host state must be complete."""
        if self._closed:
            return
        self._closed = True
        while self._machine is not None and self._on_device:
            tensor = self._on_device.pop()
            ledger.remove("device", self._owner, tensor.numel() * tensor.element_size())
            self._machine.free(tensor)
        # Buckets refer to their section, a cycle that would keep parameters alive for a while.
        for held in (self.buckets, self.parameters, self.scratch, self._views):
            held.clear()
        if self._arena is not None:
            self._arena.close()
