"""Wrapping a torch optimizer: which can be, and how the wrapped one is put out of use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import Optimizer

WRAPPABLE: tuple[type[Optimizer], ...] = (torch.optim.Adam, torch.optim.AdamW)
"""Subclasses are not among them: their ``step`` may compute something else."""


def check_wrappable(
    title: str, inner: Optimizer, kinds: Sequence[type[Optimizer]], given: Sequence[str]
) -> None:
    """Refuse an optimizer that ``title`` cannot wrap, or arguments beside it.

    Args:
        kinds: the classes it may be of.
        given: names of the hyperparameters that were given beside it.

    Raises:
        TypeError, ValueError: why not.
    """
    if type(inner) not in kinds:
        expected = " or ".join(f"torch.optim.{kind.__name__}" for kind in kinds)
        raise TypeError(f"{title} wraps {expected}, got {type(inner).__name__}")
    taken_by = getattr(inner.step, "_taken_by", None)
    if taken_by is not None:
        raise ValueError(f"this optimizer was wrapped before, by an {taken_by}")
    if given:
        raise ValueError(
            f"{', '.join(given)} beside a wrapped optimizer: its own hyperparameters are "
            "taken over; set them there"
        )


def retire(inner: Optimizer, title: str) -> None:
    """Free the state of an optimizer that was wrapped and make its methods say where to turn.

    Its groups stay: LR schedulers made on it change them, and ``zero_grad`` reads them.
    """
    inner.state.clear()
    for name in ("step", "add_param_group", "state_dict", "load_state_dict"):
        setattr(inner, name, _refuse(name, title))


def _refuse(name: str, title: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"this optimizer was wrapped: call {name}() of the {title} around it")

    refuse._taken_by = title  # type: ignore[attr-defined]
    refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers look for it
    return refuse
