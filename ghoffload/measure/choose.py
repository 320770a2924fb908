"""How ``auto`` resolves: memory kind, transfer and CTAs, each with its reason.

Note [a margin]
    The default stands unless something else is measured more than 5 % faster: less is noise, and
    the default has more to say for itself. Pinned memory works with both ways of transfer. Copy
    engines cost compute nothing, while a kernel beside a matrix product takes SMs from it; a
    kernel wins only for a step that runs alone, where copy engines are slow in one direction (as
    some coherent machines' are on the way back) or share one engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from ghoffload.config import OffloadConfig
from ghoffload.kernels.build import BULK_COPIES
from ghoffload.measure.rates import KernelRate, Rates

MARGIN = 1.05
DEFAULT_CTAS = 4
"""Where nothing was measured: what fills a PCIe 5 x16 link by bulk copies, both ways."""

Kind = Literal["pinned", "managed", "system", "device", "pageable"]
Way = Literal["copy_engine", "kernel"]

_IN_PLACE: tuple[Kind, ...] = ("managed", "system")  # no copy engine: 7 GB/s from managed memory
_INT8 = "int8 moments in place are bound by the arithmetic of few CTAs, not by the link"


class HasMemoryKinds(Protocol):
    """A machine, as far as choosing is concerned."""

    @property
    def memory_kinds(self) -> frozenset[str]:
        """Kinds that its kernels reach."""

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Of its GPU."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What an optimizer uses.

    Attributes:
        memory_kind: of host state; ``"pageable"`` where pinning is turned off.
        transfer: how host state crosses the link.
        ctas: blocks of an update in place.
        reasons: for each of these names a sentence without its full stop.
    """

    memory_kind: Kind
    transfer: Way
    ctas: int
    reasons: Mapping[str, str]


def resolve(config: OffloadConfig, machine: HasMemoryKinds | None, rates: Rates | None) -> Choice:
    """What ``config`` means on a machine with these rates.

    Args:
        config: what it sets holds; what it leaves to ``"auto"`` is chosen.
        machine: what its kernels reach; ``None`` for a step on the CPU without a GPU.
        rates: as measured; ``None`` gives the defaults.

    Raises:
        ValueError: the settings contradict one another, or ask for an update in place of a GPU
            that has no bulk copies.
    """
    if config.memory_kind in _IN_PLACE and config.transfer == "copy_engine":
        raise ValueError(
            f"memory_kind={config.memory_kind!r} expects transfer='kernel' or 'auto', got "
            "'copy_engine': copy engines are several times slower there than on pinned memory"
        )
    if (
        config.transfer == "kernel"
        and not config.pin_memory
        and config.memory_kind not in _IN_PLACE
    ):
        raise ValueError(
            "transfer='kernel' expects memory that the GPU reaches, pinned, managed or system; got "
            "pin_memory=False"
        )
    reached = machine.memory_kinds if machine is not None else frozenset()
    on_cpu = machine is None or config.step_device == "cpu"
    rates = rates if rates is not None and not on_cpu else None
    bound = None if machine is None or on_cpu else _no_updates_in_place(machine)
    if bound is not None:
        if config.memory_kind in _IN_PLACE or (
            config.transfer == "kernel" and config.memory_kind != "device"
        ):
            raise ValueError(
                "transfer='kernel' and memory_kind='managed' and 'system' update host state in "
                f"place, and {bound}; use transfer='copy_engine' and memory_kind='pinned'"
            )
        if rates is not None:
            rates = dataclasses.replace(rates, pinned=None, managed=None, system=None)
    kind, why_kind = _memory_kind(config, machine is not None, reached, rates)
    way, why_way = _transfer(config, kind, on_cpu, rates, bound)
    ctas, why_ctas = _ctas(config, kind, rates)
    return Choice(
        memory_kind=kind,
        transfer=way,
        ctas=ctas,
        reasons={"memory_kind": why_kind, "transfer": why_way, "ctas": why_ctas},
    )


def _no_updates_in_place(machine: HasMemoryKinds) -> str | None:
    """Why a kernel cannot update host state where it lies; ``None`` where it can."""
    if machine.compute_capability >= BULK_COPIES:
        return None
    least, got = (".".join(map(str, chip)) for chip in (BULK_COPIES, machine.compute_capability))
    return f"that needs bulk copies (compute capability {least} or later), this GPU has {got}"


def _memory_kind(
    config: OffloadConfig, gpu: bool, reached: frozenset[str], rates: Rates | None
) -> tuple[Kind, str]:
    asked = config.memory_kind
    if asked in ("auto", "pinned") and not gpu:
        return "system", "there is no GPU to pin host memory for"
    if asked in ("auto", "pinned") and not config.pin_memory:
        return "pageable", "pin_memory=False turns pinning off"
    if asked != "auto":
        if asked not in reached:
            return asked, f"memory_kind={asked!r} asks for it, and this device does not reach it"
        return asked, f"memory_kind={asked!r} asks for it"
    if config.step_device == "cpu":
        return "pinned", "the CPU steps, and copies of weights and gradients from it are fast"
    # Copy engines, asked for or better, settle it: no other kind is fit for them.
    others = {} if config.transfer == "copy_engine" else _others(reached, rates)
    if rates is not None and rates.pin_refusal is not None:
        if others:
            best = max(others, key=lambda kind: others[kind].rate)
            return best, (
                f"pinning was refused here ({rates.pin_refusal}), and a kernel moves "
                f"{_gb(others[best].rate)} in place both ways"
            )
        return "pinned", (
            f"pinning was refused when measured ({rates.pin_refusal}) and will be tried again; "
            "pageable memory, which is slow, takes its place"
        )
    pinned = _best_of_pinned(config, rates)
    if pinned is None:
        return "pinned", "either way of transfer is fast from it; nothing was measured to compare"
    faster = {kind: found for kind, found in others.items() if found.rate > MARGIN * pinned}
    if faster and not (config.moments == "int8" and config.transfer == "auto"):
        best = max(faster, key=lambda kind: faster[kind].rate)
        return best, (
            f"measured both ways: {_gb(faster[best].rate)} by kernel in place, and at most "
            f"{_gb(pinned)} from pinned memory"
        )
    if not others:
        return "pinned", f"measured {_gb(pinned)} both ways, and no other kind to compare with"
    if faster:
        return "pinned", _INT8
    compared = ", ".join(f"{kind} {_gb(found.rate)}" for kind, found in others.items())
    return "pinned", (
        f"measured both ways: {_gb(pinned)}; by kernel in place {compared}, not 5 % more"
    )


def _others(reached: frozenset[str], rates: Rates | None) -> dict[Kind, KernelRate]:
    if rates is None:
        return {}
    found = {kind: rates.by_kernel(kind) for kind in _IN_PLACE if kind in reached}
    return {kind: rate for kind, rate in found.items() if rate is not None}


def _best_of_pinned(config: OffloadConfig, rates: Rates | None) -> float | None:
    """Both ways, by the ways of transfer that ``config`` leaves open."""
    if rates is None:
        return None
    engine = rates.both if config.transfer != "kernel" else None
    kernel = rates.pinned.rate if rates.pinned and config.transfer != "copy_engine" else None
    return max((rate for rate in (engine, kernel) if rate is not None), default=None)


def _transfer(
    config: OffloadConfig, kind: Kind, on_cpu: bool, rates: Rates | None, bound: str | None
) -> tuple[Way, str]:
    if config.transfer != "auto":
        return config.transfer, f"transfer={config.transfer!r} asks for it"
    if kind == "device":
        return "copy_engine", "all state is in HBM, so nothing crosses the link"
    if on_cpu:
        return "copy_engine", "the CPU steps, and state stays where it is"
    if kind == "pageable":
        return "copy_engine", "from memory that is not pinned it blocks the host"
    if kind in _IN_PLACE:
        return "kernel", f"copy engines are slow on {kind} memory; the update runs in place"
    if bound is not None:
        return "copy_engine", f"a kernel would update state in place: {bound}"
    beside = "copy engines cost nothing beside compute"
    engine = rates.both if rates is not None else None
    kernel = rates.pinned.rate if rates is not None and rates.pinned is not None else None
    if engine is None or kernel is None:
        return "copy_engine", f"{beside}; nothing was measured to compare"
    if config.moments == "int8":
        return "copy_engine", _INT8
    if kernel > MARGIN * engine:
        return "kernel", (
            f"measured both ways: {_gb(kernel)} by kernel in place, {_gb(engine)} by copy engine; "
            f"so for a step by itself, though {beside}"
        )
    return "copy_engine", (
        f"measured both ways: {_gb(engine)} by copy engine, {_gb(kernel)} by kernel in place; and "
        f"{beside}"
    )


def _ctas(config: OffloadConfig, kind: Kind, rates: Rates | None) -> tuple[int, str]:
    if config.ctas > 0:
        return config.ctas, f"ctas={config.ctas} asks for it"
    if rates is not None:
        for measured in (kind, "pinned", *_IN_PLACE):  # one link: another kind's is near enough
            found = rates.by_kernel(measured)
            if found is not None:
                return found.ctas, (
                    f"the fewest that filled the link on {measured} memory: {_gb(found.rate)}"
                )
    return DEFAULT_CTAS, "enough for PCIe 5; nothing was measured"


def _gb(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.1f} GB/s"
