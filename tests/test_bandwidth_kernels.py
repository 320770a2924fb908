"""csrc/bandwidth.cu and the host's passes: what they move, bit for bit."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ghoffload.errors import KernelBuildError
from ghoffload.kernels import bandwidth, bandwidth_host, build, cuda, gate

SIZES = (0, 1, 15, 16, 17, 4096, 16383, 16384, 16400, 65536, 65536 + 16 * 513 + 3, (1 << 20) + 7)

# --- without a GPU ---


def test_the_bulk_kernel_compiles_to_bulk_copies() -> None:
    try:
        code = build.compile_source(
            (build.source_directory() / "bandwidth.cu").read_bytes(), "bandwidth.cu", "sm_90a"
        ).code
        kernels = gate.inspect(code)
    except KernelBuildError as error:
        pytest.skip(f"needs the compiler and the disassembler: {error}")
    assert set(kernels) == {"move_words", "move_bulk", "read_words", "nothing", "spin"}
    assert {"UBLKCP.S.G", "UBLKCP.G.S"} <= kernels["move_bulk"].opcodes
    assert all(kernel.stack == 0 for kernel in kernels.values())


def test_older_chips_get_the_kernels_without_bulk_copies() -> None:
    source = (build.source_directory() / "bandwidth.cu").read_bytes()
    try:
        code = build.compile_source(source, "bandwidth.cu", "sm_80").code
    except KernelBuildError as error:
        pytest.skip(f"needs the compiler: {error}")
    assert b"move_words" in code
    assert b"move_bulk" not in code


SHIM = """
#include <cstring>
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n)
#define __launch_bounds__(...)
#define __CUDA_ARCH__ 900
#define __cvta_generic_to_shared(p) ((unsigned long long)(p))
struct Index { unsigned x; };
static Index blockIdx, threadIdx, gridDim;
struct alignas(16) uint4 { unsigned x, y, z, w; };
static char shared_memory[6 * 16384];
"""
RUN = """
extern "C" void run(int bulk, char* to, const char* from, long long nbytes, unsigned blocks) {
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < (bulk ? 32 : 512); ++threadIdx.x)
            (bulk ? move_bulk : move_words)(to, from, nbytes);
}
"""


def compiled_for_host(directory: Path) -> ctypes.CDLL:
    """The copies as C++ for the CPU, thread after thread; a bulk copy is done where it begins.

    Finds wrong indices, stages and tails, and a stage that is loaded before it was stored; not
    what the instructions do.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler: neither g++ nor clang++ is on PATH")
    source = (build.source_directory() / "bandwidth.cu").read_text(encoding="utf-8")
    # read_words and the clock are for the GPU only.
    source = re.sub(r"// Reads whole 16-byte.*?(?=#if __CUDA_ARCH__)", "", source, flags=re.DOTALL)
    source = source.replace(
        "extern __shared__ __align__(128) char stages[]", "char* stages = shared_memory"
    )

    def replaced(assembly: re.Match[str]) -> str:
        if "cp.async.bulk.shared::cluster" in assembly[0]:
            return "memcpy(stages + s * CHUNK, from + at, size(at));"
        if "cp.async.bulk.global" in assembly[0]:
            return "memcpy(to + at, stages + s * CHUNK, size(at));"
        return "arrived = 1;" if "try_wait" in assembly[0] else ";"

    source, count = re.subn(r"asm volatile\(.*?\);(?=\s)", replaced, source, flags=re.DOTALL)
    assert count == 10
    path = directory / "bandwidth.cpp"
    path.write_text(SHIM + source + RUN, encoding="utf-8")
    library = path.with_suffix(".so")
    options = ["-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-shared", "-fPIC"]
    subprocess.run([compiler, *options, "-o", str(library), str(path)], check=True)
    return ctypes.CDLL(str(library))


def random_bytes(nbytes: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


def test_the_sources_copy_every_byte_and_no_other(tmp_path: Path) -> None:
    library = compiled_for_host(tmp_path)
    for bulk in (0, 1):
        for blocks in (1, 2, 3, 7, 100):
            for nbytes in SIZES:
                source = random_bytes(nbytes)
                there = np.full(nbytes + 64, 0xAB, dtype=np.uint8)
                library.run(
                    bulk,
                    ctypes.c_void_p(there.ctypes.data),
                    ctypes.c_void_p(source.ctypes.data),
                    ctypes.c_longlong(nbytes),
                    blocks,
                )
                where = f"{bulk=} {blocks=} {nbytes=}"
                assert (there[:nbytes] == source).all(), where
                assert (there[nbytes:] == 0xAB).all(), where


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"destination": 8}, "expected an address that is a multiple of 16, got 0x8"),
        ({"source": 4097}, "expected an address that is a multiple of 16, got 0x1001"),
        ({"nbytes": -1}, "nbytes expects 0 or more, got -1"),
        ({"blocks": 0}, "blocks expects 1 or more, got 0"),
    ],
)
def test_bad_copies_are_refused(changes: dict[str, int], sentence: str) -> None:
    arguments: dict[str, Any] = {"destination": 0, "source": 16, "nbytes": 16, "blocks": 1}
    for bulk in (False, True):
        with pytest.raises(ValueError, match=sentence):
            bandwidth.copy(**arguments | changes, bulk=bulk, device=0, stream=0)
    with pytest.raises(ValueError, match="nanoseconds expects 0 or more, got -1"):
        bandwidth.spin(-1, device=0, stream=0)


def test_parameters_are_what_the_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def launch(source, kernel, device, *, blocks, threads, parameters, stream):  # type: ignore[no-untyped-def]
        values = [(p.dtype.name, int(p[0])) for p in parameters]
        seen.append((source, kernel, device, blocks, threads, stream, *values))

    monkeypatch.setattr(cuda, "launch", launch)
    bandwidth.copy(1 << 40, 32, 7, bulk=False, blocks=3, device=1, stream=9)
    bandwidth.read(64, 32, 7, blocks=3, device=1, stream=9)
    bandwidth.spin(5, device=1, stream=9)
    bandwidth.nothing(device=1, stream=9)
    words = [("uint64", 32), ("int64", 7)]
    assert seen == [
        ("bandwidth", "move_words", 1, 3, 512, 9, ("uint64", 1 << 40), *words),
        ("bandwidth", "read_words", 1, 3, 512, 9, ("uint64", 64), *words),
        ("bandwidth", "spin", 1, 1, 1, 9, ("uint64", 5)),
        ("bandwidth", "nothing", 1, 1, 1, 9),
    ]


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_the_passes_over_host_memory(threads: int) -> None:
    for count in (0, 1, 5, 100_003):
        b, c = np.random.default_rng(count).standard_normal((2, count), dtype=np.float32)
        a = np.zeros(count, dtype=np.float32)
        bandwidth_host.run("copy", a, b, c, threads=threads)
        assert (a == b).all()
        bandwidth_host.run("update", a, b, c, threads=threads)
        assert (a == -b).all()
        bandwidth_host.run("triad", a, b, c, threads=threads)
        assert (a == b - c).all()


def test_bad_passes_are_refused() -> None:
    a, longer = np.zeros(2, dtype=np.float32), np.zeros(3, dtype=np.float32)
    with pytest.raises(ValueError, match="name expects one of copy, triad, update, got 'scale'"):
        bandwidth_host.run("scale", a, a, a, threads=1)
    with pytest.raises(ValueError, match="threads expects 1 or more, got 0"):
        bandwidth_host.run("copy", a, a, a, threads=0)
    with pytest.raises(ValueError, match="expected arrays of one size, got 2, 2 and 3"):
        bandwidth_host.run("copy", a, a, longer, threads=1)


# --- on a GPU ---


def stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def needs_bulk(bulk: bool) -> None:
    if bulk and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("bulk copies need compute capability 9.0 or later")


@pytest.mark.gpu
@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("pinned", ["source", "destination", "both", "neither"])
def test_a_kernel_copies_every_byte_and_no_other(bulk: bool, pinned: str) -> None:
    needs_bulk(bulk)
    device = torch.cuda.current_device()
    for blocks in (1, 2, 32):
        for nbytes in (*SIZES, (64 << 20) + 13):
            source = torch.from_numpy(random_bytes(nbytes + 16))
            there = torch.full((nbytes + 64,), 0xAB, dtype=torch.uint8)
            expected = there.clone()
            expected[:nbytes] = source[:nbytes]
            source = source.pin_memory() if pinned in ("source", "both") else source.cuda()
            there = there.pin_memory() if pinned in ("destination", "both") else there.cuda()
            bandwidth.copy(
                there.data_ptr(),
                source.data_ptr(),
                nbytes,
                bulk=bulk,
                blocks=blocks,
                device=device,
                stream=stream(),
            )
            torch.cuda.synchronize()
            assert torch.equal(there.cpu(), expected), f"{blocks=} {nbytes=}"


@pytest.mark.gpu
@pytest.mark.parametrize("bulk", [False, True])
def test_a_kernel_copies_managed_memory_that_stays_on_the_host(bulk: bool) -> None:
    needs_bulk(bulk)
    from ghoffload.bandwidth.managed import Driver

    device, nbytes = torch.cuda.current_device(), (8 << 20) + 48
    torch.cuda.synchronize()
    driver = Driver(device)
    if not driver.attribute("CONCURRENT_MANAGED_ACCESS"):
        pytest.skip("ConcurrentManagedAccess is 0 here")
    base = driver.allocate(2 * nbytes)
    try:
        memory = np.frombuffer((ctypes.c_char * (2 * nbytes)).from_address(base), dtype=np.uint8)
        memory[:nbytes], memory[nbytes:] = random_bytes(nbytes), 0
        driver.stay_on_host(base, 2 * nbytes)
        driver.prefetch(base, 2 * nbytes, to_device=False, stream=stream())
        bandwidth.copy(
            base + nbytes, base, nbytes, bulk=bulk, blocks=4, device=device, stream=stream()
        )
        torch.cuda.synchronize()
        assert (memory[nbytes:] == memory[:nbytes]).all()
    finally:
        torch.cuda.synchronize()
        driver.free(base)


@pytest.mark.gpu
def test_a_read_sees_every_word() -> None:
    for nbytes in (16, 65536, 65536 + 16 * 513, (64 << 20) + 16):
        source = torch.from_numpy(random_bytes(nbytes))
        expected = np.bitwise_xor.reduce(source.numpy().view(np.uint32))
        for blocks in (1, 7, 500):
            sink = torch.zeros(1, dtype=torch.int32, device="cuda")
            on_device = source.cuda()
            bandwidth.read(
                sink.data_ptr(),
                on_device.data_ptr(),
                nbytes,
                blocks=blocks,
                device=torch.cuda.current_device(),
                stream=stream(),
            )
            assert sink.cpu().numpy().view(np.uint32)[0] == expected


@pytest.mark.gpu
def test_a_spin_takes_its_time() -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    device = torch.cuda.current_device()
    bandwidth.spin(0, device=device, stream=stream())
    start.record()
    bandwidth.spin(2_000_000, device=device, stream=stream())
    end.record()
    end.synchronize()
    assert 1.9 < start.elapsed_time(end) < 3.0


@pytest.mark.gpu
def test_a_quick_run_measures_both_directions_by_kernel_and_engine() -> None:
    from ghoffload.bandwidth import run

    results = run.measure(quick=True, device=torch.cuda.current_device(), say=lambda text: None)
    assert results.failures == []
    assert all(0 < row.low <= row.value <= row.high for row in results.rows)
    kernels = ["words"] + ["bulk"] * (torch.cuda.get_device_capability() >= (9, 0))
    for memory, ways in (("pinned", [*kernels, "engine"]), ("managed", kernels)):
        if any(note.startswith(f"{memory} memory") for note in results.notes):
            continue
        for by in ways:
            for direction in ("h2d", "d2h", "both"):
                assert results.select(what="copy", memory=memory, by=by, direction=direction)
    assert results.select(what="hbm")
    assert {row.by for row in results.select(what="latency")} == {"call", "device", "round trip"}
    assert results.seconds < 15
