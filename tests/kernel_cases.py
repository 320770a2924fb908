"""Whole update launches, drawn by hypothesis, as buffers of bytes.

A buffer has the operands (step counters, scalars, weights, gradients) and then the state; arrays
lie in it at any distance from an aligned address, with random bytes between. So where all of it is
the same after two ways to run a case, no bit differs and nothing beside the arrays was written.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from random import Random
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from torch import Tensor

from ghoffload.kernels import adam
from ghoffload.kernels.adam_stream_cuda import Shape
from ghoffload.kernels.formats import BLOCK
from ghoffload.kernels.state_form import SCALES, StateForm
from ghoffload.machine.protocol import Launch

Bits = npt.NDArray[Any]

FP32, BF16, FP16 = DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("fp32", "amsgrad", "bf16", "int8")  # of moments
# Of the streaming kernel. On the CPU each of its threads is one.
SHAPES = (Shape(), Shape(128, 2, 1), Shape(512, 3, 23), Shape(1024, 16, 4), Shape(4096, 2, 8))
FEW_THREADS = (Shape(128, 2, 1), Shape(256, 3, 2), Shape(1024, 5, 1), Shape(2048, 2, 2))

# ---- values ----

MIXTURES = ("ordinary", "some", "special", "any")
"""Numbers of some decades; a few special ones among them; only special ones; any bit pattern."""
CODES = "codes"
"""Gradients whose moments are what int8 codes stand for, or lie where the next code begins."""
POOL = 1 << 17

_SPECIAL = {
    FP32: (
        0x00000000, 0x00000000, 0x00000001, 0x00000002, 0x007FFFFF, 0x00800000, 0x00800001,
        0x00200000, 0x00200001, 0x7F7FFFFF, 0x7F7FFFFE, 0x7F800000, 0x7F800001, 0x7FC00000,
        0x7FC12345, 0x7FFFFFFF, 0x3F800000, 0x3F7FFFFF, 0x3F800001,
        # The largest halves, and what rounds to them or to infinity.
        0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7F8001, 0x477FE000, 0x477FEFFF, 0x477FF000,
        # Subnormal halves and ties between them.
        0x00008000, 0x00018000, 0x00007FFF, 0x33000000, 0x33000001, 0x33800000, 0x33C00000,
        0x387FC000, 0x387FE000, 0x387FF000, 0x38800000,
        # About the greatest moments that have a code.
        0x7EFC0200, 0x7EFC0201, 0x1F000000,
    ),
    BF16: (0, 0, 1, 2, 0x7F, 0x80, 0x7F7F, 0x7F7E, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF, 0x3F80, 0x3F7F),
    FP16: (0, 0, 1, 2, 0x3FF, 0x400, 0x7BFF, 0x7BFE, 0x7C00, 0x7C01, 0x7E00, 0x7FFF, 0x3C00),
}  # fmt: skip
_RESTS = (0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def rounded(single: npt.NDArray[np.uint32], dtype: torch.dtype) -> Bits:
    """The bits of fp32 numbers in another dtype, ties to even, every NaN the one that is stored."""
    if dtype == FP32:
        return single
    nan = single & 0x7FFFFFFF > 0x7F800000
    if dtype == BF16:
        half = ((single + (0x7FFF + (single >> 16 & 1))) >> 16).astype(np.uint16)
        return np.where(nan, np.uint16(0x7FC0), half)
    with np.errstate(over="ignore", invalid="ignore"):
        half = single.view(np.float32).astype(np.float16).view(np.uint16)
    return np.where(nan, np.uint16(0x7E00), half)


def _kind(dtype: torch.dtype) -> type[np.unsignedinteger[Any]]:
    return cast(Any, {1: np.uint8, 2: np.uint16, 4: np.uint32}[dtype.itemsize])


@lru_cache(None)
def pool(dtype: torch.dtype, mixture: str, positive: bool = False) -> Bits:
    """``POOL`` numbers as bits; an array of a case is some of them, one behind the other.

    Of positive ones only strange ones are negative, and few of those.
    """
    random = np.random.default_rng(len(mixture) + 16 * dtype.itemsize + 2 * positive)
    kind, bits = _kind(dtype), 8 * dtype.itemsize
    raw = random.integers(0, 1 << bits, POOL, dtype=kind)
    if not dtype.is_floating_point:
        if dtype == torch.int16:
            chosen = random.random(POOL) < 0.2
            raw[chosen] = random.choice(np.array(_RESTS, dtype=kind), int(chosen.sum()))
        return raw
    signed = random.random(POOL) < (0.05 if positive else 1)
    raw &= np.where(signed, kind(2**bits - 1), kind(2 ** (bits - 1) - 1))
    if mixture == "any":
        return raw
    if mixture == CODES:
        return _codes(random)
    size = 10 ** (random.random(POOL) * 8 - 6)
    ordinary = (random.standard_normal(POOL) * size).astype(np.float32).view(np.uint32)
    numbers = rounded(ordinary, dtype)
    if positive:
        numbers &= kind((1 << bits - 1) - 1)
    if mixture == "ordinary":
        return numbers
    special = random.choice(np.array(_SPECIAL[dtype], dtype=kind), POOL)
    special |= raw & kind(1 << bits - 1)
    mantissa = {FP32: 23, BF16: 7, FP16: 10}[dtype]
    part = random.random(POOL)
    special = np.where(part < 0.15, raw & ~kind((1 << bits - 1) - (1 << mantissa)), special)
    if dtype == FP32:  # ties of either half, and their neighbours
        step = random.choice(np.array([0x10000, 0x2000], dtype=np.uint32), POOL)
        beside = random.integers(-1, 2, POOL).astype(np.uint32)
        tie = (numbers & ~(step - 1)) + step // 2 + beside
        special = np.where(part > 0.75, tie, special)
    if mixture == "some":
        special = np.where(random.random(POOL) < 0.1, special, numbers)
    return special.astype(kind)


def _codes(random: np.random.Generator) -> Bits:
    """2^k * c^2, or where nearest rounding goes up, a k for each block and often a full code."""
    c = random.integers(0, 256, POOL).astype(np.float64)
    top = np.repeat(random.choice([127, 255], POOL // BLOCK), BLOCK)
    c = np.minimum(c, top)
    c[random.random(POOL) < 0.03] = 0
    c[::BLOCK] = top[::BLOCK]
    values = c * c + np.where(random.random(POOL) < 0.5, c + 0.25, 0) * (c < top)
    exponent = random.integers(-60, 40, POOL // BLOCK).repeat(BLOCK)
    limit = random.random(POOL // BLOCK).repeat(BLOCK) < 0.1  # the greatest that have a code
    values *= 2.0 ** np.where(limit, np.where(top == 127, 113, 48), exponent)
    bits = values.astype(np.float32).view(np.uint32)
    bits = np.where(bits > 8, bits + random.integers(-1, 2, POOL) * (c < top), bits)
    return (bits | random.integers(0, 2, POOL) << 31).astype(np.uint32)


@lru_cache(None)
def _garbage() -> Bits:
    return np.random.default_rng(1).integers(0, 256, 1 << 22, dtype=np.uint8)


# ---- a case ----


@dataclass(frozen=True)
class Part:
    """One weight and its gradient: ``count`` elements from ``start``, state ``gap`` further on."""

    weight: torch.dtype
    grad: torch.dtype
    start: int
    count: int
    gap: int
    weight_shift: int
    grad_shift: int


@dataclass(frozen=True)
class _Array:
    place: int  # byte in its buffer
    dtype: torch.dtype
    count: int


class Layout:
    """Where arrays lie in a buffer, by name."""

    def __init__(self) -> None:
        self.arrays: dict[str, _Array] = {}
        self.nbytes = 64

    def add(self, name: str, dtype: torch.dtype, count: int, shift: int = 0) -> None:
        place = self.nbytes + shift * dtype.itemsize
        self.arrays[name] = _Array(place, dtype, count)
        end = place + count * dtype.itemsize
        self.nbytes = (end + 16 + 31) // 16 * 16  # of 16 to 31 bytes nobody may write one

    def tensor(self, buffer: Tensor, name: str) -> Tensor:
        a = self.arrays[name]
        return buffer[a.place : a.place + a.count * a.dtype.itemsize].view(a.dtype)

    def bits(self, buffer: Bits, name: str) -> Bits:
        a = self.arrays[name]
        return buffer[a.place : a.place + a.count * a.dtype.itemsize].view(_kind(a.dtype))

    def name_of(self, byte: int) -> str:
        """Which element of which array a byte is."""
        for name, a in self.arrays.items():
            at = (byte - a.place) // a.dtype.itemsize
            if 0 <= at < a.count:
                return f"{name}[{at}]"
        return f"byte {byte}, of no array"


@dataclass(frozen=True)
class Case:
    """A launch."""

    form: StateForm
    parts: tuple[Part, ...]
    cut: int  # most elements of a piece; 0 for no limit
    packed: bool  # state follows state, with nothing but gaps between
    first: int  # index in its parameter of each tensor's first element
    shifts: tuple[int, ...]  # of the state arrays, in elements
    hyper: adam.Hyper
    steps: tuple[float, ...]
    found_inf: float | None
    grad_scale: float | None
    clip: float | None
    mixtures: tuple[str, ...]
    seed: int
    ctas: int
    shape: Shape

    @cached_property
    def rows(self) -> list[tuple[int, ...]]:
        """The pieces."""
        rows, offset, unit = [], 0, BLOCK if self.form.moments == "int8" else 1
        for k, part in enumerate(self.parts):
            if not self.packed:
                offset = -(-offset // 16) * 16
            offset = -(-offset // unit) * unit + part.gap
            most = self.cut or max(part.count, 1)
            rows += [
                (
                    k,
                    part.start + done,
                    min(most, part.count - done),
                    offset + done,
                    len(self.parts) - 1 - k,
                    self.first + part.start + done,
                )
                for done in range(0, max(part.count, 1), most)
            ]
            offset += part.count
        return rows

    @cached_property
    def table(self) -> adam.PieceTable:
        return adam.PieceTable(self.rows)

    @cached_property
    def operands(self) -> Layout:
        layout, rows = Layout(), len(self.parts) + 1  # of one row nobody may write
        layout.add("steps", FP32, rows)
        layout.add("scalars", FP32, rows * adam.SCALARS)
        for name in ("found_inf", "grad_scale", "clip"):
            layout.add(name, FP32, 1)
        for k, part in enumerate(self.parts):
            layout.add(f"weight {k}", part.weight, part.start + part.count, part.weight_shift)
            layout.add(f"grad {k}", part.grad, part.start + part.count, part.grad_shift)
        return layout

    @cached_property
    def state(self) -> Layout:
        layout = Layout()
        for name, shift in zip(self.form.arrays, self.shifts, strict=False):
            count = self.table.end
            layout.add(
                name, self.form.dtype(name), -(-count // BLOCK) if name in SCALES else count, shift
            )
        return layout

    @property
    def nbytes(self) -> int:
        return self.operands.nbytes + self.state.nbytes

    def fill(self) -> Bits:
        """The bytes of operands and state, one behind the other."""
        random = np.random.default_rng(self.seed)
        places = iter(random.integers(0, 1 << 30, 4 * len(self.parts) + 12).tolist())

        def some(source: Bits, count: int) -> Bits:
            at = next(places) % (len(source) - count)
            at -= at % BLOCK  # blocks of codes stay whole
            return source[at : at + count]

        buffer = some(_garbage(), self.nbytes).copy()
        operands, state = buffer[: self.operands.nbytes], buffer[self.operands.nbytes :]
        master, grad, first, second = self.mixtures
        for name, a in self.state.arrays.items():
            mixture = {"exp_avg": first, "exp_avg_scale": first}.get(name, second)
            if name in ("master", "rest"):
                mixture = master
            positive = name not in ("exp_avg", "master")
            self.state.bits(state, name)[:] = some(pool(a.dtype, mixture, positive), a.count)
        numbers = {
            "steps": (*self.steps, 7.0),
            "found_inf": self.found_inf,
            "grad_scale": self.grad_scale,
            "clip": self.clip,
        }
        for name, number in numbers.items():
            if number is not None:
                self.operands.bits(operands, name).view(np.float32)[:] = number
        for k, part in enumerate(self.parts):
            weight = self.operands.bits(operands, f"weight {k}")
            weight[:] = some(pool(part.weight, master), len(weight))
            source = pool(part.grad, grad if part.grad == FP32 or grad != CODES else "some")
            self.operands.bits(operands, f"grad {k}")[:] = some(source, part.start + part.count)
            if self.form.master == "fp32" and part.count:
                at = next(row[3] for row in self.rows if row[0] == k)
                its = self.state.bits(state, "master")[at : at + part.count]
                edited = random.choice((0.0, 0.1, 1.0))  # that share of weights has another master
                kept = some(pool(FP32, "any"), part.count) >= edited * 2.0**32
                inside = weight[part.start :]
                inside[:] = np.where(kept, rounded(its, part.weight), inside)
        return buffer

    def launches(
        self, buffer: Tensor, state: Tensor | None = None, ctas: int | None = None
    ) -> list[Launch]:
        """The step, on a buffer that was filled; the state may be elsewhere."""
        operands = buffer[: self.operands.nbytes]
        if state is None:
            state = buffer[self.operands.nbytes :]

        def given(name: str) -> Tensor | None:
            there = getattr(self, name) is not None
            return self.operands.tensor(operands, name) if there else None

        scalars = self.operands.tensor(operands, "scalars").view(-1, adam.SCALARS)
        count = len(self.parts)
        return [
            *adam.prepare(
                np.arange(count, dtype=np.uint32),
                self.hyper,
                steps=self.operands.tensor(operands, "steps"),
                scalars=scalars,
                found_inf=given("found_inf"),
                grad_scale=given("grad_scale"),
                clip=given("clip"),
                seed=self.seed,
            ),
            adam.update(
                self.table,
                weights=[self.operands.tensor(operands, f"weight {k}") for k in range(count)],
                grads=[self.operands.tensor(operands, f"grad {k}") for k in range(count)],
                state={name: self.state.tensor(state, name) for name in self.form.arrays},
                scalars=scalars,
                ctas=ctas,
            ),
        ]

    def difference(self, expected: Bits, got: Bits) -> str:
        """What is first different between two buffers; nothing where they are the same."""
        if np.array_equal(expected, got):
            return ""
        byte = int(np.flatnonzero(expected != got)[0])
        word = slice(byte // 4 * 4, byte // 4 * 4 + 4)
        layout, begin = self.operands, 0
        if byte >= layout.nbytes:
            layout, begin = self.state, layout.nbytes
        return (
            f"{layout.name_of(byte - begin)}: expected bytes {expected[word].tobytes().hex()}, "
            f"got {got[word].tobytes().hex()}"
        )


# ---- drawing one ----

_ALLOWED = {"none": DTYPES, "fp32": (BF16, FP16), "split": (BF16,)}
_SHIFTS = (0, 0, 0, 0, 1, 2, 3, 4, 5, 8)
_BOUNDARIES = sorted(
    {unit * n + beside for unit in (4, 16, BLOCK) for n in range(1, 10) for beside in (-1, 0, 1)}
    | {size + beside for size in (1024, 2048, 4096) for beside in (-1, 0, 1)}
    | set(range(6))
)
_BETAS = ((0.9, 0.999), (0.95, 0.98), (0.0, 0.0), (0.0, 0.95), (0.9, 0.0), (0.5, 0.9999999),
          (1 - 2.0**-53, 1 - 2.0**-53))  # fmt: skip
# With the last pair AdamW makes ties of bfloat16 weights.
_RATES = ((1e-3, 0.1), (1e-3, 0.0), (0.1, 0.01), (0.0, 0.0), (1.0, 1e-40), (1e30, 0.1),
          (0.5, 2.0**-7))  # fmt: skip
_EPS = (1e-8, 1e-8, 1e-3, 0.0, 1e-40)
_STEPS = (0.0, 1.0, 9.0, 4999.0, 2.0**24)
_FOUND = (None, *[0.0] * 6, 1.0)
_SCALES = (*[None] * 6, 65536.0, 65536.0, 3.0, 2.0**-20, 0.0, torch.inf)
_CLIPS = (*[None] * 6, 1.0, 0.3, 0.3, 1e-30, 0.0, torch.nan)


def _case(
    kind: str, master: str, parts: int, longest: int, aligned: bool, shape: Shape, seed: int
) -> Case:
    seed = zlib.crc32(repr((kind, master, parts, longest, aligned, shape, seed)).encode())
    random = Random(seed)
    pick = random.choice
    unit, cut = (BLOCK, BLOCK) if kind == "int8" else (1, 104)
    boundaries = _BOUNDARIES[: bisect_right(_BOUNDARIES, longest)]
    shifts = (0,) if aligned else _SHIFTS
    alike, common = pick((False, True)), (pick(_ALLOWED[master]), pick(DTYPES))
    drawn = []
    for _ in range(parts):
        weight, grad = common if alike else (pick(_ALLOWED[master]), pick(DTYPES))
        start, gap, weight_shift, grad_shift = (pick(shifts) for _ in range(4))
        count = pick((pick(boundaries), random.randint(1, longest)))
        drawn.append(Part(weight, grad, unit * start, count, unit * gap, weight_shift, grad_shift))
    grads = ("some", *MIXTURES, *[CODES] * (2 * (kind == "int8")))
    mixtures = tuple(pick(names) for names in (MIXTURES, grads, MIXTURES, MIXTURES))
    alone = random.randrange(8)  # the state array that is not aligned where all else is
    (lr, decay), betas, decoupled = pick(_RATES), pick(_BETAS), pick((False, True))
    grad_scale, clip = pick(_SCALES), pick(_CLIPS)
    if mixtures[1] == CODES:  # nothing between them and the moments
        betas, decoupled, grad_scale, clip = (0.0, 0.0), True, None, None
    amsgrad = kind == "amsgrad"
    return Case(
        form=StateForm(master, "fp32" if amsgrad else kind, amsgrad),
        parts=tuple(drawn),
        cut=pick((0, 0, 0, 1024, cut, 60 if unit == 1 else cut)),
        packed=not aligned and pick((False, True)),
        first=pick((0, 0, 2**32 - 1024, 2**39)),
        shifts=tuple(pick(_SHIFTS) if k == alone or not aligned else 0 for k in range(5)),
        hyper=adam.Hyper(lr, *betas, pick(_EPS), decay, amsgrad, pick((False, True)), decoupled),
        steps=tuple(pick(_STEPS) for _ in range(parts)),
        found_inf=pick(_FOUND),
        grad_scale=grad_scale,
        clip=clip,
        mixtures=mixtures,
        seed=seed,
        ctas=pick((*range(1, 9), 200)),
        shape=shape,
    )


def cases(kinds: Sequence[str], shapes: Sequence[Shape]) -> st.SearchStrategy[Case]:
    """Launches with moments of these kinds; ``shapes`` are of the streaming kernel.

    Hypothesis draws what a failure is best made simpler by, and a number that decides the rest. No
    two draws are of equal strategies: where some are, it spends five cases of six on copying a draw
    to another.
    """
    return st.builds(
        _case,
        kind=st.sampled_from(kinds),
        master=st.sampled_from(tuple(_ALLOWED)),
        parts=st.sampled_from((1, 2, 3, 4, 5, 6)),
        longest=st.sampled_from((5, 300, 2100, 6000)),
        aligned=st.sampled_from((True, False)),
        shape=st.sampled_from(shapes),
        seed=st.integers(0, 2**32 - 1),
    )
