"""What an eager torch operation does with its tensors: which does it read, which does it write?

Read from the operator's schema: arguments marked ``(a!)`` are written, others are read, results
that alias no argument are written. Views and operations on metadata access nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Operators that look at the form of their arguments alone, and have no annotation that says so.
_FORM_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("randint_like", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
        *("sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "sym_is_contiguous"),
        *("is_same_size", "is_pinned", "_has_same_storage_numel", "_unsafe_view", "size", "stride"),
        *("is_contiguous", "_version", "_nested_tensor_size", "record_stream"),
    )
)
_WAITING_TAGS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


@dataclass(frozen=True, slots=True)
class Plan:
    """What one operator does with its arguments.

    Attributes:
        name: for messages.
        accesses: whether it touches data at all.
        maybe_view: it returns a view of an argument or a copy, which only the result tells.
        written: positions of the arguments that are written.
        written_names: names of the keyword arguments that are written.
        waits: the host needs the result, so it waits for the stream.
        fresh: memory that only the result has is new; of ``set_`` it was there before.
    """

    name: str
    accesses: bool
    maybe_view: bool
    written: frozenset[int]
    written_names: frozenset[str]
    waits: bool
    fresh: bool


@cache
def plan_of(func: Any) -> Plan:
    """The plan of an ``OpOverload``."""
    schema = func._schema
    writes = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    aliases = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    metadata = torch.Tag.inplace_view in func.tags
    return Plan(
        name=str(func),
        accesses=not metadata and schema.name not in _FORM_ONLY,
        maybe_view=aliases and not any(writes),
        written=frozenset(i for i, write in enumerate(writes) if write),
        written_names=frozenset(
            a.name for a, write in zip(schema.arguments, writes, strict=True) if write
        ),
        waits=bool(_WAITING_TAGS.intersection(func.tags)),
        fresh=schema.name != "aten::set_",
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of an argument or result: itself, or those of a list."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def split(
    plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator reads, and those it writes, among its arguments."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for position, value in enumerate(args):
        (writes if position in plan.written else reads).extend(tensors_in(value))
    for name, value in kwargs.items():
        (writes if name in plan.written_names else reads).extend(tensors_in(value))
    return reads, writes
