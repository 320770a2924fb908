"""The axes of a sweep, and the settings that their product has.

Note [axes]
    An axis is a list of values, as Python has it or as text: ``1MiB,4MiB,16MiB``. A range counts
    up by a factor, two unless it is said: ``1MiB..1GiB``, ``1MiB..1GiB..x4``; both ends belong to
    it where the factor meets them. Lists may hold ranges. Words are checked at once, since one
    that is not known is a typing error; numbers that an optimizer refuses are left to it, since a
    range may go beyond what is allowed.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from ghoffload.config import (
    Master,
    MemoryKind,
    Moments,
    OffloadConfig,
    StepDevice,
    Transfer,
    parse_bytes,
)

Value = int | str

_DEFAULTS = OffloadConfig()
_WORDS: Mapping[str, tuple[str, ...]] = {
    "memory_kind": get_args(MemoryKind),
    "transfer": get_args(Transfer),
    "step_device": get_args(StepDevice),
    "moments": get_args(Moments),
    "master": get_args(Master),
    "checkpoint": ("none", "layers"),
    "activations": ("none", "all"),
}
_BYTES = ("bucket_bytes", "activations")
_COUNTS = ("staging_buffers", "ctas")
NUMERIC = ("bucket_bytes", "staging_buffers", "ctas", "activations")
"""Axes that may have numbers."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One combination: of ``OffloadConfig``'s fields, and what is done with activations.

    Attributes:
        checkpoint: ``"layers"`` recomputes every layer in backward.
        activations: ``"none"`` leaves them alone, ``"all"`` offloads them, a number of bytes is
            the budget of HBM that forward and backward should keep.
    """

    bucket_bytes: int = _DEFAULTS.bucket_bytes
    staging_buffers: int = _DEFAULTS.staging_buffers
    memory_kind: str = _DEFAULTS.memory_kind
    transfer: str = _DEFAULTS.transfer
    ctas: int = _DEFAULTS.ctas
    step_device: str = _DEFAULTS.step_device
    moments: str = _DEFAULTS.moments
    master: str = _DEFAULTS.master
    checkpoint: str = "none"
    activations: int | str = "none"

    def config(self) -> OffloadConfig:
        """The optimizer's part of it.

        Raises:
            ValueError: a value that no optimizer takes.
        """
        fields = dataclasses.asdict(self)
        return OffloadConfig(**{k: v for k, v in fields.items() if k in _DEFAULTS.to_dict()})


AXES: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Setting))


def parse_axis(name: str, value: Value | Iterable[Value]) -> tuple[Value, ...]:
    """The values of an axis, each once, in the order given: Note [axes].

    Raises:
        TypeError: neither text, a number, nor several of them.
        ValueError: no value, a range that is none, or a word that the axis does not have.
    """
    if isinstance(value, str):
        items: list[Any] = value.split(",")
    elif isinstance(value, Iterable):
        items = list(value)
    else:
        items = [value]
    values: list[Value] = []
    for item in items:
        if isinstance(item, str) and ".." in item:
            values += _range(name, item)
        else:
            values.append(_value(name, item))
    if not values:
        raise ValueError(f"{name} expects one value or more, got none")
    return tuple(dict.fromkeys(values))


def parse_axes(axes: Mapping[str, Any]) -> dict[str, tuple[Value, ...]]:
    """Every axis by name; those that are not given, or are ``None``, have their default alone.

    Raises:
        TypeError: an axis that there is not.
        ValueError: as ``parse_axis``.
    """
    for name in axes:
        if name not in AXES:
            raise TypeError(f"a sweep expects axes of {', '.join(AXES)}, got {name!r}")
    defaults = dataclasses.asdict(Setting())
    return {
        name: (defaults[name],) if axes.get(name) is None else parse_axis(name, axes[name])
        for name in AXES
    }


def product(axes: Mapping[str, tuple[Value, ...]]) -> list[Setting]:
    """Every combination; the last axis varies first."""
    return [
        Setting(**dict(zip(axes, values, strict=True)))  # type: ignore[arg-type]
        for values in itertools.product(*axes.values())
    ]


def parse_tokens(value: Any) -> tuple[int, int]:
    """Batch and sequence length from ``"1x4096"`` or a pair of numbers.

    Raises:
        ValueError: neither, or one of them is below 1.
    """
    found = value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+)\s*x\s*(\d+)\s*", value)
        found = (int(match[1]), int(match[2])) if match else None
    if (
        not isinstance(found, (tuple, list))
        or len(found) != 2
        or not all(type(number) is int and number > 0 for number in found)
    ):
        raise ValueError(f"tokens expects batch x sequence, such as 1x4096, got {value!r}")
    return found[0], found[1]


def _value(name: str, item: Any) -> Value:
    if isinstance(item, bool) or not isinstance(item, (int, str)):
        raise TypeError(f"{name} expects text, numbers, or a list of them, got {item!r}")
    text = item.strip() if isinstance(item, str) else item
    words = _WORDS.get(name, ())
    if text in words:
        return text
    if name in _BYTES:
        try:
            return parse_bytes(text, name)
        except ValueError:
            also = f"{', '.join(words)}, or " if words else ""
            raise ValueError(f"{name} expects {also}bytes such as 64MiB, got {item!r}") from None
    if name in _COUNTS:
        if isinstance(text, str):
            if not re.fullmatch(r"\d+", text):
                raise ValueError(f"{name} expects whole numbers, got {item!r}")
            text = int(text)
        return text
    raise ValueError(f"{name} expects one of {', '.join(words)}, got {item!r}")


def _range(name: str, text: str) -> list[Value]:
    if name not in NUMERIC:
        raise ValueError(f"{name} expects words, not a range, got {text!r}")
    parts = [part.strip() for part in text.split("..")]
    factor = 2.0
    if len(parts) == 3 and (match := re.fullmatch(r"x(\d+(?:\.\d+)?)", parts[2])):
        factor = float(match[1])
    elif len(parts) != 2:
        raise ValueError(f"{name} expects a range such as 2..64 or 2..64..x4, got {text!r}")
    first, last = (_value(name, part) for part in parts[:2])
    if isinstance(first, str) or isinstance(last, str) or not 0 < first <= last or factor <= 1:
        raise ValueError(
            f"{name} expects a range from a number above 0 to one that is not smaller, by a factor "
            f"above 1, got {text!r}"
        )
    values: list[Value] = []
    at = float(first)
    while round(at) <= last:
        values.append(round(at))
        at *= factor
    return values
