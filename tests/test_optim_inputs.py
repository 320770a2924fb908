"""torch's own Adam and AdamW inputs: ours within bounds of torch's, and the same errors."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from optim_tools import CPU, PAIRS, PLACES, Place, parameters, set_grads
from torch import Tensor

KINDS = pytest.mark.parametrize(("kind", "torch_kind"), PAIRS, ids=["Adam", "AdamW"])
ULP = 2.0**-23


@pytest.fixture(scope="module")
def database() -> Any:
    """``torch.testing._internal.common_optimizers``, imported without its side effect."""
    flag = "__allow_nonbracketed_mutation_flag"
    allowed = getattr(torch.backends, flag)
    from torch.testing._internal import common_optimizers

    setattr(torch.backends, flag, allowed)  # the import froze torch.backends for the process
    return common_optimizers


def _inputs(database: Any, torch_kind: type) -> dict[str, dict[str, Any]]:
    """Keyword arguments by description: those for the CPU, for CUDA and for MPS, and one more."""
    info = next(info for info in database.optim_db if info.optim_cls is torch_kind)
    return {"eps that counts": {"eps": 0.3, "betas": (0.5, 0.8)}} | {
        item.desc: item.kwargs
        for device in ("cpu", "cuda", "mps")
        for item in info.optim_inputs_func(device=device)
    }


def _numbers(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same hyperparameters as torch's loop on the CPU takes them, in double."""

    def number(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(number(item) for item in value)
        return value.item() if isinstance(value, Tensor) else value

    return {name: number(value) for name, value in kwargs.items() if name != "capturable"}


def _copied(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters of our own, so that nobody else's tensors change."""
    return {n: v.clone() if isinstance(v, Tensor) else v for n, v in kwargs.items()}


def _ulp(values: Tensor) -> Tensor:
    """The distance of fp32 numbers at each magnitude, in fp64."""
    _, exponent = torch.frexp(values.float().abs().clamp_min(2.0**-126))
    return torch.ldexp(torch.ones_like(values, dtype=torch.float64), exponent - 24)


def _check_step(
    before: tuple[Tensor, ...], grad: Tensor, theirs: Any, ours: Any, options: dict[str, Any]
) -> None:
    """The bounds of one step from the same state; ``g`` counts what weight decay adds to it."""
    p, m, v, vmax = (tensor.double() for tensor in before)
    (p1, s1), (p2, s2) = theirs, ours
    beta1, beta2 = options["betas"]
    decay = 0.0 if options["decoupled_weight_decay"] else options["weight_decay"]
    g = grad.double().abs() + decay * p.abs()
    t = float(s1["step"])
    assert t == float(s2["step"])
    moment = torch.maximum((beta1 * m).abs(), (1 - beta1) * g)
    assert ((s1["exp_avg"].double() - s2["exp_avg"].double()).abs() <= 3 * ULP * moment).all()
    squares = [(s1["exp_avg_sq"], s2["exp_avg_sq"], v)]
    if options["amsgrad"]:
        squares.append((s1["max_exp_avg_sq"], s2["max_exp_avg_sq"], vmax))
    for first, second, old in squares:
        # without decay in the gradient this is |dv| <= 2 ulp of v itself
        value = torch.maximum(beta2 * v + (1 - beta2) * g * g, old) if decay else first.double()
        assert ((first.double() - second.double()).abs() <= 2 * _ulp(value)).all()
    denominator = squares[-1][0].double().sqrt() / math.sqrt(1 - beta2**t) + options["eps"]
    change = options["lr"] * ((beta1 * m).abs() + (1 - beta1) * g)
    bound = p.abs() + change / ((1 - beta1**t) * denominator)
    assert ((p1.double() - p2.double()).abs() <= 4 * ULP * bound).all()


@KINDS
@pytest.mark.parametrize("implementation", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_each_step_is_within_the_bounds(
    database: Any, kind: type, torch_kind: type, implementation: dict[str, bool]
) -> None:
    for description, kwargs in _inputs(database, torch_kind).items():
        numbers = _numbers(kwargs)
        theirs, ours = parameters(), parameters()
        reference = torch_kind(theirs, **numbers, **implementation)
        optimizer = kind(ours, **_copied(kwargs), config=CPU.config())
        for step in range(2 if implementation else 4):
            set_grads(theirs, step)
            set_grads(ours, step)
            before = []
            for p in theirs:
                state = reference.state.get(p) or {}
                zero = torch.zeros_like(p)
                names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
                before.append(
                    [t.detach().clone() for t in (p, *(state.get(n, zero) for n in names))]
                )
            reference.step()
            optimizer.step()
            for old, p, q in zip(before, theirs, ours, strict=True):
                try:
                    _check_step(
                        tuple(old),
                        p.grad,
                        (p.detach(), reference.state[p]),
                        (q.detach(), optimizer.state[q]),
                        reference.param_groups[0],
                    )
                except AssertionError as error:
                    raise AssertionError(f"{description}, {tuple(p.shape)}, step {step}") from error
            with torch.no_grad():
                for p, q in zip(theirs, ours, strict=True):
                    q.copy_(p)
            optimizer.load_state_dict(reference.state_dict() | {"param_groups": _groups(optimizer)})


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return optimizer.state_dict()["param_groups"]


def _fit(optimizer: torch.optim.Optimizer, model: torch.nn.Module, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(16, 20, generator=generator)
    losses = []
    sign = -1.0 if optimizer.param_groups[0]["maximize"] else 1.0
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        (sign * loss).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(20, 70), torch.nn.Tanh(), torch.nn.Linear(70, 1))


@KINDS
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_same_losses_over_many_steps(
    database: Any, kind: type, torch_kind: type, place: Place
) -> None:
    steps = 25 if place is CPU else 3
    for description, kwargs in _inputs(database, torch_kind).items():
        model = _model()
        # on the CPU torch refuses capturable; the tensors themselves it takes
        tensors = {n: v for n, v in _copied(kwargs).items() if n != "capturable"}
        expected = _fit(torch_kind(model.parameters(), **tensors), model, steps)
        with place.entered():
            model = _model()
            optimizer = kind(model.parameters(), **_copied(kwargs), config=place.config())
            losses = _fit(optimizer, model, steps)
        assert losses == pytest.approx(expected, rel=2e-5), description
        assert losses[-1] < losses[0], description


@KINDS
def test_tensor_and_number_are_the_same_bits(kind: type, torch_kind: type) -> None:
    lr, betas = torch.tensor(0.01), (torch.tensor([[0.8]]), torch.tensor([[[0.9]]]))
    runs = []
    for kwargs in (
        {"lr": lr, "betas": betas},
        {"lr": lr.item(), "betas": tuple(beta.item() for beta in betas)},
    ):
        params = parameters()
        optimizer = kind(params, **kwargs, config=CPU.config())
        for step in range(3):
            set_grads(params, step)
            optimizer.step()
        runs.append([p.detach().clone() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@KINDS
def test_same_errors(database: Any, kind: type, torch_kind: type) -> None:
    info = next(info for info in database.optim_db if info.optim_cls is torch_kind)
    inputs = info.optim_error_inputs_func(device="cpu", dtype=torch.float32)
    assert len(inputs) > 8
    for item in inputs:
        assert item.error_on is database.OptimizerErrorEnum.CONSTRUCTION_ERROR
        error_input = item.optimizer_error_input
        params = parameters((3,)) if error_input.params is None else error_input.params
        expected = (pytest.warns if issubclass(item.error_type, Warning) else pytest.raises)(
            item.error_type, match=item.error_regex
        )
        with expected:
            torch_kind(params, **error_input.kwargs)
        with expected:
            kind(params, **error_input.kwargs)


@KINDS
@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"fused": True, "foreach": True}, RuntimeError, "`fused` and `foreach` cannot be `True`"),
        ({"fused": True, "differentiable": True}, RuntimeError, "`fused` does not support"),
        ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
        ({"lr": math.nan}, ValueError, "Invalid learning rate: nan"),
        ({"eps": -1e-8}, ValueError, "Invalid epsilon value: -1e-08"),
        ({"betas": (0.9, 1.5)}, ValueError, "Invalid beta parameter at index 1: 1.5"),
    ],
    ids=str,
)
def test_same_errors_where_torch_has_no_sample(
    kind: type, torch_kind: type, kwargs: dict[str, Any], error: type, match: str
) -> None:
    # torch refuses the first two from the options alone, but needs a GPU to get that far
    if "fused" not in kwargs:
        with pytest.raises(error, match=match):
            torch_kind(parameters((3,)), **kwargs)
    with pytest.raises(error, match=match):
        kind(parameters((3,)), **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"differentiable": True}, ValueError, "expects differentiable=False, got True"),
        ({"lr": "fast"}, TypeError, "lr expects a number or a tensor, got 'fast'"),
        ({"eps": None}, TypeError, "eps expects a number, got None"),
        ({"betas": 0.9}, ValueError, "betas expects two numbers, got 0.9"),
        ({"lr": torch.tensor(1)}, ValueError, "lr expects a tensor of float32 or float64"),
    ],
    ids=str,
)
@KINDS
def test_our_own_refusals(
    kind: type, torch_kind: type, kwargs: dict[str, Any], error: type, match: str
) -> None:
    with pytest.raises(error, match=match):
        kind(parameters((3,)), **kwargs)
    group = {"params": parameters((3,))} | kwargs
    if "differentiable" not in kwargs:
        with pytest.raises(error, match=match):
            kind([group])
    optimizer = kind(parameters((4,)))
    with pytest.raises(error, match=match):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


def test_a_parameter_twice_in_a_group_is_stepped_once() -> None:
    kind, _ = PAIRS[1]
    (p,), (q,) = parameters((5,)), parameters((5,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        twice = kind([p, p])
    once = kind([q])
    set_grads([p], 0)
    set_grads([q], 0)
    twice.step()
    once.step()
    assert torch.equal(p, q)
    assert twice.state[p]["step"] == 1


@KINDS
def test_signature_is_torchs(kind: type, torch_kind: type) -> None:
    import inspect

    theirs = inspect.signature(torch_kind).parameters
    ours = inspect.signature(kind).parameters
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind, name
        assert ours[name].default == parameter.default, name
    positional = [n for n, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == positional
    assert set(ours) - set(theirs) == {"config", "machine"}
