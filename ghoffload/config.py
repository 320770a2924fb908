"""OffloadConfig: the facts a caller gives, checked when they are given."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

ENVIRONMENT_PREFIX = "GHOFFLOAD_"

StepDevice = Literal["auto", "cuda", "cpu"]
MemoryKind = Literal["auto", "pinned", "managed", "system", "device"]
Transfer = Literal["auto", "copy_engine", "kernel"]
Master = Literal["auto", "split", "fp32", "none"]
Moments = Literal["fp32", "bf16", "int8"]
Overlap = Literal["step"]

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(value: int | str, name: str = "size") -> int:
    """Bytes from an ``int`` or from text such as ``"64 MiB"`` or ``"2GB"``.

    Raises:
        TypeError: ``value`` is neither an int nor a str.
        ValueError: the text is not a whole, non-negative number of bytes.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"{name} expects bytes as an int or text such as '64 MiB', got {value!r}")
    if isinstance(value, int):
        nbytes: float = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower())
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"{name} expects bytes such as '64 MiB' or '2GB', got {value!r}")
        nbytes = float(match[1]) * _UNITS[match[2]]
    if nbytes < 0 or nbytes != int(nbytes):
        raise ValueError(f"{name} expects a whole, non-negative number of bytes, got {value!r}")
    return int(nbytes)


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """How an optimizer offloads. Every field has a safe default.

    Attributes:
        step_device: where the update is computed. ``"auto"`` is ``"cuda"`` for parameters in HBM
            and the CPU for parameters on the CPU. With ``"cpu"`` ``step()`` waits for the host.
        memory_kind: how host state is allocated. ``"pinned"``; ``"managed"``, which stays on the
            host and is updated there in place; ``"system"``, ordinary memory, where the device
            reaches it; ``"device"`` keeps all state in HBM. ``"auto"``: as measured on this
            machine, ``"pinned"`` unless another kind is faster.
        transfer: how host state crosses the link. ``"copy_engine"`` copies it through staging
            buffers and leaves compute alone; with ``"kernel"`` the update reads and writes host
            memory where it lies, which needs no staging buffer. ``"auto"``: as measured on this
            machine for pinned memory; managed and system memory take the kernel.
        ctas: thread blocks of an update in place; 0 takes the fewest that fill the link, as
            measured on this machine.
        master: how bf16 and fp16 parameters keep an fp32 master; fp32 parameters are their own.
            ``"split"`` (``"auto"``) keeps only the 16 bits that the bf16 weight does not have: 2
            bytes a parameter less, exact, with the weight rounded up at a tie; fp16 parameters
            take ``"fp32"``, an array of its own. ``"none"`` updates the parameter in its dtype.
        moments: format of ``exp_avg`` and ``exp_avg_sq``: ``"fp32"``; ``"bf16"``, stochastically
            rounded; ``"int8"``, non-linear codes with a scale for each 128 elements. A parameter
            group may have a ``"moments"`` of its own (fp32 for embeddings, say).
        moments_fp32_below: parameters with fewer elements keep fp32 moments in any case.
        bucket_bytes: the granularity: host-state bytes moved and stepped together.
        staging_buffers: HBM buffers of one bucket each that state streams through (2 or more).
        hbm_state_bytes: bytes of state that may stay in HBM; they are then never moved.
        min_offload_bytes: parameters with less state than this keep it in HBM.
        overlap: what hides the transfers. ``"step"``: the buckets of one step hide one another.
        cpu_threads: threads of a CPU step; 0 takes the CPUs this process may run on.
        pin_memory: pin host state. ``False`` (or a refused pin, with a warning) is slower.
    """

    step_device: StepDevice = "auto"
    memory_kind: MemoryKind = "auto"
    transfer: Transfer = "auto"
    ctas: int = 0
    master: Master = "auto"
    moments: Moments = "fp32"
    moments_fp32_below: int = 4096
    bucket_bytes: int = 48 << 20
    staging_buffers: int = 4
    hbm_state_bytes: int = 0
    min_offload_bytes: int = 0
    overlap: Overlap = "step"
    cpu_threads: int = 0
    pin_memory: bool = True

    def __post_init__(self) -> None:
        for name, literal in _CHOICES.items():
            value = getattr(self, name)
            if value not in get_args(literal):
                expected = ", ".join(repr(choice) for choice in get_args(literal))
                raise ValueError(f"{name} expects one of {expected}, got {value!r}")
        for name in ("bucket_bytes", "hbm_state_bytes", "min_offload_bytes"):
            object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        for name, least in (
            ("bucket_bytes", 4096),
            ("staging_buffers", 2),
            ("cpu_threads", 0),
            ("ctas", 0),
            ("moments_fp32_below", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} expects an int of {least} or more, got {value!r}")
        if not isinstance(self.pin_memory, bool):
            raise ValueError(f"pin_memory expects True or False, got {self.pin_memory!r}")

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values: ``OffloadConfig.of(config.to_dict())`` equals ``config``."""
        return dataclasses.asdict(self)

    @classmethod
    def of(
        cls, value: OffloadConfig | Mapping[str, Any] | str | os.PathLike[str] | None
    ) -> OffloadConfig:
        """A config from a config, a mapping, the path of a TOML file, or ``None`` (defaults).

        A TOML file holds the fields at its top level or in a table ``[ghoffload]``. Environment
        variables named ``GHOFFLOAD_`` and the field in capitals (``GHOFFLOAD_BUCKET_BYTES=64MiB``)
        override mappings, files and defaults; they do not touch an ``OffloadConfig`` that the
        program built itself.

        Raises:
            TypeError: ``value`` is none of these.
            ValueError: an unknown option or a bad value; nothing was changed.
        """
        if isinstance(value, OffloadConfig):
            return value
        if value is None:
            fields: dict[str, Any] = {}
        elif isinstance(value, Mapping):
            fields = dict(value)
        elif isinstance(value, (str, os.PathLike)):
            fields = _read_toml(Path(value))
        else:
            raise TypeError(
                "config expects an OffloadConfig, a mapping, a path of a TOML file or None, "
                f"got {type(value).__name__}"
            )
        known = {field.name: field.default for field in dataclasses.fields(cls)}
        unknown = [str(name) for name in fields if name not in known]
        if unknown:
            raise ValueError(
                f"unknown option {', '.join(map(repr, unknown))}; the options are "
                f"{', '.join(known)}"
            )
        for name, default in known.items():
            text = os.environ.get(ENVIRONMENT_PREFIX + name.upper())
            if text is not None:
                fields[name] = _from_text(text, default, ENVIRONMENT_PREFIX + name.upper())
        return cls(**fields)


_CHOICES: dict[str, Any] = {
    "step_device": StepDevice,
    "memory_kind": MemoryKind,
    "transfer": Transfer,
    "master": Master,
    "moments": Moments,
    "overlap": Overlap,
}


def _from_text(text: str, default: Any, name: str) -> Any:
    if isinstance(default, bool):
        if text.lower() not in ("0", "1", "true", "false"):
            raise ValueError(f"{name} expects 0, 1, true or false, got {text!r}")
        return text.lower() in ("1", "true")
    return parse_bytes(text, name) if isinstance(default, int) else text


def _read_toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"config file {str(path)!r} cannot be read: {error}") from error
    return cast("dict[str, Any]", document.get("ghoffload", document))
