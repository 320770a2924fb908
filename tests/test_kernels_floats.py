"""Half-precision conversions: every value, and every place where rounding changes its mind."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch

from ghoffload.kernels import floats

HALVES = {
    torch.bfloat16: (floats.to_bfloat16, floats.from_bfloat16, 0x7FC0),
    torch.float16: (floats.to_float16, floats.from_float16, 0x7E00),
}


def all_halves() -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint16)


def as_floats(bits: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(bits.view(np.int16)).view(dtype).float().numpy()


def mapped(function, values: np.ndarray, result: type) -> np.ndarray:  # type: ignore[no-untyped-def]
    @numba.njit
    def loop(values, out):  # type: ignore[no-untyped-def]
        for i in range(len(values)):
            out[i] = function(values[i])

    out = np.empty(len(values), dtype=result)
    loop(values, out)
    return out


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_becomes_its_float(dtype: torch.dtype) -> None:
    bits = all_halves()
    got = mapped(HALVES[dtype][1], bits, np.float32)
    expected = as_floats(bits, dtype)
    number = ~np.isnan(expected)
    assert number.sum() > 60_000
    assert (got.view(np.uint32)[number] == expected.view(np.uint32)[number]).all()
    assert np.isnan(got[~number]).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_survives_the_round_trip(dtype: torch.dtype) -> None:
    to_half, from_half, nan = HALVES[dtype]
    bits = all_halves()
    back = mapped(to_half, mapped(from_half, bits, np.float32), np.uint16)
    expected = np.where(np.isnan(as_floats(bits, dtype)), nan, bits)
    assert (back == expected).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rounding_at_and_beside_every_midpoint(dtype: torch.dtype) -> None:
    positive = all_halves()[: 1 << 15]
    values = as_floats(positive, dtype)
    values = np.sort(values[np.isfinite(values)]).astype(np.float64)
    # Beyond the last finite half the next step decides between it and infinity.
    ends = np.append(values[1:], values[-1] + (values[-1] - values[-2]))
    with np.errstate(over="ignore"):
        middle = ((values + ends) / 2).astype(np.float32)
        around = [
            middle,
            np.nextafter(middle, np.float32(0)),
            np.nextafter(middle, np.float32(9e9)),
        ]
    inputs = np.concatenate(around + [-x for x in around] + [np.float32([np.inf, -np.inf, 3e38])])
    got = mapped(HALVES[dtype][0], inputs, np.uint16)
    expected = torch.from_numpy(inputs).to(dtype).view(torch.int16).numpy().view(np.uint16)
    assert (got == expected).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_nan_becomes_the_canonical_one(dtype: torch.dtype) -> None:
    nans = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC12345], dtype=np.uint32)
    got = mapped(HALVES[dtype][0], nans.view(np.float32), np.uint16)
    assert (got == HALVES[dtype][2]).all()
    stored = mapped(floats.canonical, nans.view(np.float32), np.float32)
    assert (stored.view(np.uint32) == 0x7FC00000).all()
