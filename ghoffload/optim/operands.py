"""One step's weights and gradients as dense memory, by way of scratch where they lie otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ghoffload.optim.section import LiveBucket, Section


@dataclass(slots=True)
class BucketJob:
    """One bucket's part in a step: tensor k of each list belongs to active piece k."""

    bucket: LiveBucket
    active: tuple[int, ...]
    weights: list[Tensor]
    grads: list[Tensor]


@dataclass(slots=True)
class Operands:
    """The dense weights and gradients of a section's parameters in one step.

    Attributes:
        weights, grads: by parameter index, in the order of the parameter's ``Layout``.
        write_through: scratch weights and the parameters they go back to after the update.
    """

    weights: dict[int, Tensor] = field(default_factory=dict)
    grads: dict[int, Tensor] = field(default_factory=dict)
    write_through: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def reserve(section: Section, grads: dict[int, Tensor]) -> None:
    """Make the scratch that ``collect`` will need; nothing where everything is dense."""
    for index, grad in grads.items():
        layout, parameter = section.layouts[index], section.parameters[index]
        if not layout.holds(parameter):
            _scratch(section, index, "weight", parameter.dtype)
        if not layout.holds(grad):
            _scratch(section, index, "grad", grad.dtype)


def collect(section: Section, grads: dict[int, Tensor]) -> Operands:
    """Dense operands for the parameters in ``grads``, copied on the current stream if need be."""
    operands = Operands()
    for index, grad in grads.items():
        layout, parameter = section.layouts[index], section.parameters[index].detach()
        if layout.holds(parameter):
            operands.weights[index] = parameter
        else:
            dense = _scratch(section, index, "weight", parameter.dtype).copy_(parameter)
            operands.weights[index] = dense
            operands.write_through.append((dense, parameter))
        if layout.holds(grad):
            operands.grads[index] = grad
        else:
            operands.grads[index] = _scratch(section, index, "grad", grad.dtype).copy_(grad)
    return operands


def _scratch(section: Section, index: int, what: str, dtype: torch.dtype) -> Tensor:
    key = (index, what)
    tensor = section.scratch.get(key)
    if tensor is None or tensor.dtype != dtype:
        layout = section.layouts[index]
        flat = section.keep_on_device((section.specs[index].count,), dtype)
        tensor = section.scratch[key] = layout.view(flat)
    return tensor


def jobs(section: Section, operands: Operands) -> list[BucketJob]:
    """The section's buckets that take part, with the pieces that have a gradient."""
    result = []
    complete = len(operands.grads) == len(section.parameters)
    for bucket in section.buckets:
        pieces = bucket.plan.pieces
        active = tuple(
            k for k, piece in enumerate(pieces) if complete or piece.parameter in operands.grads
        )
        if active:
            indices = [pieces[k].parameter for k in active]
            result.append(
                BucketJob(
                    bucket,
                    active,
                    [operands.weights[i] for i in indices],
                    [operands.grads[i] for i in indices],
                )
            )
    return result
