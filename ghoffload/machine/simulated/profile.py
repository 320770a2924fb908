"""Machine profiles: the figures that a simulated machine goes by, and where each is from.

A profile is a TOML file with a table for each figure, as ``ghoffload bandwidth --save-profile``
writes it: ``value``, ``unit``, and ``how`` it was found or its ``source``.

Note [figures]
    h2d_engine, d2h_engine     a copy engine, one way                        GB/s
    both_engine                copy engines both ways at once, the sum       GB/s
    h2d_kernel, d2h_kernel     a kernel that reads or writes host memory     GB/s
    both_kernel                a kernel that does both, the sum              GB/s
    hbm                        HBM, read + write                             GB/s
    host_read_write            host memory, read + write, for the GPU        GB/s
    cpu_read_write             the same for the CPU's threads; else          GB/s
                               host_read_write
    bf16                       matrix products as they are reached           TFLOP/s
    launch_call, copy_call     the host's time of a call                     us
    launch_device, copy_device the device's time of an empty one             us
    eager_call                 the host's time of one torch operation        us
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_UNITS = {"GB/s": 1e9, "TFLOP/s": 1e12, "us": 1e-6, "B": 1.0}
_NEEDED = ("h2d_engine", "d2h_engine", "both_engine", "hbm", "host_read_write")
_ELSE: Mapping[str, tuple[float, str]] = {
    "bf16": (600e12, "none given: 600 TFLOP/s"),
    "launch_call": (7e-6, "none given: 7 us"),
    "copy_call": (8e-6, "none given: 8 us"),
    "launch_device": (2e-6, "none given: 2 us"),
    "copy_device": (8e-6, "none given: 8 us"),
    "eager_call": (6e-6, "none given: 6 us"),
}
_SAME_AS = {
    "h2d_kernel": "h2d_engine",
    "d2h_kernel": "d2h_engine",
    "both_kernel": "both_engine",
    "cpu_read_write": "host_read_write",
}


@dataclass(frozen=True)
class Figure:
    """One figure of a profile.

    Attributes:
        value: in bytes, FLOP or seconds, a second where it is a rate.
        origin: how it was found, or whose it is.
    """

    value: float
    origin: str


@dataclass(frozen=True)
class Profile:
    """What a machine is taken to be.

    Attributes:
        name: of the profile.
        title: of the machine.
        hbm_bytes, host_bytes: of both memories.
        figures: Note [figures].
    """

    name: str
    title: str
    hbm_bytes: int
    host_bytes: int
    figures: Mapping[str, Figure]

    def __getitem__(self, figure: str) -> float:
        """The value of a figure."""
        return self.figures[figure].value


def profiles() -> list[str]:
    """Names of the profiles that come with the package."""
    folder = resources.files(__package__) / "profiles"
    names = (entry.name for entry in folder.iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def load_profile(name: str | Path) -> Profile:
    """A profile by its name, or from a TOML file.

    Raises:
        ValueError: no such profile; or a figure is missing, not positive, or of another unit.
        OSError: the file cannot be read.
    """
    known = profiles()
    if str(name) in known:
        text = (resources.files(__package__) / "profiles" / f"{name}.toml").read_text("utf-8")
        return parse_profile(text, str(name))
    path = Path(name)
    if path.suffix != ".toml":
        raise ValueError(f"profile expects one of {', '.join(known)} or a .toml file, got {name}")
    return parse_profile(path.read_text("utf-8"), path.stem)


def parse_profile(text: str, name: str) -> Profile:
    """A profile from TOML: Note [figures].

    Raises:
        ValueError: as ``load_profile``.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"profile {name} is not TOML: {error}") from None
    figures = {
        key: _figure(f"{name}: {key}", table)
        for key, table in document.items()
        if isinstance(table, dict)
    }
    if missing := [key for key in _NEEDED if key not in figures]:
        raise ValueError(f"profile {name} has no {', '.join(missing)}")
    for key, other in _SAME_AS.items():
        figures.setdefault(key, Figure(figures[other].value, f"as {other}"))
    for key, (value, origin) in _ELSE.items():
        figures.setdefault(key, Figure(value, origin))
    return Profile(
        name=name,
        title=str(document.get("machine", name)),
        hbm_bytes=_bytes(name, document, "hbm_bytes"),
        host_bytes=_bytes(name, document, "host_bytes"),
        figures=figures,
    )


def _figure(what: str, table: dict[str, Any]) -> Figure:
    value, unit = table.get("value"), table.get("unit")
    if unit not in _UNITS:
        raise ValueError(f"{what} expects a unit of {', '.join(_UNITS)}, got {unit!r}")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{what} expects a value above 0, got {value!r}")
    origin = table.get("source") or table.get("how")
    if not origin:
        raise ValueError(f"{what} expects a source, or how it was found")
    return Figure(float(value) * _UNITS[unit], str(origin))


def _bytes(name: str, document: dict[str, Any], key: str) -> int:
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"profile {name} expects {key} in bytes, got {value!r}")
    return value
