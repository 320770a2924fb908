"""The update on the CPU: for parameters on the CPU, and as ``step_device="cpu"`` for those in HBM.

Note [the CPU step of parameters in HBM]
    Each bucket's weights and gradients are packed on the compute stream into one HBM buffer, sent
    to pinned memory, stepped there beside the host state, and the new weights come back the same
    way. Several buckets are in flight, but the host waits for each of them: ``step()`` returns
    when the last weights are on their way. Weights travel down too, so an edit from outside wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ghoffload.kernels import pool
from ghoffload.kernels.adam import PieceTable, update
from ghoffload.kernels.pack import pack, unpack
from ghoffload.machine.protocol import Launch, Machine
from ghoffload.memory import HostArena
from ghoffload.optim.operands import BucketJob
from ghoffload.optim.section import LiveBucket
from ghoffload.transfer import Reload, Staging, WriteBack, chunked

PACK_ALIGNMENT = 16


class DirectStep:
    """Steps parameters on the CPU where they lie."""

    staging_bytes = 0
    captured = False

    def __init__(self, *, threads: int) -> None:
        self._threads = threads

    def reserve(self, buckets: Sequence[LiveBucket]) -> None:
        """Nothing: state and parameters are in host memory already."""

    def build(self, jobs: Sequence[BucketJob]) -> list[Launch]:
        """The launches of a step; what cannot be launched is refused here."""
        return [job.bucket.update(job.active).launch(job.weights, job.grads) for job in jobs]

    def run(self, prepares: Sequence[Launch], updates: Sequence[Launch]) -> None:
        """Step, and return when it is done."""
        with pool.threads(self._threads):
            for launch in (*prepares, *updates):
                launch.run_on_host()

    def host_value(self, tensor: Tensor | None) -> Tensor | None:
        return tensor

    def drain(self) -> None:
        """Nothing is ever pending."""

    def close(self) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class _Packed:
    """Where one bucket's weights and gradients lie in a packed buffer (bytes)."""

    job: BucketJob
    weight_offsets: list[int]
    grad_offsets: list[int]
    weight_bytes: int
    total_bytes: int

    @classmethod
    def of(cls, job: BucketJob) -> _Packed:
        counts = [job.bucket.plan.pieces[k].count for k in job.active]
        offsets: list[list[int]] = []
        end = 0
        ends = []
        for tensors in (job.weights, job.grads):
            starts = []
            for count, tensor in zip(counts, tensors, strict=True):
                starts.append(end)
                end += -(-count * tensor.element_size() // PACK_ALIGNMENT) * PACK_ALIGNMENT
            offsets.append(starts)
            ends.append(end)
        return cls(job, offsets[0], offsets[1], ends[0], ends[1])

    def table(self, which: str) -> PieceTable:
        """Byte pieces for pack and unpack."""
        job = self.job
        if which == "weights":
            tensors, offsets = job.weights, self.weight_offsets
        else:
            tensors, offsets = job.grads, self.grad_offsets
        pieces = []
        for k, (index, tensor) in enumerate(zip(job.active, tensors, strict=True)):
            piece, size = job.bucket.plan.pieces[index], tensor.element_size()
            pieces.append((k, piece.start * size, piece.count * size, offsets[k], 0))
        return PieceTable(pieces)

    def update(self, packed: Tensor) -> Launch:
        """The update on the packed copies in host memory."""
        job = self.job
        plan = job.bucket.plan

        def unpacked(tensors: list[Tensor], offsets: list[int]) -> list[Tensor]:
            result = []
            for index, tensor, start in zip(job.active, tensors, offsets, strict=True):
                nbytes = plan.pieces[index].count * tensor.element_size()
                result.append(packed[start : start + nbytes].view(tensor.dtype))
            return result

        pieces = [plan.pieces[index] for index in job.active]
        table = PieceTable(
            [(k, 0, p.count, p.offset, p.parameter, p.start) for k, p in enumerate(pieces)]
        )
        return update(
            table,
            weights=unpacked(job.weights, self.weight_offsets),
            grads=unpacked(job.grads, self.grad_offsets),
            state=job.bucket.host,
            scalars=job.bucket.section.scalars,
        )


def _bytes(tensor: Tensor) -> Tensor:
    """The dense memory of a tensor as 1-D uint8."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class HostStep:
    """Steps parameters in HBM on the CPU; ``step`` waits on the host for each bucket."""

    captured = False  # such a step cannot be

    def __init__(
        self, machine: Machine, *, staging_buffers: int, threads: int, pin: bool, owner: str
    ) -> None:
        self._machine, self._owner, self._threads, self._pin = machine, owner, threads, pin
        self._slots = staging_buffers
        self._staging: Staging | None = None
        self.arena: HostArena | None = None
        self._host: list[Tensor] = []
        self._reload, self._offload = Reload(machine), WriteBack(machine)
        self._updated = machine.event("last update")
        machine.record(self._updated, machine.current_stream())

    @property
    def staging_bytes(self) -> int:
        return 0 if self._staging is None else self._staging.nbytes

    def reserve(self, buckets: Sequence[LiveBucket]) -> None:
        """Make packed buffers that hold any bucket's weights and gradients."""
        widest = 0
        for bucket in buckets:
            parameters = bucket.section.parameters
            padded = (
                2 * (piece.count * parameters[piece.parameter].element_size() + PACK_ALIGNMENT)
                for piece in bucket.plan.pieces
            )
            widest = max(widest, sum(padded))
        self._ensure(widest)

    def _ensure(self, slot_bytes: int) -> None:
        if slot_bytes == 0 or (
            self._staging is not None and self._staging.slot_bytes >= slot_bytes
        ):
            return
        slot_bytes = -(-slot_bytes // 256) * 256
        machine = self._machine
        # The new buffers first: where they do not fit, the optimizer goes on with the old ones.
        staging = Staging(machine, slots=self._slots, slot_bytes=slot_bytes, owner=self._owner)
        try:
            arena = HostArena(
                slot_bytes * self._slots, machine=machine, owner=self._owner, pin=self._pin
            )
        except BaseException:
            staging.close()
            raise
        if self._staging is not None:
            machine.synchronize_all()
            self.close()
        self._staging, self.arena = staging, arena
        self._host = [arena.carve(slot_bytes, torch.uint8) for _ in range(self._slots)]
        # The buffers are the current stream's: what it had to do comes before their first use.
        compute = machine.current_stream()
        machine.wait(compute, self._updated, label="update waits for the one before")
        machine.record(self._updated, compute)

    def build(self, jobs: Sequence[BucketJob]) -> list[_Packed]:
        """Where each bucket's weights and gradients go; makes room for them if need be.

        Raises:
            RuntimeError: the current stream is being captured into a graph.
        """
        if self._machine.capturing:
            raise RuntimeError(
                "a step on the CPU (step_device='cpu') blocks the host, so that it cannot be "
                "captured into a CUDA graph; use step_device='cuda'"
            )
        packed = [_Packed.of(job) for job in jobs]
        self._ensure(max((p.total_bytes for p in packed), default=0))
        return packed

    def run(self, prepares: Sequence[Launch], packed: Sequence[_Packed]) -> None:
        """One step; waits on the host for each bucket to arrive."""
        machine, compute = self._machine, self._machine.current_stream()
        machine.wait(compute, self._updated, label="update waits for the one before")
        with pool.threads(self._threads):
            for prepare in prepares:
                prepare.run_on_host()
            for index in range(len(packed) + self._slots - 1):
                if index < len(packed):
                    self._send(packed[index], index % self._slots)
                done = index - self._slots + 1
                if done >= 0:
                    self._finish(packed[done], done % self._slots)
        machine.record(self._updated, compute)

    def _send(self, packed: _Packed, slot: int) -> None:
        """Pack a bucket's weights and gradients and send them to the host."""
        assert self._staging is not None
        machine, compute = self._machine, self._machine.current_stream()
        buffer = self._staging.buffers[slot]
        for which, tensors in (("weights", packed.job.weights), ("grads", packed.job.grads)):
            sources = [_bytes(tensor) for tensor in tensors]
            launch = pack(packed.table(which), sources=sources, packed=buffer)
            machine.launch(launch, stream=compute)
        nbytes = packed.total_bytes
        chunks = chunked([(self._host[slot][:nbytes], buffer[:nbytes])])
        self._offload.copy(chunks, after=compute, done=self._staging.drained[slot])

    def _finish(self, packed: _Packed, slot: int) -> None:
        """Step a bucket on the CPU once it has arrived and send its weights back."""
        assert self._staging is not None
        machine, compute = self._machine, self._machine.current_stream()
        buffer, host = self._staging.buffers[slot], self._host[slot]
        machine.synchronize(self._staging.drained[slot], label="CPU update waits for its gradients")
        machine.run_on_host(packed.update(host))
        nbytes = packed.weight_bytes
        reloaded = self._staging.reloaded[slot]
        self._reload.copy([(buffer[:nbytes], host[:nbytes])], after=None, done=reloaded)
        machine.wait(compute, reloaded, label="unpacking waits for the new weights")
        destinations = [_bytes(tensor) for tensor in packed.job.weights]
        launch = unpack(packed.table("weights"), packed=buffer, destinations=destinations)
        machine.launch(launch, stream=compute)

    def host_value(self, tensor: Tensor | None) -> Tensor | None:
        """A scalar's value on the host; waits for it."""
        return None if tensor is None else tensor.cpu()

    def drain(self) -> None:
        """Nothing is ever pending: ``step`` has waited for host state."""

    def close(self) -> None:
        """Give the packed buffers back. Nothing may be queued any more."""
        if self._staging is not None:
            self._staging.close()
            self._staging = None
        self._host.clear()
        if self.arena is not None:
            self.arena.close()
            self.arena = None
