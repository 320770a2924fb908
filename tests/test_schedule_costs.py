"""What a step asks of the machine: launches and copies go by the bucket, bytes by the state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ghoffload
from ghoffload.machine.virtual import VirtualMachine
from ghoffload.optim.buckets import SPLIT_ALIGNMENT

MIB = 1 << 20


def one_step(parameters: list[nn.Parameter], **config: object) -> VirtualMachine:
    machine = VirtualMachine(check=True)
    with ghoffload.use_machine(machine):
        optimizer = ghoffload.OffloadAdamW(parameters, config=config)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()  # reserves what it needs
        machine.traffic.reset()
        optimizer.step()
        optimizer.synchronize()
    return machine


def test_2000_tensors_of_1_kb_cost_by_the_bucket() -> None:
    parameters = [nn.Parameter(torch.ones(256)) for _ in range(2000)]
    machine = one_step(parameters)
    # 4 MB of state is one bucket by bytes and four by the pieces that one launch can take.
    assert machine.traffic.launches == 1 + 4
    assert machine.traffic.copies == 2 * 2 * 4  # in and back, exp_avg and exp_avg_sq


@pytest.mark.parametrize(
    ("dtype", "state_bytes"), [(torch.bfloat16, 10), (torch.float16, 12), (torch.float32, 8)]
)
def test_the_state_moves_once_each_way(dtype: torch.dtype, state_bytes: int) -> None:
    count = 3 * MIB
    machine = one_step([nn.Parameter(torch.ones(count, dtype=dtype))], bucket_bytes=4 * MIB)
    assert machine.traffic.h2d_bytes == machine.traffic.d2h_bytes == count * state_bytes
    bucket = 4 * MIB // state_bytes // SPLIT_ALIGNMENT * SPLIT_ALIGNMENT
    assert machine.traffic.launches == 1 + -(-count // bucket)


@pytest.mark.parametrize("option", [{"memory_kind": "device"}, {"transfer": "kernel"}], ids=str)
def test_state_that_stays_where_it_is_is_not_copied(option: dict[str, object]) -> None:
    machine = one_step([nn.Parameter(torch.ones(MIB))], **option)
    assert machine.traffic.copies == 0
    assert machine.traffic.launches == 2
