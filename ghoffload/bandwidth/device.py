"""HBM, and what one copy and one launch cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ghoffload.bandwidth.link import Bench
from ghoffload.bandwidth.results import Row, latency, rate
from ghoffload.kernels import bandwidth
from ghoffload.machine.cuda import CudaStream
from ghoffload.measure.clock import DeviceClock, host_samples
from ghoffload.measure.link import BLOCKS_PER_SM

_CALLS = 20
_SMALL_BYTES = 4096


def hbm(bench: Bench) -> Iterator[Row]:
    """HBM by a read, by a copy by kernel and by the driver's copy."""
    clock, nbytes = bench.clock, bench.plan.hbm_bytes
    properties = torch.cuda.get_device_properties(clock.machine.device)
    blocks = BLOCKS_PER_SM * properties.multi_processor_count
    source, destination = (buffer[:nbytes] for buffer in bench.hbm)
    sink = clock.machine.empty((1,), torch.int32)
    try:

        def read(streams: Sequence[CudaStream]) -> None:
            bandwidth.read(
                sink.data_ptr(),
                source.data_ptr(),
                nbytes,
                blocks=blocks,
                device=clock.index,
                stream=streams[0].handle,
            )

        def copy(streams: Sequence[CudaStream]) -> None:
            bandwidth.copy(
                destination.data_ptr(),
                source.data_ptr(),
                nbytes,
                bulk=False,
                blocks=blocks,
                device=clock.index,
                stream=streams[0].handle,
            )

        def driver_copy(streams: Sequence[CudaStream]) -> None:
            clock.machine.copy(destination, source, stream=streams[0])

        for direction, by, moved, work in (
            ("read", "words", nbytes, read),
            ("copy", "words", 2 * nbytes, copy),
            ("copy", "driver", 2 * nbytes, driver_copy),
        ):
            yield rate(
                clock.samples(work, repeats=bench.plan.repeats, calls=1),
                moved,
                what="hbm",
                direction=direction,
                by=by,
                nbytes=nbytes,
                blocks=blocks if by == "words" else 0,
            )
    finally:
        clock.machine.free(sink)


def latencies(bench: Bench, host: Tensor | None) -> Iterator[Row]:
    """One launch and one copy of 4 KB, seen from three sides.

    ``call``: how long queueing it keeps the host. ``device``: how long the device is busy with it
    among others. ``round trip``: from an idle device until the host knows that it is done.

    Args:
        bench: as said there.
        host: pinned; ``None`` leaves the copies out.
    """
    clock = bench.clock

    def launch(stream: CudaStream) -> None:
        bandwidth.nothing(device=clock.index, stream=stream.handle)

    yield from _sides(bench, launch, "launch", "", 0)
    if host is None:
        return
    there, here = bench.hbm[0][:_SMALL_BYTES], host[:_SMALL_BYTES]
    for direction, destination, source in (("h2d", there, here), ("d2h", here, there)):

        def copy(
            stream: CudaStream, destination: Tensor = destination, source: Tensor = source
        ) -> None:
            clock.machine.copy(destination, source, stream=stream)

        yield from _sides(bench, copy, direction, "pinned", _SMALL_BYTES)


def _sides(
    bench: Bench, one: Callable[[CudaStream], None], name: str, memory: str, nbytes: int
) -> Iterator[Row]:
    clock: DeviceClock = bench.clock
    repeats = 4 * bench.plan.repeats  # cheap, and latencies scatter more than rates

    def several() -> None:
        for _ in range(_CALLS):
            one(clock.main)

    def round_trip() -> None:
        one(clock.main)
        clock.main.torch_stream.synchronize()

    clock.machine.synchronize_all()
    calls = []
    for _ in range(repeats):
        calls += host_samples(several, repeats=1)
        clock.main.torch_stream.synchronize()
    device = clock.samples(lambda streams: several(), repeats=repeats, calls=_CALLS)
    trips = host_samples(round_trip, repeats=repeats)
    for by, seconds, count in (
        ("call", calls, _CALLS),
        ("device", device, _CALLS),
        ("round trip", trips, 1),
    ):
        yield latency(
            [s / count for s in seconds],
            what="latency",
            memory=memory,
            direction=name,
            by=by,
            nbytes=nbytes,
        )
