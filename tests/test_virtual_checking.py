"""Checking mode reports every unordered access, and nothing else."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
import torch
from test_virtual_machine import add_one, launch, register
from torch import nn

from ghoffload import use_machine
from ghoffload.errors import OrderingError
from ghoffload.machine.protocol import Stream
from ghoffload.machine.virtual import VirtualMachine

ORDERS = ["earliest", "latest", "adversarial"]


@pytest.fixture(params=ORDERS)
def machine(request: pytest.FixtureRequest) -> Iterator[VirtualMachine]:
    machine = VirtualMachine(order=request.param, seed=3, check=True)
    with use_machine(machine):
        yield machine


def after(machine: VirtualMachine, first: Stream, then: Stream, label: str = "") -> None:
    event = machine.event("between")
    machine.record(event, first)
    machine.wait(then, event, label=label)


def test_side_stream_must_wait_for_compute(machine: VirtualMachine) -> None:
    hbm, host = torch.zeros(2, 3), torch.zeros(6)
    register(machine, host)
    after(machine, machine.current_stream(), machine.d2h[0])
    hbm.mul_(2)
    with pytest.raises(
        OrderingError,
        match=r"'copy' on stream 'd2h 0' reads a tensor of shape \(2, 3\) and torch.float32, and "
        r"nothing orders it after 'aten.mul_.Tensor' on stream 'compute', which writes",
    ):
        machine.copy(host, hbm, stream=machine.d2h[0])
    after(machine, machine.current_stream(), machine.d2h[0])
    machine.copy(host, hbm, stream=machine.d2h[0])
    machine.synchronize_all()


def test_compute_must_wait_for_a_side_stream(machine: VirtualMachine) -> None:
    hbm, source = torch.zeros(4), torch.ones(4)
    after(machine, machine.current_stream(), machine.h2d)
    machine.copy(hbm, source, stream=machine.h2d)
    with pytest.raises(OrderingError, match=r"'aten.add.Tensor'.* reads .*'copy' on stream 'h2d'"):
        hbm + 1
    after(machine, machine.h2d, machine.current_stream())
    assert (hbm + 1).tolist() == [2] * 4


def test_write_after_read(machine: VirtualMachine) -> None:
    hbm, host = torch.ones(4), torch.zeros(4)
    register(machine, host)
    after(machine, machine.current_stream(), machine.d2h[0])
    machine.copy(host, hbm, stream=machine.d2h[0])
    assert hbm.sum() == 4  # two reads may meet
    with pytest.raises(OrderingError, match=r"'aten.zero_.default'.* writes .* which reads"):
        hbm.zero_()
    with pytest.raises(OrderingError, match=r"'aten.mul.out'.* writes .* which reads"):
        torch.mul(torch.ones(4), 2, out=hbm)
    after(machine, machine.d2h[0], machine.current_stream())
    hbm.zero_()
    machine.synchronize_all()
    assert host.tolist() == [1] * 4


def test_two_side_streams_race(machine: VirtualMachine) -> None:
    hbm, source = torch.zeros(4), torch.ones(4)
    for stream in machine.d2h:
        after(machine, machine.current_stream(), stream)
    machine.launch(launch("first", (), (hbm,), add_one), stream=machine.d2h[0])
    with pytest.raises(OrderingError, match=r"'second' on stream 'd2h 1' .* 'first' on stream"):
        machine.launch(launch("second", (source,), (hbm,), add_one), stream=machine.d2h[1])
    after(machine, machine.d2h[0], machine.d2h[1])
    machine.launch(launch("second", (source,), (hbm,), add_one), stream=machine.d2h[1])
    machine.synchronize_all()
    assert hbm.tolist() == [2] * 4


def test_order_goes_through_a_chain_of_streams(machine: VirtualMachine) -> None:
    hbm = torch.zeros(4)
    after(machine, machine.current_stream(), machine.h2d)
    machine.launch(launch("a", (), (hbm,), add_one), stream=machine.h2d)
    after(machine, machine.h2d, machine.d2h[0])
    after(machine, machine.d2h[0], machine.d2h[1])
    after(machine, machine.d2h[1], machine.current_stream())
    assert hbm.sum() == 4


def test_allocation_counts(machine: VirtualMachine) -> None:
    buffer, source = machine.empty((4,), torch.float32), torch.ones(4)
    with pytest.raises(OrderingError, match="'allocation' on stream 'compute'"):
        machine.launch(launch("k", (), (buffer,), add_one), stream=machine.h2d)
    after(machine, machine.current_stream(), machine.h2d)
    machine.copy(buffer, source, stream=machine.h2d)
    machine.synchronize_all()


def test_host_reads_an_arena_without_synchronize(machine: VirtualMachine) -> None:
    hbm, host = torch.ones(4), torch.zeros(4)
    register(machine, host)
    after(machine, machine.current_stream(), machine.d2h[0])
    machine.copy(host, hbm, stream=machine.d2h[0])
    after(machine, machine.d2h[0], machine.current_stream())  # which the host does not follow
    with pytest.raises(OrderingError, match=r"'aten.sum.default' on the host reads"):
        host.sum()
    with pytest.raises(OrderingError, match="'numba' on the host writes"):
        machine.run_on_host(launch("numba", (), (host,), add_one))
    event = machine.event("back")
    machine.record(event, machine.d2h[0])
    machine.synchronize(event, label="back")
    assert host.sum() == 4


def test_reload_comes_after_what_the_host_wrote(machine: VirtualMachine) -> None:
    hbm, host = torch.zeros(4), torch.zeros(4)
    register(machine, host)
    after(machine, machine.current_stream(), machine.h2d)
    host.fill_(3)
    machine.copy(hbm, host, stream=machine.h2d)
    with pytest.raises(OrderingError, match=r"'aten.fill_.Scalar' on the host writes"):
        host.fill_(4)
    machine.synchronize_all()
    assert hbm.tolist() == [3] * 4


def test_copy_between_arena_and_hbm_is_synchronous(machine: VirtualMachine) -> None:
    hbm, host = torch.ones(4), torch.zeros(4)
    register(machine, host)
    host.copy_(hbm)
    assert host.add_(1).tolist() == [2] * 4
    hbm.copy_(host)
    host.zero_()
    assert hbm.tolist() == [2] * 4


def test_reading_a_value_waits_for_the_stream(machine: VirtualMachine) -> None:
    hbm, host = torch.ones(4), torch.zeros(4)
    register(machine, host)
    machine.launch(launch("k", (), (host,), add_one), stream=machine.current_stream())
    with pytest.raises(OrderingError, match="on the host reads"):
        host.clone()
    hbm.sum().item()
    assert host.clone().tolist() == [1] * 4


def test_freed_source(machine: VirtualMachine) -> None:
    source, host = torch.ones(5), torch.zeros(5)
    register(machine, host)
    after(machine, machine.current_stream(), machine.d2h[0])
    machine.copy(host, source, stream=machine.d2h[0])
    del source
    with pytest.raises(OrderingError, match=r"shape \(5,\) .* was freed while 'copy' on .*'d2h 0'"):
        torch.ones(1)
    torch.ones(1)  # said once
    machine.synchronize_all()


def test_freed_source_is_reported_before_clocks_join(machine: VirtualMachine) -> None:
    source, host = torch.ones(5), torch.zeros(5)
    register(machine, host)
    after(machine, machine.current_stream(), machine.d2h[0])
    machine.copy(host, source, stream=machine.d2h[0])
    event = machine.event("done")
    machine.record(event, machine.d2h[0])
    del source
    with pytest.raises(OrderingError, match="was freed while"):
        machine.wait(machine.current_stream(), event, label="too late")


@pytest.mark.parametrize("how", ["wait", "synchronize", "record_stream"])
def test_freed_source_in_order(machine: VirtualMachine, how: str) -> None:
    source, host = torch.ones(5), torch.zeros(5)
    register(machine, host)
    after(machine, machine.current_stream(), machine.d2h[0])
    machine.copy(host, source, stream=machine.d2h[0])
    event = machine.event("done")
    machine.record(event, machine.d2h[0])
    if how == "wait":
        machine.wait(machine.current_stream(), event, label="done")
    elif how == "synchronize":
        machine.synchronize(event, label="done")
    else:
        machine.record_stream(source, machine.d2h[0])
    del source
    torch.ones(5)
    machine.synchronize_all()
    assert host.tolist() == [1] * 5


def test_record_stream_covers_what_was_queued_before_it() -> None:
    machine = VirtualMachine(check=True)
    with use_machine(machine):
        source, host = torch.ones(5), torch.zeros(5)
        register(machine, host)
        after(machine, machine.current_stream(), machine.d2h[0])
        machine.record_stream(source, machine.d2h[0])
        machine.copy(host, source, stream=machine.d2h[0])
        del source
        with pytest.raises(OrderingError, match="was freed while"):
            machine.synchronize_all()


def test_freed_at_the_end_of_use_machine() -> None:
    machine = VirtualMachine(check=True)
    host = torch.zeros(5)

    def run() -> None:
        with use_machine(machine):
            register(machine, host)
            source = torch.ones(5)
            after(machine, machine.current_stream(), machine.d2h[0])
            machine.copy(host, source, stream=machine.d2h[0])
            del source

    with pytest.raises(OrderingError, match="was freed while"):
        run()


def test_reused_addresses_are_no_alarm(machine: VirtualMachine) -> None:
    host, addresses, shared = torch.zeros(1 << 12), [], 0
    register(machine, host)
    for _ in range(50):
        source = torch.ones(1 << 12)
        after(machine, machine.current_stream(), machine.d2h[0])
        machine.copy(host, source, stream=machine.d2h[0])
        after(machine, machine.d2h[0], machine.current_stream())
        shared += source.data_ptr() in addresses
        addresses.append(source.data_ptr())
        del source
    assert shared > 10  # else nothing was tried
    machine.synchronize_all()
    # The same where the old owner's work is ordered by record_stream alone.
    for _ in range(50):
        source = torch.ones(1 << 12)
        after(machine, machine.current_stream(), machine.d2h[0])
        machine.copy(host, source, stream=machine.d2h[0])
        machine.record_stream(source, machine.d2h[0])
        del source
    machine.synchronize_all()


def test_freed_on_a_borrowed_stream(machine: VirtualMachine) -> None:
    side, source = machine.stream("side"), torch.ones(4)
    after(machine, machine.current_stream(), side)
    with machine.use_stream(side):
        read = source.clone()
        del source  # returns to compute, which has not waited for the side stream
        with pytest.raises(OrderingError, match="until stream 'compute' has waited"):
            torch.ones(1)
    del read


def test_disjoint_views_of_one_storage(machine: VirtualMachine) -> None:
    whole, source = torch.zeros(12), torch.ones(4)
    rows = whole.view(3, 4)
    for stream in machine.d2h:
        after(machine, machine.current_stream(), stream)
    machine.copy(rows[0], source, stream=machine.d2h[0])
    machine.copy(rows[1], source, stream=machine.d2h[1])
    rows[2].add_(1)
    with pytest.raises(OrderingError):
        whole[7:9].add_(1)
    machine.synchronize_all()
    assert whole.tolist() == [1] * 12


def test_arena_is_one_memory_whatever_storage_looks_at_it(machine: VirtualMachine) -> None:
    base = torch.zeros(8)
    register(machine, base)
    buffer = base.numpy()
    first = torch.frombuffer(buffer, dtype=torch.float32, count=4)
    again = torch.frombuffer(buffer, dtype=torch.float32, count=4, offset=8)
    apart = torch.frombuffer(buffer, dtype=torch.float32, count=2, offset=24)
    hbm = torch.ones(4)
    after(machine, machine.current_stream(), machine.d2h[0])
    machine.copy(first, hbm, stream=machine.d2h[0])
    apart.add_(1)
    with pytest.raises(OrderingError, match="on the host writes"):
        again.add_(1)
    machine.synchronize_all()
    again.add_(1)
    assert base.tolist() == [1, 1, 2, 2, 1, 1, 1, 1]


def test_views_and_metadata_access_nothing(machine: VirtualMachine) -> None:
    hbm, source = torch.zeros(4, 4), torch.ones(4, 4)
    after(machine, machine.current_stream(), machine.h2d)
    machine.copy(hbm, source, stream=machine.h2d)
    with torch.inference_mode():  # where reshape and its like arrive undecomposed
        views = [hbm.reshape(16), hbm.contiguous(), hbm.to(torch.float32)]
    views += [hbm.t(), hbm.view(16), hbm[1:], hbm.detach(), hbm.as_strided((2,), (3,)), hbm.mT]
    views += [hbm.unsqueeze(0), hbm.expand(2, 4, 4), hbm.chunk(2)[0], hbm.detach().unsqueeze_(0)]
    torch.empty_like(hbm), torch.zeros_like(hbm), hbm.new_empty(3), hbm.new_zeros(3)
    assert hbm.size() == (4, 4)
    assert hbm.is_contiguous()
    for unordered in (
        lambda: hbm.clone(),
        lambda: hbm.t().contiguous(),
        lambda: hbm.t().reshape(16),
        lambda: hbm.to(torch.float64),
        lambda: views[0] + 1,
        lambda: torch.cat([source, hbm]),
        lambda: torch.mul(source, 2, out=hbm),
        lambda: torch.add(input=source, other=hbm),
        lambda: torch._foreach_add_([source, hbm], 1),
        lambda: torch._foreach_mul([source, hbm], 2),
        lambda: source.index_put_((torch.tensor([0]),), hbm[0]),
        lambda: hbm.sum().item(),
    ):
        with pytest.raises(OrderingError):
            unordered()
    with torch.inference_mode(), pytest.raises(OrderingError):
        hbm.t().reshape(16)
    with pytest.raises(OrderingError):
        hbm.t_().add_(1)
    machine.synchronize_all()


def test_free_with_work_in_flight(machine: VirtualMachine) -> None:
    buffer, host = machine.empty((4,), torch.float32).fill_(1), torch.zeros(4)
    register(machine, host)
    after(machine, machine.current_stream(), machine.d2h[0])
    machine.copy(host, buffer, stream=machine.d2h[0])
    with pytest.raises(OrderingError, match=r"free\(\) gives back memory while 'copy' on stream"):
        machine.free(buffer)
    with pytest.raises(OrderingError, match=r"unregister_host\(\) gives back memory while 'copy'"):
        machine.unregister_host(host.data_ptr())
    machine.synchronize_all()
    machine.free(buffer)
    with pytest.raises(OrderingError, match=r"after its memory was given back with free\(\)"):
        buffer.add_(1)
    machine.unregister_host(host.data_ptr())
    assert host.tolist() == [1] * 4  # the memory itself is not the machine's


def test_training_is_no_alarm_and_quick(machine: VirtualMachine) -> None:
    model = nn.Sequential(nn.Embedding(64, 32), *(nn.Linear(32, 32) for _ in range(20)))
    head = nn.Linear(32, 64)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=True)
    tokens = torch.randint(64, (8, 16))
    losses = []
    gc.collect()
    started = time.perf_counter()
    for _ in range(4):
        logits = head(model(tokens)).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        # Every gradient travels to the host and back beside compute.
        for parameter in parameters:
            assert parameter.grad is not None
            after(machine, machine.current_stream(), machine.d2h[0])
            machine.launch(launch("scale", (), (parameter.grad,), add_one), stream=machine.d2h[0])
        after(machine, machine.d2h[0], machine.current_stream())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = (time.perf_counter() - started) / 4
    assert losses[0] > 3
    assert seconds < 1, f"{seconds:.2f} s a step"
