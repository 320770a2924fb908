"""Where a timeline comes from: the simulated machine's clock, or torch's profiler on a GPU."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ghoffload.machine.cuda import CudaMachine
from ghoffload.machine.protocol import Machine
from ghoffload.machine.simulated.machine import Did, SimulatedMachine
from ghoffload.tracing.spans import Span, Timeline

_OURS = (
    *("adam_", "copy_pieces", "norm_partials", "norm_finish"),
    *("encode_", "decode_", "stochastic_cast"),
)
"""How the names of the runtime's kernels begin: csrc/manifest.json."""
_BYTES = re.compile(r'"bytes": (\d+)')


@contextlib.contextmanager
def recorded(machine: Machine) -> Iterator[Timeline]:
    """What runs within it; complete when it is left.

    Raises:
        TypeError: a machine without a clock.
    """
    if isinstance(machine, SimulatedMachine):
        source = _simulated(machine)
    elif isinstance(machine, CudaMachine):
        source = _profiled(machine)
    else:
        raise TypeError(
            f"timeline expects a GPU or a SimulatedMachine, got a {machine.kind} machine, which "
            "has no clock"
        )
    with source as timeline:
        yield timeline


@contextlib.contextmanager
def _simulated(machine: SimulatedMachine) -> Iterator[Timeline]:
    timeline = Timeline(machine.profile.title, simulated=True, begin=machine.elapsed())
    first, changes = len(machine.fluid.finished), len(machine.live.changes)
    in_use = machine.memory_allocated()
    yield timeline
    timeline.end = machine.elapsed()
    for task in machine.fluid.finished[first:]:
        if isinstance(task.tag, Did):
            did = task.tag
            span = Span(task.name, did.what, task.stream, task.begin, task.end, did.nbytes)
            timeline.spans.append(span)
    timeline.spans.sort(key=lambda span: span.begin)
    machine.live.sweep()
    timeline.memory = [(timeline.begin, in_use), *machine.live.changes[changes:]]


@contextlib.contextmanager
def _profiled(machine: CudaMachine) -> Iterator[Timeline]:
    from torch.profiler import ProfilerActivity, profile

    timeline = Timeline(torch.cuda.get_device_name(machine.device), simulated=False)
    torch.cuda.synchronize(machine.device)
    in_use = machine.memory_allocated()
    with profile(
        activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], profile_memory=True
    ) as p:
        yield timeline
        torch.cuda.synchronize(machine.device)
    assert p.profiler is not None
    fill(timeline, p.profiler.kineto_results.events(), in_use)


def fill(timeline: Timeline, events: Iterable[Any], in_use: int) -> None:
    """Take what torch's profiler found on GPUs.

    Args:
        timeline: to be filled.
        events: of kineto.
        in_use: bytes in HBM at the beginning.
    """
    changes = []
    for event in events:
        if event.device_type() != torch.autograd.DeviceType.CUDA:
            continue
        name, begin = event.name(), event.start_ns() / 1e9
        if name == "[memory]":
            changes.append((begin, event.nbytes()))
            continue
        track, nbytes = "model", 0
        if name.startswith("Memcpy"):
            track = "h2d" if "HtoD" in name else "d2h" if "DtoH" in name else "hbm"
            said = _BYTES.search(event.metadata_json())
            nbytes = int(said.group(1)) if said else 0
        elif name.startswith(_OURS):
            track = "runtime"
        stream = f"stream {event.device_resource_id()}"
        timeline.spans.append(Span(name, track, stream, begin, event.end_ns() / 1e9, nbytes))
    timeline.spans.sort(key=lambda span: span.begin)
    timeline.begin = min((span.begin for span in timeline.spans), default=0.0)
    timeline.end = max((span.end for span in timeline.spans), default=0.0)
    for seconds, change in sorted(changes):
        in_use += change
        timeline.memory.append((seconds, in_use))
