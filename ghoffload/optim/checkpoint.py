"""State dicts: torch's form and the native one, out and in.

Note [forms]
    Torch's form is ``{"state": {i: {"step", "exp_avg", "exp_avg_sq", ...}}, "param_groups"}`` on
    the CPU, with the fp32 ``master`` of a bf16 or fp16 parameter under a key of its own. The native
    form adds ``"ghoffload"``: a version and the config; and has what is coded as it is coded, so
    it is as small as the host state. What is not decoded is the live host memory, no copy of it (a
    state dict of torch's optimizers is live, too): save it before the next step. Each form goes
    into an optimizer of any config: Note [entries] in entries.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor

from ghoffload.optim import entries as parts
from ghoffload.optim.checks import check_options
from ghoffload.optim.engine import Engine
from ghoffload.optim.state import check_entries

NATIVE_KEY = "ghoffload"
NATIVE_VERSION = 2
READABLE_VERSIONS = (1, 2)
NEEDED_OPTIONS = ("lr", "betas", "eps", "weight_decay")  # the others came to torch later


def pack(engine: Engine, param_groups: list[dict[str, Any]], *, native: bool) -> dict[str, Any]:
    """The state dict of an optimizer whose pending work is complete."""
    ids: dict[Tensor, int] = {}
    groups = []
    for group in param_groups:
        for parameter in group["params"]:
            ids.setdefault(parameter, len(ids))
        packed = {key: value for key, value in group.items() if key != "params"}
        packed["params"] = [ids[parameter] for parameter in group["params"]]
        groups.append(packed)
    state = {}
    for parameter, index in ids.items():
        home = engine.find(parameter)
        if home is None:
            continue
        section, position = home
        entries: dict[Any, Any] = {}
        if section.started[position]:
            form = parts.native if native else parts.read
            entries = {name: t.cpu() for name, t in form(section, position).items()}
            entries["step"] = entries["step"].clone()
        entries.update(section.extras[position])
        if entries:
            state[index] = entries
    result: dict[str, Any] = {"state": state, "param_groups": groups}
    if native:
        result[NATIVE_KEY] = {"version": NATIVE_VERSION, "config": engine.config.to_dict()}
    return result


def check(
    engine: Engine, title: str, param_groups: list[dict[str, Any]], state_dict: Mapping[str, Any]
) -> tuple[dict[Tensor, Mapping[Any, Any]], list[dict[str, Any]]]:
    """What loading ``state_dict`` would set: entries by parameter, and the new group options.

    Raises:
        ValueError, TypeError: the state dict does not fit this optimizer. Nothing was changed.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(
                f"state dict expects the keys 'state' and 'param_groups', {key!r} is missing"
            )
    header = state_dict.get(NATIVE_KEY, {"version": NATIVE_VERSION})
    if not isinstance(header, Mapping):
        raise TypeError(f"{NATIVE_KEY!r} expects a dict, got {type(header).__name__}")
    if header.get("version") not in READABLE_VERSIONS:
        raise ValueError(
            f"native state dict expects version {' or '.join(map(str, READABLE_VERSIONS))}, got "
            f"{header.get('version')!r}"
        )
    saved = state_dict["param_groups"]
    if len(saved) != len(param_groups):
        raise ValueError(
            "loaded state dict has a different number of parameter groups: expected "
            f"{len(param_groups)}, got {len(saved)}"
        )
    for number, (mine, theirs) in enumerate(zip(param_groups, saved, strict=True)):
        _check_group(title, number, mine, theirs)
    groups = {p: group for group in param_groups for p in group["params"]}
    ids = _parameters_of(param_groups, saved)
    entries: dict[Tensor, Mapping[Any, Any]] = {}
    for index, values in state_dict["state"].items():
        if index not in ids:
            raise ValueError(
                f"state dict has an entry for parameter {index!r}, which is in none of its groups"
            )
        parameter = ids[index]
        group = groups[parameter]
        targets = parts.expected(engine.format(parameter, group), parameter)
        check_entries(targets, values, f"parameter {index!r}")
        if values:
            entries[parameter] = values
    return entries, [
        {key: deepcopy(value) for key, value in group.items() if key != "params"} for group in saved
    ]


def _check_group(
    title: str, number: int, mine: Mapping[str, Any], theirs: Mapping[str, Any]
) -> None:
    missing = [name for name in ("params", *NEEDED_OPTIONS) if name not in theirs]
    if missing:
        raise ValueError(
            f"group {number} of the state dict expects the options of Adam, "
            f"{', '.join(map(repr, missing))} is missing"
        )
    if len(mine["params"]) != len(theirs["params"]):
        raise ValueError(
            "loaded state dict contains a parameter group that doesn't match the size of "
            f"optimizer's group {number}: expected {len(mine['params'])} parameters, got "
            f"{len(theirs['params'])}"
        )
    if bool(theirs.get("amsgrad", False)) != bool(mine["amsgrad"]):
        raise ValueError(
            f"group {number} expects amsgrad={bool(mine['amsgrad'])}, as this optimizer was "
            f"built, got amsgrad={bool(theirs.get('amsgrad', False))}"
        )
    check_options(title, {**mine, **theirs})


def _parameters_of(
    param_groups: list[dict[str, Any]], saved: list[dict[str, Any]]
) -> dict[Any, Tensor]:
    """The parameter behind each id of a state dict whose groups fit."""
    return {
        index: parameter
        for mine, theirs in zip(param_groups, saved, strict=True)
        for index, parameter in zip(theirs["params"], mine["params"], strict=True)
    }
