"""fp8 and int8 codes: their bounds, what they are by other means, and what is not a number."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ghoffload.kernels import coding, pool
from ghoffload.machine.virtual import VirtualMachine

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

every_code = pytest.mark.parametrize("code", coding.CODES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def encoded(x: Tensor, code: str) -> tuple[Tensor, Tensor]:
    codes = torch.full((x.numel(),), 99, dtype=torch.uint8)
    scales = torch.full((coding.scale_count(x.numel()),), 99.0)
    coding.encode(x, codes, scales, code=code).run_on_host()
    return codes, scales


def decoded(codes: Tensor, scales: Tensor, dtype: torch.dtype, code: str) -> Tensor:
    y = torch.full((codes.numel(),), 99.0, dtype=dtype)
    coding.decode(codes, scales, y, code=code).run_on_host()
    return y


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def any_bits(count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Uniform over bit patterns, so NaNs, infinities and subnormals are common."""
    kind = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    limits = torch.iinfo(kind)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        limits.min, limits.max + 1, (count,), generator=generator, dtype=kind
    ).view(dtype)


def spread(count: int, dtype: torch.dtype, seed: int, low: float, high: float) -> Tensor:
    """Normal numbers times powers of ten that change from block to block and within each."""
    generator = torch.Generator().manual_seed(seed)
    size = low + (high - low) * torch.rand(-(-count // 128), 1, generator=generator).double()
    within = -4 * torch.rand(len(size), 128, generator=generator).double()
    x = torch.randn(len(size), 128, generator=generator).double() * 10 ** (size + within)
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype).view(-1)[:count].clone()


def maxima(x: Tensor) -> Tensor:
    """For each element the largest finite magnitude of its block, in double."""
    magnitude = torch.where(x.isfinite(), x.double().abs(), 0.0)
    padded = torch.zeros(coding.scale_count(len(x)) * 128, dtype=torch.float64)
    padded[: len(x)] = magnitude
    return padded.view(-1, 128).amax(1).repeat_interleave(128)[: len(x)]


def check_bounds(x: Tensor, y: Tensor, code: str) -> None:
    finite = x.isfinite()
    assert y[~finite].isnan().all()
    assert y[finite].isfinite().all()
    a, exact, got = maxima(x)[finite], x.double()[finite], y.double()[finite]
    error = (got - exact).abs()
    if code == "fp8":
        bound = torch.maximum(exact.abs() / 16, (a / 237_568).clamp_min(2.0**-136))
    else:
        digits = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}[x.dtype]
        smallest = torch.finfo(x.dtype).tiny * 2.0 ** (1 - digits)
        bound = (a / 253.9).clamp_min(2.0**-127)
        if x.dtype != torch.float32:
            bound += (got.abs() * 2.0**-digits).clamp_min(smallest / 2)
    assert (error <= bound).all()


@every_code
@settings(max_examples=120)
@given(
    dtype=st.sampled_from(DTYPES),
    count=st.one_of(st.integers(0, 300), st.integers(300, 5000)),
    seed=st.integers(0, 2**31),
    low=st.sampled_from([-45.0, -8.0, -2.0]),
    high=st.sampled_from([0.0, 5.0, 39.0]),
    odd=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
)
def test_the_stated_bounds_hold_and_coding_again_changes_nothing(
    code: str, dtype: torch.dtype, count: int, seed: int, low: float, high: float, odd: float
) -> None:
    x = spread(count, dtype, seed, low, high)
    strange = torch.rand(count) < odd
    x[strange] = any_bits(count, dtype, seed)[strange]
    codes, scales = encoded(x, code)
    y = decoded(codes, scales, dtype, code)
    check_bounds(x, y, code)
    again = encoded(y, code)
    assert torch.equal(again[0], codes)
    assert torch.equal(bits(again[1]), bits(scales))
    assert torch.equal(bits(decoded(*again, dtype, code)), bits(y))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@every_code
def test_every_half_alone_and_beside_every_magnitude(code: str, dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    for x in (
        every.repeat_interleave(128),  # each is its block's maximum
        every,
        every[torch.randperm(1 << 16)],
    ):
        codes, scales = encoded(x, code)
        y = decoded(codes, scales, dtype, code)
        check_bounds(x, y, code)
        again = encoded(y, code)
        assert torch.equal(again[0], codes)
        assert torch.equal(again[1], scales)


@every_dtype
def test_fp8_codes_are_torchs_e4m3(dtype: torch.dtype) -> None:
    x = torch.cat([spread(40_000, dtype, 1, -3, 3), torch.linspace(-500, 500, 9999).to(dtype)])
    codes, scales = encoded(x, "fp8")
    a, scale = maxima(x), scales.repeat_interleave(128)[: len(x)]
    mantissa, _ = scales.frexp()
    assert (mantissa == 0.5).all()  # powers of two
    assert (a <= 464 * scale).all()
    assert (a > 232 * scale)[a > 0].all()
    theirs = (x.float() / scale).to(torch.float8_e4m3fn)
    assert torch.equal(codes, theirs.view(torch.uint8))
    assert len(codes.unique()) > 240
    back = (codes.view(torch.float8_e4m3fn).float() * scale).to(dtype)
    assert torch.equal(decoded(codes, scales, dtype, "fp8"), back)


@every_dtype
def test_int8_codes_are_rounded_multiples_of_the_scale(dtype: torch.dtype) -> None:
    x = spread(40_000, dtype, 2, -3, 3)
    codes, scales = encoded(x, "int8")
    scale = scales.double().repeat_interleave(128)[: len(x)]
    assert torch.allclose(scale * 127, maxima(x), rtol=2**-16, atol=0)
    assert torch.equal(scales.view(torch.int32) & 0x7F, torch.zeros(len(scales), dtype=torch.int32))
    numbers = codes.view(torch.int8).double()
    assert (numbers - x.double() / scale).abs().max() <= 0.50003
    assert numbers.abs().max() == 127
    assert torch.equal(decoded(codes, scales, dtype, "int8"), (numbers * scale).to(dtype))


@every_code
@every_dtype
def test_zeros_nans_and_infinities(code: str, dtype: torch.dtype) -> None:
    inf, nan = torch.inf, torch.nan
    x = torch.zeros(5 * 128, dtype=dtype)
    x[129] = -0.0  # block 0 is all zeros; block 1 too, but for a sign
    x[256:384] = nan  # nothing finite
    x[384:390] = torch.tensor([inf, -inf, nan, -nan, 3.0, -0.5])
    x[512:640] = torch.linspace(-1, 1, 128)
    codes, scales = encoded(x, code)
    y = decoded(codes, scales, dtype, code)
    assert torch.equal(bits(y[:128]), bits(x[:128]))
    assert y[129] == 0
    assert bool(y[129].signbit()) == (code == "fp8")
    lost = 0x7F if code == "fp8" else 0x80
    assert (codes[256:384] == lost).all()
    assert (codes[384:388] == lost).all()
    canonical = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}[dtype]
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    assert (y[256:388].view(kind) == canonical).all()
    assert (y[388:390].float() - torch.tensor([3.0, -0.5])).abs().max() < 0.01
    assert scales[2] == 2.0**-126
    # The finite elements of a block do not feel its infinities.
    alone = x.clone()
    alone[384:388] = 0
    assert torch.equal(encoded(alone, code)[1], scales)


@every_code
@every_dtype
def test_the_largest_numbers_stay_finite(code: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, -largest, largest / 2, 0.0], dtype=dtype)
    y = decoded(*encoded(x, code), dtype, code)
    assert y.isfinite().all()
    assert y[0] >= largest * (1 - 2**-16)
    assert y[1] == -y[0]


@every_code
def test_another_dtype_may_come_out(code: str) -> None:
    x = torch.tensor([1e6, -1e6, 1.0, torch.nan])
    codes, scales = encoded(x, code)
    wide = decoded(codes, scales, torch.float32, code)
    narrow = decoded(codes, scales, torch.float16, code)
    assert narrow[0] == 65504  # finite stays finite
    assert narrow[1] == -65504
    assert narrow[3].isnan()
    assert torch.equal(decoded(codes, scales, torch.bfloat16, code)[:3], wide[:3].bfloat16())


@every_code
@every_dtype
def test_any_address_and_nothing_beside_it(code: str, dtype: torch.dtype) -> None:
    x = spread(3000, dtype, 5, -2, 2)
    for shift, count in ((1, 700), (2, 129), (3, 128), (5, 1), (7, 0), (0, 2999)):
        part = x[shift : shift + count]
        room = torch.full((count + 9,), 55, dtype=torch.uint8)
        scales = torch.full((coding.scale_count(count) + 2,), 55.0)
        back = torch.full((count + 9,), 55.0, dtype=dtype)
        codes, inner = room[shift : shift + count], scales[1:-1]
        coding.encode(part, codes, inner, code=code).run_on_host()
        expected = encoded(part.clone(), code)
        assert torch.equal(codes, expected[0])
        assert torch.equal(inner, expected[1])
        coding.decode(codes, inner, back[shift : shift + count], code=code).run_on_host()
        for array, inside in ((room, count), (scales, len(inner)), (back, count)):
            assert int((array == 55).sum()) >= len(array) - inside
        assert torch.equal(back[shift : shift + count], decoded(*expected, dtype, code))


@every_code
def test_threads_do_not_change_the_bits(code: str) -> None:
    x = spread(600_001, torch.bfloat16, 3, -3, 3)
    with pool.threads(1):
        one = encoded(x, code)
    with pool.threads(3):
        three = encoded(x, code)
    assert torch.equal(one[0], three[0])
    assert torch.equal(one[1], three[1])


@every_code
def test_on_the_virtual_machine(code: str, virtual: VirtualMachine) -> None:
    x = spread(1000, torch.bfloat16, 4, -1, 1)
    codes = virtual.empty((1000,), torch.uint8)
    scales = virtual.empty((8,), torch.float32)
    source, back = (virtual.empty((1000,), torch.bfloat16) for _ in range(2))
    stream = virtual.current_stream()
    source.copy_(x)
    virtual.launch(coding.encode(source, codes, scales, code=code), stream=stream)
    virtual.launch(coding.decode(codes, scales, back, code=code), stream=stream)
    assert torch.equal(back.cpu(), decoded(*encoded(x, code), torch.bfloat16, code))


def test_what_does_not_fit_is_refused() -> None:
    x, codes, scales = torch.zeros(200), torch.zeros(200, dtype=torch.uint8), torch.zeros(2)
    with pytest.raises(ValueError, match="code expects fp8 or int8, got 'fp4'"):
        coding.encode(x, codes, scales, code="fp4")
    with pytest.raises(ValueError, match="source expects float32, bfloat16 or float16, got"):
        coding.encode(x.double(), codes, scales, code="fp8")
    with pytest.raises(
        ValueError, match=r"codes expects 1-D contiguous uint8 of 200 elements, got uint8 \[199\]"
    ):
        coding.encode(x, codes[:-1], scales, code="fp8")
    with pytest.raises(ValueError, match="scales expects 1-D contiguous float32 of 2 elements"):
        coding.decode(codes, scales.half(), x, code="int8")
    with pytest.raises(ValueError, match=r"destination expects .* got non-contiguous float32"):
        coding.decode(codes, scales, torch.zeros(400)[::2], code="int8")
    with pytest.raises(ValueError, match="source expects 1-D contiguous float32 of 200"):
        coding.encode(x.view(2, 100), codes, scales, code="fp8")


def cast(x: Tensor, **keywords: int) -> Tensor:
    y = torch.full((len(x),), 99, dtype=torch.bfloat16)
    coding.stochastic_cast(x, y, **keywords).run_on_host()
    return y


def test_a_stochastic_cast_takes_a_neighbour_and_has_no_bias() -> None:
    for value in (1.0 + 2**-9, -3.0e-40, 1e30 * (1 + 2**-12), 2.0**-133 * 0.75):
        x = torch.full((1 << 20,), value)
        y = cast(x, seed=3).double()
        exact = float(x[0])
        low, high = float(y.min()), float(y.max())
        assert low < exact < high
        assert len(y.unique()) == 2
        share = (exact - low) / (high - low)
        tolerance = 5 * (share * (1 - share) / len(y)) ** 0.5
        assert (y == high).double().mean() == pytest.approx(share, abs=tolerance)
        bits_of = y.unique().bfloat16().view(torch.int16).int()
        assert abs(int(bits_of[1]) - int(bits_of[0])) == 1  # neighbours


def test_what_a_stochastic_cast_leaves_alone() -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)
    number = every[~every.isnan()]
    assert torch.equal(bits(cast(number.float(), seed=1)), bits(number))
    assert (cast(every[every.isnan()].float(), seed=1).view(torch.int16) == 0x7FC0).all()
    largest = torch.full((4096,), torch.finfo(torch.float32).max)
    assert (cast(largest, seed=1) == torch.finfo(torch.bfloat16).max).all()


def test_a_stochastic_cast_repeats_and_may_be_done_in_pieces() -> None:
    x = torch.randn(600_000)
    whole = cast(x, seed=-5)
    assert torch.equal(cast(x, seed=-5), whole)
    assert not torch.equal(cast(x, seed=-4), whole)
    for begin in (0, 1, 4097, 300_000):
        assert torch.equal(cast(x[begin:], seed=-5, offset=begin), whole[begin:])
    far = cast(x[:1000], seed=-5, offset=1 << 40)
    assert not torch.equal(far, whole[:1000])
    with pytest.raises(ValueError, match="offset expects 0 or more, got -1"):
        coding.stochastic_cast(x, whole, seed=0, offset=-1)
    with pytest.raises(ValueError, match="destination expects 1-D contiguous bfloat16 of 600000"):
        coding.stochastic_cast(x, whole.half(), seed=0)


GOLDEN = {
    ("fp8", torch.float32): "25f5748268a26e34",
    ("fp8", torch.bfloat16): "3db6e45a581ea39e",
    ("fp8", torch.float16): "9e3938110affb427",
    ("int8", torch.float32): "77dc63e9e44f33d8",
    ("int8", torch.bfloat16): "9e1ca0139be6e6bf",
    ("int8", torch.float16): "23af1cbfec05b5db",
}


def golden_hash(code: str, dtype: torch.dtype, device: str = "cpu") -> str:
    """sha256 of codes, scales and results of fixed inputs made by integer hashing."""
    state = np.arange(70_001, dtype=np.uint32) * np.uint32(2654435761)
    state ^= state >> np.uint32(15)
    state *= np.uint32(0x2C1B3C6D)
    state ^= state >> np.uint32(13)
    # Bits whose exponents differ by little within a block, and some blocks of any bits.
    block = (np.arange(70_001) // 128 * 37 % 251).astype(np.uint32)
    single = (state & np.uint32(0x807FFFFF)) | (block << np.uint32(23))
    single += (state >> np.uint32(9) & np.uint32(3)) << np.uint32(23)
    single = np.where(block % 5 == 0, state, single)
    x = torch.from_numpy(single.view(np.float32).copy())
    if dtype != torch.float32:
        halves = (single >> np.uint32(16)).astype(np.uint16).view(np.int16)
        x = torch.from_numpy(halves.copy()).view(dtype)
    x = x.to(device)
    codes = torch.zeros(len(x), dtype=torch.uint8, device=device)
    scales = torch.zeros(coding.scale_count(len(x)), device=device)
    y = torch.zeros_like(x)
    for launch in (
        coding.encode(x, codes, scales, code=code),
        coding.decode(codes, scales, y, code=code),
    ):
        if device == "cpu":
            launch.run_on_host()
        else:
            launch.device(torch.cuda.current_stream().cuda_stream)
    sha = hashlib.sha256()
    for array in (codes, scales, y):
        sha.update(array.cpu().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


@every_code
@every_dtype
def test_golden_hashes(code: str, dtype: torch.dtype) -> None:
    assert golden_hash(code, dtype) == GOLDEN[code, dtype]
