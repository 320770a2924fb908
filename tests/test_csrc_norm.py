"""csrc/norm.cu compiled as C++ for the CPU, a real thread for each of a block's, against numba.

Finds wrong indices, layouts, tails and orders of operations without a GPU; shuffles are exchanges
between threads that wait for each other.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import pytest
import torch
from csrc_on_cpu import ARITHMETIC, THREADS, library_of, translated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_kernels_norm import (
    DTYPES,
    NORMS,
    ORDERS,
    RESULTS,
    bits,
    gradients,
    mixed,
    norm,
    ordered,
)
from torch import Tensor

from ghoffload.kernels import cuda, norm_cuda, norm_host
from ghoffload.machine.protocol import Launch

BLOCK = """
#include <pthread.h>
#include <thread>
#include <vector>
#define __shared__ static
static pthread_barrier_t whole_block, warp_barriers[32];
static double exchanged[1024];
static void __syncthreads() { pthread_barrier_wait(&whole_block); }
static double __shfl_xor_sync(unsigned, double x, unsigned distance) {
    pthread_barrier_t* warp = &warp_barriers[threadIdx.x / 32];
    exchanged[threadIdx.x] = x;
    pthread_barrier_wait(warp);
    double theirs = exchanged[threadIdx.x ^ distance];
    pthread_barrier_wait(warp);
    return theirs;
}
template <typename Kernel, typename Argument>
static void run(Kernel kernel, const Argument& argument, unsigned blocks, unsigned threads) {
    pthread_barrier_init(&whole_block, nullptr, threads);
    for (auto& barrier : warp_barriers) pthread_barrier_init(&barrier, nullptr, 32);
    std::vector<std::thread> running;
    for (unsigned t = 0; t < threads; ++t)
        running.emplace_back([&, t] {
            threadIdx.x = t;
            for (unsigned b = 0; b < blocks; ++b) {
                blockIdx.x = b;
                kernel(argument);
                __syncthreads();
            }
        });
    for (auto& thread : running) thread.join();
}
"""

KERNELS = {
    "norm_partials_small_2": "Gradients<SMALL_PIECES>",
    "norm_partials_large_2": "Gradients<LARGE_TENSORS>",
    "norm_partials_small_inf": "Gradients<SMALL_PIECES>",
    "norm_partials_large_inf": "Gradients<LARGE_TENSORS>",
    "norm_finish_2": "Finish",
    "norm_finish_inf": "Finish",
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    entries = "\n".join(
        f'extern "C" void run_{kernel}(void* argument, unsigned blocks, unsigned threads) {{'
        f" run({kernel}, *({type_}*)argument, blocks, threads); }}"
        for kernel, type_ in KERNELS.items()
    )
    path = tmp_path_factory.mktemp("norm") / "norm"
    return library_of(path, THREADS, ARITHMETIC, BLOCK, translated("norm"), entries)


@pytest.fixture
def on_cuda(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[dict[str, Tensor], list[str]]]:
    """``norm`` by the CUDA source, with the kernels it started."""

    def run(*args: object, **options: object) -> tuple[dict[str, Tensor], list[str]]:
        started = []

        def launch(source, kernel, device, *, blocks, threads, parameters, stream):  # type: ignore[no-untyped-def]
            started.append(kernel)
            if "partials" in kernel:
                table = parameters[0][0]
                pieces = table["piece"][: table["pieces"]]
                vector = pieces["code_and_vector"] & 0x100 != 0
                assert ((pieces["at"] % 16 == 0) == vector).all()
            getattr(library, f"run_{kernel}")(
                ctypes.c_void_p(parameters[0].ctypes.data), blocks, threads
            )

        with monkeypatch.context() as patch:
            patch.setattr(cuda, "launch", launch)
            patch.setattr(cuda, "device_index", lambda tensor: 0)
            patch.setattr(Launch, "run_on_host", lambda self: self.device(0))
            return norm(*args, **options), started  # type: ignore[arg-type]

    return run


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("scale", [None, 3.0])
def test_the_cuda_source_gives_numbas_bits(
    scale: float | None, norm_type: float, on_cuda: Callable[..., tuple[dict, list[str]]]
) -> None:
    grads = mixed(5)
    options = {"norm_type": norm_type, "max_norm": 1.0}
    if scale is not None:
        options["grad_scale"] = torch.tensor(scale)
    expected = norm(grads, **options)
    got, started = on_cuda(grads, **options)
    assert bits(got) == bits(expected)
    kind = "2" if norm_type == 2.0 else "inf"
    assert started == [f"norm_partials_small_{kind}", f"norm_finish_{kind}"]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(grads=gradients(), norm_type=st.sampled_from(NORMS), max_norm=st.sampled_from([0.0, 1.0]))
def test_any_sizes_alignments_and_values(
    grads: list[Tensor],
    norm_type: float,
    max_norm: float,
    on_cuda: Callable[..., tuple[dict, list[str]]],
) -> None:
    got, _ = on_cuda(grads, norm_type=norm_type, max_norm=max_norm)
    assert bits(got) == bits(norm(grads, norm_type=norm_type, max_norm=max_norm))


@pytest.mark.parametrize("norm_type", NORMS)
def test_many_small_tensors_take_the_large_table(
    norm_type: float, on_cuda: Callable[..., tuple[dict, list[str]]]
) -> None:
    generator = torch.Generator().manual_seed(9)
    grads = [
        torch.randn(k % 5, generator=generator).to(DTYPES[k % 3]) * 10.0 ** (k % 7)
        for k in range(100)
    ]
    expected = norm(grads, norm_type=norm_type)
    got, started = on_cuda(grads, norm_type=norm_type)
    assert bits(got) == bits(expected)
    assert started[0].startswith("norm_partials_large")


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 9000])
def test_non_finite(
    where: int, bad: float, norm_type: float, on_cuda: Callable[..., tuple[dict, list[str]]]
) -> None:
    grads = [torch.randn(9001).bfloat16(), torch.randn(5)]
    grads[0][where] = bad
    got, _ = on_cuda(grads, norm_type=norm_type, max_norm=1.0)
    assert bits(got) == bits(norm(grads, norm_type=norm_type, max_norm=1.0))
    assert got["found_inf"] == 1.0
    empty, started = on_cuda([], max_norm=1.0)
    assert [empty[name].item() for name in RESULTS] == [0.0, 0.0, 1.0]
    assert started == ["norm_finish_2"]


@pytest.mark.parametrize("maximum", [False, True])
@pytest.mark.parametrize("count", [1, 1024, 5000])
def test_more_partials_than_the_finishing_block_has_threads(
    count: int, maximum: bool, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(source, kernel, device, *, blocks, threads, parameters, stream):  # type: ignore[no-untyped-def]
        argument = ctypes.c_void_p(parameters[0].ctypes.data)
        getattr(library, f"run_{kernel}")(argument, blocks, threads)

    monkeypatch.setattr(cuda, "launch", launch)
    monkeypatch.setattr(cuda, "device_index", lambda tensor: 0)
    partials = torch.rand(count, dtype=torch.float64) * 10 ** torch.randint(-9, 9, (count,))
    results = {name: torch.empty(()) for name in RESULTS}
    norm_cuda.finish(partials, count, 1e3, 2.0, None, results, maximum, 0)
    expected = norm_host.finish(partials.numpy(), maximum, 1e3, 2.0)
    assert [t.numpy().tobytes() for t in results.values()] == [x.tobytes() for x in expected]
    for places, total in ORDERS if not maximum else ():
        norm_cuda.finish(ordered(places), 5000, 1.0, 1.0, None, results, False, 0)
        assert results["total_norm"].item() == total, places
