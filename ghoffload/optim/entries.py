"""State entries: a parameter's arrays as torch names them, read and written.

Note [entries]
    ``optimizer.state`` and torch's form of a state dict have ``step``, ``exp_avg``,
    ``exp_avg_sq``, ``max_exp_avg_sq`` and ``master`` in the parameter's shape. What a format keeps
    as such is live memory; what it codes (a split master, int8 moments) is decoded into a copy, and
    writing it encodes. Decoding and encoding again gives the same codes.
    The native form has the arrays themselves: ``rest`` for a split master, int8 codes with their
    scales beside them. Blocks of codes follow the order of the parameter's memory, so where that is
    not row-major the native form, too, has the moments decoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ghoffload.kernels import formats as codes
from ghoffload.optim.formats import MASTER, REST, SCALES, Format
from ghoffload.optim.section import STEP, Section

NATIVE_NAMES = (REST, *SCALES.values())
"""Entries that only the native form has."""


def names(form: Format) -> tuple[str, ...]:
    """Names of the entries, in torch's order with the master last."""
    return (STEP, *form.entries)


@dataclass(frozen=True, slots=True)
class Expected:
    """What an entry has, or can be set from: fp32 in its shape, whatever the format."""

    shape: torch.Size
    dtype: torch.dtype = torch.float32


def expected(form: Format, parameter: Tensor) -> dict[str, Expected]:
    """The entries of a parameter with state of a format."""
    return {
        name: Expected(torch.Size() if name == STEP else parameter.shape) for name in names(form)
    }


def read(section: Section, index: int) -> dict[str, Tensor]:
    """All entries of a parameter: Note [entries]. Pending work must be complete."""
    return {name: read_one(section, index, name) for name in names(section.format(index))}


def read_one(section: Section, index: int, name: str) -> Tensor:
    """One entry, in the parameter's shape (``step``: 0-dim)."""
    if name == STEP:
        return section.steps[index]
    form, layout = section.format(index), section.layouts[index]
    if name == MASTER and form.master == "split":
        rest = section.array(index, REST)
        joined = codes.join(_weight(section, index), rest.cpu())
        return layout.view(joined.to(rest.device))
    array = section.array(index, name)
    if form.moments == "int8" and name in SCALES:
        scales = section.array(index, SCALES[name])
        return layout.view(codes.decode(array.cpu(), scales.cpu()).to(array.device))
    return layout.view(array)


def native(section: Section, index: int) -> dict[str, Tensor]:
    """The entries of the native form: Note [entries]."""
    form, layout = section.format(index), section.layouts[index]
    found = {STEP: section.steps[index]}
    for name in form.entries:
        if name == MASTER and form.master == "split":
            found[REST] = layout.view(section.array(index, REST))
        elif form.moments == "int8" and name in SCALES and layout.row_major:
            found[name] = layout.view(section.array(index, name))
            found[SCALES[name]] = section.array(index, SCALES[name])
        else:
            found[name] = read_one(section, index, name)
    return found


@torch.no_grad()
def write(section: Section, index: int, name: str, value: Tensor) -> None:
    """Set one entry from a checked tensor: Note [entries]."""
    form, layout = section.format(index), section.layouts[index]
    if name == STEP:
        section.steps[index].copy_(value.reshape(()))
    elif name == MASTER and form.master == "split":
        _write_split(section, index, value)
    elif form.moments == "int8" and name in SCALES:
        coded, scales = codes.encode(name, _flat(section, index, value))
        section.array(index, name).copy_(coded)
        section.array(index, SCALES[name]).copy_(scales)
    else:
        target = layout.view(section.array(index, name))
        if value.data_ptr() != target.data_ptr() or value.stride() != target.stride():
            target.copy_(value.reshape(target.shape))


def clear(section: Section, index: int, name: str) -> None:
    """Set one entry to zero."""
    form = section.format(index)
    if name == STEP:
        section.steps[index].zero_()
        return
    arrays = [REST if name == MASTER and form.master == "split" else name]
    if form.moments == "int8" and name in SCALES:
        arrays.append(SCALES[name])
    for array in arrays:
        section.array(index, array).zero_()


@torch.no_grad()
def replace(section: Section, index: int, entries: Mapping[Any, Any]) -> None:
    """Set a parameter's whole state from checked ``entries`` of either form.

    What is not among them becomes zero; without any the parameter is as never stepped.
    """
    form = section.format(index)
    given = dict(entries)
    known = (*names(form), MASTER, *NATIVE_NAMES)
    live = {name: given.pop(name) for name in known if name in given}
    section.started[index] = any(name in live for name in (*names(form), *NATIVE_NAMES))
    section.extras[index] = given
    for name in names(form):
        scale = SCALES.get(name)
        if name == MASTER and REST in live:
            _write_rest(section, index, live[REST])
        elif scale is not None and scale in live:
            _write_codes(section, index, name, live[name], live[scale])
        elif name in live:
            write(section, index, name, live[name])
        else:
            clear(section, index, name)


def _write_rest(section: Section, index: int, rest: Tensor) -> None:
    """Set the master from the native form."""
    if section.format(index).master == "split":
        section.layouts[index].view(section.array(index, REST)).copy_(rest)
        return
    weight = section.parameters[index].detach().cpu().contiguous()
    master = codes.join(weight.view(-1), rest.cpu().contiguous().view(-1))
    write(section, index, MASTER, master.view(weight.shape))


def _write_codes(section: Section, index: int, name: str, coded: Tensor, scales: Tensor) -> None:
    """Set a moment from the native form."""
    if section.format(index).moments == "int8" and section.layouts[index].row_major:
        section.array(index, name).copy_(coded.reshape(-1))
        section.array(index, SCALES[name]).copy_(scales)
    else:
        flat = codes.decode(coded.cpu().reshape(-1), scales.cpu())
        write(section, index, name, flat.view(coded.shape))


def _flat(section: Section, index: int, value: Tensor) -> Tensor:
    """A value's elements on the CPU as fp32, in the order of the state arrays."""
    layout = section.layouts[index]
    flat = torch.empty(section.specs[index].count, dtype=torch.float32, device="cpu")
    layout.view(flat).copy_(value.reshape(layout.size))
    return flat


def _weight(section: Section, index: int) -> Tensor:
    """A copy of the weight on the CPU, in the order of the state arrays."""
    layout, parameter = section.layouts[index], section.parameters[index].detach()
    flat = torch.empty(section.specs[index].count, dtype=parameter.dtype, device="cpu")
    layout.view(flat).copy_(parameter)
    return flat


def _write_split(section: Section, index: int, value: Tensor) -> None:
    """Take a master over where it rounds to the weight (up at a tie, or to even).

    The weight is then the master's, rounded up at a tie; elsewhere the weight counts alone.
    """
    master, weight = _flat(section, index, value), _weight(section, index)
    rounded, rest = codes.split(master)
    bits = weight.view(torch.int16)
    nearest = master.to(torch.bfloat16).view(torch.int16)
    takes = (rounded.view(torch.int16) == bits) | (nearest == bits)
    section.array(index, REST).copy_(torch.where(takes, rest, torch.zeros_like(rest)))
    new = torch.where(takes, rounded, weight)
    if not torch.equal(new.view(torch.int16), bits):
        section.parameters[index].copy_(section.layouts[index].view(new))
