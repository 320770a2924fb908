"""Starting the kernels of csrc/coding.cu."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ghoffload.kernels import cuda

_THREADS = 256
_CHUNK = 4096  # elements of one block of threads
_DTYPES = ("fp32", "bf16", "fp16")


def encode(
    source: Tensor, codes: Tensor, scales: Tensor, code: str, dtype_code: int, stream: int
) -> None:
    """Queue encode for whole tensors, checked before."""
    kernel = f"encode_{code}_{_DTYPES[dtype_code]}"
    _code(kernel, (source, codes, scales), source, codes, stream)


def decode(
    codes: Tensor, scales: Tensor, destination: Tensor, code: str, dtype_code: int, stream: int
) -> None:
    """Queue decode for whole tensors, checked before."""
    kernel = f"decode_{code}_{_DTYPES[dtype_code]}"
    _code(kernel, (codes, scales, destination), destination, codes, stream)


def stochastic_cast(
    source: Tensor, destination: Tensor, offset: int, key: np.uint32, stream: int
) -> None:
    """Queue stochastic_cast for whole tensors, checked before."""
    numbers = offset, int(key)
    vector = source.data_ptr() % 16 == 0 and destination.data_ptr() % 8 == 0
    _launch("stochastic_cast", (source, destination), source.numel(), numbers, vector, stream)


def _code(
    kernel: str, arguments: tuple[Tensor, ...], wide: Tensor, codes: Tensor, stream: int
) -> None:
    vector = wide.data_ptr() % (4 * wide.element_size()) == 0 and codes.data_ptr() % 4 == 0
    _launch(kernel, arguments, wide.numel(), (), vector, stream)


def _launch(
    kernel: str,
    arguments: tuple[Tensor, ...],
    elements: int,
    numbers: tuple[int, ...],
    vector: bool,
    stream: int,
) -> None:
    if elements == 0:
        return
    on_device = next((tensor for tensor in arguments if tensor.is_cuda), arguments[0])
    cuda.launch_words(
        "coding",
        kernel,
        cuda.device_index(on_device),
        blocks=-(-elements // _CHUNK),
        threads=_THREADS,
        words=(*(tensor.data_ptr() for tensor in arguments), elements, *numbers, int(vector)),
        stream=stream,
    )
