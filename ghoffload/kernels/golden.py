"""Golden hashes: every kernel on fixed inputs, as sha256 of what it wrote.

The inputs come from integer hashing, so they are the same everywhere: ordinary numbers, zeros,
subnormals, infinities, NaNs with and without payload; several pieces, misaligned starts, tails,
pieces of 0, 1 and 7 elements, more than one block; several steps, one of them skipped, one cut
differently. ``golden.json`` beside this file has the hashes; CPU and GPU must both give them.

``python -m ghoffload.kernels.golden`` compares the CPU (``--device cuda``: the GPU) and exits with
1 at a difference; ``--write`` records anew, after a deliberate change of the formula.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ghoffload.kernels import adam, pack
from ghoffload.kernels.formats import BLOCK
from ghoffload.machine.protocol import Launch, Machine

_PATH = Path(__file__).with_name("golden.json")
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

# (elements of the tensor, start, count, gap before it in the state arrays)
_LAYOUT = (
    (9001, 0, 9001, 0),  # aligned, three blocks of csrc/adamw.cu, a tail of one
    (7, 0, 7, 0),
    (4200, 1, 4099, 2),  # starts inside its tensor, and not aligned
    (0, 0, 0, 0),
    (1, 0, 1, 0),
    (5000, 4, 4996, 3),
)

_SPECIALS32 = (
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF,
    0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x3F800000, 0xBF800000, 0x33800000,
    0x477FF000, 0x387FE000, 0x1E3CE508,
)  # fmt: skip
_SPECIALS16 = {
    torch.bfloat16: (0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0,
                     0xFFC1, 0x7F81, 0x3F80, 0xBF80),
    torch.float16: (0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00,
                    0xFE01, 0x7C01, 0x3C00, 0xBC00),
}  # fmt: skip


# The same for int8 moments, whose pieces are made of whole blocks.
_BLOCK_LAYOUT = (
    (9001, 0, 9001, 0),
    (7, 0, 7, 87),
    (4200, 128, 4072, 121),
    (0, 0, 0, 24),
    (1, 0, 1, 128),
    (5000, 0, 5000, 383),
)


@dataclass(frozen=True)
class _Case:
    weight: torch.dtype
    grad: torch.dtype
    master: str
    moments: str
    amsgrad: bool
    number: int

    @property
    def name(self) -> str:
        master = {"none": "", "fp32": " master", "split": " split"}[self.master]
        moments = "" if self.moments == "fp32" else f" {self.moments} moments"
        extras = master + moments + " amsgrad" * self.amsgrad
        return f"adam {_NAMES[self.weight]} weight, {_NAMES[self.grad]} gradient{extras}"

    @property
    def layout(self) -> tuple[tuple[int, int, int, int], ...]:
        return _BLOCK_LAYOUT if self.moments == "int8" else _LAYOUT


def _variants() -> Iterator[tuple[torch.dtype, torch.dtype, str, str, bool]]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for weight, grad in itertools.product(_NAMES, _NAMES):
        for master, amsgrad in itertools.product(("none", "fp32"), (False, True)):
            if not (master == "fp32" and weight == fp32):
                yield weight, grad, master, "fp32", amsgrad
    for grad, amsgrad in itertools.product(_NAMES, (False, True)):
        yield bf16, grad, "split", "fp32", amsgrad
    for moments in ("bf16", "int8"):
        for grad in _NAMES:
            yield bf16, grad, "split", moments, False
        for weight, master in ((fp32, "none"), (bf16, "none"), (bf16, "fp32"), (fp16, "none")):
            yield weight, bf16, master, moments, False
        yield fp16, fp16, "fp32", moments, False


def _cases() -> Iterator[_Case]:
    for number, variant in enumerate(_variants()):
        yield _Case(*variant, number)


def _hash(count: int, salt: int) -> npt.NDArray[np.uint32]:
    """One well mixed 32-bit number for each of 0 ... count - 1."""
    x = np.arange(count, dtype=np.uint32) + np.uint32(salt * 0x9E3779B9 & 0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def _tensor(
    count: int, salt: int, dtype: torch.dtype, every: int, positive: bool = False
) -> Tensor:
    """Numbers of size 2^-15 ... 2, every ``every``-th of them a special value."""
    h = _hash(count, salt)
    sign = np.uint32(0) if positive else h >> np.uint32(31)
    exponent = (h >> np.uint32(23)) % np.uint32(16)
    special = np.arange(count) % every == salt % every
    order = _hash(count, salt + 1000)
    if dtype == torch.float16:
        bits = sign << np.uint32(15) | exponent << np.uint32(10)
        bits |= h & np.uint32(0x3FF)
    else:
        bits = sign << np.uint32(31) | (exponent + np.uint32(112)) << np.uint32(23)
        bits |= h & np.uint32(0x7FFFFF)
        if dtype == torch.bfloat16:
            bits >>= np.uint32(16)
    if dtype == torch.float32:
        specials = np.array(_SPECIALS32, dtype=np.uint32)
        bits[special] = specials[order[special] % len(specials)]
        return torch.from_numpy(bits.view(np.int32)).view(dtype)
    specials = np.array(_SPECIALS16[dtype], dtype=np.uint32)
    bits[special] = specials[order[special] % len(specials)]
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(dtype)


def _tables(
    layout: Sequence[tuple[int, int, int, int]] = _LAYOUT, pitch: int = 211
) -> tuple[adam.PieceTable, adam.PieceTable, int]:
    """The layout whole, the same cut into more than 64 pieces, and the state's elements."""
    whole, cut, offset = [], [], 0
    for index, (_, start, count, gap) in enumerate(layout):
        offset += gap
        whole.append((index, start, count, offset, index % 3))
        for done in range(0, count, pitch):
            part = min(pitch, count - done)
            cut.append((index, start + done, part, offset + done, index % 3))
        offset += count
    return adam.PieceTable(whole), adam.PieceTable(cut), offset + 5


class _Place:
    """Where a run keeps its tensors and how it starts launches."""

    def __init__(
        self, target: Machine | torch.device | str, place: Callable[[Tensor], Tensor] | None
    ) -> None:
        self._machine = target if isinstance(target, Machine) else None
        self._device = target.device if isinstance(target, Machine) else torch.device(target)
        self._place = place
        self._owned: list[Tensor] = []

    def put(self, tensor: Tensor) -> Tensor:
        if self._place is not None:
            return self._place(tensor)
        if self._machine is None:
            return tensor.to(self._device, copy=True)
        there = self._machine.empty(tuple(tensor.shape), tensor.dtype)
        self._owned.append(there)
        if tensor.numel():
            there.copy_(tensor)
        return there

    def start(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            if self._machine is not None:
                self._machine.launch(launch, stream=self._machine.current_stream())
            elif self._device.type == "cuda":
                launch.device(torch.cuda.current_stream(self._device).cuda_stream)
            else:
                launch.run_on_host()

    def finish(self, tensors: Sequence[Tensor]) -> str:
        sha = hashlib.sha256()
        if self._machine is not None:  # reading host memory that a kernel writes waits for nothing
            self._machine.synchronize_all()
        for tensor in tensors:
            data = tensor.detach().cpu().contiguous()
            sha.update(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")
        if self._machine is not None:
            for tensor in self._owned:
                self._machine.free(tensor)
        self._owned.clear()
        return sha.hexdigest()


def _run_adam(case: _Case, place: _Place) -> str:
    whole, cut, end = _tables(case.layout, 256 if case.moments == "int8" else 211)
    k = case.number
    host_weights = [
        _tensor(size, 50 * k + i, case.weight, every=23) for i, (size, *_) in enumerate(case.layout)
    ]
    state = {name: place.put(array) for name, array in _moments(case, end, 50 * k).items()}
    if case.master == "fp32":
        state["master"] = place.put(_masters(host_weights, end, 50 * k + 23))
    if case.master == "split":
        state["rest"] = place.put(_bytes(2 * end, 50 * k + 23).view(torch.int16))
    weights = [place.put(weight) for weight in host_weights]
    steps = place.put(torch.tensor([0.0, 999.0, 5.0, 123456.0]))
    scalars = place.put(torch.zeros(4, adam.SCALARS))
    for step in range(4):
        grads = [
            place.put(_tensor(size, 50 * k + 30 + 7 * step + i, case.grad, every=19 + step))
            for i, (size, *_) in enumerate(case.layout)
        ]
        lr = (1e-3, 0.1, 1.0, place.put(torch.tensor(3e-4, dtype=torch.float64)))[step]
        hyper = adam.Hyper(
            lr=lr,
            beta1=(0.9, 0.5, 0.9, place.put(torch.tensor(0.95)))[step],
            beta2=(0.999, 0.95, 0.999, 0.98)[step],
            eps=(1e-8, 1e-3)[(k + step) % 2],
            weight_decay=(0.1, 0.0, 0.01)[(k + step) % 3],
            amsgrad=case.amsgrad,
            maximize=(k + step) % 5 == 0,
            decoupled=(k // 2 + step) % 2 == 0,
        )
        found_inf = (None, torch.tensor([0.0]), torch.tensor([1.0]), None)[step]
        grad_scale = (None, torch.tensor([65536.0]), torch.tensor(2.0), torch.tensor(3.0))[step]
        place.start(
            adam.prepare(
                np.arange(3, dtype=np.uint32),
                hyper,
                steps=steps,
                scalars=scalars,
                found_inf=None if found_inf is None else place.put(found_inf),
                grad_scale=None if grad_scale is None else place.put(grad_scale),
                seed=0 if case.moments == "fp32" else k,
            )
        )
        table = cut if step == 1 else whole
        place.start(
            [adam.update(table, weights=weights, grads=grads, state=state, scalars=scalars)]
        )
    return place.finish([*weights, *state.values(), steps, scalars])


def _bytes(count: int, salt: int) -> Tensor:
    return torch.from_numpy((_hash(count, salt) >> np.uint32(24)).astype(np.uint8))


def _moments(case: _Case, end: int, salt: int) -> dict[str, Tensor]:
    if case.moments == "int8":
        blocks = -(-end // BLOCK)
        return {
            "exp_avg": _bytes(end, salt + 20).view(torch.int8),
            "exp_avg_sq": _bytes(end, salt + 21),
            "exp_avg_scale": _tensor(blocks, salt + 24, torch.float32, every=7),
            "exp_avg_sq_scale": _tensor(blocks, salt + 25, torch.float32, every=9, positive=True),
        }
    dtype = torch.float32 if case.moments == "fp32" else torch.bfloat16
    state = {
        "exp_avg": _tensor(end, salt + 20, dtype, every=29),
        "exp_avg_sq": _tensor(end, salt + 21, dtype, every=31, positive=True),
    }
    if case.amsgrad:
        state["max_exp_avg_sq"] = _tensor(end, salt + 22, dtype, every=37, positive=True)
    return state


def _masters(weights: Sequence[Tensor], end: int, salt: int) -> Tensor:
    """Zeros, masters that round to the weight, and (at some weights) masters that do not."""
    masters = np.zeros(end, dtype=np.uint32)
    offset = 0
    for weight, (_, start, count, gap) in zip(weights, _LAYOUT, strict=True):
        offset += gap
        part = weight[start : start + count].float().view(torch.int32).numpy().view(np.uint32)
        noise = _hash(count, salt) % np.uint32(0x1200)  # more than half an ulp of fp16 now and then
        masters[offset : offset + count] = np.where(noise % 3, part + noise, 0)
        offset += count
    return torch.from_numpy(masters.view(np.int32)).view(torch.float32)


def _run_prepare_many(place: _Place) -> str:
    """More parameters than one launch's table has room for, each with its own step count."""
    count = adam.MAX_INDICES + 77
    steps = place.put(torch.from_numpy((_hash(count, 7) % np.uint32(1 << 20)).astype(np.float32)))
    scalars = place.put(torch.zeros(count, adam.SCALARS))
    hyper = adam.Hyper(2e-4, 0.9, 0.999, 1e-8, 0.1, False, False, True)
    indices = np.arange(count, dtype=np.uint32)[::-1]
    place.start(adam.prepare(indices, hyper, steps=steps, scalars=scalars))
    return place.finish([steps, scalars])


def _run_pack(dtype: torch.dtype, place: _Place) -> str:
    whole, cut, end = _tables()
    sources = [place.put(_tensor(size, i, dtype, every=11)) for i, (size, *_) in enumerate(_LAYOUT)]
    packed = place.put(torch.zeros(end, dtype=dtype))
    back = [place.put(torch.zeros(size, dtype=dtype)) for size, *_ in _LAYOUT]
    place.start([pack.pack(whole, sources=sources, packed=packed)])
    place.start([pack.unpack(cut, packed=packed, destinations=back)])
    return place.finish([packed, *back])


def names() -> list[str]:
    """Names of all cases."""
    packs = [f"pack {name}" for name in _NAMES.values()]
    return [case.name for case in _cases()] + ["prepare many"] + packs


def run(
    target: Machine | torch.device | str = "cpu",
    *,
    only: Sequence[str] | None = None,
    place: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, str]:
    """Run the cases and hash what they wrote.

    Args:
        target: a machine (its memory, its current stream), or a device: the CPU, where the launches
            run at once, or a CUDA device, on its current stream.
        only: names of the cases to run; all by default.
        place: copies a CPU tensor to memory of the kind to be tested; by default ``target``'s own.

    Returns:
        The sha256 of each case's results, by name.
    """
    there = _Place(target, place)
    cases: dict[str, Callable[[], str]] = {
        case.name: partial(_run_adam, case, there) for case in _cases()
    }
    cases["prepare many"] = partial(_run_prepare_many, there)
    for dtype, name in _NAMES.items():
        cases[f"pack {name}"] = partial(_run_pack, dtype, there)
    return {name: cases[name]() for name in (names() if only is None else only)}


def expected() -> dict[str, str]:
    """The recorded hashes, by name."""
    hashes: dict[str, str] = json.loads(_PATH.read_text(encoding="utf-8"))
    return hashes


def _main() -> int:
    parser = argparse.ArgumentParser(description="Compare the kernels with their golden hashes.")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    parser.add_argument("--write", action="store_true", help="record the hashes anew (CPU only)")
    arguments = parser.parse_args()
    if arguments.write and arguments.device != "cpu":
        parser.error("--write expects the CPU's hashes: leave out --device")
    hashes = run(arguments.device)
    if arguments.write:
        _PATH.write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
        return 0
    recorded = expected()
    different = [name for name in names() if recorded.get(name) != hashes[name]]
    for name in different:
        print(f"{name}: expected {recorded.get(name)}, got {hashes[name]}", file=sys.stderr)
    print(f"{len(hashes) - len(different)} of {len(hashes)} golden hashes agree")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(_main())
