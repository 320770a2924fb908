"""The device that benchmark_activations.py measures, and digests of gradients."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import time
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ghoffload.activations.mover import release
from ghoffload.machine.cuda import CudaMachine
from ghoffload.machine.protocol import Machine
from ghoffload.measure import measure


class Gpu:
    """The device that is measured. A test has another one."""

    def __init__(self) -> None:
        self.machine: Machine = CudaMachine.of(torch.cuda.current_device())
        self.device = self.machine.device

    def timed(self, work: Callable[[], object]) -> tuple[float, float]:
        """Milliseconds of the device, and of the host until the device is idle."""
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun = time.perf_counter()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end), 1e3 * (time.perf_counter() - begun)

    def rates(self) -> dict[str, float]:
        """Bytes a second to the host and from it.

        Raises:
            RuntimeError: they could not be measured.
        """
        assert isinstance(self.machine, CudaMachine)
        found = measure(self.machine)
        if not found.d2h or not found.h2d:
            raise RuntimeError(f"the link could not be measured: {'; '.join(found.left_out)}")
        return {"d2h": found.d2h, "h2d": found.h2d}

    def clear(self) -> None:
        """Give back what nobody holds: HBM, offload_activations' host memory, torch's pinned."""
        gc.collect()
        release(self.machine)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        empty = getattr(torch._C, "_host_emptyCache", None)
        if empty is not None:
            empty()


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Sums in one order; memory is left uninitialised as it is otherwise.

    Of attention's backwards on a GPU it is the flash kernel's that can do so.
    """
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True)  # attention's is not, where it should only warn
        torch.utils.deterministic.fill_uninitialized_memory = False
        try:
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
                yield
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = filled
            torch.use_deterministic_algorithms(before)


def digest(gradients: list[Tensor | None]) -> str:
    """Of all bits and their places; computed where the gradients are."""
    found = hashlib.blake2b(digest_size=16)
    for gradient in gradients:
        if gradient is None:
            found.update(b"none")
            continue
        kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        number = gradient.contiguous().view(kind[gradient.element_size()]).flatten()
        total = 0
        for start in range(0, number.numel(), 1 << 24):
            part = number[start : start + (1 << 24)].long()
            place = torch.arange(start, start + part.numel(), device=part.device)
            place = (place + 1) * 0x2545F4914F6CDD1D  # odd: wraps, and tells all places apart
            total += int(((part + 1) * (place ^ (place >> 29) | 1)).sum())
        found.update(f"{tuple(gradient.shape)} {gradient.dtype} {total};".encode())
    return found.hexdigest()
