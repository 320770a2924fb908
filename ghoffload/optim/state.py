"""``optimizer.state``: torch's mapping, over memory that is written behind the program's back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from ghoffload.kernels.formats import BLOCK
from ghoffload.optim import entries as parts
from ghoffload.optim.engine import Engine
from ghoffload.optim.formats import EXP_AVG, MASTER, REST, SCALES
from ghoffload.optim.section import STEP, Section

MOST_STEPS = 2**24
"""Above it an fp32 counter no longer advances."""


class ParameterState(dict[Any, Any]):
    """One parameter's state entries: Note [entries] in entries.py. Assigning one copies it in."""

    def __init__(self, section: Section, index: int) -> None:
        entries = parts.read(section, index) if section.started[index] else {}
        super().__init__({**entries, **section.extras[index]})
        self._section, self._index = section, index
        self._known = _expected(section, index)

    def __setitem__(self, name: Any, value: Any) -> None:
        section, index = self._section, self._index
        if name not in self._known:
            section.extras[index][name] = value
        else:
            checked = check_entry(name, self._known[name], value, f"state entry {name!r}")
            parts.write(section, index, name, checked)
            value = parts.read_one(section, index, name)
            if not section.started[index]:
                section.started[index] = True
                super().update(parts.read(section, index))
        super().__setitem__(name, value)

    def __delitem__(self, name: Any) -> None:
        super().__delitem__(name)
        if name in self._section.extras[self._index]:
            del self._section.extras[self._index][name]
        else:
            parts.clear(self._section, self._index, name)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __ior__(self, other: Any) -> ParameterState:  # type: ignore[misc]
        self.update(other)
        return self

    def setdefault(self, name: Any, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def pop(self, name: Any, *default: Any) -> Any:
        if name not in self:
            return super().pop(name, *default)
        value = self[name]
        if isinstance(value, Tensor):
            value = value.clone()  # deleting sets the live one to zero
        del self[name]
        return value

    def popitem(self) -> tuple[Any, Any]:
        name = next(reversed(self), None)
        return super().popitem() if name is None else (name, self.pop(name))

    def clear(self) -> None:
        super().clear()
        self._section.reset(self._index)

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))


class NoState(dict[Any, Any]):
    """What reading gives where no memory is reserved: empty, and not to be written to."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise KeyError(
            "expected a parameter of this optimizer with state; a parameter that was frozen when "
            "the optimizer was built gets its state at its first step"
        )

    __setitem__ = __ior__ = update = setdefault = _refuse


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
            return NoState()
        self._engine.drain()
        return ParameterState(*home)

    def __setitem__(self, parameter: Any, entries: Mapping[Any, Any]) -> None:
        home = self._engine.find(parameter)
        if home is None:
            NoState()._refuse()
        self._engine.drain()
        checked = check_entries(_expected(*home), entries, "this parameter")
        parts.replace(*home, checked)

    def replace(self, new: Mapping[Any, Mapping[Any, Any]]) -> None:
        """Make ``new`` the whole state: parameters that are not in it have none.

        Raises:
            KeyError, TypeError, ValueError: it does not fit. Nothing was changed.
        """
        checked = {}
        for number, (parameter, entries) in enumerate(new.items()):
            home = self._engine.find(parameter)
            if home is None:
                raise KeyError(f"expected parameters of this optimizer, entry {number} is of none")
            checked[home] = check_entries(_expected(*home), entries, f"parameter {number}")
        self._engine.drain()
        homes = [(s, i) for s in self._engine.sections for i in range(len(s.parameters))]
        # Live memory of one entry that is to become another's is copied before it is overwritten.
        for home, entries in checked.items():
            section, index = home
            mine = {section.array(index, a.name).data_ptr() for a in section.format(index).arrays}
            mine.add(section.steps[index].data_ptr())
            for name, value in entries.items():
                if (
                    isinstance(value, Tensor)
                    and value.data_ptr() not in mine
                    and any(other.owns(value) for other in self._engine.sections)
                ):
                    entries[name] = value.clone()
        for home in homes:
            parts.replace(*home, checked.get(home, {}))

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
        # Reading a parameter without entries gives an empty dict, so the base class's get would.
        return self[parameter] if parameter in self else default  # noqa: SIM401

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are plain dicts, with copies of the entries."""
        return (dict, ({parameter: dict(self[parameter]) for parameter in self},))

    def __repr__(self) -> str:
        return repr({parameter: dict(self[parameter]) for parameter in self})


def _expected(section: Section, index: int) -> dict[str, parts.Expected]:
    return parts.expected(section.format(index), section.parameters[index])


def check_entries(
    targets: Mapping[str, parts.Expected], entries: Mapping[Any, Any], who: str
) -> dict[Any, Any]:
    """What would become a parameter's state, without changing anything.

    A ``master`` may be missing (the weight then counts), and is dropped where there is none.

    Args:
        targets: what ``entries.expected`` says.
        entries: of torch's form or the native one: Note [entries] in entries.py.
        who: whose they are, for messages.

    Raises:
        TypeError, ValueError: entries are missing or one does not fit.
    """
    if not isinstance(entries, Mapping):
        raise TypeError(f"state of {who} expects a dict, got {type(entries).__name__}")
    missing = [name for name in targets if name not in entries and name != MASTER]
    if missing and any(name in entries for name in targets):
        raise ValueError(
            f"state of {who} expects {', '.join(map(repr, targets))}; "
            f"{', '.join(map(repr, missing))} is missing"
        )
    dropped = () if MASTER in targets else (MASTER, REST)
    checked = {name: value for name, value in entries.items() if name not in dropped}
    for name, target in targets.items():
        if name not in entries:
            continue
        what = f"state {name!r} of {who}"
        if SCALES.get(name) in entries:
            dtype = torch.int8 if name == EXP_AVG else torch.uint8
            _check_native(entries[name], target.shape, dtype, what)
        else:
            checked[name] = check_entry(name, target, entries[name], what)
    shape = targets[EXP_AVG].shape
    for scale in SCALES.values():
        if scale in entries:
            blocks = torch.Size([-(-shape.numel() // BLOCK)])
            _check_native(entries[scale], blocks, torch.float32, f"state {scale!r} of {who}")
    if REST in checked:
        _check_native(checked[REST], shape, torch.int16, f"state {REST!r} of {who}")
    return checked


def _check_native(value: Any, shape: torch.Size, dtype: torch.dtype, what: str) -> None:
    if not isinstance(value, Tensor) or value.shape != shape or value.dtype != dtype:
        got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{what} expects {dtype} {tuple(shape)}, got {got}")


def check_entry(name: Any, target: parts.Expected, value: Any, what: str) -> Tensor:
    """The tensor that would be copied into ``target``, without changing anything.

    Raises:
        TypeError, ValueError: it is no tensor, has another shape, would lose precision, or is no
            number of steps.
    """
    if name == STEP and isinstance(value, (int, float)):
        value = torch.tensor(value, dtype=torch.float64, device="cpu")
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} expects a tensor, got {type(value).__name__}")
    if value.shape != target.shape and not value.numel() == target.shape.numel() == 1:
        raise ValueError(f"{what} expects shape {tuple(target.shape)}, got {tuple(value.shape)}")
    if name == STEP:
        number = float(value)
        if not (number.is_integer() and 0 <= number <= MOST_STEPS):
            raise ValueError(f"{what} expects a whole number up to {MOST_STEPS}, got {number}")
    elif value.dtype not in (target.dtype, torch.bfloat16, torch.float16):
        raise ValueError(f"{what} expects {target.dtype} or a narrower float, got {value.dtype}")
    return value
