"""Steps captured in a CUDA graph: each replay is a step, with the bits of an eager one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_tools import raw
from torch import Tensor

from ghoffload import OffloadAdamW

pytestmark = pytest.mark.gpu

SHAPES = ((700, 31), (64,), (1025,), (3, 5000))
CONFIGS = {
    "device": {"memory_kind": "device"},
    "device int8": {"memory_kind": "device", "moments": "int8", "moments_fp32_below": 0},
    "staged": {"transfer": "copy_engine", "bucket_bytes": 1 << 16, "staging_buffers": 2},
    "in place": {"transfer": "kernel", "ctas": 3},
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


class Run:
    """A small model's worth of parameters, gradients that stay where they are, an optimizer."""

    def __init__(self, config: dict[str, Any], **options: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        dtypes = (torch.bfloat16, torch.float32)
        self.params = [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to("cuda", dtypes[k % 2]))
            for k, shape in enumerate(SHAPES)
        ]
        for p in self.params:
            p.grad = torch.zeros_like(p)
        self.lr = torch.tensor(1e-2, device="cuda")
        self.optimizer = OffloadAdamW(self.params, lr=self.lr, config=config, **options)

    def set(self, step: int) -> None:
        generator = torch.Generator().manual_seed(100 + step)
        for p in self.params:
            assert p.grad is not None
            p.grad.copy_(torch.randn(p.shape, generator=generator))
        self.lr.fill_(1e-2 / (1 + step))

    def steps(self, first: int, stop: int, step: Callable[[], Any] | None = None) -> None:
        for number in range(first, stop):
            self.set(number)
            (step or self.optimizer.step)()

    def capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.optimizer.step()
        return graph

    def bits(self) -> list[bytes]:
        state = self.optimizer.state
        entries = [v for p in self.params for v in state[p].values() if isinstance(v, Tensor)]
        return [raw(tensor) for tensor in (*self.params, *entries)]


@configs
def test_replays_are_steps(config: dict[str, Any]) -> None:
    eager, graphed = Run(config), Run(config)
    eager.steps(0, 2)
    graphed.steps(0, 2)
    before = graphed.bits()
    graph = graphed.capture()
    assert graphed.bits() == before  # a capture is no step
    eager.steps(2, 5)
    graphed.steps(2, 5, graph.replay)
    assert graphed.bits() == eager.bits()


@configs
def test_replays_and_eager_steps_take_turns(config: dict[str, Any]) -> None:
    eager, graphed = Run(config), Run(config)
    eager.steps(0, 12)
    graphed.steps(0, 1)
    graph = graphed.capture()
    graphed.steps(1, 3, graph.replay)
    graphed.steps(3, 4)
    graphed.steps(4, 6, graph.replay)
    graphed.steps(6, 8)
    graphed.steps(8, 9, graph.replay)
    again = graphed.capture()
    graphed.steps(9, 10, again.replay)
    graphed.steps(10, 11, graph.replay)
    graphed.steps(11, 12)
    assert graphed.bits() == eager.bits()


def test_the_first_step_may_be_the_captured_one() -> None:
    eager, graphed = Run(CONFIGS["device"]), Run(CONFIGS["device"])
    eager.steps(0, 3)
    graphed.steps(0, 3, graphed.capture().replay)
    assert graphed.bits() == eager.bits()


def test_backward_and_step_in_one_graph() -> None:
    results = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64, device="cuda")
        optimizer = OffloadAdamW(model.parameters(), lr=1e-2, config=CONFIGS["device"])
        inputs = torch.zeros(8, 64, device="cuda")

        def once(model=model, optimizer=optimizer, inputs=inputs) -> None:  # type: ignore[no-untyped-def]
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                inputs.normal_(generator=torch.Generator("cuda").manual_seed(1))
                once()
        torch.cuda.current_stream().wait_stream(side)
        step = once
        if captured:
            optimizer.zero_grad()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                once()
            step = graph.replay
        for number in range(3):
            inputs.normal_(generator=torch.Generator("cuda").manual_seed(2 + number))
            step()
        results.append([raw(p) for p in model.parameters()])
    assert results[0] == results[1]


def test_a_step_on_the_cpu_is_refused_inside_a_capture() -> None:
    run = Run({"step_device": "cpu"})
    run.optimizer.param_groups[0]["lr"] = 1e-2
    run.steps(0, 1)
    before = run.bits()
    with pytest.raises(RuntimeError, match=r"step_device='cpu'.* cannot be captured"):
        run.capture()
    assert run.bits() == before
    run.steps(1, 2)
    assert run.bits() != before
