"""How things are timed.

Note [hidden launches]
    Python takes microseconds to queue a copy, some copies take less. So a kernel spins on the
    stream while everything to be timed, both events among it, is queued behind it; the device then
    runs through it without a gap. Had the spin ended before the last of it was queued, the sample
    would contain the host's time: it is thrown away and taken again with a longer spin.

Note [cold L2]
    Before each sample a buffer larger than the L2 is written, so that no copy finds its source or
    its destination there. A quick measurement does without: the link, which is slower, hides it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ghoffload.kernels import bandwidth
from ghoffload.machine.cuda import CudaMachine, CudaStream

Work = Callable[[Sequence[CudaStream]], None]

_SPIN_US = 150
_SPIN_US_PER_CALL = 25
_TRIES = 4


class DeviceClock:
    """Times work on a device by its own events.

    Args:
        machine: of the device.
        streams: two lanes; by default the machine's ``h2d`` and the first of its ``d2h``.
        cold: whether to empty the L2 before each sample, which takes twice its size of HBM.

    Attributes:
        exposed: samples in which launch cost could not be hidden.
    """

    def __init__(
        self,
        machine: CudaMachine,
        *,
        streams: tuple[CudaStream, CudaStream] | None = None,
        cold: bool = True,
    ) -> None:
        self.machine = machine
        self.index = int(machine.device.index)
        self.exposed = 0
        main, second = streams or (machine.h2d, machine.d2h[0])
        assert isinstance(main, CudaStream)
        assert isinstance(second, CudaStream)
        self.main, self._second = main, second
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._joined = torch.cuda.Event()
        self._flush: torch.Tensor | None = None
        if cold:
            l2_bytes = int(torch.cuda.get_device_properties(machine.device).L2_cache_size)
            self._flush = machine.empty((max(2 * l2_bytes, 1 << 20),), torch.uint8)
            machine.synchronize_all()

    def seconds(self, work: Work, *, calls: int, lanes: int = 1) -> float:
        """How long the device takes for what ``work`` queues.

        Args:
            work: is given the lanes' streams and queues on them; on an error nothing is timed.
            calls: about how many operations it queues.
            lanes: 1, or 2 streams that begin together; the time ends with the later one.
        """
        spin_us = _SPIN_US + _SPIN_US_PER_CALL * calls
        streams = (self.main, self._second)[:lanes]
        for _ in range(_TRIES):
            if self._flush is not None:
                with torch.cuda.stream(self.main.torch_stream):
                    self._flush.zero_()
            bandwidth.spin(spin_us * 1000, device=self.index, stream=self.main.handle)
            self._start.record(self.main.torch_stream)
            for other in streams[1:]:
                other.torch_stream.wait_event(self._start)
            work(streams)
            for other in streams[1:]:
                self._joined.record(other.torch_stream)
                self.main.torch_stream.wait_event(self._joined)
            self._end.record(self.main.torch_stream)
            hidden = not self._start.query()
            self._end.synchronize()
            if hidden:
                break
            spin_us *= 4
        else:
            self.exposed += 1
        return float(self._start.elapsed_time(self._end)) / 1e3

    def samples(self, work: Work, *, repeats: int, calls: int, lanes: int = 1) -> list[float]:
        """``seconds`` several times, after one that is not counted."""
        return [self.seconds(work, calls=calls, lanes=lanes) for _ in range(repeats + 1)][1:]

    def wall_once(self, work: Work) -> float:
        """From an idle device to an idle device by the host's clock: for calls that block it."""
        self.machine.synchronize_all()
        start = time.perf_counter()
        work((self.main,))
        self.main.torch_stream.synchronize()
        return time.perf_counter() - start

    def wall_samples(self, work: Work, *, repeats: int) -> list[float]:
        """``wall_once`` several times, after one that is not counted."""
        return [self.wall_once(work) for _ in range(repeats + 1)][1:]

    def close(self) -> None:
        """Give the device memory back."""
        if self._flush is not None:
            self.machine.synchronize_all()
            self.machine.free(self._flush)


def host_samples(work: Callable[[], None], *, repeats: int) -> list[float]:
    """How long ``work`` takes by the host's clock, several times after one not counted."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]
