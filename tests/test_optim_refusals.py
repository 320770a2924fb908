"""What cannot be stepped is refused with one sentence before anything has changed."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_tools import CPU, PAIRS, Place, everywhere, parameters, set_grads, snapshot, train

import ghoffload
from ghoffload import (
    InterruptedStepError,
    MachineUnavailableError,
    OffloadAdam,
    OffloadAdamW,
    VirtualMachine,
)
from ghoffload.machine import Launch, active_machine
from ghoffload.memory import ledger

KINDS = pytest.mark.parametrize("kind", [pair[0] for pair in PAIRS])


@KINDS
@pytest.mark.parametrize(
    ("tensor", "error", "match"),
    [
        (torch.zeros(2, dtype=torch.float64), TypeError, "got torch.float64"),
        (torch.zeros(2, dtype=torch.complex64), TypeError, "got torch.complex64"),
        (torch.zeros(2, dtype=torch.int32), TypeError, "got torch.int32"),
        (torch.eye(2).to_sparse(), TypeError, "expects dense parameters, got torch.sparse_coo"),
        (torch.zeros(1).expand(4), ValueError, "an expanded one"),
        (torch.zeros(2, device="meta"), ValueError, "on one device, got cpu, meta"),
        (torch.nn.UninitializedParameter(), TypeError, "got UninitializedParameter"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parameters(kind: type, tensor: torch.Tensor, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        kind([*parameters((3,)), tensor])


def test_parameters_on_no_device_of_ours() -> None:
    with pytest.raises(ValueError, match="parameters on meta have no numbers to step: use a Simul"):
        OffloadAdamW([torch.zeros(2, device="meta")])


class _Wrapper(torch.Tensor):
    """A subclass without memory of its own kind, as DTensor is."""


def _gradient(value: torch.Tensor) -> Callable[[torch.nn.Parameter], None]:
    def give(p: torch.nn.Parameter) -> None:
        if not hasattr(p, "grad_dtype") and value.dtype != p.dtype:
            pytest.skip(f"torch {torch.__version__} refuses such a gradient itself")
        if hasattr(p, "grad_dtype"):
            p.grad_dtype = None
        p.grad = value

    return give


def _data(value: torch.Tensor) -> Callable[[torch.nn.Parameter], None]:
    def give(p: torch.nn.Parameter) -> None:
        p.grad = None
        p.data = value
        p.grad = torch.zeros_like(value)

    return give


@KINDS
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_gradient(torch.eye(3).to_sparse()), "does not support sparse gradients"),
        (_gradient(torch.zeros(3, 3, dtype=torch.complex64)), "gradients, got torch.complex64"),
        (_gradient(torch.zeros(3, 3, dtype=torch.float64)), "gradients, got torch.float64"),
        (_gradient(torch.zeros(3, 3).as_subclass(_Wrapper)), "gradients, got _Wrapper"),
        (_data(torch.zeros(4, 3)), r"of shape \(3, 3\), it now has \(4, 3\)"),
        (_data(torch.zeros(9)), r"of shape \(3, 3\), it now has \(9,\)"),
        (_data(torch.zeros(3, 3, dtype=torch.bfloat16)), "float32, it now is torch.bfloat16"),
        (_data(torch.zeros(3, 3, dtype=torch.float16)), "after converting the model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_at_the_step(kind: type, change: Callable[[Any], None], match: str) -> None:
    params = parameters((2000,), (3, 3), (5,))
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    optimizer = kind(groups, config=CPU.config())
    train(optimizer)
    set_grads(params, 3)
    data = params[1].data
    change(params[1])
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=match):
        optimizer.step()
    assert snapshot(optimizer) == before
    params[1].grad = None
    params[1].data = data
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [4, 3, 4]


def test_a_first_gradient_that_is_refused_leaves_no_state() -> None:
    params = parameters((3, 3), (5,))
    for p in params:
        p.requires_grad_(False)
    optimizer = OffloadAdamW(params)
    params[1].grad = torch.ones(5)
    params[0].grad = torch.eye(3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert not optimizer.state
    assert optimizer.report().parameters == 0


def test_a_parameter_that_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = OffloadAdamW(parameters((3,)))
    train(optimizer)
    before = snapshot(optimizer)
    # as after model.cuda(): the parameters are no longer where the optimizer was built
    monkeypatch.setattr(optimizer._engine, "device", torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="was built for cuda:0, got a parameter on cpu; build"):
        optimizer.step()
    monkeypatch.undo()
    assert snapshot(optimizer) == before


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("lr", torch.tensor([0.1, 0.2]), "lr expects one element"),
        ("lr", torch.tensor(1), "lr expects one element of torch.float32 or torch.float64"),
        ("lr", "fast", "could not convert"),
        ("eps", "small", "could not convert"),
        ("betas", (0.9, "x"), "could not convert"),
    ],
    ids=str,
)
def test_a_hyperparameter_spoiled_later(name: str, value: Any, match: str) -> None:
    params = parameters((2000,), (3,))
    optimizer = OffloadAdamW([{"params": [p]} for p in params], config=CPU.config())
    train(optimizer)
    kept = optimizer.param_groups[1][name]
    optimizer.param_groups[1][name] = value
    set_grads(params, 3)
    with pytest.raises(ValueError, match=match):
        optimizer.step()
    optimizer.param_groups[1][name] = kept
    plain = OffloadAdamW([{"params": [p]} for p in parameters((2000,), (3,))], config=CPU.config())
    train(plain)
    assert snapshot(optimizer) == snapshot(plain)
    optimizer.step()


def test_an_error_in_the_closure_changes_nothing() -> None:
    optimizer = OffloadAdamW(parameters((3,)))
    train(optimizer)
    before = snapshot(optimizer)

    def closure() -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert snapshot(optimizer) == before
    optimizer.step()


@everywhere
@pytest.mark.parametrize("launches", [1, 2, 4])
def test_a_step_that_stopped_part_way_says_so(
    launches: int, monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    params = parameters((5000,), dtype=torch.bfloat16)
    optimizer = OffloadAdamW(params, config=place.config())
    train(optimizer)
    saved = copy.deepcopy(optimizer.state_dict(native=True))
    weights = [p.detach().clone() for p in params]
    calls = []
    machine = active_machine()
    owner, name = (Launch, "run_on_host") if machine is None else (machine, "launch")
    run = getattr(owner, name)

    def interrupted(launch: Launch, **kwargs: Any) -> None:
        calls.append(launch.name)
        if len(calls) > launches:
            raise KeyboardInterrupt
        run(launch, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    for use in (
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.state,
        lambda: pickle.dumps(optimizer),
    ):
        with pytest.raises(InterruptedStepError, match="an earlier step stopped while"):
            use()
    # weights and state of one step make it whole again
    with torch.no_grad():
        params[0].copy_(weights[0])
    optimizer.load_state_dict(saved)
    train(optimizer, start=3)
    plain = OffloadAdamW(parameters((5000,), dtype=torch.bfloat16))
    train(plain, steps=6)
    assert snapshot(optimizer) == snapshot(plain)


def test_step_device_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="step_device='cuda' expects parameters in HBM"):
        OffloadAdamW(parameters((3,)), config={"step_device": "cuda"})
    with pytest.raises(ValueError, match="keep state in HBM"):
        OffloadAdam(parameters((3,)), config={"memory_kind": "device"})


@pytest.mark.parametrize(
    "options",
    [
        {"transfer": "kernel", "step_device": "cpu"},
        {"transfer": "kernel", "pin_memory": False},
        {"memory_kind": "managed", "step_device": "cpu"},
        {"memory_kind": "managed", "transfer": "copy_engine"},
        {"memory_kind": "system", "transfer": "copy_engine"},
    ],
    ids=str,
)
def test_an_update_in_place_needs_memory_that_the_gpu_reaches(options: dict[str, Any]) -> None:
    with ghoffload.use_machine("virtual"), pytest.raises(ValueError, match="transfer='kernel'"):
        OffloadAdamW(parameters((3,)), config=options)
    with pytest.raises(ValueError, match="got parameters on the CPU"):
        OffloadAdamW(parameters((3,)), config={"memory_kind": "managed"})


@pytest.mark.parametrize("kind", ["managed", "system"])
def test_a_machine_without_a_memory_kind_says_so(kind: str) -> None:
    before = ledger.rows()
    with (
        ghoffload.use_machine("virtual", memory_kinds=("device", "pinned")),
        pytest.raises(ValueError, match=f"memory kind '{kind}' expects a device with .*Access"),
    ):
        OffloadAdamW(parameters((3,)), config={"memory_kind": kind})
    assert ledger.rows() == before


@pytest.mark.filterwarnings("ignore::ghoffload.errors.PinWarning")
def test_a_refused_pin_is_no_memory_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ledger.rows()
    with ghoffload.use_machine("virtual") as machine:
        register = machine.register_host

        def refuse(address: int, nbytes: int, *, pin: bool, node: int | None) -> bool:
            register(address, nbytes, pin=pin)
            return False

        monkeypatch.setattr(machine, "register_host", refuse)
        with pytest.raises(RuntimeError, match="pinning it was refused"):
            OffloadAdamW(parameters((3,)), config={"transfer": "kernel"})
        gc.collect()
    assert ledger.rows() == before


@pytest.mark.parametrize(
    ("chip", "config", "error", "match"),
    [
        ((7, 5), {}, MachineUnavailableError, r"8\.0 \(Ampere\) or later, got one of 7\.5"),
        ((8, 0), {"transfer": "kernel"}, ValueError, r"this GPU has 8\.0; use transfer='copy_eng"),
        ((8, 9), {"memory_kind": "managed"}, ValueError, "needs bulk copies"),
    ],
)
def test_older_chips_are_refused_before_anything_is_reserved(
    chip: tuple[int, int],
    config: dict[str, Any],
    error: type,
    match: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(VirtualMachine, "compute_capability", chip)
    before = ledger.rows()
    with ghoffload.use_machine("virtual"), pytest.raises(error, match=match):
        OffloadAdamW(parameters((3,)), config=config)
    assert ledger.rows() == before
    with ghoffload.use_machine("virtual"):
        OffloadAdamW(parameters((3,)), config={"step_device": "cpu"})
        if chip >= (8, 0):
            OffloadAdamW(parameters((3,)))
