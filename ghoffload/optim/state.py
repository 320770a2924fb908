"""``optimizer.state``: torch's mapping, over memory that is written behind the program's back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from ghoffload.optim.engine import Engine
from ghoffload.optim.section import Section


class ParameterState(dict[Any, Any]):
    """One parameter's state entries. The tensors are live; assigning one copies it in."""

    def __init__(self, section: Section, index: int) -> None:
        entries: dict[Any, Any] = {}
        if section.started[index]:
            entries = {**section.entries(index), **section.extras[index]}
        super().__init__(entries)
        self._section, self._index = section, index

    def __setitem__(self, name: Any, value: Any) -> None:
        section, index = self._section, self._index
        known = section.entries(index)
        if name not in known:
            section.extras[index][name] = value
        else:
            assign({name: known[name]}, {name: value}, what=f"state entry {name!r}")
            value = known[name]
            if not section.started[index]:
                section.started[index] = True
                super().update(known)
        super().__setitem__(name, value)

    def __delitem__(self, name: Any) -> None:
        super().__delitem__(name)
        if name in self._section.extras[self._index]:
            del self._section.extras[self._index][name]
        else:
            self._section.entry(self._index, name).zero_()

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def setdefault(self, name: Any, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))


class OffloadState(MutableMapping[Any, Any]):
    """Parameter -> ``ParameterState``. Reading completes pending write-back first.

    As in ``torch.optim``: a parameter has no entries before its first step, reading one that is
    not there gives an empty dict, and what is assigned is used by the next step.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def _started(self) -> Iterator[tuple[Tensor, Section, int]]:
        for section in self._engine.sections:
            for index, parameter in enumerate(section.parameters):
                if section.started[index] or section.extras[index]:
                    yield parameter, section, index

    def __getitem__(self, parameter: Any) -> ParameterState | dict[Any, Any]:
        home = self._engine.find(parameter)
        if home is None:
            return {}
        self._engine.drain()
        return ParameterState(*home)

    def __setitem__(self, parameter: Any, entries: Mapping[Any, Any]) -> None:
        home = self._engine.find(parameter)
        if home is None:
            raise KeyError("expected a parameter of this optimizer that has been stepped")
        self._engine.drain()
        section, index = home
        if not entries:
            section.reset(index)
            return
        known = section.entries(index)
        values = {name: value for name, value in entries.items() if name in known}
        assign({name: known[name] for name in values}, values, what="state")
        section.started[index] = True
        section.extras[index] = {n: v for n, v in entries.items() if n not in known}

    def __delitem__(self, parameter: Any) -> None:
        if parameter not in self:
            raise KeyError(parameter)
        self._engine.drain()
        section, index = self._engine.find(parameter)  # type: ignore[misc]
        section.reset(index)

    def __contains__(self, parameter: object) -> bool:
        home = self._engine.find(parameter) if isinstance(parameter, Tensor) else None
        return home is not None and (home[0].started[home[1]] or bool(home[0].extras[home[1]]))

    def __iter__(self) -> Iterator[Any]:
        return (parameter for parameter, _, _ in self._started())

    def __len__(self) -> int:
        return sum(1 for _ in self._started())

    def get(self, parameter: Any, default: Any = None) -> Any:
        return self[parameter] if parameter in self else default

    def __repr__(self) -> str:
        return repr({parameter: dict(self[parameter]) for parameter in self})


def check_entry(target: Tensor, value: Any, what: str) -> Tensor:
    """The tensor that would be copied into ``target``, without changing anything.

    Raises:
        TypeError, ValueError: it is no tensor, has another shape, or would lose precision.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and target.dim() == 0:
        value = torch.tensor(float(value))
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} expects a tensor, got {type(value).__name__}")
    if value.shape != target.shape and not value.numel() == target.numel() == 1:
        raise ValueError(f"{what} expects shape {tuple(target.shape)}, got {tuple(value.shape)}")
    exact = value.dtype in (target.dtype, torch.bfloat16, torch.float16)
    if target.dim() == 0 and not exact:  # step counters are whole numbers in any dtype
        number = float(value)
        exact = number.is_integer() and 0 <= number <= 2**24
    if not exact:
        raise ValueError(f"{what} expects {target.dtype} or a narrower float, got {value.dtype}")
    return value


@torch.no_grad()
def assign(targets: Mapping[Any, Tensor], values: Mapping[Any, Any], *, what: str) -> None:
    """Copy ``values`` into the live ``targets`` of the same names, checked before the first copy."""
    checked = {
        name: check_entry(targets[name], value, f"{what} {name!r}" if what == "state" else what)
        for name, value in values.items()
    }
    for name, value in checked.items():
        if value is not targets[name]:
            targets[name].copy_(value.reshape(targets[name].shape))
