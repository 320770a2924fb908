"""What stands behind an optimizer: its sections, and the step that fits machine and config."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ghoffload.config import OffloadConfig
from ghoffload.kernels import adam_stream_cuda
from ghoffload.kernels.adam import MAX_PIECES, Hyper, prepare
from ghoffload.kernels.cuda import preload
from ghoffload.machine.cuda import CudaMachine
from ghoffload.machine.protocol import Launch, Machine
from ghoffload.memory import HostArena
from ghoffload.memory.published import page
from ghoffload.optim.buckets import ParameterSpec, plan
from ghoffload.optim.formats import Format, format_of
from ghoffload.optim.hosted import DirectStep, HostStep
from ghoffload.optim.operands import BucketJob, gather, jobs
from ghoffload.optim.resolve import resolve
from ghoffload.optim.section import LiveBucket, Section
from ghoffload.optim.streamed import StreamedStep


@dataclass(frozen=True, slots=True)
class GroupStep:
    """One parameter group's part in a step: its hyperparameters and gradients by parameter."""

    hyper: Hyper
    grads: Mapping[Tensor, Tensor]


class Engine:
    """Owns host state and staging buffers of one optimizer. Knows nothing of ``torch.optim``."""

    def __init__(
        self, machine: Machine | None, device: torch.device, config: OffloadConfig, *, owner: str
    ) -> None:
        self.machine, self.device, self.config, self.owner = machine, device, config, owner
        self.sections: list[Section] = []
        self.interrupted: str | None = None
        self._home: dict[Tensor, tuple[Section, int]] = {}
        self._pending = False
        self._closed = False
        self._process = os.getpid()
        self.resolved = resolve(machine, config)
        self.on_host = self.resolved.on_host
        if isinstance(machine, CudaMachine):
            # A kernel that cannot be built is known before any step.
            preload(machine.device.index, _sources(self.resolved.in_place))
        self._stepper: StreamedStep | HostStep | DirectStep
        if machine is None:
            self._stepper = DirectStep(threads=config.cpu_threads)
        elif self.on_host:
            self._stepper = HostStep(
                machine,
                staging_buffers=config.staging_buffers,
                threads=config.cpu_threads,
                pin=self.resolved.memory_kind == "pinned",
                owner=owner,
            )
        else:
            self._stepper = StreamedStep(
                machine,
                staging_buffers=config.staging_buffers,
                in_place=self.resolved.in_place,
                ctas=self.resolved.ctas,
                owner=owner,
            )

    @property
    def staging_bytes(self) -> int:
        """HBM held by staging buffers."""
        return self._stepper.staging_bytes

    @property
    def staging_arena(self) -> HostArena | None:
        """Host memory beside the staging buffers, where a CPU step has one."""
        return self._stepper.arena if isinstance(self._stepper, HostStep) else None

    def find(self, parameter: Tensor) -> tuple[Section, int] | None:
        """The section of a parameter and its index there, if it has been planned."""
        return self._home.get(parameter)

    def format(self, parameter: Tensor, group: Mapping[str, Any]) -> Format:
        """The format of a parameter's state, or the one it would get."""
        home = self._home.get(parameter)
        if home is not None:
            return home[0].format(home[1])
        config = self.config
        return format_of(
            parameter.dtype,
            parameter.numel(),
            master=config.master,
            moments=group.get("moments") or config.moments,
            moments_fp32_below=config.moments_fp32_below,
            amsgrad=bool(group["amsgrad"]),
        )

    def add(self, parameters: Sequence[Tensor], groups: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Plan ``parameters`` and reserve all the memory their state will need.

        Args:
            parameters: those without state yet.
            groups: the options of every parameter's group, in the optimizer's order: where a
                parameter stands in it decides its random numbers.

        Raises:
            ValueError: options that exclude one another.
            torch.OutOfMemoryError: there is no room. Nothing was reserved.
        """
        if not parameters:
            return
        config = self.config
        numbers = {p: number for number, p in enumerate(groups)}
        parameters = sorted(parameters, key=numbers.__getitem__)
        specs = [
            ParameterSpec(count=p.numel(), format=self.format(p, groups[p])) for p in parameters
        ]
        everything = sum(spec.state_bytes for spec in specs)
        resolved = self.resolved
        resident = everything if resolved.memory_kind == "device" else config.hbm_state_bytes
        spaces = plan(
            specs,
            # An update in place needs no granularity: nothing is staged.
            bucket_bytes=everything if resolved.in_place else config.bucket_bytes,
            max_pieces=MAX_PIECES,
            resident_bytes=resident,
            min_offload_bytes=config.min_offload_bytes,
        )
        first_slot = sum(1 for bucket in self._buckets() if not bucket.resident)
        section = Section(
            parameters,
            specs,
            spaces,
            machine=self.machine,
            counters_on_host=self.on_host,
            memory_kind=resolved.memory_kind,
            first_slot=first_slot,
            owner=self.owner,
        )
        section.seeds = [numbers[p] - index for index, p in enumerate(parameters)]
        try:
            if resolved.in_place and section.host_kind not in (None, resolved.memory_kind):
                raise RuntimeError(
                    "transfer='kernel' expects host state in pinned memory, and pinning it was "
                    "refused; raise the limit, or use transfer='copy_engine'"
                )
            self._stepper.reserve([*self._buckets(), *section.buckets])
        except BaseException:
            section.close()
            raise
        self.sections.append(section)
        for index, parameter in enumerate(parameters):
            self._home[parameter] = (section, index)

    def _buckets(self) -> Iterable[LiveBucket]:
        return (bucket for section in self.sections for bucket in section.buckets)

    @torch.no_grad()
    def step(
        self,
        groups: Sequence[GroupStep],
        *,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
        clip: Tensor | None = None,
    ) -> None:
        """Queue one update. Nothing is changed before everything it needs is there."""
        stepper = self._stepper
        found_inf, grad_scale = stepper.host_value(found_inf), stepper.host_value(grad_scale)
        clip = stepper.host_value(clip)
        grads: dict[Section, dict[int, Tensor]] = {}
        members: list[tuple[Section, int, Hyper, list[int]]] = []
        for group in groups:
            by_seed: dict[tuple[Section, int], list[int]] = {}
            for parameter, grad in group.grads.items():
                section, index = self._home[parameter]
                by_seed.setdefault((section, section.seeds[index]), []).append(index)
                grads.setdefault(section, {})[index] = grad
            hyper = self._hyper(group.hyper)
            members += [(*key, hyper, indices) for key, indices in by_seed.items()]
        operands = [(section, gather(section, present)) for section, present in grads.items()]
        prepares: list[Launch] = []
        for section, seed, hyper, indices in members:
            prepares += prepare(
                np.array(indices, dtype=np.uint32),
                hyper,
                steps=section.steps,
                scalars=section.scalars,
                found_inf=found_inf,
                grad_scale=grad_scale,
                clip=clip,
                seed=seed,
            )
        work: list[BucketJob] = []
        write_through: list[tuple[Tensor, Tensor]] = []
        for section, dense in operands:
            dense.copy_in()
            work += jobs(section, dense)
            write_through += dense.write_through
        updates: Any = stepper.build(work)
        self._pending = True
        self.interrupted = "while its updates were being queued"
        stepper.run(prepares, updates)
        for scratch, parameter in write_through:
            parameter.copy_(scratch)
        for section, present in grads.items():
            for index in present:
                section.started[index] = True
        self.interrupted = None
        page.stepped(self.machine, sum(section.elements(grads[section]) for section in grads))

    def _hyper(self, hyper: Hyper) -> Hyper:
        """Tensor hyperparameters where the step can read them."""
        values: dict[str, Any] = {
            name: self._stepper.host_value(value)
            for name in ("lr", "beta1", "beta2")
            if isinstance(value := getattr(hyper, name), Tensor) and value.device.type != "cpu"
        }
        return replace(hyper, **values) if values else hyper

    def drain(self) -> None:
        """Block the host until host state shows every step so far; free of cost when it does."""
        if self._pending or self._stepper.captured:
            self._stepper.drain()
            self._pending = False

    def close(self) -> None:
        """Finish pending work and give back all memory; in a forked child this does nothing."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        if self.machine is not None:
            self.machine.synchronize_all()
        self._stepper.close()
        for section in self.sections:
            section.close()
        self._home.clear()


def _sources(in_place: bool) -> tuple[str, ...]:
    """The files of csrc that a step may need; parameter groups may ask for coded moments."""
    sources = ("prepare", "norm", "pack", "adamw", "adamw_coded")
    return sources + (adam_stream_cuda.SOURCES if in_place else ())
