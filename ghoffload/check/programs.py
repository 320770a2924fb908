"""Small programs whose bits are known: run on any machine, they must give the same.

The tests run them, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ghoffload.machine import use_machine
from ghoffload.machine.protocol import Machine
from ghoffload.machine.virtual import VirtualMachine
from ghoffload.optim import OffloadAdamW

SHAPES = ((70, 301), (301,), (0,), (1,), (7,), (16, 5, 3, 3), (2048, 33), ())


def result(optimizer: OffloadAdamW, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Weights and state on the CPU, not to change any more."""
    values = [p.detach().cpu().clone() for p in parameters]
    for entries in optimizer.state_dict()["state"].values():
        values += [tensor.clone() for tensor in entries.values()]
    return values


def same_bits(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether two results agree in every bit."""

    def bits(tensor: Tensor) -> Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return len(first) == len(second) and all(
        a.dtype == b.dtype and torch.equal(bits(a), bits(b))
        for a, b in zip(first, second, strict=True)
    )


def synthetic(
    device: torch.device | str,
    config: Mapping[str, Any],
    *,
    machine: Machine | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    steps: int = 4,
    amsgrad: bool = False,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> list[Tensor]:
    """Steps on made-up weights and gradients; one parameter misses its gradient now and then."""
    generator = torch.Generator().manual_seed(7)

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    parameters = [nn.Parameter(random(shape)) for shape in shapes]
    optimizer = OffloadAdamW(
        parameters,
        lr=1e-2,
        weight_decay=0.1,
        amsgrad=amsgrad,
        config=dict(config),
        machine=machine,
    )
    for step in range(steps):
        for index, parameter in enumerate(parameters):
            grad = random(tuple(parameter.shape))
            parameter.grad = None if step % 3 == index == 1 else grad
        optimizer.step()
    return result(optimizer, parameters)


def train(
    model: nn.Module,
    inputs: Tensor,
    config: Mapping[str, Any],
    machine: VirtualMachine | None,
    *,
    amsgrad: bool = False,
) -> list[Tensor]:
    """A few steps of a model; on the CPU directly where there is no machine."""

    def loop() -> list[Tensor]:
        optimizer = OffloadAdamW(
            model.parameters(),
            lr=1e-2,
            amsgrad=amsgrad,
            config=dict(config),
            machine="cpu" if machine is None else None,
        )
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs).float().square().mean().backward()
            optimizer.step()
        return result(optimizer, list(model.parameters()))

    if machine is None:
        return loop()
    with use_machine(machine):
        return loop()


def wide_linear(
    machine: VirtualMachine | None, step_device: str = "cuda", outputs: int = 1024
) -> list[Tensor]:
    """Nearly all transfer: a small input, very many weights, split over several buckets."""
    torch.manual_seed(1)
    model = nn.Linear(32, outputs).to(torch.bfloat16)
    inputs = torch.randn(2, 32).to(torch.bfloat16)
    config: dict[str, Any] = {"bucket_bytes": outputs * 32 * 12 // 5, "staging_buffers": 2}
    config["step_device"] = "auto" if machine is None else step_device
    return train(model, inputs, config, machine)


def many_layers(machine: VirtualMachine | None, step_device: str = "cuda") -> list[Tensor]:
    """Small tensors, several sharing a bucket and some cut by one."""
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Linear(16, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 96), nn.Linear(96, 3)
    )
    config: dict[str, Any] = {"bucket_bytes": 16384, "staging_buffers": 3}
    config["step_device"] = "auto" if machine is None else step_device
    return train(model, torch.randn(4, 16), config, machine, amsgrad=True)


def two_streams(machine: VirtualMachine, config: Mapping[str, Any]) -> None:
    """Built on one stream, stepped on another, read on the first.

    The model is the second stream's alone, so the user has nothing to order between the two.
    """
    torch.manual_seed(3)
    other = machine.stream("user")
    with use_machine(machine):
        with machine.use_stream(other):
            model, inputs = nn.Linear(64, 128), torch.randn(4, 64)
        optimizer = OffloadAdamW(model.parameters(), config=dict(config))
        with machine.use_stream(other):
            for _ in range(2):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
        result(optimizer, [])


def everything(machine: VirtualMachine, step_device: str) -> None:
    """One program that needs every wait of a step device."""
    many_layers(machine, step_device)
    wide_linear(machine, step_device)
    two_streams(machine, {"bucket_bytes": 16384, "step_device": step_device})
    if step_device == "cuda":
        two_streams(machine, {"memory_kind": "device"})
        two_streams(machine, {"transfer": "kernel"})
        two_streams(machine, {"memory_kind": "managed"})
