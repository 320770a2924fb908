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
        copies: scratch, and what it stands for.
        write_through: scratch weights and the parameters they go back to after the update.
    """

    weights: dict[int, Tensor] = field(default_factory=dict)
    grads: dict[int, Tensor] = field(default_factory=dict)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    write_through: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def copy_in(self) -> None:
        """Fill scratch on the current stream."""
        for dense, source in self.copies:
            dense.copy_(source)


def gather(section: Section, grads: dict[int, Tensor]) -> Operands:
    """Dense operands for the parameters in ``grads``; makes the scratch that they need.

    Scratch is not filled before ``copy_in``.
    """
    operands = Operands()
    layouts, parameters = section.layouts, section.parameters
    for index, grad in grads.items():
        layout, parameter = layouts[index], parameters[index]
        if layout.holds(parameter):
            operands.weights[index] = parameter
        else:
            dense = _scratch(section, index, "weight", parameter.dtype)
            operands.weights[index] = dense
            operands.copies.append((dense, parameter))
            operands.write_through.append((dense, parameter))
        if layout.holds(grad):
            operands.grads[index] = grad
        else:
            dense = _scratch(section, index, "grad", grad.dtype)
            operands.grads[index] = dense
            operands.copies.append((dense, grad))
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
    weights, grads = operands.weights, operands.grads
    complete = len(grads) == len(section.parameters)
    for bucket in section.buckets:
        active, members = bucket.everything, bucket.members
        if not complete and not all(index in grads for index in members):
            active = tuple(k for k in active if members[k] in grads)
            members = tuple(members[k] for k in active)
        if active:
            result.append(
                BucketJob(
                    bucket, active, [weights[i] for i in members], [grads[i] for i in members]
                )
            )
    return result
