"""The update in HBM: host state streamed through staging buffers, or updated where it lies.

Note [the life of a parameter]
    weight in HBM  ->  gradient ready after backward  ->  at ``step()`` its bucket's host state is
    reloaded into a staging buffer on the h2d stream, as soon as the buffer's last content has been
    written back  ->  on the compute stream one fused kernel unscales, steps, and writes the new
    weight into the parameter and the new state into the staging buffer  ->  the state is written
    back on the d2h pair, in paced chunks  ->  the next forward needs only the weight, which the
    compute stream itself has written.

    With ``transfer="kernel"`` nothing is copied: the kernel reads and writes the bucket's host
    state over the link, and whoever reads state on the host waits for the update instead.

Note [why one wait a direction is enough]
    A bucket always uses the same staging buffer and all write-backs form one total order. So when
    a buffer is free, the host state of every bucket that ever used it is complete, this bucket's
    own included: the reload waits for that one event and for nothing else.

Note [graphs]
    A captured step ends with the write-backs joined to the compute stream, so a replay is complete
    when the stream it was started on has passed it, host state included. It leaves no events
    behind. So once a step was captured, each eager step has its lanes wait for the current stream
    and joins them at its end, and reading state waits for the whole device.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ghoffload.machine.protocol import Launch, Machine, Stream
from ghoffload.optim.operands import BucketJob
from ghoffload.optim.section import ARENA_ALIGNMENT, LiveBucket
from ghoffload.transfer import Reload, Staging, WriteBack, chunked


class StreamedStep:
    """Steps buckets in HBM; queues everything and never waits on the host.

    Args:
        in_place: kernels read and write host state over the link; nothing is copied.
        ctas: thread blocks of an update in place.
    """

    def __init__(
        self, machine: Machine, *, staging_buffers: int, in_place: bool, ctas: int, owner: str
    ) -> None:
        self._machine, self._owner = machine, owner
        self._staging_buffers, self._in_place, self._ctas = staging_buffers, in_place, ctas
        self._staging: Staging | None = None
        self._reload, self._write_back = Reload(machine), WriteBack(machine)
        self._updated = machine.event("last update")
        machine.record(self._updated, machine.current_stream())
        self.captured = False

    @property
    def staging_bytes(self) -> int:
        return 0 if self._staging is None else self._staging.nbytes

    def reserve(self, buckets: Sequence[LiveBucket]) -> None:
        """Make staging buffers for ``buckets`` (all of the optimizer's) and place each in one."""
        moving = [bucket for bucket in buckets if self._moves(bucket)]
        # Whatever was queued for the sections so far (zeroing HBM) comes before the next update.
        compute = self._machine.current_stream()
        self._machine.wait(compute, self._updated, label="update waits for the one before")
        self._machine.record(self._updated, compute)
        if not moving:
            return
        slot_bytes = max(sum(_extents(bucket)) for bucket in moving)
        slots = min(self._staging_buffers, len(moving))
        old = self._staging
        if old is None or old.slot_bytes < slot_bytes or len(old.buffers) < slots:
            # The new ring first: where it does not fit, the optimizer goes on with the old one.
            self._staging = Staging(
                self._machine, slots=slots, slot_bytes=slot_bytes, owner=self._owner
            )
            if old is not None:
                self._machine.synchronize_all()
                old.close()
            for bucket in moving:
                bucket.place({})
        for bucket in moving:
            if not bucket.staged:
                self._place(bucket)

    def _moves(self, bucket: LiveBucket) -> bool:
        return not (bucket.resident or self._in_place)

    def _place(self, bucket: LiveBucket) -> None:
        assert self._staging is not None
        buffer = self._staging.buffers[self._slot(bucket)]
        start = 0
        staged = {}
        for (name, host), extent in zip(bucket.host.items(), _extents(bucket), strict=True):
            nbytes = host.numel() * host.element_size()
            staged[name] = buffer[start : start + nbytes].view(host.dtype)
            start += extent
        bucket.place(staged)
        bucket.chunks = chunked([(host, staged[name]) for name, host in bucket.host.items()])
        bucket.reloads = [(hbm, host) for host, hbm in bucket.chunks]

    def _slot(self, bucket: LiveBucket) -> int:
        assert self._staging is not None
        return bucket.slot % len(self._staging.buffers)

    def build(self, jobs: Sequence[BucketJob]) -> list[tuple[LiveBucket, Launch]]:
        """The launches of a step; what cannot be launched is refused here."""
        return [
            (
                job.bucket,
                job.bucket.update(
                    job.active, self._ctas if self._in_place and not job.bucket.resident else None
                ).launch(job.weights, job.grads),
            )
            for job in jobs
        ]

    def run(self, prepares: Sequence[Launch], updates: Sequence[tuple[LiveBucket, Launch]]) -> None:
        """Queue one step."""
        machine, compute = self._machine, self._machine.current_stream()
        capturing = machine.capturing
        if self.captured and not capturing:
            self._fork(compute)
        self.captured |= capturing
        machine.wait(compute, self._updated, label="update waits for the one before")
        for prepare in prepares:
            machine.launch(prepare, stream=compute)
        for bucket, launch in updates:
            if self._moves(bucket):
                self._stream(bucket, launch, compute)
            else:
                machine.launch(launch, stream=compute)
        if self.captured:
            self._write_back.join(compute)
        machine.record(self._updated, compute)

    def _fork(self, compute: Stream) -> None:
        """Order this step behind replays, which leave no events: Note [graphs]."""
        machine = self._machine
        machine.record(self._updated, compute)
        for lane in (machine.h2d, *machine.d2h):
            machine.wait(lane, self._updated, label="step waits for replays")

    def _stream(self, bucket: LiveBucket, launch: Launch, compute: Stream) -> None:
        staging = self._staging
        assert staging is not None
        slot = self._slot(bucket)
        self._reload.copy(
            bucket.reloads,
            after=staging.drained[slot],
            done=staging.reloaded[slot],
        )
        self._machine.wait(compute, staging.reloaded[slot], label="update waits for the reload")
        self._machine.launch(launch, stream=compute)
        self._write_back.copy(bucket.chunks, after=compute, done=staging.drained[slot])

    def host_value(self, tensor: Tensor | None) -> Tensor | None:
        """``found_inf`` and the like stay on the device here."""
        return tensor

    def drain(self) -> None:
        """Block the host until host state shows every step queued so far.

        What stays in HBM (counters, resident state) is then in order for the current stream.
        """
        if self.captured:  # replays leave no events
            self._machine.synchronize_all()
        self._write_back.drain(label="reading state waits for the write-back")
        if self._in_place:
            label = "reading state waits for the update in place"
            self._machine.synchronize(self._updated, label=label)
        compute = self._machine.current_stream()
        self._machine.wait(compute, self._updated, label="reading state waits for the update")

    def close(self) -> None:
        """Give the staging buffers back. Nothing may be queued any more."""
        if self._staging is not None:
            self._staging.close()
            self._staging = None


def _extents(bucket: LiveBucket) -> list[int]:
    """Bytes of a staging buffer that each of the bucket's arrays takes."""
    sizes = [array.numel() * array.element_size() for array in bucket.host.values()]
    return [-(-size // ARENA_ALIGNMENT) * ARENA_ALIGNMENT for size in sizes]
