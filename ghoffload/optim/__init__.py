"""Optimizers whose state lives in host memory."""

from ghoffload.optim.adam import OffloadAdam, OffloadAdamW

__all__ = ["OffloadAdam", "OffloadAdamW"]
