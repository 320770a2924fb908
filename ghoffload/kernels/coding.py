"""Lossy codes of one byte an element: fp8 and int8, each with a scale for every 128 elements.

Made for activations on their way to the host: half of bf16's bytes, and a 64th for the scales.
``stochastic_cast`` makes bf16 of fp32 without a bias.

Note [error bounds]
    For a finite x of a block whose largest finite magnitude is a, and its result y, before y is
    rounded to the destination's dtype (which adds nothing where that is the source's dtype, except
    half a unit in the last place of y for int8):

        fp8     |y - x| <= max(|x| / 16, a / 237,568, 2^-136)
        int8    |y - x| <= max(a / 253.9, 2^-127)

    fp8 keeps four significant bits of every element down to a / 14,848 or less, int8 the same
    absolute error in all of a block. Both give zero for zero (int8 forgets its sign), NaN for NaN
    and for infinities (there is no code for those), and a finite value for every finite one. A
    block with an infinity or a NaN keeps its other elements: its scale comes from the finite ones.
    Decoding and encoding again changes nothing, neither codes nor scales.

The codes themselves are in Note [codes] of ``coding_host``; csrc/coding.cu has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ghoffload.kernels import pool
from ghoffload.kernels.pieces import common_device, dtype_codes
from ghoffload.kernels.prepare import random_keys
from ghoffload.machine.protocol import Launch

__all__ = ["BLOCK", "CODES", "decode", "encode", "scale_count", "stochastic_cast"]

BLOCK = 128
"""Consecutive elements that share a scale, counted from the tensor's first."""

CODES = ("fp8", "int8")

_TASK_BLOCKS = 1 << 11  # 256 Ki elements of a CPU task: some 100 us


def scale_count(elements: int) -> int:
    """Scales of so many elements: one a block, the last of which may be short."""
    return -(-elements // BLOCK)


def encode(source: Tensor, codes: Tensor, scales: Tensor, *, code: str) -> Launch:
    """Write a code for each element of ``source`` and a scale for each 128 of them.

    Args:
        source: float32, bfloat16 or float16, 1-D contiguous, at any address.
        codes: uint8, 1-D contiguous, ``source.numel()`` elements, at any address.
        scales: float32, 1-D contiguous, ``scale_count(source.numel())`` elements.
        code: ``"fp8"`` (e4m3) or ``"int8"``; the uint8 are its bits.

    Raises:
        ValueError: a tensor of another dtype, size or device, or another code.
    """
    return encoding(source, codes, scales, code, _check(code, codes, scales, "source", source))


def encoding(source: Tensor, codes: Tensor, scales: Tensor, code: str, dtype_code: int) -> Launch:
    """``encode`` for tensors that are known to be as it expects.

    Args:
        dtype_code: of the source's dtype, as in ``pieces.DTYPE_CODES``.
    """

    def host(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        from ghoffload.kernels.coding_host import encode_blocks

        _run_on_host(
            encode_blocks(code == "fp8", dtype_code), reads[0], *writes, elements=reads[0].numel()
        )

    def device(stream: int) -> None:
        from ghoffload.kernels import coding_cuda

        coding_cuda.encode(source, codes, scales, code, dtype_code, stream)

    return Launch(f"encode_{code}", (source,), (codes, scales), device, host)


def decode(codes: Tensor, scales: Tensor, destination: Tensor, *, code: str) -> Launch:
    """Write the elements that ``encode`` coded; arguments and errors as there.

    ``destination`` may have another dtype than the source had. A finite element stays finite: one
    beyond the largest value of that dtype becomes it.
    """
    dtype_code = _check(code, codes, scales, "destination", destination)
    return decoding(codes, scales, destination, code, dtype_code)


def decoding(
    codes: Tensor, scales: Tensor, destination: Tensor, code: str, dtype_code: int
) -> Launch:
    """``decode`` for tensors that are known to be as it expects."""

    def host(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        from ghoffload.kernels.coding_host import decode_blocks

        _run_on_host(
            decode_blocks(code == "fp8", dtype_code), *reads, writes[0], elements=writes[0].numel()
        )

    def device(stream: int) -> None:
        from ghoffload.kernels import coding_cuda

        coding_cuda.decode(codes, scales, destination, code, dtype_code, stream)

    return Launch(f"decode_{code}", (codes, scales), (destination,), device, host)


def stochastic_cast(source: Tensor, destination: Tensor, *, seed: int, offset: int = 0) -> Launch:
    """Round fp32 to bf16 up or down at random, so that the expected result is the source.

    Element i gets the random bits of ``(seed, offset + i)``: runs repeat, and a tensor that is cast
    in pieces gets the same bits as one that is cast whole. A value that bf16 has stays what it is,
    nothing finite becomes infinite, NaN is 0x7FC0.

    Args:
        source: float32, 1-D contiguous.
        destination: bfloat16, 1-D contiguous, of the same size.
        seed: any int; 64 bits of it count.
        offset: number of the first element, 0 or more.

    Raises:
        ValueError: a tensor of another dtype, size or device, or a negative offset.
    """
    _check_arrays(
        ("source", source, torch.float32, source.numel()),
        ("destination", destination, torch.bfloat16, source.numel()),
    )
    if offset < 0:
        raise ValueError(f"offset expects 0 or more, got {offset}")
    zero = np.zeros(1, dtype=np.uint32)
    (key,) = random_keys(seed % (1 << 64), zero, zero.astype(np.int64))

    def host(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        from ghoffload.kernels.coding_host import stochastic_elements

        kernel, elements = stochastic_elements(), reads[0].numel()
        addresses = reads[0].data_ptr(), writes[0].data_ptr()

        def task(begin: int) -> None:
            kernel(*addresses, begin, min(begin + _TASK_BLOCKS * BLOCK, elements), offset, key)

        pool.run(task, range(0, elements, _TASK_BLOCKS * BLOCK))

    def device(stream: int) -> None:
        from ghoffload.kernels import coding_cuda

        coding_cuda.stochastic_cast(source, destination, offset, key, stream)

    return Launch("stochastic_cast", (source,), (destination,), device, host)


def _check(code: str, codes: Tensor, scales: Tensor, name: str, tensor: Tensor) -> int:
    if code not in CODES:
        raise ValueError(f"code expects {' or '.join(CODES)}, got {code!r}")
    dtype_code = int(dtype_codes(name, [tensor])[0])
    elements = tensor.numel()
    _check_arrays(
        (name, tensor, tensor.dtype, elements),
        ("codes", codes, torch.uint8, elements),
        ("scales", scales, torch.float32, scale_count(elements)),
    )
    return dtype_code


def _check_arrays(*expected: tuple[str, Tensor, torch.dtype, int]) -> None:
    for name, array, dtype, count in expected:
        if array.dtype != dtype or array.shape != (count,) or not array.is_contiguous():
            layout = "" if array.is_contiguous() else "non-contiguous "
            raise ValueError(
                f"{name} expects 1-D contiguous {_short(dtype)} of {count} elements, got "
                f"{layout}{_short(array.dtype)} {list(array.shape)}"
            )
    # A GPU reaches pinned host memory as well; the machine looks at that at the launch.
    on_device = {name: [array] for name, array, _, _ in expected if array.device.type != "cpu"}
    if on_device:
        common_device(**on_device)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _run_on_host(kernel: object, *arrays: Tensor, elements: int) -> None:
    addresses = [array.data_ptr() for array in arrays]
    blocks = scale_count(elements)
    # Smaller tasks where there is little to do, so that every thread gets some.
    step = min(_TASK_BLOCKS, max(64, -(-blocks // pool.get_threads())))

    def task(begin: int) -> None:
        kernel(*addresses, begin, min(begin + step, blocks), elements)  # type: ignore[operator]

    pool.run(task, range(0, blocks, step))
