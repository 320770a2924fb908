"""What a measurement found out, as a frozen value that JSON can hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class KernelRate:
    """What a kernel moves that reads host memory and writes other host memory.

    Attributes:
        rate: bytes a second, read and written together.
        ctas: the fewest blocks that reach 97 % of the best rate.
    """

    rate: float
    ctas: int


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Figures of one device and its host, in bytes a second; ``None``: not there or not measured.

    Attributes:
        uuid: of the device, or of the MIG slice.
        driver: the driver's version.
        source: digest of the kernels that measured.
        measured: when, in seconds since 1970.
        h2d: copies by engine to the device, from pinned memory.
        d2h: copies by engine from it.
        both: both at once, their sum.
        hbm: a copy within HBM, read and written together.
        pinned: by kernel on pinned memory.
        managed: by kernel on managed memory that stays on the host.
        system: by kernel on ordinary memory.
        pinned_bytes: how much host memory was pinned for it; 0 where that was refused.
        pin_refusal: what the driver said then.
        left_out: sentences: what could not be measured this time, and why.
        notes: sentences: what was measured and is not to be trusted, and why.
    """

    uuid: str = ""
    driver: str = ""
    source: str = ""
    measured: float = 0.0
    h2d: float | None = None
    d2h: float | None = None
    both: float | None = None
    hbm: float | None = None
    pinned: KernelRate | None = None
    managed: KernelRate | None = None
    system: KernelRate | None = None
    pinned_bytes: int = 0
    pin_refusal: str | None = None
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether another measurement on this machine could know no more."""
        return not self.left_out and self.pin_refusal is None

    def by_kernel(self, memory_kind: str) -> KernelRate | None:
        """The kernel's figure on memory of a kind."""
        kinds = {"pinned": self.pinned, "managed": self.managed, "system": self.system}
        return kinds.get(memory_kind)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: ``Rates.of(rates.to_dict())`` equals ``rates``, through JSON, too."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Rates:
        """What ``to_dict`` made.

        Raises:
            ValueError: the values are something else.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        if set(values) != names:
            raise ValueError(f"expected {', '.join(sorted(names))}, got {', '.join(values)}")
        made = dict(values)
        for name in ("uuid", "driver", "source"):
            _expect(isinstance(made[name], str), name, made[name])
        for name in ("h2d", "d2h", "both", "hbm"):
            _expect(made[name] is None or _positive(made[name]), name, made[name])
        for name in ("pinned", "managed", "system"):
            found = made[name]
            if found is not None:
                good = isinstance(found, Mapping) and set(found) == {"rate", "ctas"}
                _expect(good and _positive(found["rate"]), name, found)
                _expect(_whole(found["ctas"]) and found["ctas"] > 0, name, found)
                made[name] = KernelRate(**found)
        _expect(_positive(made["measured"]), "measured", made["measured"])
        _expect(_whole(made["pinned_bytes"]), "pinned_bytes", made["pinned_bytes"])
        refusal = made["pin_refusal"]
        _expect(refusal is None or isinstance(refusal, str), "pin_refusal", refusal)
        for name in ("left_out", "notes"):
            good = isinstance(made[name], (list, tuple))
            _expect(good and all(isinstance(x, str) for x in made[name]), name, made[name])
            made[name] = tuple(made[name])
        return cls(**made)


def _expect(good: bool, name: str, value: object) -> None:
    if not good:
        raise ValueError(f"{name} is not a figure of a measurement: {value!r}")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _positive(value: object) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value > 0
    )
