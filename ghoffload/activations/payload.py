"""What crosses the link for a saved tensor: its bytes, a compact copy of them, or fp8 codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ghoffload.activations.spill import Extent
from ghoffload.kernels import coding
from ghoffload.kernels.pieces import DTYPE_CODES
from ghoffload.machine.protocol import Machine
from ghoffload.memory.carving import align

_SCALES_AT = 256  # alignment of the scales behind the codes


@dataclass(frozen=True, slots=True)
class Payload:
    """What crosses the link for a tensor.

    Attributes:
        extent: the bytes it stands for.
        memory: uint8, 1-D, in HBM: those bytes or their codes.
        nbytes: of the extent in HBM.
        coded: dtype of the elements; ``None`` for bytes as they are.
    """

    extent: Extent
    memory: Tensor
    nbytes: int
    coded: torch.dtype | None


def payload_of(tensor: Tensor, extent: Extent, machine: Machine, *, code: bool) -> Payload:
    """What to move for a tensor; what has to be made of it first is queued."""
    tensor = tensor.detach()
    item = tensor.element_size()
    if extent.compact:
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        flat.view(tensor.shape).copy_(tensor)
    else:
        begin, end = extent.start // item, extent.end // item
        flat = tensor.as_strided((end - begin,), (1,), begin)
    memory = flat.view(torch.uint8)
    if not code:
        return Payload(extent, memory, memory.numel(), None)
    scales_at, total = _coded_size(flat.numel())
    codes = torch.empty(total, dtype=torch.uint8, device=flat.device)
    scales = codes[scales_at:].view(torch.float32)
    dtype_code = DTYPE_CODES[flat.dtype]
    launch = coding.encoding(flat, codes[: flat.numel()], scales, "fp8", dtype_code)
    machine.launch(launch, stream=machine.current_stream())
    return Payload(extent, codes, memory.numel(), flat.dtype)


def decoded(codes: Tensor, nbytes: int, dtype: torch.dtype, machine: Machine) -> Tensor:
    """The bytes that were coded, uint8: decoding them is queued on the current stream."""
    elements = nbytes // dtype.itemsize
    flat = torch.empty(elements, dtype=dtype, device=codes.device)
    scales = codes[_coded_size(elements)[0] :].view(torch.float32)
    launch = coding.decoding(codes[:elements], scales, flat, "fp8", DTYPE_CODES[dtype])
    machine.launch(launch, stream=machine.current_stream())
    return flat.view(torch.uint8)


def _coded_size(elements: int) -> tuple[int, int]:
    """Where the scales begin behind so many codes, and bytes of both."""
    at = align(elements, _SCALES_AT)
    return at, at + 4 * coding.scale_count(elements)
