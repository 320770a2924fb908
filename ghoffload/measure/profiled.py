"""What a profile says in place of a measurement."""

from __future__ import annotations

from ghoffload.machine.simulated import Profile
from ghoffload.measure.rates import KernelRate, Rates

_CTAS = 4
"""Thread blocks with which a kernel fills a link; see BENCHMARKS.md for PCIe 5."""


def rates_from(profile: Profile) -> Rates:
    """The figures of a simulated machine, for as many bytes one way as the other."""
    kernel = _both(profile, "kernel")
    return Rates(
        h2d=profile["h2d_engine"],
        d2h=profile["d2h_engine"],
        both=_both(profile, "engine"),
        hbm=profile["hbm"],
        pinned=KernelRate(rate=kernel, ctas=_CTAS),
        managed=KernelRate(rate=kernel, ctas=_CTAS),
    )


def _both(profile: Profile, by: str) -> float:
    slower = min(profile[f"h2d_{by}"], profile[f"d2h_{by}"])
    return min(profile[f"both_{by}"], 2 * slower)
