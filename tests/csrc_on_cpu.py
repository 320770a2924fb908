"""csrc as C++ for the CPU: enough of CUDA, and a compiler. Shared by the tests of each kernel."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ghoffload.kernels import build

THREADS = """
#include <cmath>
#include <cstring>
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
struct Index { unsigned x; };
static thread_local Index blockIdx, threadIdx;
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
static float __fsub_rn(float x, float y) { return x - y; }
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
static double __fma_rn(double x, double y, double z) { return fma(x, y, z); }
static double __dadd_rn(double x, double y) { return x + y; }
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
ASSEMBLY = {
    r'asm\("cvt\.f32\.f16[^;]*;[^;]*;': "x = f16_to_f32(bits);",
    r'asm\("cvt\.rn\.f16\.f32[^;]*;[^;]*;': "half = f32_to_f16(x);",
    # An approximation: what comes out must not depend on its last bits.
    r'asm\("sqrt\.approx[^;]*;[^;]*;': "root = sqrtf(x) * 1.0000002f;",
}
OPTIONS = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-pthread"]


def translated(name: str) -> str:
    """``csrc/<name>.cu`` with the instructions that C++ does not know replaced."""
    source = build.read_source(build.source_directory() / f"{name}.cu").decode()
    for pattern, replacement in ASSEMBLY.items():
        source = re.sub(pattern, replacement, source)
    return source


def library_of(path: Path, *parts: str) -> ctypes.CDLL:
    """The shared library of C++ in ``parts``; ``path`` is where it is written, without a suffix."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler: neither g++ nor clang++ is on PATH")
    source, library = path.with_suffix(".cpp"), path.with_suffix(".so")
    source.write_text("\n".join(parts), encoding="utf-8")
    command = [compiler, *OPTIONS, "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))
