"""The virtual machine runs what is queued in any order the rules allow, and only those."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from ghoffload import use_machine
from ghoffload.errors import OrderingError
from ghoffload.machine.protocol import Event, Launch
from ghoffload.machine.virtual import VirtualMachine

BUCKETS, SLOTS, SIZE = 6, 2, 64
WAITS = {
    "reload waits for compute",
    "update waits for the reload",
    "write-back waits for its source",
    "reload waits for its buffer",
    "write-back keeps its order",
    "host waits for the write-back",
}


def launch(name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], host: object) -> Launch:
    def device(stream: int) -> None:
        raise AssertionError("no GPU here")

    return Launch(name, tuple(reads), tuple(writes), device, host)  # type: ignore[arg-type]


def add_one(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
    writes[0].add_(1)


def register(machine: VirtualMachine, tensor: Tensor) -> None:
    machine.register_host(tensor.data_ptr(), tensor.numel() * tensor.element_size(), pin=True)


def streamed(machine: VirtualMachine, steps: int = 3) -> Tensor:
    """State of six buckets through two staging buffers, as the optimizer moves it."""
    arena = torch.arange(BUCKETS * SIZE, dtype=torch.float32)
    register(machine, arena)
    buffers = [machine.empty((SIZE,), torch.float32) for _ in range(SLOTS)]
    compute = machine.current_stream()
    allocated, reloaded, updated = (machine.event(n) for n in ("allocated", "reloaded", "updated"))
    drained: list[Event] = [machine.event(f"drained {slot}") for slot in range(SLOTS)]
    last: Event | None = None
    machine.record(allocated, compute)
    machine.wait(machine.h2d, allocated, label="reload waits for compute")
    for turn in range(steps * BUCKETS):
        slot, bucket = turn % SLOTS, turn % BUCKETS
        host = torch.frombuffer(  # a storage of its own, as the state of each parameter has
            arena.numpy(), dtype=torch.float32, count=SIZE, offset=4 * SIZE * bucket
        )
        buffer, back = buffers[slot], machine.d2h[turn % 2]
        if turn >= SLOTS:
            machine.wait(machine.h2d, drained[slot], label="reload waits for its buffer")
        machine.copy(buffer, host, stream=machine.h2d)
        machine.record(reloaded, machine.h2d)
        machine.wait(compute, reloaded, label="update waits for the reload")
        machine.launch(launch("update", (), (buffer,), add_one), stream=compute)
        machine.record(updated, compute)
        machine.wait(back, updated, label="write-back waits for its source")
        if last is not None:
            machine.wait(back, last, label="write-back keeps its order")
        machine.copy(host, buffer, stream=back)
        machine.record(drained[slot], back)
        last = drained[slot]
    assert last is not None
    machine.synchronize(last, label="host waits for the write-back")
    read: list[Tensor] = []
    machine.run_on_host(
        launch("reading the result", (arena,), (), lambda reads, _: read.append(reads[0].clone()))
    )
    for buffer in buffers:
        machine.free(buffer)
    machine.unregister_host(arena.data_ptr())
    return read[0]


EXPECTED = torch.arange(BUCKETS * SIZE, dtype=torch.float32) + 3


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("order", ["earliest", "latest", "adversarial"])
def test_every_order_gives_the_same_values(order: str, check: bool) -> None:
    for seed in range(20 if order == "adversarial" else 1):
        machine = VirtualMachine(order=order, seed=seed, check=check)
        with use_machine(machine):
            assert torch.equal(streamed(machine), EXPECTED)
    assert set(machine.labels) == WAITS


@pytest.mark.parametrize("label", sorted(WAITS))
def test_each_dropped_wait_is_reported_in_one_checked_run(label: str) -> None:
    machine = VirtualMachine(check=True)
    machine.dropped_waits.add(label)
    with pytest.raises(OrderingError, match=r"nothing orders it after|may still be running"):
        streamed(machine)


def test_dropped_wait_shows_in_the_values_of_some_order_without_checks() -> None:
    def bits(order: str, seed: int = 0) -> Tensor:
        machine = VirtualMachine(order=order, seed=seed)
        machine.dropped_waits.add("update waits for the reload")
        return streamed(machine, steps=1)

    assert torch.equal(bits("earliest"), EXPECTED - 2)
    assert not torch.equal(bits("latest"), EXPECTED - 2)
    assert any(not torch.equal(bits("adversarial", seed), EXPECTED - 2) for seed in range(5))


def trace(machine: VirtualMachine) -> list[str]:
    """The order in which independent kernels on three side streams run."""
    ran: list[str] = []
    with use_machine(machine):
        for turn in range(8):
            for stream in (machine.h2d, *machine.d2h):
                name = f"{stream.name} {turn}"

                def host(reads: object, writes: object, name: str = name) -> None:
                    ran.append(name)

                machine.launch(launch(name, (), (), host), stream=stream)
            torch.ones(1)
        machine.synchronize_all()
    return ran


def test_adversarial_order_depends_on_the_seed_and_on_nothing_else() -> None:
    traces = [trace(VirtualMachine(order="adversarial", seed=seed)) for seed in range(8)]
    again = [trace(VirtualMachine(order="adversarial", seed=seed)) for seed in range(8)]
    assert traces == again
    assert len({tuple(ran) for ran in traces}) == 8
    for ran in traces:  # each stream keeps its own order
        for stream in ("h2d", "d2h 0", "d2h 1"):
            mine = [name for name in ran if name.startswith(stream)]
            assert mine == [f"{stream} {turn}" for turn in range(8)]


@pytest.fixture
def late() -> Iterator[VirtualMachine]:
    machine = VirtualMachine(order="latest")
    with use_machine(machine):
        yield machine


def test_latest_runs_only_what_is_needed(late: VirtualMachine) -> None:
    first, second = torch.zeros(4), torch.zeros(4)
    late.copy(first, source := torch.ones(4), stream=late.h2d)
    late.copy(second, source, stream=late.d2h[0])
    assert first.sum() == 0
    event = late.event("first")
    late.record(event, late.h2d)
    late.synchronize(event, label="first")
    assert first.sum() == 4
    assert second.sum() == 0
    late.run_pending()
    assert second.sum() == 4


def test_wait_follows_chains_through_other_streams(late: VirtualMachine) -> None:
    a, b, c = torch.ones(4), torch.zeros(4), torch.zeros(4)
    one, two = late.event("one"), late.event("two")
    late.copy(b, a, stream=late.h2d)
    late.record(one, late.h2d)
    late.wait(late.d2h[0], one, label="second after first")
    late.copy(c, b, stream=late.d2h[0])
    late.record(two, late.d2h[0])
    late.wait(late.current_stream(), two, label="compute after both")
    assert c.tolist() == [1, 1, 1, 1]


def test_wait_takes_the_recording_that_stood_when_it_was_queued(late: VirtualMachine) -> None:
    a, b = torch.zeros(1), torch.zeros(1)
    event = late.event("reused")
    late.copy(a, source := torch.ones(1), stream=late.h2d)
    late.record(event, late.h2d)
    late.wait(late.d2h[0], event, label="first recording")
    late.copy(b, source, stream=late.h2d)
    late.record(event, late.h2d)
    done = late.event("done")
    late.record(done, late.d2h[0])
    late.synchronize(done, label="done")
    assert (a.item(), b.item()) == (1, 0)


def test_another_current_stream(late: VirtualMachine) -> None:
    side, a = late.stream("side"), torch.zeros(4)
    compute = late.current_stream()
    late.copy(a, source := torch.ones(4), stream=side)
    with late.use_stream(side):
        assert late.current_stream() is side
        assert a.tolist() == [1] * 4  # what was queued on it comes before what is eager on it
        late.copy(a, source2 := torch.zeros(4), stream=compute)
        assert a.tolist() == [1] * 4
    assert late.current_stream() is compute
    assert a.tolist() == [0] * 4
    del source, source2


@pytest.mark.parametrize("use", ["wait", "synchronize"])
def test_event_never_recorded(use: str) -> None:
    machine = VirtualMachine()
    event = machine.event("phantom")
    calls = {
        "wait": lambda: machine.wait(machine.h2d, event, label="x"),
        "synchronize": lambda: machine.synchronize(event, label="x"),
    }
    with pytest.raises(RuntimeError, match="'phantom' was never recorded"):
        calls[use]()


def test_dead_source_is_read_as_ff(late: VirtualMachine) -> None:
    into, source, out = torch.zeros(4), torch.ones(4), torch.zeros(4)
    late.copy(into, source, stream=late.h2d)
    late.launch(
        launch("double", (source,), (out,), lambda r, w: torch.mul(r[0], 2, out=w[0])),
        stream=late.h2d,
    )
    del source
    late.synchronize_all()
    assert into.view(torch.int32).tolist() == [-1] * 4
    assert out.isnan().all()


def test_dead_destination_is_dropped(late: VirtualMachine) -> None:
    source, into, other = torch.ones(4), torch.zeros(4), torch.zeros(4)

    def host(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        for tensor in writes:
            tensor.copy_(reads[0])

    late.copy(into, source, stream=late.h2d)
    late.launch(launch("both", (source,), (into, other), host), stream=late.h2d)
    del into
    late.synchronize_all()
    assert other.sum() == 4


def test_queue_keeps_nothing_alive_but_record_stream_does(late: VirtualMachine) -> None:
    source, into = torch.ones(4), torch.zeros(4)
    late.copy(into, source, stream=late.h2d)
    late.record_stream(source, late.h2d)
    storage = torch.multiprocessing.reductions.StorageWeakRef(source.untyped_storage())
    del source
    gc.collect()
    assert not storage.expired()
    late.synchronize_all()
    assert into.sum() == 4
    assert storage.expired()


def test_views_of_an_arena_may_come_and_go(late: VirtualMachine) -> None:
    arena = torch.arange(8, dtype=torch.float32)
    register(late, arena)
    into = torch.zeros(4)
    late.copy(into, torch.frombuffer(arena.numpy(), dtype=torch.float32)[4:], stream=late.h2d)
    gc.collect()
    late.synchronize_all()
    assert into.tolist() == [4, 5, 6, 7]


def test_traffic_is_counted() -> None:
    machine = VirtualMachine()
    hbm = machine.empty((4,), torch.float32)
    machine.copy(hbm, torch.ones(4), stream=machine.h2d)
    machine.copy(torch.ones(2), hbm[:2], stream=machine.d2h[1])
    machine.copy(hbm, torch.ones(4), stream=machine.current_stream())
    machine.copy(hbm[:0], torch.ones(0), stream=machine.h2d)
    machine.launch(launch("k", (), (hbm,), add_one), stream=machine.h2d)
    traffic = machine.traffic
    assert (traffic.h2d_bytes, traffic.d2h_bytes, traffic.copies, traffic.launches) == (16, 8, 3, 1)
    traffic.reset()
    assert (traffic.h2d_bytes, traffic.d2h_bytes, traffic.copies, traffic.launches) == (0, 0, 0, 0)


def test_kernel_runs_on_leaves_and_its_error_reaches_the_caller() -> None:
    machine = VirtualMachine(order="latest")
    weight = torch.zeros(2, requires_grad=True)
    machine.launch(launch("k", (), (weight,), add_one), stream=machine.current_stream())
    assert weight.tolist() == [1, 1]

    def broken(reads: object, writes: object) -> None:
        raise ZeroDivisionError

    machine.launch(launch("broken", (), (), broken), stream=machine.h2d)
    with pytest.raises(ZeroDivisionError):
        machine.synchronize_all()
    machine.synchronize_all()


def test_refusals() -> None:
    machine = VirtualMachine()
    a = torch.zeros(4, 4)
    with pytest.raises(ValueError, match="as many bytes on both sides, got 8 from"):
        machine.copy(a, torch.zeros(2), stream=machine.h2d)
    with pytest.raises(ValueError, match="expects contiguous CPU tensors, got shape"):
        machine.copy(a.t(), a, stream=machine.h2d)
    with pytest.raises(ValueError, match="k expects CPU tensors on the virtual machine, got"):
        machine.launch(launch("k", (a.to("meta"),), (), add_one), stream=machine.h2d)
    with pytest.raises(ValueError, match=r"order expects one of 'earliest', .* got 'random'"):
        VirtualMachine(order="random")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a stream of a virtual machine, got 3"):
        machine.copy(a, a, stream=3)  # type: ignore[arg-type]
