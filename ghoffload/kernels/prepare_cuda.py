"""The kernel parameters of csrc/prepare.cu, laid out as its structs are."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ghoffload.kernels import cuda

_THREADS = 256
_SMALL_INDICES, _LARGE_INDICES = 64, 7680
_MAXIMIZE, _DECOUPLED, _HAS_GRAD_SCALE = 1, 2, 32
_IS_DOUBLE = {"lr": 4, "beta1": 8, "beta2": 16}

_NUMBERS = ("lr", "beta1", "beta2", "eps", "weight_decay", "found_inf", "grad_scale", "clip")
_POINTERS = ("lr", "beta1", "beta2", "found_inf", "grad_scale", "clip")
_HYPER = np.dtype(
    [(name, "f8") for name in _NUMBERS]
    + [(f"{name}_at", "u8") for name in _POINTERS]
    + [("seed", "u8"), ("steps", "u8"), ("scalars", "u8"), ("count", "u4"), ("flags", "u4")]
)


def prepare(
    indices: npt.NDArray[np.uint32],
    numbers: Mapping[str, float],
    on_device: Mapping[str, Tensor],
    flags: tuple[bool, bool],
    seed: int,
    steps: Tensor,
    scalars: Tensor,
    stream: int,
) -> None:
    """Queue adam_prepare for at most 7,680 parameters."""
    if len(indices) == 0:
        return
    maximize, decoupled = flags
    hyper = np.zeros(1, dtype=_HYPER)
    bits = _MAXIMIZE * maximize + _DECOUPLED * decoupled
    hyper["clip"] = 1.0
    for name, value in numbers.items():
        hyper[name] = value
    for name, tensor in on_device.items():
        hyper[f"{name}_at"] = tensor.data_ptr()
        if tensor.element_size() == 8:
            bits |= _IS_DOUBLE[name]
    if "grad_scale" in numbers or "grad_scale" in on_device:
        bits |= _HAS_GRAD_SCALE
    hyper["seed"], hyper["steps"], hyper["scalars"] = seed, steps.data_ptr(), scalars.data_ptr()
    hyper["count"], hyper["flags"] = len(indices), bits
    size = "small" if len(indices) <= _SMALL_INDICES else "large"
    padded = np.zeros(_SMALL_INDICES if size == "small" else _LARGE_INDICES, dtype=np.uint32)
    padded[: len(indices)] = indices
    cuda.launch(
        "prepare",
        f"adam_prepare_{size}",
        cuda.device_index(steps),
        blocks=-(-len(indices) // _THREADS),
        threads=_THREADS,
        parameters=(hyper, padded),
        stream=stream,
    )
