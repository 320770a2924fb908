"""Long random sequences of everything a program may do, the same bits in every place."""

from __future__ import annotations

import copy
import io
import random
from typing import Any

import pytest
import torch
from optim_tools import CPU, PLACES, Place, assert_near, parameters, set_grads, snapshot
from torch import Tensor

import ghoffload
from ghoffload import OffloadAdam

SHAPES = ((1500, 2), (7,), (), (0,), (1025,), (30, 9))


class _Program:
    """One run of the sequence that ``seed`` gives; the decisions depend on nothing else."""

    def __init__(self, seed: int, kind: type, dtypes: tuple[torch.dtype, ...], **extra: Any):
        self.random = random.Random(seed)
        self.kind, self.extra = kind, extra
        params = [p for n, d in enumerate(dtypes) for p in parameters(*SHAPES, dtype=d, seed=n)]
        self.later = params[-3:]
        self.params = params[:-3]
        self.params[0].requires_grad_(False)
        half = len(self.params) // 2
        groups = [
            {"params": self.params[:half], "lr": 0.05, "weight_decay": 0.2},
            {"params": self.params[half:], "amsgrad": True, "maximize": True},
        ]
        self.optimizer = kind(groups, lr=0.02, **extra)
        self.steps = 0

    def run(self, count: int) -> None:
        actions = [getattr(self, name) for name in dir(self) if name.startswith("do_")]
        for _ in range(count):
            self.random.choice([self.do_step, *actions])()

    def do_step(self) -> None:
        set_grads(self.params, self.steps)
        for p in self.params:
            if not p.requires_grad or self.random.random() < 0.2:
                p.grad = None
        self.steps += 1
        self.optimizer.step()

    def do_scaled_steps(self) -> None:
        """As a GradScaler: a step that finds an inf, and one with scaled gradients."""
        self.params[0].grad = None
        if self.kind is OffloadAdam:
            for found_inf in (1.0, 0.0):
                set_grads(self.params[1:], self.steps, scale=2.0)
                self.optimizer.found_inf = torch.tensor(found_inf)
                self.optimizer.grad_scale = torch.tensor(2.0)
                self.optimizer.step()
                del self.optimizer.found_inf, self.optimizer.grad_scale
        else:
            set_grads(self.params[1:], self.steps)
            self.optimizer.step()
        self.steps += 1

    def do_edit_weights(self) -> None:
        p = self.random.choice(self.params)
        with torch.no_grad():
            (p[::3] if p.dim() else p).mul_(0.5)

    def do_edit_state(self) -> None:
        p = self.random.choice(self.params)
        entries = self.optimizer.state.get(p)
        if entries:
            entries["exp_avg"].mul_(0.5)
            entries["exp_avg_sq"] = entries["exp_avg_sq"] * 2

    def do_forget_state(self) -> None:
        p = self.random.choice(self.params)
        if p in self.optimizer.state:
            del self.optimizer.state[p]

    def do_change_options(self) -> None:
        group = self.random.choice(self.optimizer.param_groups)
        group["lr"] = group["lr"] * 0.9
        group["betas"] = (0.8, 0.95)

    def do_unfreeze(self) -> None:
        self.params[0].requires_grad_(True)

    def do_add_a_group(self) -> None:
        if self.later:
            p = self.later.pop()
            self.params.append(p)
            self.optimizer.add_param_group({"params": [p], "lr": 0.1})

    def do_transpose_memory(self) -> None:
        p = self.params[-1]
        if p.dim() == 2:
            p.grad = None
            p.data = p.data.t().contiguous().t()

    def do_save_and_load(self) -> None:
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        file.seek(0)
        state_dict = torch.load(file, weights_only=True)
        if self.random.random() < 0.5:
            groups = [
                {k: v for k, v in group.items() if k in ("params", "amsgrad")}
                for group in self.optimizer.param_groups
            ]
            self.optimizer = self.kind(groups, **self.extra)
        self.optimizer.load_state_dict(state_dict)

    def do_load_its_own(self) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def do_copy(self) -> None:
        memo = {id(p): p for p in (*self.params, *self.later)}  # the parameters stay the same
        self.optimizer = copy.deepcopy(self.optimizer, memo)

    def result(self) -> tuple[list[Tensor], Any]:
        return [*self.params, *self.later], snapshot(self.optimizer)


def run_everywhere(seed: int, count: int = 25) -> None:
    """The same bits on the CPU and on the machine, and nearly torch's for fp32."""
    order = random.Random(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    results = []
    for place in PLACES:
        sizes = {
            "bucket_bytes": order.choice([4096, 20_000, 1 << 20]),
            "staging_buffers": order.choice([2, 3]),
        }
        results.append(_in_place(place, seed, dtypes, count, sizes))
    assert results[0] == results[1]
    assert results[0] == results[2]
    runs = []
    for kind, extra in ((OffloadAdam, {"config": CPU.config()}), (torch.optim.Adam, {})):
        program = _Program(seed, kind, (torch.float32,), **extra)
        program.run(count)
        runs.append(program.result()[0])
    assert_near(*runs, 1e-3)


def _in_place(
    place: Place, seed: int, dtypes: tuple[torch.dtype, ...], count: int, sizes: dict[str, Any]
) -> Any:
    def run() -> Any:
        program = _Program(seed, OffloadAdam, dtypes, config=place.config(**sizes))
        program.run(count)
        return program.result()[1]

    if not place.virtual:
        return run()
    with ghoffload.use_machine("virtual", order="adversarial", seed=seed, check=True):
        return run()


@pytest.mark.parametrize("seed", range(6))
def test_sequences(seed: int) -> None:
    run_everywhere(seed)
