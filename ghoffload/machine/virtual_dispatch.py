"""Eager torch operations on a virtual machine.

Note [eager]
    The caller's own operations are torch's, run at once in the calling thread, and count as
    operations on the current stream. ``EagerMode`` shows them to the machine. Those on tensors in a
    host arena alone are the host's own; those that mix both are as a synchronous ``cudaMemcpy``: on
    the stream, and the host has waited for them. So has it for operations whose result it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ghoffload.machine.checking import Checker
from ghoffload.machine.clocks import HOST
from ghoffload.machine.virtual_memory import Memory, Region
from ghoffload.machine.virtual_queue import Queues
from ghoffload.machine.virtual_schema import plan_of, split, tensors_in


class EagerMode(TorchDispatchMode):
    """Shows a machine the eager operations of this thread.

    Attributes:
        enabled: ``False`` while another machine is the active one.
    """

    def __init__(self, queues: Queues, memory: Memory, checker: Checker | None) -> None:
        super().__init__()
        self.enabled = True
        self._queues = queues
        self._memory = memory
        self._checker = checker

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        foreign = not self.enabled or not isinstance(func, torch._ops.OpOverload)
        if foreign or self._queues.running:  # the machine's own work is not the caller's
            return func(*args, **kwargs)
        if self._checker is not None:
            self._memory.sweep_watched()
        self._queues.disturb()
        self._queues.settle()
        with self._queues.own_work():
            if self._checker is not None:
                return self._checked(self._checker, func, args, kwargs)
            result = func(*args, **kwargs)
            if self._memory.hbm_bytes is not None:
                for tensor in (
                    *tensors_in(args),
                    *tensors_in(kwargs.values()),
                    *tensors_in(result),
                ):
                    self._memory.region(tensor, self._queues.current.thread)
            return result

    def _checked(
        self, checker: Checker, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        plan = plan_of(func)
        reads, writes = split(plan, args, kwargs)
        regions = self._regions(reads) | self._regions(writes)
        arenas = sum(region.arena for region in regions)
        on_host = 0 < arenas == len(regions)
        stream = self._queues.current
        thread = HOST if on_host else stream.thread
        clock = checker.issue_on_host() if on_host else checker.issue(stream)
        if plan.accesses and not plan.maybe_view:
            checker.access(plan.name, thread, clock, reads=reads, writes=writes)
        result = func(*args, **kwargs)
        made = [t for t in tensors_in(result) if plan.fresh and not self._regions((t,)) <= regions]
        copied = reads if plan.accesses and plan.maybe_view and made else ()
        checker.access(plan.name, thread, clock, reads=copied, writes=made)
        if not on_host and (arenas or plan.waits):
            checker.synchronize(stream.clock)
        return result

    def _regions(self, tensors: Sequence[Tensor]) -> set[Region]:
        home = self._queues.current.thread
        regions = (self._memory.region(tensor, home) for tensor in tensors)
        return {region for region in regions if region is not None}
