"""Memory: reserved at construction, none taken by steps, all given back, every byte accounted."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from optim_tools import CPU, PLACES, Place, everywhere, parameters, set_grads, snapshot, train
from torch.utils._python_dispatch import TorchDispatchMode

import ghoffload
from ghoffload import OffloadAdamW
from ghoffload.memory import HostArena, ledger

ROW = 4 * (1 + 16)  # bytes of a step counter and a row of scalars
VIRTUAL = pytest.mark.parametrize("place", PLACES[1:], ids=lambda place: place.name)


class _NewStorages(TorchDispatchMode):
    """Names the operators that return memory their arguments do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        made = isinstance(result, torch.Tensor) and result.numel() > 0
        if made and result.untyped_storage().data_ptr() not in known:
            self.names.append(str(func))
        return result


def _strided() -> list[torch.nn.Parameter]:
    return [
        *parameters((1500, 3), (7,)),
        torch.nn.Parameter(torch.ones(40, 60)[:, ::2]),
        *parameters((300, 9), dtype=torch.bfloat16),
    ]


@everywhere
def test_steps_allocate_nothing_after_the_first(
    monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    params = _strided()
    optimizer = OffloadAdamW(params, config=place.config())
    set_grads(params, 0)
    params[3].grad = params[3].grad.t().contiguous().t()
    optimizer.step()
    machine = ghoffload.machine.active_machine()
    held, allocated = ledger.rows(), machine and machine.memory_allocated()
    monkeypatch.setattr(HostArena, "__init__", lambda *_, **__: pytest.fail("a host arena"))
    if machine is not None:
        monkeypatch.setattr(machine, "empty", lambda *_: pytest.fail("HBM was allocated"))
    for _ in range(3):
        with _NewStorages() as new:
            optimizer.step()
        assert new.names == []
    assert ledger.rows() == held
    if machine is not None:
        assert machine.memory_allocated() == allocated


@VIRTUAL
def test_memory_stays_flat(place: Place) -> None:
    with ghoffload.use_machine("virtual", check=True) as machine:
        params = _strided()
        optimizer = OffloadAdamW(params, config=place.config())
        seen = set()
        for step in range(8):
            for index, p in enumerate(params):
                p.grad = None if (index + step) % 4 == 0 else torch.ones_like(p)
            optimizer.step()
            optimizer.zero_grad()
            if step >= 4:
                seen.add((machine.memory_allocated(), tuple(ledger.rows())))
        assert len(seen) == 1


@everywhere
def test_everything_is_given_back(place: Place) -> None:
    machine = ghoffload.machine.active_machine()
    before = ledger.rows()
    params = _strided()
    allocated = machine and machine.memory_allocated()
    for way in range(4):
        optimizer = OffloadAdamW(params, config=place.config())
        assert ledger.total() > sum(row.nbytes for row in before)
        if way >= 1:
            train(optimizer)
        if way == 2:
            exp_avg = optimizer.state_dict()["state"][0]["exp_avg"]  # outlives the optimizer
            expected = exp_avg.clone()
        if way == 3:
            optimizer.add_param_group({"params": parameters((4000,))})
            train(optimizer)
        del optimizer
        for p in params:
            p.grad = None
        assert ledger.rows() == before
        if way == 2:
            assert torch.equal(exp_avg, expected)
            del exp_avg, expected
        if machine is not None:
            assert machine.memory_allocated() == allocated


def test_no_reference_cycle_keeps_it() -> None:
    before = ledger.rows()
    gc.disable()
    try:
        params = parameters((3000,))
        optimizer = OffloadAdamW(params, config=CPU.config())
        train(optimizer)
        optimizer.state_dict()
        weight = weakref.ref(params[0])
        del optimizer, params
        assert ledger.rows() == before
        assert weight() is None  # nor the parameters
    finally:
        gc.enable()


def test_a_wrapped_optimizer_gives_its_state_back() -> None:
    inner = torch.optim.AdamW(parameters((3000,)))
    train(inner)
    (entries,) = inner.state.values()
    storage = torch.multiprocessing.reductions.StorageWeakRef(entries["exp_avg"].untyped_storage())
    del entries
    optimizer = OffloadAdamW(inner)
    gc.collect()
    assert storage.expired()
    assert len(optimizer.state) == 1


def _rows(optimizer: OffloadAdamW) -> dict[tuple[str, str], int]:
    return {(row.what, row.memory_kind): row.nbytes for row in optimizer.report().rows}


def test_report_on_the_cpu() -> None:
    params = [*parameters((1000,), (24,)), *parameters((512,), dtype=torch.bfloat16)]
    optimizer = OffloadAdamW(params, config=CPU.config())
    set_grads(params[:1], 0)
    report = optimizer.report()
    assert report.parameters == 1536
    assert _rows(optimizer) == {
        ("weights", "system"): 1024 * 4 + 512 * 2,
        ("gradients", "system"): 4000,
        ("exp_avg", "system"): 1536 * 4,
        ("exp_avg_sq", "system"): 1536 * 4,
        ("rest", "system"): 512 * 2,
        ("step counters", "system"): 3 * ROW,
    }
    assert report.total("system") == 1024 * 4 + 512 * 2 + 4000 + 1536 * 8 + 1024 + 3 * ROW
    assert report.total("device") == 0
    assert "exp_avg_sq" in str(report)
    assert "1,536 parameters" in str(report)
    assert report.to_dict()["rows"][0] == {
        "what": "weights",
        "memory_kind": "system",
        "nbytes": 5120,
        "bytes_per_parameter": 5120 / 1536,
    }


@VIRTUAL
def test_report_on_a_machine(place: Place) -> None:
    with ghoffload.use_machine("virtual"):
        params = parameters((4096,), (1024,), dtype=torch.bfloat16)
        config = place.config(bucket_bytes=1024 * 10, staging_buffers=3)
        optimizer = OffloadAdamW(params, config=config)
        rows = _rows(optimizer)
        on_host = place.step_device == "cpu"
        # packed weights and gradients of a bucket, or its three arrays
        buffer = (1024 * 4 + 2 * 16 + 255) // 256 * 256 if on_host else 1024 * 10
        counters = ("step counters", "system" if on_host else "device")
        assert rows == {
            ("weights", "device"): 5120 * 2,
            ("exp_avg", "pinned"): 5120 * 4,
            ("exp_avg_sq", "pinned"): 5120 * 4,
            ("rest", "pinned"): 5120 * 2,
            counters: 2 * ROW,
            ("staging buffers", "device"): 3 * buffer,
        } | ({("staging buffers", "pinned"): 3 * buffer} if on_host else {})
        owner = optimizer.report().title
        assert ledger.total("pinned", owner) == optimizer.report().total("pinned")
        held = 3 * buffer + (0 if on_host else 2 * ROW)
        assert ledger.total("device", owner) == held


def test_report_of_resident_state_and_scratch() -> None:
    with ghoffload.use_machine("virtual"):
        params = [torch.nn.Parameter(torch.ones(64, 64)[:, ::2])]
        optimizer = OffloadAdamW(params, config={"memory_kind": "device"})
        train(optimizer, steps=1)
        rows = _rows(optimizer)
        assert rows["exp_avg", "device"] == rows["exp_avg_sq", "device"] == 2048 * 4
        assert rows["scratch", "device"] == 2048 * 4  # a dense stand-in for the parameter
        owner = optimizer.report().title
        assert ledger.total("device", owner) == 3 * 2048 * 4 + ROW
        assert ledger.total("pinned", owner) == 0


def test_host_state_is_as_large_as_said() -> None:
    # 12 bytes a parameter with a master, 8 without: nothing is rounded up but the ends
    params = parameters((100_000,), *[(1000,)] * 30, dtype=torch.bfloat16)
    elements = sum(p.numel() for p in params)
    for master, each in (("fp32", 12), ("none", 8)):
        optimizer = OffloadAdamW(params, config={"master": master})
        held = ledger.total("system", optimizer.report().title)
        assert each * elements <= held < 1.002 * each * elements
        del optimizer


@VIRTUAL
@pytest.mark.parametrize("what", ["hbm_bytes", "host_bytes"])
def test_out_of_memory_at_construction_leaves_nothing(what: str, place: Place) -> None:
    before = ledger.rows()
    limit = 20_000 if what == "hbm_bytes" else 10_000
    with ghoffload.use_machine("virtual", **{what: limit}) as machine:
        params = parameters((4000,))
        allocated = machine.memory_allocated()
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                OffloadAdamW(params, config=place.config(bucket_bytes=1 << 20))
            assert ledger.rows() == before
            assert machine.memory_allocated() == allocated
        small = OffloadAdamW(parameters((10,)), config=place.config(staging_buffers=2))
        train(small)


@VIRTUAL
def test_out_of_memory_when_a_group_is_added(place: Place) -> None:
    with ghoffload.use_machine("virtual", host_bytes=60_000):
        optimizer = OffloadAdamW(parameters((2000,)), config=place.config())
        train(optimizer)
        before, held = snapshot(optimizer), ledger.rows()
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.add_param_group({"params": parameters((9000,))})
        assert (snapshot(optimizer), ledger.rows()) == (before, held)
        train(optimizer, start=3)
        end = snapshot(optimizer)
    plain = OffloadAdamW(parameters((2000,)), config=CPU.config())
    train(plain, steps=6)
    assert snapshot(plain) == end


def test_out_of_memory_in_the_middle_changes_nothing() -> None:
    """A gradient in an order that needs scratch, where there is no room for it."""
    params = parameters((60, 70))
    with ghoffload.use_machine("virtual", hbm_bytes=110_000) as machine:
        optimizer = OffloadAdamW(params, config=CPU.config(step_device="cuda"))
        train(optimizer, steps=1)
        before = snapshot(optimizer)
        params[0].grad = params[0].grad.t().contiguous().t()
        ballast = torch.zeros((110_000 - machine.memory_allocated()) // 4 - 100)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
        del ballast
        assert snapshot(optimizer) == before
        optimizer.step()
        assert optimizer.state[params[0]]["step"] == 2


def test_loading_takes_no_more_hbm() -> None:
    with ghoffload.use_machine("virtual", check=True) as machine:
        optimizer = OffloadAdamW(parameters((9000,)), config=CPU.config(step_device="cuda"))
        train(optimizer)
        other = OffloadAdamW(parameters((9000,)), config=CPU.config(step_device="cuda"))
        state_dict = optimizer.state_dict()
        allocated = machine.memory_allocated()
        with _NewStorages() as new:
            other.load_state_dict(state_dict)
        assert not [name for name in new.names if "empty" in name or "clone" in name]
        assert machine.memory_allocated() == allocated


@pytest.mark.parametrize("memory", ["hbm", "host"])
@pytest.mark.parametrize("step_device", ["cuda", "cpu"])
def test_a_group_that_does_not_fit_leaves_the_optimizer_as_it_was(
    step_device: str, memory: str
) -> None:
    """Wider buckets want new buffers, and the old ones have to outlive a refusal."""
    small, large = parameters((3000,), (2_000_000,))
    expected = parameters((3000,))
    plain = OffloadAdamW(expected, machine="cpu")
    train(plain)
    train(plain)
    # 16 MB of state; a CPU step has room for it and none for its packed buffers.
    room = {f"{memory}_bytes": (12 if (step_device, memory) == ("cuda", "host") else 20) << 20}
    with ghoffload.use_machine("virtual", check=True, **room):
        config = {"step_device": step_device, "bucket_bytes": 64 << 20}
        optimizer = OffloadAdamW([small], config=config)
        train(optimizer)
        owner = optimizer.report().title
        held = ledger.total(owner=owner)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.add_param_group({"params": [large]})
        assert len(optimizer.param_groups) == 1
        gc.collect()
        assert ledger.total(owner=owner) == held
        train(optimizer)
    assert torch.equal(small, expected[0])
