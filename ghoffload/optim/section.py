"""The memory of the parameters planned together: host state, counters, buckets.

A ``Section`` is made when an optimizer is built, for each parameter group added later, and when a
frozen parameter gets its first gradient. It reserves everything it will ever need.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ghoffload.kernels.adam import SCALARS, PieceTable
from ghoffload.machine.protocol import Machine
from ghoffload.memory import Carved, ledger, state_arena
from ghoffload.optim.buckets import MASTER, Bucket, ParameterSpec, Space
from ghoffload.optim.layout import Layout

ARENA_ALIGNMENT = 256
STEP = "step"


def entry_names(spec: ParameterSpec) -> tuple[str, ...]:
    """Names of a parameter's state entries, in torch's order with the master last."""
    names = (STEP, *(name for name in spec.arrays if name != MASTER))
    return (*names, MASTER) if spec.master else names


@dataclass(slots=True)
class SpaceState:
    """The state arrays of one space: 1-D fp32 tensors on the host, or in HBM where resident."""

    plan: Space
    arrays: dict[str, Tensor]


@dataclass(slots=True)
class LiveBucket:
    """A bucket with the tensors it works on.

    Attributes:
        slot: index in the order of all offloaded buckets; its staging buffer is slot modulo ring.
        host: its range of each state array.
        tables: piece tables by the set of pieces that take part (all of them, nearly always).
    """

    section: Section
    plan: Bucket
    host: dict[str, Tensor]
    resident: bool
    slot: int
    staged: dict[str, Tensor] = field(default_factory=dict)
    chunks: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (host, staged)
    tables: dict[tuple[int, ...], PieceTable] = field(default_factory=dict)

    @property
    def state_bytes(self) -> int:
        return sum(array.numel() * array.element_size() for array in self.host.values())

    def table(self, active: tuple[int, ...]) -> PieceTable:
        """The table of the pieces at ``active``; tensor k of a launch belongs to the k-th."""
        table = self.tables.get(active)
        if table is None:
            if len(self.tables) >= 8:  # gradients that come and go at random must not pile up
                self.tables.clear()
            pieces = [self.plan.pieces[index] for index in active]
            table = PieceTable(
                [(k, p.start, p.count, p.offset, p.parameter) for k, p in enumerate(pieces)]
            )
            self.tables[active] = table
        return table


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
        self.layouts = [Layout.of(parameter) for parameter in parameters]
        self.dtypes = [parameter.dtype for parameter in parameters]
        self.started = [False] * len(self.parameters)
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
                host={n: a[bucket.start : bucket.stop] for n, a in space.arrays.items()},
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
                array = -(-space.elements * 4 // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
                nbytes += array * len(space.arrays)
        if nbytes == 0:
            return None
        return state_arena(memory_kind, nbytes, machine=self._machine, owner=self._owner)

    def _reserve_space(self, plan: Space) -> SpaceState:
        arrays = {}
        for name in plan.arrays:
            if plan.resident:
                arrays[name] = self._device_zeros((plan.elements,))
            elif self._arena is None:
                arrays[name] = torch.zeros(0, dtype=torch.float32, device="cpu")
            else:
                arrays[name] = self._arena.carve(
                    plan.elements, torch.float32, alignment=ARENA_ALIGNMENT
                )
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

    def entry(self, index: int, name: str) -> Tensor:
        """The live tensor of one state entry, in the parameter's shape (``step``: 0-dim).

        It is memory of its own extent (saving it writes its bytes alone). On the host it shows the
        new values once pending write-back is complete.
        """
        if name == STEP:
            return self.steps[index]
        key = (index, name)
        if key not in self._views:
            space = self._space_of[index]
            offset, count = space.plan.offsets[index], self.specs[index].count
            array = space.arrays[name]
            if space.plan.resident or self._arena is None:
                flat = array[offset : offset + count]
            else:
                start = array.data_ptr() - self._arena.address + offset * array.element_size()
                flat = self._arena.tensor(start, count, array.dtype)
            self._views[key] = self.layouts[index].view(flat)
        return self._views[key]

    def entries(self, index: int) -> dict[str, Tensor]:
        """All live state entries of a parameter."""
        return {name: self.entry(index, name) for name in entry_names(self.specs[index])}

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
        for tensor in self.entries(index).values():
            tensor.zero_()
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
