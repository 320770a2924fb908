"""csrc's kernels compiled as C++ for the CPU, thread after thread, against the golden hashes.

Finds wrong indices, layouts, tails and orders of operations without a GPU. What it cannot see: what
nvcc's instructions do (tests/test_kernels_cuda.py) and races (the kernels' threads share nothing).
"""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ghoffload.kernels import build, cuda, golden
from ghoffload.machine.protocol import Launch

SHIM = """
#include <cmath>
#include <cstring>
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
struct Index { unsigned x; };
static Index blockIdx, threadIdx;
"""
ARITHMETIC = """
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static float __uint_as_float(unsigned b) { float x; memcpy(&x, &b, 4); return x; }
static unsigned __float_as_uint(float x) { unsigned b; memcpy(&b, &x, 4); return b; }
static float __fmul_rn(float x, float y) { return x * y; }
static float __fadd_rn(float x, float y) { return x + y; }
static float __fdiv_rn(float x, float y) { return x / y; }
static float __fsqrt_rn(float x) { return sqrtf(x); }
static float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
static unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    unsigned long long both = x | (unsigned long long)y << 32;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i)
        result |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}
template <typename T> static T __ldcs(const T* at) { return *at; }
template <typename T> static void __stcs(T* at, T x) { *at = x; }
static double __dmul_rn(double x, double y) { return x * y; }
static double __dsub_rn(double x, double y) { return x - y; }
static double __ddiv_rn(double x, double y) { return x / y; }
static double __dsqrt_rn(double x) { return sqrt(x); }
static float f16_to_f32(unsigned h) {
    int exponent = h >> 10 & 31, mantissa = h & 1023;
    float x = exponent == 31 ? (mantissa ? NAN : INFINITY)
            : exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
    return h & 0x8000 ? -x : x;
}
static unsigned short f32_to_f16(float x) {
    unsigned sign = __float_as_uint(x) >> 16 & 0x8000;
    double a = fabs((double)x);
    if (x != x) return 0x7FFF;
    if (a >= 65520) return sign | 0x7C00;
    if (a == 0) return sign;
    int e = ilogb(a) < -14 ? -14 : ilogb(a);
    double scaled = nearbyint(ldexp(a, 10 - e));  // 0 ... 2048
    return sign | ((unsigned)(e + 14) * 1024 + (unsigned)scaled);
}
"""
SHIM += ARITHMETIC
# The lanes of a warp are 32 threads that meet where the warp reduces.
WARP = """
#include <pthread.h>
#include <thread>
#include <vector>
static pthread_barrier_t barrier;
static unsigned meeting[32];
static unsigned __reduce_max_sync(unsigned, unsigned x) {
    meeting[threadIdx.x % 32] = x;
    pthread_barrier_wait(&barrier);
    unsigned most = 0;
    for (unsigned y : meeting) most = y > most ? y : most;
    pthread_barrier_wait(&barrier);
    return most;
}
template <typename Kernel>
static void run(unsigned blocks, unsigned threads, Kernel kernel) {
    pthread_barrier_init(&barrier, nullptr, 32);
    std::vector<std::thread> lanes;
    for (unsigned lane = 0; lane < 32; ++lane)
        lanes.emplace_back([=] {
            for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
                for (threadIdx.x = lane; threadIdx.x < threads; threadIdx.x += 32) kernel();
        });
    for (std::thread& lane : lanes) lane.join();
    pthread_barrier_destroy(&barrier);
}
"""
SOURCES = ("prepare", "adamw", "adamw_coded", "pack")
vectors: list[int] = []

ASSEMBLY = {
    r'asm\("cvt\.f32\.f16[^;]*;[^;]*;': "x = f16_to_f32(bits);",
    r'asm\("cvt\.rn\.f16\.f32[^;]*;[^;]*;': "half = f32_to_f16(x);",
    # An approximation: what comes out must not depend on its last bits.
    r'asm\("sqrt\.approx[^;]*;[^;]*;': "root = sqrtf(x) * 1.0000002f;",
}


def compile_for_host(name: str, directory: Path) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler: neither g++ nor clang++ is on PATH")
    source = build.read_source(build.source_directory() / f"{name}.cu").decode()
    for pattern, replacement in ASSEMBLY.items():
        source = re.sub(pattern, replacement, source)
    path = directory / f"{name}.cpp"
    shim = SHIM.replace("static Index", "static thread_local Index") + WARP
    path.write_text(f"{shim}\n{source}\n{_launchers(name)}", encoding="utf-8")
    library = path.with_suffix(".so")
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-pthread"]
    subprocess.run(
        [compiler, *options, "-shared", "-fPIC", "-o", str(library), str(path)], check=True
    )
    return ctypes.CDLL(str(library))


def _launchers(name: str) -> str:
    """One C function for each kernel that runs all of its threads in turn."""
    masters = ("", "_master", "_split")
    moments = ("_bf16", "_int8") if name == "adamw_coded" else ("", "_amsgrad")
    variants = [master + kind for master in masters for kind in moments]
    kernels = []
    for size in ("small", "large"):
        pieces, indices = f"{size.upper()}_PIECES", f"{size.upper()}_INDICES"
        if name == "pack":
            kernels.append((f"copy_pieces_{size}", [f"Table<{pieces}>"]))
        elif name == "prepare":
            kernels.append((f"adam_prepare_{size}", ["Hyper", f"Indices<{indices}>"]))
        else:
            kernels += [(f"adam_update_{size}{v}", [f"Table<{pieces}>"]) for v in variants]
    text = ""
    for kernel, types in kernels:
        arguments = ", ".join(f"*({type_}*)parameters[{k}]" for k, type_ in enumerate(types))
        text += f"""
extern "C" void run_{kernel}(void** parameters, unsigned blocks, unsigned threads) {{
    if ({int(kernel.endswith("_int8"))})
        return run(blocks, threads, [=] {{ {kernel}({arguments}); }});
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {kernel}({arguments});
}}"""
    return text


def check_alignment(kernel: str, table: np.void) -> None:
    """Vector accesses only where all that they touch is aligned: x86 would not notice."""
    if kernel.startswith("adam_update"):
        pieces = table["piece"][: table["pieces"]]
        pieces = pieces[pieces["vector"] == 1]
        assert all(table[array] % 16 == 0 for array in ("exp_avg", "exp_avg_sq", "master"))
        assert (pieces["offset"] % 4 == 0).all()
        for operand in ("weight", "grad"):
            width = np.where(pieces[f"{operand}_code"] == 0, 16, 8)
            assert (pieces[operand] % width == 0).all()
        vectors.append(len(pieces))
    if kernel.startswith("copy_pieces"):
        pieces = table["piece"][: table["pieces"]]
        assert ((pieces["source"] | pieces["destination"]) % pieces["width"] == 0).all()
        vectors.append(int((pieces["width"] == 16).sum()))


def test_the_cuda_sources_give_the_golden_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = {name: compile_for_host(name, tmp_path) for name in SOURCES}
    started = set()
    vectors.clear()

    def launch(source, kernel, device, *, blocks, threads, parameters, stream):  # type: ignore[no-untyped-def]
        started.add(kernel)
        check_alignment(kernel, parameters[0][0])
        addresses = (ctypes.c_void_p * len(parameters))(*(p.ctypes.data for p in parameters))
        getattr(libraries[source], f"run_{kernel}")(addresses, blocks, threads)

    monkeypatch.setattr(cuda, "launch", launch)
    monkeypatch.setattr(
        cuda, "Start", lambda *what, **how: lambda stream: launch(*what, stream=stream, **how)
    )
    monkeypatch.setattr(cuda, "device_index", lambda tensor: 0)
    monkeypatch.setattr(Launch, "run_on_host", lambda self: self.device(0))
    assert golden.run("cpu") == golden.expected()
    manifest = json.loads((build.source_directory() / "manifest.json").read_text())
    # And no kernel was left out.
    assert started == {kernel for source in SOURCES for kernel in manifest[source]}
    assert sum(vectors) > 100
