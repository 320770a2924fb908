"""Activations: what the forward saves spills to the host and is back before backward asks."""

from ghoffload.activations.context import offload_activations, offload_module
from ghoffload.activations.mover import release
from ghoffload.activations.policy import Saved

__all__ = ["Saved", "offload_activations", "offload_module", "release"]
