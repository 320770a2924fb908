"""What offload_activations keeps, moves and codes; budgets; refusals; what it learns."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import warnings
from typing import Any

import pytest
import torch
from activation_programs import PROGRAMS, SMALL, gradients, machine_of, offloaded
from torch import Tensor, nn

import ghoffload
from ghoffload.activations import Saved, hooks
from ghoffload.activations.mover import mover_of
from ghoffload.activations.usage import budget_left
from ghoffload.check.programs import same_bits
from ghoffload.machine.select import WrongDeviceError

KIB = 1 << 10
LAYER = 64 * KIB  # what each layer of the deep model saves: 256 rows of 64 fp32
BLOCK = nn.Sequential(nn.Linear(1, 1))


class Sines(nn.Module):
    """Saves one tensor of ``LAYER`` bytes a layer; the first is the input, a leaf that stays."""

    def __init__(self, layers: int = 16) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.layers):
            x = x.sin()
        return x.sum()


def train(context: Any, *, steps: int = 4, layers: int = 17) -> list[bytes]:
    """The gradients' bytes; nothing is left in HBM."""
    torch.manual_seed(0)
    model, found = Sines(layers), []
    for _ in range(steps):
        x = torch.randn(256, 64, requires_grad=True)
        with context():
            loss = model(x)
        loss.backward()
        assert x.grad is not None
        found.append(x.grad.numpy().tobytes())
        del x, loss
    return found


def options(**more: Any) -> Any:
    small = {"min_offload_bytes": KIB, "window_bytes": 2 * LAYER, "ahead_bytes": 2 * LAYER}
    return ghoffload.offload_activations(**(small | more))


@pytest.mark.parametrize("layers_in_hbm", [8, 12, 16, 24])
def test_a_budget_is_kept_and_no_more_is_moved_than_it_needs(layers_in_hbm: int) -> None:
    expected = train(contextlib.nullcontext)
    budget = layers_in_hbm * LAYER
    with machine_of(hbm_bytes=budget + 64) as machine:  # and a few scalars
        moved = []

        def context() -> Any:
            moved.append(machine.traffic.d2h_bytes)
            return options(budget_bytes=budget)

        assert train(context) == expected
        moved = [after - before for before, after in itertools.pairwise(moved)]
        assert moved[0] == 16 * LAYER
        # The input, what an operation makes, its gradient, and what is on its way.
        needed = max(16 * LAYER + 7 * LAYER - budget, 0)
        assert moved[1] <= needed
        assert moved[1] == moved[2]


def test_a_budget_that_cannot_be_met_says_what_could() -> None:
    with (
        machine_of(hbm_bytes=1 << 30),
        pytest.warns(RuntimeWarning, match=r"budget_bytes expects [\d,]+ or more"),
    ):
        train(lambda: options(budget_bytes=2 * LAYER), steps=2)


class Spike(nn.Module):
    """Layers, and an end that takes more than they do."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(16):
            x = x.sin()
        return x.repeat(8, 1).logsumexp(0).sum()


def peaks(model: nn.Module, context: Any, *, steps: int = 4) -> list[int]:
    """Bytes in HBM of each step."""
    with machine_of(hbm_bytes=1 << 30) as machine:
        found = []
        for _ in range(steps):
            x = torch.randn(256, 64, requires_grad=True)
            machine.reset_peak()
            with context():
                loss = model(x)
            loss.backward()
            found.append(machine.memory_peak())
            del x, loss
    return found


def test_what_is_on_its_way_adds_nothing_to_a_peak_that_is_short() -> None:
    waits = peaks(Spike(), lambda: options(window_bytes=0, ahead_bytes=0))
    overlaps = peaks(Spike(), lambda: options(window_bytes=4 * LAYER, ahead_bytes=4 * LAYER))
    assert overlaps[-1] <= waits[-1]


def test_where_all_is_a_peak_the_window_comes_on_top() -> None:
    waits = peaks(Sines(), lambda: options(window_bytes=0, ahead_bytes=0))
    overlaps = peaks(Sines(), lambda: options(window_bytes=4 * LAYER, ahead_bytes=4 * LAYER))
    assert waits[-1] + 3 * LAYER <= overlaps[-1] <= waits[-1] + 4 * LAYER


def test_a_budget_holds_when_other_tensors_come_into_hbm() -> None:
    """As the state of an optimizer does, that steps for the first time after the first backward."""
    budget = 16 * LAYER
    with machine_of(hbm_bytes=budget + 64) as machine:
        held, moved = [], []
        for step in range(6):
            x = torch.randn(256, 64, requires_grad=True)
            before = machine.traffic.d2h_bytes
            with options(budget_bytes=budget):
                loss = Sines(17)(x)
            loss.backward()
            moved.append(machine.traffic.d2h_bytes - before)
            del x, loss
            if step in (1, 3):
                held.append(torch.zeros(3 * 256, 64))
            if step == 4:
                held.clear()
        assert moved[0] == 16 * LAYER
        assert moved[1] < moved[2] == moved[3] < moved[4]
        assert moved[5] == moved[1]


def readings(context: Any, lengths: list[int]) -> list[int]:
    """How often each step reads what is in use."""
    with machine_of() as machine:
        found, reset = [], machine.reset_peak

        def counted() -> None:
            found[-1] += 1
            reset()

        machine.reset_peak = counted  # type: ignore[method-assign]
        for length in lengths:
            found.append(0)
            x = torch.randn(length, 64, requires_grad=True)
            with context():
                loss = Sines()(x)
            loss.backward()
            del x, loss
    return found


@pytest.mark.parametrize("more", [{}, {"fraction": 0.0}, {"min_offload_bytes": 1 << 30}])
def test_what_is_in_use_is_read_in_the_first_pass_alone(more: dict[str, Any]) -> None:
    first, *others = readings(lambda: options(**more), [256] * 4)
    assert first > 16
    assert others == [0, 0, 0]


def test_other_lengths_are_not_read_until_one_comes_again() -> None:
    found = readings(options, [256, 128, 192, 64, 64, 64])
    assert found[0] > 16
    assert max(found[1:4]) <= 3  # it is another one by the first tensor that could be moved
    assert found[4] > 16
    assert found[5] == 0


def test_a_budget_for_what_has_grown() -> None:
    assert budget_left(6400, 0, None) == 6400
    assert budget_left(6400, 1000, 6400) == 5400
    assert budget_left(6400, 950, 5400) == 5400  # nearly as much: the plan stays
    assert budget_left(6400, 1001, 5400) == 5399  # never more than there is
    assert budget_left(6400, 0, 5400) == 6400


def test_tensors_on_the_cpu_stay_where_those_of_a_gpu_are_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checkpointing saves an empty one there."""

    def refuse(device: torch.device, machine: Any) -> Any:
        raise WrongDeviceError(f"the cuda machine expects a CUDA device, got {device}")

    monkeypatch.setattr(hooks, "machine_for", refuse)
    x = torch.randn(256, 64, requires_grad=True)
    with options(machine="cuda"):
        loss = Sines()(x)
    loss.backward()
    with pytest.raises(WrongDeviceError):
        hooks.Forward(options()._options, None, "virtual", lambda machine: None)._pass(  # type: ignore[arg-type, return-value]
            torch.device("cuda", 0)
        )


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 1.0])
def test_a_fraction_is_moved_evenly(fraction: float) -> None:
    expected = train(contextlib.nullcontext, steps=1)
    with machine_of() as machine:
        assert train(lambda: options(fraction=fraction), steps=1) == expected
        assert machine.traffic.d2h_bytes == fraction * 16 * LAYER


def test_a_callable_decides() -> None:
    seen: list[Saved] = []

    def policy(saved: Saved) -> str | bool:
        seen.append(saved)
        return {0: "keep", 1: "offload", 2: True, 3: False}.get(saved.index, "keep")

    with machine_of() as machine:
        train(lambda: options(policy=policy), steps=1)
        assert machine.traffic.d2h_bytes == 2 * LAYER
    assert [saved.index for saved in seen] == list(range(16))
    assert {saved.nbytes for saved in seen} == {LAYER}
    assert {saved.dtype for saved in seen} == {"float32"}
    assert {saved.operator for saved in seen} == {"SinBackward0"}


@pytest.mark.parametrize("answer", ["drop", None, 3])
def test_a_policy_that_returns_nonsense_is_named(answer: Any) -> None:
    with machine_of(), pytest.raises(ValueError, match="policy expects 'keep', 'offload'"):
        train(lambda: options(policy=lambda saved: answer), steps=1)
    gc.collect()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"budget_bytes": 0}, "budget_bytes expects"),
        ({"budget_bytes": -1}, "budget_bytes expects"),
        ({"budget_bytes": "many"}, "budget_bytes expects"),
        ({"fraction": 1.5}, "fraction expects 0 to 1, got 1.5"),
        ({"fraction": "half"}, "fraction expects a number"),
        ({"compress": "zip"}, "compress expects None or 'fp8', got 'zip'"),
        ({"policy": "all"}, "policy expects a callable, 'auto' or None, got 'all'"),
        ({"model": 3}, r"model expects a torch.nn.Module"),
        ({"fraction": 0.5, "budget_bytes": 1 << 20}, "expected a budget .* got several"),
        ({"policy": bool, "blocks": [nn.Linear(1, 1)]}, "expected a budget .* got several"),
        ({"blocks": []}, "blocks expects modules, got none"),
        ({"blocks": [3]}, "blocks expects modules, got int"),
        ({"blocks": [BLOCK, BLOCK]}, "modules that share none"),
        ({"blocks": [BLOCK, BLOCK[0]]}, "modules that share none"),
    ],
)
def test_bad_arguments_are_refused_at_once(bad: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ghoffload.offload_activations(**bad)


def test_no_room_on_the_host_is_said_before_anything_moves() -> None:
    expected = train(contextlib.nullcontext, steps=1)
    with machine_of(host_bytes=LAYER // 2) as machine:
        with pytest.raises(torch.OutOfMemoryError, match="activations"):
            train(lambda: options(), steps=1)
        assert machine.traffic.d2h_bytes == 0
        gc.collect()
        assert train(contextlib.nullcontext, steps=1) == expected


def test_fp8_halves_the_bytes_and_stays_near() -> None:
    def run(context: Any) -> Tensor:
        torch.manual_seed(4)
        layers = [nn.Linear(64, 64).bfloat16() for _ in range(4)]
        x = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
        y = x
        with context():
            for layer in layers:
                y = torch.nn.functional.gelu(layer(y))
            loss = y.float().square().mean()
        loss.backward()
        assert x.grad is not None
        return x.grad

    expected = run(contextlib.nullcontext)
    for seed in range(10):
        with machine_of(order="adversarial", seed=seed, check=True) as machine:
            lossless = run(lambda: ghoffload.offload_activations(**SMALL))
            moved = machine.traffic.d2h_bytes
            assert same_bits([lossless], [expected])
            coded = run(lambda: ghoffload.offload_activations(compress="fp8", **SMALL))
            # Of this model's bytes a fifth are fp32, which is not coded.
            assert machine.traffic.d2h_bytes - moved < 0.65 * moved
            error = (coded.float() - expected.float()).norm() / expected.float().norm()
            assert 0 < error < 0.05


def test_modules_offload_until_the_handle_is_removed() -> None:
    expected = gradients("blocks", steps=1)
    with machine_of() as machine:
        torch.manual_seed(3)
        model = PROGRAMS["blocks"][0]()
        handle = ghoffload.offload_module(model[1], **SMALL)
        x = torch.randn(2, 6, 16).requires_grad_()
        loss = model(x).float().square().mean()
        loss.backward()
        found = [loss.detach(), x.grad, *(p.grad for p in model.parameters())]
        assert same_bits(found, expected)
        moved = machine.traffic.d2h_bytes
        assert moved > 0
        with pytest.raises(RuntimeError):
            model[1](torch.randn(3))
        handle.remove()
        model(x).sum().backward()
        assert machine.traffic.d2h_bytes == moved
        with pytest.raises(TypeError, match=r"expects a torch.nn.Module"):
            ghoffload.offload_module(lambda x: x)  # type: ignore[arg-type]
        del loss, found
        gc.collect()


def test_without_a_machine_nothing_happens() -> None:
    expected = gradients("blocks")
    context = ghoffload.offload_activations(machine="cpu", **SMALL)
    assert same_bits(gradients("blocks", lambda: context), expected)
    assert context.report() == ""


def test_no_grad_and_inference_save_nothing() -> None:
    with machine_of() as machine, ghoffload.offload_activations(**SMALL):
        with torch.no_grad():
            Sines()(torch.randn(64, 64))
        with torch.inference_mode():
            seen = Sines()(torch.randn(64, 64))
            w = torch.randn(64, 64)
        assert machine.traffic.copies == 0
        assert seen.is_inference()
        x = torch.randn(64, 64, requires_grad=True)
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            (x * w).sum().backward()
    gc.collect()


def test_what_something_else_holds_is_not_moved_again() -> None:
    with machine_of() as machine:
        held: list[Tensor] = []
        moved = []
        for _ in range(3):
            held.clear()
            x = torch.randn(256, 64, requires_grad=True)
            before = machine.traffic.d2h_bytes
            with options(window_bytes=0) as context:
                y = x
                for _ in range(8):
                    y = y.sin()
                    held.append(y)
                loss = y.cos().sum()
            loss.backward()
            moved.append((machine.traffic.d2h_bytes - before) // LAYER)
            assert machine.traffic.h2d_bytes == 0
        assert moved == [8, 0, 0]
        assert "held by something else" in context.report()
        held.clear()
        del loss, y
        gc.collect()


def test_reloads_are_ahead_and_in_the_learned_order() -> None:
    """Two branches whose backward runs in another order than the reverse of forward."""

    def run(context: Any, machine: Any = None) -> list[Tensor]:
        x = torch.linspace(0, 1, 64 * 256).view(256, 64).requires_grad_()
        with context():
            a = x.sin().sin().sin().sin()
            b = x.cos().cos().cos().cos()
        # The first branch's backward first.
        grads = [*torch.autograd.grad(a.sum(), x)]
        return grads + [*torch.autograd.grad(b.sum(), x)]

    expected = run(contextlib.nullcontext)
    with machine_of(order="latest", check=True) as machine:
        for _ in range(3):
            assert same_bits(run(lambda: options(window_bytes=0)), expected)
        learned, _ = mover_of(machine).expected(options(window_bytes=0)._options, None)
        assert learned is not None
        assert list(learned.order[:3]) == [2, 1, 0]
        for _ in range(2):  # another graph: learned anew
            train(lambda: options(window_bytes=0), steps=1, layers=6)
        learned, _ = mover_of(machine).expected(options(window_bytes=0)._options, None)
        assert learned is not None
        assert len(learned.candidates) == 5


def test_a_backward_that_fails_midway() -> None:
    expected = gradients("blocks")

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    for seed in range(20):
        with machine_of(order="adversarial", seed=seed, check=True) as machine:
            for _ in range(2):
                x = torch.randn(256, 64, requires_grad=True)
                with options(window_bytes=0, ahead_bytes=8 * LAYER):
                    y = x.sin().sin().sin().sin().sin().sin()
                    y.register_hook(lambda grad: grad)
                    z = y.sin()
                    z.grad_fn.next_functions[0][0].register_hook(lambda a, b: fail(a))
                with contextlib.suppress(ZeroDivisionError):
                    z.sum().backward()
                del y, z
                gc.collect()
            assert mover_of(machine).slabs.used_bytes == 0
            assert same_bits(offloaded("blocks"), expected)


def test_saved_tensors_may_be_read_early() -> None:
    def run(context: Any) -> list[Tensor]:
        torch.manual_seed(5)
        x = torch.randn(256, 64, requires_grad=True)
        with context():
            y = x.sin().sin()
            early = y.grad_fn._saved_self.detach().clone()
            z = y.sin().sum()
        (grad,) = torch.autograd.grad(z, x)
        return [early, grad]

    expected = run(contextlib.nullcontext)
    for order in ("earliest", "latest"):
        with machine_of(order=order, check=True):
            assert same_bits(run(options), expected)


def test_backward_in_several_threads() -> None:
    expected = train(contextlib.nullcontext, steps=1)[0]
    with machine_of():
        found: list[bytes] = []

        def backward(loss: Tensor, x: Tensor) -> None:
            loss.backward()
            assert x.grad is not None
            found.append(x.grad.numpy().tobytes())

        torch.manual_seed(0)
        x = torch.randn(256, 64, requires_grad=True)
        losses = []
        for _ in range(4):
            leaf = x.detach().clone().requires_grad_()
            with options():
                losses.append((Sines(17)(leaf), leaf))
        threads = [threading.Thread(target=backward, args=pair) for pair in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [expected] * 4
        del losses, threads
        gc.collect()


def test_compiled_models_run() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(64, 64)
    compiled(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    with machine_of(), warnings.catch_warnings():
        with ghoffload.offload_activations(**SMALL):
            loss = compiled(x).sum()
        loss.backward()
        assert same_bits([p.grad for p in model.parameters()], expected)
        del loss
        gc.collect()
