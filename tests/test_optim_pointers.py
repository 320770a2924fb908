"""Weights and gradients that are elsewhere, or of another kind, at each step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from optim_tools import CPU, Place, everywhere, parameters, same_weights, set_grads
from torch import Tensor

from ghoffload import OffloadAdamW

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def fresh(params: list[Tensor], step: int) -> None:
    """New gradients while the old ones are still held: none gets an old one's memory."""
    held = [p.grad for p in params]
    for p in params:
        p.grad = None
    set_grads(params, step)
    del held


def in_place(params: list[Tensor], step: int) -> None:
    old = [p.grad for p in params]
    set_grads(params, step)
    for p, grad in zip(params, old, strict=True):
        if grad is not None:
            p.grad = grad.copy_(p.grad)


def moved(params: list[Tensor], step: int) -> None:
    in_place(params, step)
    for p in params[step % 2 :: 2]:
        p.data = p.data.clone()


def other_dtype(params: list[Tensor], step: int) -> None:
    set_grads(params, step)
    for p in params[step % 3 :: 3]:
        if step % 2:
            grad = p.grad.to(torch.float16)
            p.grad = None
            p.grad_dtype = None
            p.grad = grad


def missing(params: list[Tensor], step: int) -> None:
    in_place(params, step)
    if step % 2:
        for p in params[step % 3 :: 3]:
            p.grad = None


def strided(params: list[Tensor], step: int) -> None:
    set_grads(params, step)
    if step % 2:
        for p in params:
            p.grad = torch.stack([p.grad, p.grad], dim=-1)[..., 0]


@DTYPES
@pytest.mark.parametrize("change", [fresh, in_place, moved, other_dtype, missing, strided])
@everywhere
def test_every_step_reads_what_is_there_then(
    dtype: torch.dtype, change: Callable[[list[Tensor], int], None], place: Place
) -> None:
    ours = parameters(dtype=dtype)
    if change is other_dtype and not hasattr(ours[0], "grad_dtype"):
        pytest.skip("gradients have the dtype of their parameter in this torch")
    optimizer = OffloadAdamW(ours, lr=1e-2, config=place.config())
    expected = parameters(dtype=dtype)
    theirs = OffloadAdamW(expected, lr=1e-2, machine="cpu", config=CPU.config())
    for step in range(5):
        change(ours, step)
        optimizer.step()
        change(expected, step)
        # An optimizer that steps for the first time has nothing left from earlier steps.
        known = theirs.state_dict(native=True)
        theirs = OffloadAdamW(expected, lr=1e-2, machine="cpu", config=CPU.config())
        if step:
            theirs.load_state_dict(known)
        theirs.step()
        assert same_weights(ours, expected), step


@everywhere
def test_the_last_gradients_are_not_kept_alive(place: Place) -> None:
    import gc
    import weakref

    ours = parameters((40, 60), (7,))
    optimizer = OffloadAdamW(ours, config=place.config())
    set_grads(ours, 0)
    optimizer.step()
    optimizer.synchronize()
    known = [weakref.ref(p.grad) for p in ours]
    optimizer.zero_grad()
    gc.collect()
    assert [ref() for ref in known] == [None, None]
