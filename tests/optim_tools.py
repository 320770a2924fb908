"""What the optimizer's tests share: places to run in, models, comparison of bits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import ghoffload
from ghoffload import OffloadAdam, OffloadAdamW

PAIRS = [(OffloadAdam, torch.optim.Adam), (OffloadAdamW, torch.optim.AdamW)]


@dataclass(frozen=True)
class Place:
    """Where an optimizer runs: on the CPU, or on the virtual machine in either way to step."""

    name: str
    step_device: str = "auto"
    virtual: bool = False

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.virtual:
                use = ghoffload.use_machine("virtual", order="adversarial", seed=7, check=True)
                stack.enter_context(use)
            yield

    def config(self, **fields: Any) -> dict[str, Any]:
        """Buckets of 1,024 elements, so that a parameter of a few thousand spans several."""
        return {
            "bucket_bytes": 4096,
            "staging_buffers": 2,
            "step_device": self.step_device,
        } | fields


CPU = Place("cpu")
PLACES = (CPU, Place("virtual", "cuda", virtual=True), Place("virtual-host", "cpu", virtual=True))


def everywhere(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test, which takes ``place``, once in each place."""

    @pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
    @functools.wraps(test)
    def run(*args: Any, place: Place, **kwargs: Any) -> None:
        with place.entered():
            test(*args, place=place, **kwargs)

    return run


SHAPES = ((1500, 3), (7,), (), (40, 60), (1,), (0, 5), (1025,))


def parameters(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[torch.nn.Parameter]:
    """Fresh parameters of ``shapes`` (default: ``SHAPES``), the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes or SHAPES)
    return [torch.nn.Parameter(tensor) for tensor in made]


def set_grads(params: Iterable[Tensor], step: int, scale: float = 1.0) -> None:
    """Give each parameter the gradient of step number ``step``."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def train(optimizer: torch.optim.Optimizer, *, start: int = 0, steps: int = 3) -> None:
    """A few steps with gradients that depend on the step number alone."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(start, start + steps):
        set_grads(params, step)
        optimizer.step()


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor's elements in row-major order."""
    if tensor.is_meta:
        return b""
    dense = tensor.detach().cpu().resolve_neg().clone(memory_format=torch.contiguous_format)
    return dense.view(-1).view(torch.uint8).numpy().tobytes()


def snapshot(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights, state and hyperparameters as plain values: equal where the bits are equal."""
    weights, state = [], []
    for group in optimizer.param_groups:
        for p in group["params"]:
            weights.append(raw(p))
            entries = optimizer.state.get(p, {})
            state.append({n: raw(v) if isinstance(v, Tensor) else v for n, v in entries.items()})
    groups = [
        {k: repr(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups
    ]
    return {"weights": weights, "state": state, "groups": groups}


def same_weights(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    """Whether two lists of tensors are the same bit for bit."""
    return [raw(tensor) for tensor in first] == [raw(tensor) for tensor in second]


def assert_near(ours: Iterable[Tensor], theirs: Iterable[Tensor], tol: float = 2e-6) -> None:
    """Equal up to ``tol`` relative and a tenth of it absolute."""
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            mine.detach(), other.detach(), rtol=tol, atol=tol / 10, equal_nan=True
        )
