"""What this machine's link gives, measured once and remembered, and what follows from it.

``rates_of`` measures (under a second) or reads what was measured before, ``resolve`` turns the
figures and an ``OffloadConfig`` into what an optimizer uses, with a reason for each.
"""

from __future__ import annotations

from ghoffload.measure.choose import Choice, resolve
from ghoffload.measure.measuring import measure, under_load
from ghoffload.measure.rates import KernelRate, Rates
from ghoffload.measure.remembered import look_up, measuring_is_on, rates_of

__all__ = [
    "Choice",
    "KernelRate",
    "Rates",
    "look_up",
    "measure",
    "measuring_is_on",
    "rates_of",
    "resolve",
    "under_load",
]
