"""How ``auto`` resolves, on rates of machines that nobody here has (facts with their sources).

GH200-96/480: copy engines 378 and 297 GB/s, about 370 both ways, kernels 370-386. GH200-96/120 of
a quad node: 415 and 170 by engine, 474-489 both ways by kernel. GB200: 176 and 183 loaded. H200 on
PCIe 5: 96.2 by engine, 84.7 by kernel with 4 CTAs.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ghoffload.config import OffloadConfig
from ghoffload.measure import Choice, KernelRate, Rates, resolve

EVERY = frozenset({"device", "pinned", "managed", "system"})
NO_SYSTEM = EVERY - {"system"}
PINNED_ALONE = frozenset({"device", "pinned"})


def kernel(rate: float, ctas: int) -> KernelRate:
    return KernelRate(rate=rate * 1e9, ctas=ctas)


def rates(h2d: float, d2h: float, both: float, **kinds: Any) -> Rates:
    return Rates(h2d=h2d * 1e9, d2h=d2h * 1e9, both=both * 1e9, **kinds)


GH200 = rates(
    378, 297, 370, pinned=kernel(378, 32), managed=kernel(376, 32), system=kernel(380, 32)
)
QUAD = rates(415, 170, 340, pinned=kernel(474, 16), managed=kernel(470, 16), system=kernel(489, 16))
GB200 = rates(176, 183, 350, pinned=kernel(355, 8), managed=kernel(350, 8), system=kernel(352, 8))
H200 = rates(54.9, 55, 96.2, pinned=kernel(84.7, 4), managed=kernel(84.8, 4))


def chosen(
    rates: Rates | None,
    reached: frozenset[str] = EVERY,
    chip: tuple[int, int] = (9, 0),
    **config: Any,
) -> Choice:
    machine = types.SimpleNamespace(memory_kinds=reached, compute_capability=chip)
    return resolve(OffloadConfig(**config), machine, rates)


def short(choice: Choice) -> tuple[str, str, int]:
    assert set(choice.reasons) == {"memory_kind", "transfer", "ctas"}
    assert all(text and not text.endswith(".") for text in choice.reasons.values())
    return choice.memory_kind, choice.transfer, choice.ctas


@pytest.mark.parametrize(
    ("measured", "reached", "expected"),
    [
        (GH200, EVERY, ("pinned", "copy_engine", 32)),
        (QUAD, EVERY, ("pinned", "kernel", 16)),  # system is 3 % faster: not enough
        (GB200, EVERY, ("pinned", "copy_engine", 8)),
        (H200, NO_SYSTEM, ("pinned", "copy_engine", 4)),
        (dataclasses.replace(H200, managed=None), PINNED_ALONE, ("pinned", "copy_engine", 4)),
        (None, EVERY, ("pinned", "copy_engine", 4)),
        (Rates(), EVERY, ("pinned", "copy_engine", 4)),
    ],
    ids=["gh200", "quad gh200", "gb200", "h200", "no managed", "unmeasured", "empty"],
)
def test_machines(measured: Rates | None, reached: frozenset, expected: tuple) -> None:
    assert short(chosen(measured, reached)) == expected


def test_reasons_have_the_figures() -> None:
    why = chosen(H200, NO_SYSTEM).reasons
    assert why["memory_kind"] == (
        "measured both ways: 96.2 GB/s; by kernel in place managed 84.8 GB/s, not 5 % more"
    )
    assert why["transfer"] == (
        "measured both ways: 96.2 GB/s by copy engine, 84.7 GB/s by kernel in place; and copy "
        "engines cost nothing beside compute"
    )
    assert (
        "474.0 GB/s by kernel in place, 340.0 GB/s by copy engine"
        in (chosen(QUAD).reasons["transfer"])
    )
    assert "step by itself" in chosen(QUAD).reasons["transfer"]
    assert "nothing was measured" in chosen(None).reasons["transfer"]


def test_another_kind_must_be_more_than_five_percent_faster() -> None:
    base = rates(50, 50, 100, pinned=kernel(90, 4))
    near = dataclasses.replace(base, managed=kernel(105, 8))
    assert short(chosen(near)) == ("pinned", "copy_engine", 4)
    far = dataclasses.replace(base, managed=kernel(105.1, 8), system=kernel(105.2, 2))
    assert short(chosen(far)) == ("system", "kernel", 2)
    assert short(chosen(far, NO_SYSTEM)) == ("managed", "kernel", 8)
    assert short(chosen(far, PINNED_ALONE)) == ("pinned", "copy_engine", 4)
    # A copy engine that was asked for is fit for pinned memory alone.
    assert short(chosen(far, transfer="copy_engine")) == ("pinned", "copy_engine", 4)


def test_a_kernel_must_be_more_than_five_percent_faster() -> None:
    assert chosen(rates(50, 50, 100, pinned=kernel(105, 4))).transfer == "copy_engine"
    assert chosen(rates(50, 50, 100, pinned=kernel(105.1, 4))).transfer == "kernel"


def test_int8_moments_are_staged_unless_asked_otherwise() -> None:
    fast = rates(50, 50, 100, pinned=kernel(300, 4), managed=kernel(400, 4))
    assert short(chosen(fast, moments="fp32")) == ("managed", "kernel", 4)
    for moments in ("fp32", "int8"):
        assert short(chosen(fast, moments=moments, transfer="kernel")) == ("managed", "kernel", 4)
    choice = chosen(fast, moments="int8")
    assert short(choice) == ("pinned", "copy_engine", 4)
    assert "arithmetic" in choice.reasons["memory_kind"]
    assert "arithmetic" in choice.reasons["transfer"]
    assert chosen(fast, moments="int8", memory_kind="managed").transfer == "kernel"
    refused = dataclasses.replace(fast, pinned=None, pin_refusal="limit")
    assert chosen(refused, moments="int8").memory_kind == "managed"


def test_an_explicit_kernel_compares_kernels_alone() -> None:
    measured = rates(55, 55, 96, pinned=kernel(80, 4), managed=kernel(85, 8))
    assert short(chosen(measured)) == ("pinned", "copy_engine", 4)
    assert short(chosen(measured, transfer="kernel")) == ("managed", "kernel", 8)


def test_explicit_settings_win() -> None:
    assert short(chosen(QUAD, memory_kind="pinned", transfer="copy_engine", ctas=3)) == (
        "pinned",
        "copy_engine",
        3,
    )
    assert short(chosen(H200, memory_kind="managed")) == ("managed", "kernel", 4)
    choice = chosen(None, memory_kind="system")
    assert short(choice) == ("system", "kernel", 4)
    assert choice.reasons["memory_kind"] == "memory_kind='system' asks for it"
    unreached = chosen(None, NO_SYSTEM, memory_kind="system")
    assert "does not reach it" in unreached.reasons["memory_kind"]
    assert short(chosen(H200, memory_kind="device"))[:2] == ("device", "copy_engine")
    assert "nothing crosses" in chosen(H200, memory_kind="device").reasons["transfer"]


@pytest.mark.parametrize("kind", ["managed", "system"])
def test_copy_engines_never_copy_managed_or_system_memory(kind: str) -> None:
    with pytest.raises(ValueError, match=f"memory_kind='{kind}' expects transfer='kernel' or"):
        chosen(H200, memory_kind=kind, transfer="copy_engine")


def test_without_pins() -> None:
    assert short(chosen(H200, pin_memory=False)) == ("pageable", "copy_engine", 4)
    with pytest.raises(ValueError, match="got pin_memory=False"):
        chosen(H200, pin_memory=False, transfer="kernel")
    assert short(chosen(H200, pin_memory=False, memory_kind="managed"))[0] == "managed"
    refused = Rates(pin_refusal="NOT_PERMITTED", managed=kernel(84, 4), system=kernel(80, 2))
    assert short(chosen(refused)) == ("managed", "kernel", 4)
    assert short(chosen(refused, PINNED_ALONE))[:2] == ("pinned", "copy_engine")
    assert "NOT_PERMITTED" in chosen(refused, PINNED_ALONE).reasons["memory_kind"]


def test_ctas_of_another_kind_are_better_than_none() -> None:
    measured = rates(50, 50, 90, pinned=kernel(80, 8))
    assert short(chosen(measured, memory_kind="managed")) == ("managed", "kernel", 8)


def test_a_step_on_the_cpu_is_no_matter_of_the_link() -> None:
    assert short(chosen(QUAD, step_device="cpu"))[:2] == ("pinned", "copy_engine")
    assert short(resolve(OffloadConfig(), None, None))[:2] == ("system", "copy_engine")


figures = st.none() | st.floats(1e9, 1e12)
kernels = st.none() | st.builds(KernelRate, rate=st.floats(1e9, 1e12), ctas=st.integers(1, 64))


@given(
    both=figures,
    kinds=st.fixed_dictionaries(dict.fromkeys(("pinned", "managed", "system"), kernels)),
    refused=st.none() | st.just("no"),
    config=st.fixed_dictionaries(
        {
            "memory_kind": st.sampled_from(["auto", "pinned", "managed", "system", "device"]),
            "transfer": st.sampled_from(["auto", "copy_engine", "kernel"]),
            "ctas": st.integers(0, 9),
            "pin_memory": st.booleans(),
        }
    ),
)
def test_no_figures_lead_to_what_cannot_be(
    both: float | None, kinds: dict, refused: str | None, config: dict
) -> None:
    try:
        choice = chosen(Rates(both=both, pin_refusal=refused, **kinds), NO_SYSTEM, **config)
    except ValueError:
        assert config["transfer"] != "auto"
        return
    kind, way, ctas = short(choice)
    assert not (kind in ("managed", "system") and way == "copy_engine")
    assert kind != "system" or config["memory_kind"] == "system"
    assert ctas == (config["ctas"] or ctas) >= 1
    assert config["transfer"] in ("auto", way)


# --- GPUs without bulk copies --------------------------------------------------------------------

KERNEL_WINS = dataclasses.replace(QUAD, both=100e9)
MANAGED_WINS = rates(54.9, 55, 50, managed=kernel(84.8, 4))
MANAGED_ALONE = Rates(pin_refusal="NOT_PERMITTED", managed=kernel(84, 4))


@pytest.mark.parametrize("measured", [KERNEL_WINS, MANAGED_WINS, MANAGED_ALONE, GH200, None])
@pytest.mark.parametrize("config", [{}, {"memory_kind": "pinned"}, {"transfer": "copy_engine"}])
def test_auto_never_updates_in_place_without_bulk_copies(
    measured: Rates | None, config: dict[str, Any]
) -> None:
    for chip in ((8, 0), (8, 9)):
        assert short(chosen(measured, chip=chip, **config))[:2] == ("pinned", "copy_engine")


def test_why_a_kernel_was_not_chosen() -> None:
    assert short(chosen(KERNEL_WINS))[1] == "kernel"
    assert short(chosen(MANAGED_WINS))[0] == short(chosen(MANAGED_ALONE))[0] == "managed"
    assert chosen(KERNEL_WINS, chip=(8, 6)).reasons["transfer"] == (
        "a kernel would update state in place: that needs bulk copies (compute capability 9.0 or "
        "later), this GPU has 8.6"
    )


@pytest.mark.parametrize(
    "config", [{"transfer": "kernel"}, {"memory_kind": "managed"}, {"memory_kind": "system"}]
)
def test_an_update_in_place_that_is_asked_for_is_refused(config: dict[str, Any]) -> None:
    chosen(QUAD, chip=(10, 0), **config)
    with pytest.raises(ValueError) as caught:
        chosen(QUAD, chip=(8, 0), **config)
    assert str(caught.value) == (
        "transfer='kernel' and memory_kind='managed' and 'system' update host state in place, and "
        "that needs bulk copies (compute capability 9.0 or later), this GPU has 8.0; use "
        "transfer='copy_engine' and memory_kind='pinned'"
    )
    with pytest.raises(ValueError):
        chosen(None, chip=(8, 0), **config)
    # All state in HBM, or a step on the CPU: no update in place is asked for.
    if config == {"transfer": "kernel"}:
        chosen(None, chip=(8, 0), memory_kind="device", **config)
        chosen(None, chip=(8, 0), step_device="cpu", **config)
