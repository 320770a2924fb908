"""csrc/coding.cu compiled as C++ for the CPU, a warp of threads at a time, against the CPU kernels.

As tests/test_csrc_host.py, for kernels whose threads talk to each other.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from csrc_on_cpu import ARITHMETIC, THREADS, WARP, library_of, translated
from torch import Tensor

from ghoffload.kernels import coding, cuda

ENCODE = ("const char*", "u8*", "float*", "i64", "u32")
DECODE = ("const u8*", "const float*", "char*", "i64", "u32")
CAST = ("const float*", "u16*", "i64", "u64", "u32", "u32")
SIZES = (1, 127, 128, 129, 512, 1000, 4096, 4096 + 513)


def launcher(kernel: str) -> str:
    types = CAST if kernel == "stochastic_cast" else ENCODE if "encode" in kernel else DECODE
    arguments = ", ".join(f"*({type_}*)parameters[{k}]" for k, type_ in enumerate(types))
    return f"""
extern "C" void run_{kernel}(void** parameters, unsigned blocks, unsigned threads) {{
    run(blocks, threads, [=] {{ {kernel}({arguments}); }});
}}"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    kernels = [
        f"{way}_{code}_{dtype}"
        for way in ("encode", "decode")
        for code in coding.CODES
        for dtype in ("fp32", "bf16", "fp16")
    ]
    kernels.append("stochastic_cast")
    return library_of(
        tmp_path_factory.mktemp("coding") / "coding",
        THREADS,
        ARITHMETIC,
        WARP,
        translated("coding"),
        "using namespace coding;",
        *map(launcher, kernels),
    )


@pytest.fixture
def vectors(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Launches go to the library; which of them took the vector path."""
    taken: list[bool] = []

    def launch(source, kernel, device, *, blocks, threads, words, stream):  # type: ignore[no-untyped-def]
        assert source == "coding"
        vector = bool(words[-1])
        first, second, third = words[:3]
        wide, narrow = (third, first) if kernel.startswith("decode") else (first, second)
        cast = kernel == "stochastic_cast"
        width = 16 if cast or kernel.endswith("fp32") else 8
        assert not vector or (wide % width == 0 and narrow % (8 if cast else 4) == 0)
        taken.append(vector)
        memory = (ctypes.c_uint64 * len(words))(*words)
        at = range(ctypes.addressof(memory), ctypes.addressof(memory) + 8 * len(words), 8)
        array = (ctypes.c_void_p * len(words))(*at)
        getattr(library, f"run_{kernel}")(array, blocks, threads)

    monkeypatch.setattr(cuda, "launch_words", launch)
    monkeypatch.setattr(cuda, "device_index", lambda tensor: 0)
    return taken


def any_bits(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    kind = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    limits = torch.iinfo(kind)
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(limits.min, limits.max + 1, (count,), generator=generator, dtype=kind)
    return bits.view(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("code", coding.CODES)
def test_the_cuda_source_gives_the_bits_of_the_cpu(
    code: str, dtype: torch.dtype, vectors: list[bool]
) -> None:
    for number, size in enumerate(SIZES):
        for shift, codes_shift in ((0, 0), (1, 0), (0, 1)):
            # Ordinary numbers, and uniform bits: subnormals, infinities, NaNs, the largest.
            x = torch.randn(size + shift).to(dtype)
            if number % 2:
                x = torch.where(torch.rand(size + shift) < 0.9, x, any_bits(len(x), dtype, number))
            if number % 4 == 3:
                x = any_bits(size + shift, dtype, number)
            if number % 4 == 2:
                x = (torch.randn(size + shift) * 2.0**-124).to(dtype)
            x = x[shift:]
            guard = 5
            results = []
            for on_host in (True, False):
                codes = torch.full((size + guard,), 77, dtype=torch.uint8)
                scales = torch.full((coding.scale_count(size) + 1,), 7.0)
                back = torch.full((size + guard,), 7.0, dtype=dtype)
                part = codes[codes_shift : codes_shift + size]
                result = back[shift : shift + size]
                for launch in (
                    coding.encode(x, part, scales[:-1], code=code),
                    coding.decode(part, scales[:-1], result, code=code),
                ):
                    launch.run_on_host() if on_host else launch.device(0)
                results.append((codes, scales, back))
            for expected, got in zip(*results, strict=True):
                assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    assert vectors.count(True) >= 2 * (len(SIZES) - 1)
    assert vectors.count(False) >= 4 * len(SIZES)


@pytest.mark.parametrize("code", coding.CODES)
def test_all_codes_and_strange_scales_decode_alike(code: str, vectors: list[bool]) -> None:
    scales = torch.tensor(
        [0.0, 1.0, -2.0, 2.0**-149, 2.0**118, 2.0**120, 3e38, torch.inf, -torch.inf, torch.nan]
    )
    codes = torch.arange(256, dtype=torch.uint8).repeat(len(scales))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        both = [torch.empty(len(codes), dtype=dtype) for _ in range(2)]
        repeated = scales.repeat_interleave(2)
        coding.decode(codes, repeated, both[0], code=code).run_on_host()
        coding.decode(codes, repeated, both[1], code=code).device(0)
        assert torch.equal(both[0].view(torch.uint8), both[1].view(torch.uint8))
    assert vectors == [True] * 3


def test_the_stochastic_cast_too(vectors: list[bool]) -> None:
    for size, shift, offset in ((9, 0, 0), (4096, 0, (1 << 32) - 5), (9000, 0, 3), (9000, 1, 3)):
        x = torch.where(torch.rand(size + shift) < 0.5, 1.0, 0.0) * torch.randn(size + shift)
        x[::3] = any_bits(len(x), torch.float32, size)[::3]
        both = [torch.full((size + 8,), 7, dtype=torch.bfloat16) for _ in range(2)]
        for y, on_host in zip(both, (True, False), strict=True):
            launch = coding.stochastic_cast(x[shift:], y[4:-4], seed=size, offset=offset)
            launch.run_on_host() if on_host else launch.device(0)
        assert torch.equal(both[0].view(torch.uint8), both[1].view(torch.uint8))
    assert vectors == [True, True, True, False]
