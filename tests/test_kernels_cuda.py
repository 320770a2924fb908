"""The CUDA kernels against the CPU's, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ghoffload.kernels import adam, cuda, golden, pack

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def start(launch: adam.Launch, device: torch.device | str = "cuda") -> None:
    launch.device(torch.cuda.current_stream(device).cuda_stream)


def same(got: Tensor, expected: Tensor) -> bool:
    return torch.equal(got.cpu().view(torch.uint8), expected.view(torch.uint8))


def any_bits(count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Uniform over bit patterns, so NaNs, infinities and subnormals are common."""
    kind = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    limits = torch.iinfo(kind)
    return torch.randint(
        limits.min, limits.max + 1, (count,), generator=generator, dtype=kind
    ).view(dtype)


def test_golden_hashes() -> None:
    assert golden.run("cuda") == golden.expected()


def test_golden_hashes_on_another_stream() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        only = golden.names()[::7]
        assert golden.run("cuda", only=only) == {name: golden.expected()[name] for name in only}


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
def test_golden_hashes_on_the_second_gpu_while_the_first_is_current() -> None:
    torch.cuda.set_device(0)
    only = golden.names()[::7]
    assert golden.run("cuda:1", only=only) == {name: golden.expected()[name] for name in only}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_weight_and_gradient_bit_pattern(dtype: torch.dtype) -> None:
    """All 65,536 halves (random fp32 patterns) as weight and as gradient, with a stale master."""
    generator = torch.Generator().manual_seed(1)
    count = 1 << 16
    if dtype == torch.float32:
        weight, grad = (any_bits(count, dtype, generator) for _ in range(2))
    else:
        weight = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
        grad = weight[torch.randperm(count, generator=generator)]
    table = adam.PieceTable([(0, 0, count, 0, 0)])
    h = adam.Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, True, False, False)
    results = []
    for device in ("cpu", "cuda"):
        steps = torch.zeros(1, device=device)
        scalars = torch.zeros(1, adam.SCALARS, device=device)
        state = {n: torch.zeros(count, device=device) for n in ("exp_avg", "exp_avg_sq")}
        state["max_exp_avg_sq"] = torch.zeros(count, device=device)
        if dtype != torch.float32:
            state["master"] = torch.zeros(count, device=device)
        w = weight.to(device, copy=True)
        for launch in (
            *adam.prepare(np.zeros(1, np.uint32), h, steps=steps, scalars=scalars),
            adam.update(table, weights=[w], grads=[grad.to(device)], state=state, scalars=scalars),
        ):
            launch.run_on_host() if device == "cpu" else start(launch)
        results.append([w, *state.values()])
    for expected, got in zip(*results, strict=True):
        assert same(got, expected)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
    pieces=st.lists(
        st.tuples(
            st.integers(0, 17),
            st.one_of(st.integers(0, 70), st.integers(16_000, 40_000)),
            st.integers(0, 17),
        ),
        min_size=1,
        max_size=100,
    ),
)
def test_pack_and_unpack(seed: int, dtype: torch.dtype, pieces: list[tuple[int, int, int]]) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, offset = [], 0
    for index, (begin, count, gap) in enumerate(pieces):
        offset += gap
        rows.append((index, begin, count, offset, 0))
        offset += count
    table = adam.PieceTable(rows)
    sources = [
        torch.randint(1, 255, (begin + count + 2,), generator=generator).to(dtype)
        for begin, count, _ in pieces
    ]
    results = []
    for device in ("cpu", "cuda"):
        here = [source.to(device) for source in sources]
        packed = torch.zeros(offset + 5, dtype=dtype, device=device)
        back = [torch.zeros_like(source) for source in here]
        for launch in (
            pack.pack(table, sources=here, packed=packed),
            pack.unpack(table, packed=packed, destinations=back),
        ):
            launch.run_on_host() if device == "cpu" else start(launch)
        results.append([packed, *back])
    for expected, got in zip(*results, strict=True):
        assert same(got, expected)


def test_more_than_two_to_the_31_elements_behind_one_pointer() -> None:
    count = (1 << 31) + 4099
    free, _ = torch.cuda.mem_get_info()
    if free < 5 * count:
        pytest.skip(f"needs {5 * count} bytes of HBM, has {free} free")
    source = torch.zeros(count, dtype=torch.uint8, device="cuda")
    source[-4099:] = torch.arange(4099, device="cuda") % 251
    packed = torch.full((count,), 7, dtype=torch.uint8, device="cuda")
    start(pack.pack(adam.PieceTable([(0, 0, count, 0, 0)]), sources=[source], packed=packed))
    assert torch.equal(packed, source)


def test_launches_do_not_synchronise_and_tables_may_change_at_once() -> None:
    """Parameters are copied by the launch: the next table may be built while the first waits."""
    sources = [torch.full((4096,), float(k), device="cuda") for k in range(200)]
    packed = torch.zeros(200 * 4096, device="cuda")
    cuda.preload(torch.cuda.current_device())
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        try:
            for k in range(200):
                table = adam.PieceTable([(0, 0, 4096, k * 4096, 0)])
                start(pack.pack(table, sources=[sources[k]], packed=packed))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not torch.cuda.current_stream().query()
    expected = torch.arange(200.0).repeat_interleave(4096)
    assert torch.equal(packed.cpu(), expected)


def test_a_refused_launch_names_the_kernel() -> None:
    parameters = (np.zeros(4096, dtype=np.uint8),)
    with pytest.raises(RuntimeError, match=r"launch of copy_pieces_small on cuda:0 .*INVALID"):
        cuda.launch(
            "pack", "copy_pieces_small", 0,
            blocks=1, threads=4096, parameters=parameters, stream=0,
        )  # fmt: skip
    torch.cuda.synchronize()
