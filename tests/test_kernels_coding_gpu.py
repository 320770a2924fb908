"""csrc/coding.cu on a GPU against the CPU kernels, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels_coding import DTYPES, GOLDEN, any_bits, every_code, golden_hash, spread
from torch import Tensor

from ghoffload.kernels import coding, cuda, pack
from ghoffload.machine.protocol import Launch

pytestmark = pytest.mark.gpu


def start(*launches: Launch) -> None:
    for launch in launches:
        launch.device(torch.cuda.current_stream().cuda_stream)


def same(got: Tensor, expected: Tensor) -> bool:
    return torch.equal(got.cpu().view(torch.uint8), expected.cpu().view(torch.uint8))


def coded(x: Tensor, code: str, shift: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and what they decode to, each with room around it that must stay."""
    count = len(x)
    codes = torch.full((count + 9,), 77, dtype=torch.uint8, device=x.device)
    scales = torch.full((coding.scale_count(count) + 2,), 77.0, device=x.device)
    back = torch.full((count + 9,), 77.0, dtype=x.dtype, device=x.device)
    part = slice(shift, shift + count)
    launches = (
        coding.encode(x, codes[part], scales[1:-1], code=code),
        coding.decode(codes[part], scales[1:-1], back[part], code=code),
    )
    if x.is_cuda:
        start(*launches)
    else:
        for launch in launches:
            launch.run_on_host()
    return codes, scales, back


def agree(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    for got, expected in zip(ours, theirs, strict=True):
        assert same(got, expected)


@every_code
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_golden_hashes(code: str, dtype: torch.dtype) -> None:
    assert golden_hash(code, dtype, "cuda") == GOLDEN[code, dtype]


@settings(max_examples=600)
@given(
    code=st.sampled_from(coding.CODES),
    dtype=st.sampled_from(DTYPES),
    count=st.one_of(st.integers(0, 300), st.integers(300, 5000), st.integers(5000, 40_000)),
    shifts=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    seed=st.integers(0, 2**31),
    high=st.sampled_from([-30.0, 5.0, 39.0]),
    odd=st.sampled_from([0.0, 0.01, 1.0]),
)
def test_codes_scales_and_results_are_bit_identical(
    code: str,
    dtype: torch.dtype,
    count: int,
    shifts: tuple[int, int],
    seed: int,
    high: float,
    odd: float,
) -> None:
    x = spread(count + shifts[0], dtype, seed, -40.0, high)
    strange = torch.rand(len(x)) < odd
    x[strange] = any_bits(len(x), dtype, seed)[strange]
    on_gpu = x.cuda()
    agree(coded(on_gpu[shifts[0] :], code, shifts[1]), coded(x[shifts[0] :], code, shifts[1]))


@every_code
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_every_half_as_its_blocks_maximum_and_beside_others(code: str, dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    alone = torch.zeros(1 << 16, 128, dtype=dtype)
    alone[:, 77] = every
    alone[:, 78:90] = every[:, None] * torch.linspace(-1, 1, 12, dtype=dtype)
    for x in (alone.view(-1), every, every[torch.randperm(1 << 16)]):
        agree(coded(x.cuda(), code), coded(x, code))


@every_code
def test_all_codes_and_strange_scales(code: str) -> None:
    values = [0.0, 1.0, -2.0, 2.0**-149, 2.0**118, 2.0**120, 3e38, torch.inf, -torch.inf, torch.nan]
    scales = torch.tensor(values).repeat_interleave(2)
    codes = torch.arange(256, dtype=torch.uint8).repeat(len(values))
    for dtype in DTYPES:
        here, there = torch.empty(len(codes), dtype=dtype), torch.empty(len(codes), dtype=dtype)
        there = there.cuda()
        coding.decode(codes, scales, here, code=code).run_on_host()
        start(coding.decode(codes.cuda(), scales.cuda(), there, code=code))
        assert same(there, here)


@settings(max_examples=100)
@given(
    count=st.integers(0, 20_000),
    shift=st.integers(0, 5),
    seed=st.integers(-(2**63), 2**63),
    offset=st.one_of(st.integers(0, 9), st.integers(2**32 - 9000, 2**32), st.just(2**45)),
    wild=st.booleans(),
)
def test_the_stochastic_cast_is_bit_identical(
    count: int, shift: int, seed: int, offset: int, wild: bool
) -> None:
    x = any_bits(count + shift, torch.float32, seed % 1000) if wild else torch.randn(count + shift)
    here = torch.full((count + shift + 3,), 7.0, dtype=torch.bfloat16)
    there = here.cuda()
    part = slice(shift, shift + count)
    keywords = {"seed": seed, "offset": offset}
    coding.stochastic_cast(x[shift:], here[part], **keywords).run_on_host()
    start(coding.stochastic_cast(x.cuda()[shift:], there[part], **keywords))
    assert same(there, here)


@every_code
def test_more_than_two_to_the_31_elements(code: str) -> None:
    count = (1 << 31) + 4099
    free, _ = torch.cuda.mem_get_info()
    if free < 6 * count:
        pytest.skip(f"needs {6 * count} bytes of HBM, has {free} free")
    end = spread(8195, torch.bfloat16, 9, -3, 3)
    x = torch.zeros(count, dtype=torch.bfloat16, device="cuda")
    x[-len(end) :] = end.cuda()
    codes = torch.full((count,), 77, dtype=torch.uint8, device="cuda")
    scales = torch.full((coding.scale_count(count),), 77.0, device="cuda")
    start(coding.encode(x, codes, scales, code=code))
    x.fill_(7)
    start(coding.decode(codes, scales, x, code=code))
    assert (count - len(end)) % 128 == 0  # the same blocks, alone
    assert torch.equal(x[-len(end) :].cpu(), coded(end, code)[2][: len(end)])
    assert not x[: -len(end)].any()


def test_host_memory_and_graph_capture() -> None:
    cuda.preload(torch.cuda.current_device(), ["coding"])
    x = spread(5000, torch.bfloat16, 1, -2, 2)
    on_gpu = x.cuda()
    codes = torch.zeros(5000, dtype=torch.uint8).pin_memory()
    scales = torch.zeros(40).pin_memory()
    back = torch.zeros_like(on_gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        start(
            coding.encode(on_gpu, codes, scales, code="fp8"),
            coding.decode(codes, scales, back, code="fp8"),
        )
    for _ in range(2):
        on_gpu.mul_(2)
        graph.replay()
        torch.cuda.synchronize()
        expected = coded(on_gpu.cpu(), "fp8")
        assert torch.equal(codes, expected[0][:5000])
        assert torch.equal(scales, expected[1][1:-1])
        assert same(back, expected[2][:5000])


@pytest.mark.parametrize("pinned", [False, True])
def test_thousands_of_small_tensors_packed(pinned: bool) -> None:
    sizes = torch.randint(0, 3000, (2000,)).tolist()
    dtypes = (torch.uint8, torch.bfloat16, torch.float32)
    sources = [torch.randint(0, 99, (s,)).to(dtypes[k % 3]) for k, s in enumerate(sizes)]
    nbytes = pack.packed_bytes(sources)
    here = torch.zeros(nbytes, dtype=torch.uint8)
    for launch in pack.pack_whole(sources, here):
        launch.run_on_host()
    there = torch.zeros(nbytes, dtype=torch.uint8)
    there = there.pin_memory() if pinned else there.cuda()
    on_gpu = [source.cuda() for source in sources]
    back = [torch.zeros_like(source) for source in on_gpu]
    start(*pack.pack_whole(on_gpu, there), *pack.unpack_whole(there, back))
    torch.cuda.synchronize()
    assert same(there, here)
    assert all(torch.equal(a, b) for a, b in zip(back, on_gpu, strict=True))
