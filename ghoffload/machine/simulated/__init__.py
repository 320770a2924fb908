"""A machine that is not there: the runtime's own schedule on a clock, priced from a profile."""

from __future__ import annotations

from ghoffload.machine.simulated.machine import SimulatedMachine
from ghoffload.machine.simulated.profile import Figure, Profile, load_profile, profiles

__all__ = ["Figure", "Profile", "SimulatedMachine", "load_profile", "profiles"]
