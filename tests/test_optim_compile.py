"""``step()`` inside ``torch.compile``: a graph break, and the bits of the uncompiled loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_tools import everywhere, same_weights

import ghoffload


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Training:
    """A small model, its optimizer, and a step function that may be compiled."""

    def __init__(self, config: dict[str, Any], device: str = "cpu") -> None:
        self.device = device
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4)
        ).to(device)
        self.optimizer = ghoffload.OffloadAdamW(self.model.parameters(), lr=1e-2, config=config)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.9)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = ((self.model(x) - y) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.detach()

    def run(self, step: Callable[..., torch.Tensor]) -> list[float]:
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(4):
            x, y = (torch.randn(8, n, generator=generator).to(self.device) for n in (16, 4))
            losses.append(step(x, y).item())
        return losses


@everywhere
def test_a_compiled_training_step_gives_the_same_bits(place: Any) -> None:
    plain, compiled = (Training(place.config()) for _ in range(2))
    expected = plain.run(plain.step)
    assert compiled.run(torch.compile(compiled.step, backend="eager")) == expected
    assert same_weights(plain.model.parameters(), compiled.model.parameters())
    for p, q in zip(plain.model.parameters(), compiled.model.parameters(), strict=True):
        assert torch.equal(
            plain.optimizer.state[p]["exp_avg_sq"], compiled.optimizer.state[q]["exp_avg_sq"]
        )


@pytest.mark.gpu
def test_on_a_gpu_too() -> None:
    plain, compiled = (Training({"bucket_bytes": 4096}, "cuda") for _ in range(2))
    expected = plain.run(plain.step)
    assert compiled.run(torch.compile(compiled.step, backend="eager")) == expected
    assert same_weights(plain.model.parameters(), compiled.model.parameters())


def test_a_changed_learning_rate_compiles_nothing_anew() -> None:
    weight = torch.nn.Parameter(torch.ones(5))
    optimizer = ghoffload.OffloadAdamW([weight], lr=1.0, weight_decay=0.0)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def step(x: torch.Tensor) -> torch.Tensor:
        weight.grad = torch.ones(5)
        optimizer.step()
        return x + 1

    before = weight.detach().clone()
    for number, lr in enumerate((0.5, 0.25, 0.125)):
        optimizer.param_groups[0]["lr"] = lr
        assert step(torch.zeros(1)) == 1
        assert torch.allclose(before - weight.detach(), torch.full((5,), lr))
        before = weight.detach().clone()
        if number == 0:
            compiled = len(graphs)
    assert len(graphs) == compiled


def test_a_closure_may_be_given() -> None:
    results = []
    for compiled in (False, True):
        weight = torch.nn.Parameter(torch.ones(5))
        optimizer = ghoffload.OffloadAdam([weight], lr=0.1)

        def closure(weight: Any = weight, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (weight**2).sum()
            loss.backward()
            return loss

        def step(optimizer: Any = optimizer, closure: Any = closure) -> Any:
            return optimizer.step(closure)

        run = torch.compile(step, backend="eager") if compiled else step
        results.append(([run().item() for _ in range(3)], weight.detach()))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_fullgraph_is_refused_with_the_reason_and_changes_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(5))
    optimizer = ghoffload.OffloadAdamW([weight], lr=0.1)
    weight.grad = torch.ones(5)
    step = torch.compile(lambda: optimizer.step(), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="runs outside compiled graphs; compile without") as caught:
        step()
    assert type(caught.value).__name__ == "Unsupported"
    assert torch.equal(weight.detach(), torch.ones(5))
    optimizer.step()
    assert not torch.equal(weight.detach(), torch.ones(5))


@pytest.mark.slow
def test_the_default_backend_trains_as_well() -> None:
    training = Training({})
    try:
        losses = training.run(torch.compile(training.step))
    except torch._inductor.exc.InductorError as error:  # type: ignore[attr-defined]
        pytest.skip(f"needs what inductor compiles with: {error}")
    plain = Training({})
    assert losses == pytest.approx(plain.run(plain.step), rel=1e-4)
