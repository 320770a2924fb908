"""What an optimizer refuses, each in one sentence, before anything has changed."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from ghoffload.config import Moments

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def check_options(title: str, options: Mapping[str, Any]) -> None:
    """Refuse hyperparameters of one group; in torch's words where torch would refuse them, too.

    Raises:
        TypeError, ValueError: a value that cannot be used.
        RuntimeError: ``fused`` beside ``foreach`` or ``differentiable``, as in torch.
    """
    betas = options["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas expects two numbers, got {betas!r}")
    for name, value in (("lr", options["lr"]), ("betas[0]", betas[0]), ("betas[1]", betas[1])):
        if isinstance(value, Tensor):
            _check_tensor(name, value)
            if options["foreach"] and not options["capturable"]:
                raise ValueError(
                    f"{name} as a Tensor is not supported for capturable=False and foreach=True"
                )
        elif not isinstance(value, numbers.Real):
            raise TypeError(f"{name} expects a number or a tensor, got {value!r}")
    for name in ("eps", "weight_decay"):
        if not isinstance(options[name], numbers.Real):
            raise TypeError(f"{name} expects a number, got {options[name]!r}")
    if not options["lr"] >= 0.0:
        raise ValueError(f"Invalid learning rate: {options['lr']}")
    if not options["eps"] >= 0.0:
        raise ValueError(f"Invalid epsilon value: {options['eps']}")
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    if not options["weight_decay"] >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {options['weight_decay']}")
    moments = options.get("moments")
    if moments is not None and moments not in get_args(Moments):
        raise ValueError(
            f"moments expects one of {', '.join(map(repr, get_args(Moments)))}, got {moments!r}"
        )
    if isinstance(betas[0], Tensor) != isinstance(betas[1], Tensor):
        raise ValueError("betas must be either both floats or both Tensors")
    if options["fused"] and options["differentiable"]:
        raise RuntimeError("`fused` does not support `differentiable`")
    if options["fused"] and options["foreach"]:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
    if options["differentiable"]:
        raise ValueError(f"{title} expects differentiable=False, got True")


def _check_tensor(name: str, value: Tensor) -> None:
    if value.numel() != 1:
        raise ValueError(f"Tensor {name} must be 1-element")
    if value.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} expects a tensor of float32 or float64, got {value.dtype}")


def check_parameters(title: str, parameters: Iterable[Tensor]) -> None:
    """Refuse parameters that no step could update.

    Raises:
        TypeError: not fp32, bf16 or fp16, not dense, or a tensor subclass.
        ValueError: several of its elements are the same memory.
    """
    for parameter in parameters:
        if type(parameter) not in _PLAIN:
            raise TypeError(
                f"{title} expects plain tensors as parameters, got {type(parameter).__name__}"
            )
        if parameter.layout is not torch.strided:
            raise TypeError(f"{title} expects dense parameters, got {parameter.layout}")
        if parameter.dtype not in DTYPES:
            raise TypeError(
                f"{title} expects fp32, bf16 or fp16 parameters, got {parameter.dtype} "
                f"(shape {tuple(parameter.shape)})"
            )
        if any(n > 1 and s == 0 for n, s in zip(parameter.shape, parameter.stride(), strict=True)):
            raise ValueError(
                f"{title} expects parameters whose elements have memory of their own, got an "
                f"expanded one (shape {tuple(parameter.shape)}, stride {parameter.stride()})"
            )


def check_sharing(title: str, parameters: Sequence[Tensor]) -> None:
    """Refuse different parameters with common memory: it would be updated twice at once.

    Raises:
        ValueError: two of them share elements. Interleaved ones that share none are fine.
    """
    extents = []
    for number, p in enumerate(parameters):
        if p.numel() and p.device.type != "meta":
            last = sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True))
            extents.append((p.data_ptr(), p.data_ptr() + (last + 1) * p.element_size(), number))
    extents.sort()
    cluster: list[int] = []
    start = reached = 0
    for begin, end, number in [*extents, (1 << 64, 1 << 64, -1)]:
        if begin >= reached:
            if len(cluster) > 1:
                _check_cluster(title, parameters, cluster, reached - start)
            cluster, start = [], begin
        cluster.append(number)
        reached = max(reached, end)


def _check_cluster(
    title: str, parameters: Sequence[Tensor], cluster: list[int], nbytes: int
) -> None:
    """Mark the elements of parameters whose extents overlap, one parameter after the other."""
    first = parameters[cluster[0]]
    unit = first.element_size()
    owners = torch.full((nbytes // unit + 1,), -1, dtype=torch.int32, device="cpu")
    for number in cluster:
        p = parameters[number]
        offset, rest = divmod(p.data_ptr() - first.data_ptr(), unit)
        elements = owners.as_strided(p.shape, p.stride(), offset)
        other = int(elements.max()) if p.element_size() == unit and not rest else cluster[0]
        if other >= 0:
            raise ValueError(
                f"{title} expects parameters with memory of their own; parameters {other} and "
                f"{number} overlap: pass a tied parameter once"
            )
        elements.fill_(number)


def check_gradient(title: str, parameter: Tensor, grad: Tensor, device: torch.device) -> None:
    """Refuse a gradient, or a parameter that has moved.

    Raises:
        RuntimeError: a gradient that is sparse, complex, fp64, a tensor subclass, or elsewhere.
    """
    if grad.layout is not torch.strided:
        raise RuntimeError(f"{title} does not support sparse gradients, got {grad.layout}")
    if grad.dtype not in DTYPES:
        raise RuntimeError(f"{title} expects fp32, bf16 or fp16 gradients, got {grad.dtype}")
    if type(grad) not in _PLAIN:
        raise RuntimeError(f"{title} expects plain tensors as gradients, got {type(grad).__name__}")
    for what, tensor in (("parameter", parameter), ("gradient", grad)):
        if tensor.device != device:
            raise RuntimeError(
                f"{title} was built for {device}, got a {what} on {tensor.device}; build the "
                "optimizer after moving the model"
            )


def check_unchanged(
    title: str, parameter: Tensor, size: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Refuse a parameter that is no longer of the size and dtype its state was planned for.

    Raises:
        RuntimeError: it was changed by way of ``.data``, as ``model.half()`` does.
    """
    if tuple(parameter.shape) != size:
        raise RuntimeError(
            f"{title} was built for a parameter of shape {size}, it now has "
            f"{tuple(parameter.shape)}"
        )
    if parameter.dtype != dtype:
        raise RuntimeError(
            f"{title} was built for a parameter of {dtype}, it now is {parameter.dtype}; build "
            "the optimizer after converting the model"
        )
