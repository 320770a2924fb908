"""csrc's kernels compiled as C++ for the CPU, thread after thread, against the golden hashes.

Finds wrong indices, layouts, tails and orders of operations without a GPU. What it cannot see: what
nvcc's instructions do (tests/test_kernels_cuda.py) and races (the kernels' threads share nothing).
"""

from __future__ import annotations

import ctypes
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
vectors: list[int] = []

ASSEMBLY = {
    r'asm\("cvt\.f32\.f16[^;]*;[^;]*;': "x = f16_to_f32(bits);",
    r'asm\("cvt\.rn\.f16\.f32[^;]*;[^;]*;': "half = f32_to_f16(x);",
}


def compile_for_host(name: str, directory: Path) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler: neither g++ nor clang++ is on PATH")
    source = (build.source_directory() / f"{name}.cu").read_text(encoding="utf-8")
    for pattern, replacement in ASSEMBLY.items():
        source = re.sub(pattern, replacement, source)
    path = directory / f"{name}.cpp"
    path.write_text(f"{SHIM}\n{source}\n{_launchers(name)}", encoding="utf-8")
    library = path.with_suffix(".so")
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-w"]
    subprocess.run(
        [compiler, *options, "-shared", "-fPIC", "-o", str(library), str(path)], check=True
    )
    return ctypes.CDLL(str(library))


def _launchers(name: str) -> str:
    """One C function for each kernel that runs all of its threads in turn."""
    variants = ("", "_master", "_amsgrad", "_master_amsgrad")
    kernels = []
    for size in ("small", "large"):
        pieces, indices = f"{size.upper()}_PIECES", f"{size.upper()}_INDICES"
        if name == "pack":
            kernels.append((f"copy_pieces_{size}", [f"Table<{pieces}>"]))
        else:
            kernels.append((f"adam_prepare_{size}", ["Hyper", f"Indices<{indices}>"]))
            kernels += [(f"adam_update_{size}{v}", [f"Table<{pieces}>"]) for v in variants]
    text = ""
    for kernel, types in kernels:
        arguments = ", ".join(f"*({type_}*)parameters[{k}]" for k, type_ in enumerate(types))
        text += f"""
extern "C" void run_{kernel}(void** parameters, unsigned blocks, unsigned threads) {{
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {kernel}({arguments});
}}"""
    return text


def check_alignment(kernel: str, table: np.void) -> None:
    """Vector accesses only where all that they touch is aligned: x86 would not notice."""
    if kernel.startswith("adam_update"):
        pieces = table["piece"][: table["pieces"]]
        pieces = pieces[pieces["grad_code_and_vector"] & 0x100 != 0]
        assert all(table[array] % 16 == 0 for array in ("exp_avg", "exp_avg_sq", "master"))
        assert (pieces["offset"] % 4 == 0).all()
        assert (pieces["weight"] % np.where(pieces["weight_code"] == 0, 16, 8) == 0).all()
        assert (
            pieces["grad"] % np.where(pieces["grad_code_and_vector"] & 3 == 0, 16, 8) == 0
        ).all()
        vectors.append(len(pieces))
    if kernel.startswith("copy_pieces"):
        pieces = table["piece"][: table["pieces"]]
        assert ((pieces["source"] | pieces["destination"]) % pieces["width"] == 0).all()
        vectors.append(int((pieces["width"] == 16).sum()))


def test_the_cuda_sources_give_the_golden_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = {name: compile_for_host(name, tmp_path) for name in ("adamw", "pack")}
    started = set()
    vectors.clear()

    def launch(source, kernel, device, *, blocks, threads, parameters, stream):  # type: ignore[no-untyped-def]
        started.add(kernel)
        check_alignment(kernel, parameters[0][0])
        addresses = (ctypes.c_void_p * len(parameters))(*(p.ctypes.data for p in parameters))
        getattr(libraries[source], f"run_{kernel}")(addresses, blocks, threads)

    monkeypatch.setattr(cuda, "launch", launch)
    monkeypatch.setattr(cuda, "device_index", lambda tensor: 0)
    monkeypatch.setattr(Launch, "run_on_host", lambda self: self.device(0))
    assert golden.run("cpu") == golden.expected()
    manifest_kernels = re.findall(
        r'"((?:adam|copy)_\w+)"', (build.source_directory() / "manifest.json").read_text()
    )
    assert started == set(manifest_kernels)  # and no kernel was left out
    assert sum(vectors) > 100
