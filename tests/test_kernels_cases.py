"""The update kernels against the CPU's on drawn launches: sizes, alignments, formats, values.

Bit for bit, guards around the arrays included. Without a GPU it is csrc as C++ on the CPU;
``--hypothesis-profile thorough`` runs 10,000 cases. On a GPU there are 10,000 by default.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import test_csrc_host
import test_csrc_stream
import torch
from hypothesis import given, settings
from kernel_cases import FEW_THREADS, KINDS, SHAPES, Bits, Case, cases
from torch import Tensor

from ghoffload.kernels import adam_stream_cuda, pool
from ghoffload.machine.cuda import CudaMachine
from ghoffload.memory import HostArena


def expected(case: Case, buffer: Bits) -> Bits:
    """What the CPU's kernels make of the bytes."""
    ours = buffer.copy()
    with pool.threads(1):
        for launch in case.launches(torch.from_numpy(ours)):
            launch.run_on_host()
    return ours


# ---- csrc as C++ ----


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Launches on CPU tensors start csrc's kernels, compiled for the CPU."""
    directory = tmp_path_factory.mktemp("cases")
    host, stream = (
        {name: module.compile_for_host(name, directory) for name in names}
        for module, names in (
            (test_csrc_host, ("prepare", "adamw", "adamw_coded")),
            (test_csrc_stream, adam_stream_cuda.SOURCES),
        )
    )

    def make(source: str, kernel: str, device: int, **how: Any) -> Any:
        parameters, grid = how["parameters"], (how["blocks"], how["threads"])

        def start(_: int) -> None:
            addresses = [ctypes.c_void_p(array.ctypes.data) for array in parameters]
            if source in stream:
                run = getattr(stream[source], f"run_{kernel}")
                run(*addresses, *grid, how["shared_bytes"])
            else:
                test_csrc_host.check_alignment(kernel, parameters[0][0])
                run = getattr(host[source], f"run_{kernel}")
                run((ctypes.c_void_p * len(addresses))(*addresses), *grid)

        return start

    with pytest.MonkeyPatch.context() as patch:
        test_csrc_stream.pretend_hopper(patch, make)
        yield


def check_on_host(case: Case, ctas: int | None) -> None:
    buffer = case.fill()
    theirs = expected(case, buffer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam_stream_cuda, "SHAPE", case.shape)
        for launch in case.launches(torch.from_numpy(buffer), ctas=ctas):
            launch.device(0)
    assert not case.difference(theirs, buffer)


@pytest.mark.timeout(7200)
@given(case=cases(KINDS, FEW_THREADS))
def test_loads_and_stores(built: None, case: Case) -> None:
    check_on_host(case, None)


@pytest.mark.timeout(7200)
@given(case=cases(KINDS, FEW_THREADS))
def test_stream(built: None, case: Case) -> None:
    check_on_host(case, case.ctas)


# ---- a GPU ----


class Bench:
    """Memory for cases on a GPU, used again for each."""

    MOST = 4 << 20

    def __init__(self, machine: CudaMachine | None, device: str) -> None:
        self._arena = HostArena(5 * self.MOST, machine=machine, owner="test", threads=1)
        self._source, self._state, *self._results = (
            self._arena.carve(self.MOST, torch.uint8) for _ in range(5)
        )
        self._there = torch.empty(3, self.MOST, dtype=torch.uint8, device=device)

    def close(self) -> None:
        self._arena.close()

    def check(self, case: Case, stream: bool) -> None:
        """Run it by every kernel, with state in every place, and compare."""
        buffer = case.fill()
        nbytes, begin = case.nbytes, case.operands.nbytes
        self._source[:nbytes].numpy()[:] = buffer
        first, second, third = self._there[:, :nbytes]
        first.copy_(self._source[:nbytes], non_blocking=True)
        ways: list[tuple[Tensor, Tensor | None, int | None]] = [(first, None, None)]
        if stream:
            second.copy_(first)
            third[:begin].copy_(first[:begin])
            state = self._state[: nbytes - begin]
            state.numpy()[:] = buffer[begin:]
            ways += [(second, None, case.ctas), (third, state, case.ctas)]
        queue = torch.cuda.current_stream()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adam_stream_cuda, "SHAPE", case.shape)
            for there, state_there, ctas in ways:
                for launch in case.launches(there, state_there, ctas):
                    launch.device(queue.cuda_stream)
        for result, (there, *_) in zip(self._results, ways, strict=False):
            result[:nbytes].copy_(there, non_blocking=True)
        theirs = expected(case, buffer)
        queue.synchronize()
        got = [result[:nbytes].numpy() for result in self._results[: len(ways)]]
        if stream:
            got[2][begin:] = state.numpy()
        for way, found in zip(("loads and stores", "stream", "pinned"), got, strict=False):
            assert not case.difference(theirs, found), way


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench(CudaMachine.of("cuda"), "cuda")
    yield bench
    torch.cuda.synchronize()
    bench.close()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind: str, bench: Bench) -> None:
    """2,500 cases of each kind of moments, by three launches each."""
    stream = torch.cuda.get_device_capability() >= (9, 0)

    @settings(max_examples=max(2500, settings.default.max_examples))
    @given(case=cases([kind], SHAPES))
    def check(case: Case) -> None:
        bench.check(case, stream)

    check()
