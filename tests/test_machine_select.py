"""Which machine serves a device, and what is said where none can."""

from __future__ import annotations

import threading

import pytest
import torch

from ghoffload import use_machine
from ghoffload.errors import MachineUnavailableError, OrderingError
from ghoffload.machine import topology
from ghoffload.machine.protocol import Machine
from ghoffload.machine.select import active_machine, machine_for
from ghoffload.machine.virtual import VirtualMachine

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _no_hidden_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "unusable_gpu", lambda: None)


def test_parameters_on_the_cpu_step_on_the_cpu() -> None:
    assert machine_for(CPU) is None
    assert active_machine() is None


def test_use_machine_nests_and_ends() -> None:
    inner = VirtualMachine()
    with use_machine("virtual", order="latest", seed=7) as outer:
        assert isinstance(outer, VirtualMachine)
        assert machine_for(CPU) is active_machine() is outer
        with use_machine(inner) as same:
            assert same is inner
            assert machine_for(CPU) is active_machine() is inner
        assert machine_for(CPU) is outer
        assert machine_for(CPU, "cpu") is None
    assert machine_for(CPU) is None
    with pytest.raises(KeyError), use_machine(inner):
        raise KeyError
    assert active_machine() is None


def test_use_machine_is_per_thread() -> None:
    seen: list[Machine | None] = []
    with use_machine("virtual"):
        thread = threading.Thread(target=lambda: seen.append(active_machine()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_only_the_innermost_machine_sees_eager_operations() -> None:
    outer, inner = VirtualMachine(hbm_bytes=1 << 20), VirtualMachine(check=True)
    with use_machine(outer):
        with use_machine(inner):
            one = torch.ones(4)
            with pytest.raises(OrderingError):
                inner.copy(one, one.clone(), stream=inner.h2d)
            assert outer.memory_allocated() == 0
        two = torch.ones(4)
        assert outer.memory_allocated() == two.nbytes
        with use_machine(outer):  # twice the same
            three = torch.ones(4)
        assert outer.memory_allocated() == two.nbytes + three.nbytes


def test_explicit_beats_use_machine_beats_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GHOFFLOAD_MACHINE", "Virtual")
    shared = machine_for(CPU)
    assert isinstance(shared, VirtualMachine)
    assert machine_for(CPU) is shared
    assert machine_for(CPU, "virtual") is shared
    mine = VirtualMachine()
    with use_machine("virtual") as used:
        assert machine_for(CPU) is used is not shared
        assert machine_for(CPU, mine) is mine
    monkeypatch.setenv("GHOFFLOAD_MACHINE", "cpu")
    assert machine_for(CPU) is None
    monkeypatch.setenv("GHOFFLOAD_MACHINE", "")
    assert machine_for(CPU) is None


def test_a_gpu_that_torch_cannot_use_stops_until_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topology, "unusable_gpu", lambda: "a GPU, and no CUDA in torch")
    with pytest.raises(
        MachineUnavailableError, match=r"a GPU, and no CUDA in torch.*GHOFFLOAD_MACHINE=cpu"
    ):
        machine_for(CPU)
    assert machine_for(CPU, "cpu") is None
    assert isinstance(machine_for(CPU, "virtual"), VirtualMachine)
    with use_machine("virtual"):
        assert machine_for(CPU) is active_machine()
    monkeypatch.setenv("GHOFFLOAD_MACHINE", "cpu")
    assert machine_for(CPU) is None


def test_unknown_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match="machine kind of 'virtual', 'cuda', 'simulated', got 'tpu'"
    ):
        use_machine("tpu").__enter__()
    with pytest.raises(
        ValueError, match=r"the machine argument expects .*'virtual', 'cuda', 'cpu'"
    ):
        machine_for(CPU, "tpu")
    with pytest.raises(ValueError, match=r"the machine argument expects a Machine or .* got 3"):
        machine_for(CPU, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="use_machine expects a Machine or a kind, got 3"):
        use_machine(3).__enter__()  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"options for a new machine only, got .'seed'."):
        use_machine(VirtualMachine(), seed=1).__enter__()
    monkeypatch.setenv("GHOFFLOAD_MACHINE", "tpu")
    with pytest.raises(ValueError, match="GHOFFLOAD_MACHINE expects"):
        machine_for(CPU)


def test_machine_and_parameters_must_match(monkeypatch: pytest.MonkeyPatch) -> None:
    for explicit in ("virtual", VirtualMachine()):
        with pytest.raises(
            ValueError,
            match=r"the virtual machine \(from the machine argument\) expects parameters on the "
            r"CPU, got parameters on cuda:0",
        ):
            machine_for(CUDA, explicit)
    with use_machine("virtual"), pytest.raises(ValueError, match="from use_machine"):
        machine_for(CUDA)
    with pytest.raises(ValueError, match=r"the cuda machine .* on a CUDA device, got .* cpu"):
        machine_for(CPU, "cuda")
    with pytest.raises(ValueError, match=r"plain stepping on the CPU .* got parameters on cuda:0"):
        machine_for(CUDA, "cpu")
    with pytest.raises(ValueError, match="parameters on meta have no numbers to step: use a Simul"):
        machine_for(torch.device("meta"))
    monkeypatch.setenv("GHOFFLOAD_MACHINE", "cuda")
    with pytest.raises(ValueError, match=r"\(from GHOFFLOAD_MACHINE\)"):
        machine_for(CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu() -> None:
    with pytest.raises(MachineUnavailableError):
        use_machine("cuda").__enter__()
    with pytest.raises(MachineUnavailableError):
        machine_for(CUDA)


@pytest.mark.gpu
def test_cuda_parameters_get_their_own_machine() -> None:
    machine = machine_for(CUDA)
    assert machine is not None
    assert machine.kind == "cuda"
    assert machine.device == CUDA
    with use_machine("cuda") as used:
        assert machine_for(CUDA) is used
        for index in range(torch.cuda.device_count()):
            device = torch.device("cuda", index)
            found = machine_for(device)
            assert found is not None
            assert found.device == device
