"""The checks, in the order in which they run."""

from __future__ import annotations

import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ghoffload.check import programs
from ghoffload.errors import OrderingError
from ghoffload.kernels import golden
from ghoffload.kernels.build import BULK_COPIES
from ghoffload.machine.cuda import CudaMachine
from ghoffload.machine.protocol import Launch, Machine, Stream
from ghoffload.machine.virtual import VirtualMachine
from ghoffload.memory import HostArena
from ghoffload.optim import OffloadAdamW
from ghoffload.transfer import WriteBack, chunked

STEP_DEVICES = ("cuda", "cpu")


class Difference(Exception):
    """Two results that must agree do not."""


@dataclass(frozen=True)
class Check:
    """One check: ``run`` returns what to report, or raises."""

    name: str
    run: Callable[[], Any]


def checks(*, gpu: bool, seeds: int) -> Iterator[Check]:
    """All checks for this machine; those of the GPU where torch can use one."""
    yield Check("golden hashes, CPU kernels", lambda: _golden("cpu"))
    for step_device in STEP_DEVICES:
        yield Check(
            f"each wait removed is reported (virtual machine, step_device={step_device})",
            lambda device=step_device: _waits(device),  # type: ignore[misc]
        )
        yield Check(
            f"{seeds} adversarial orders give the CPU's bits (step_device={step_device})",
            lambda device=step_device: _orders(device, seeds),  # type: ignore[misc]
        )
    if not (gpu and torch.cuda.is_available()):
        yield Check("training against torch on the CPU", lambda: _training("cpu", None))
        return
    machine = CudaMachine.of("cuda")
    yield Check("golden hashes, GPU kernels, HBM", lambda: _golden(machine))
    yield Check("golden hashes, GPU kernels, pinned memory in place", lambda: _in_place(machine))
    yield Check("bits of the streamed step equal the CPU's", lambda: _streamed(machine))
    yield Check("bits under random delays on every stream", lambda: _delayed(seeds))
    yield Check("training against torch on the GPU", lambda: _training("cuda", machine))
    yield Check("the link, in figures (no verdict)", lambda: _link(machine))


def _golden(target: Machine | str, place: Callable[[Tensor], Tensor] | None = None) -> str:
    expected, found = golden.expected(), golden.run(target, place=place)
    for name, digest in found.items():
        if expected.get(name) != digest:
            raise Difference(f"{name}: expected sha256 {expected.get(name)}, got {digest}")
    return f"{len(found)} of {len(expected)}"


def _in_place(machine: Machine) -> str:
    """The kernels read and write pinned host memory where it lies."""
    arena = HostArena(64 << 20, machine=machine, owner="ghoffload check")
    try:
        if not arena.pinned:
            return "left out: this system lets no memory be pinned"

        def place(tensor: Tensor) -> Tensor:
            if arena.remaining < tensor.nbytes + 4096:
                raise MemoryError("the golden cases outgrew their arena")
            there = arena.carve(tensor.numel(), tensor.dtype).view(tensor.shape)
            return there.copy_(tensor)

        found = {}
        expected = golden.expected()
        for name in golden.names():
            found[name] = golden.run(machine, only=[name], place=place)[name]
            if expected.get(name) != found[name]:
                raise Difference(f"{name}: expected {expected.get(name)}, got {found[name]}")
        return f"{len(found)} of {len(expected)}"
    finally:
        arena.close()


def _waits(step_device: str) -> str:
    from ghoffload.transfer import link

    chunk_bytes, link.CHUNK_BYTES = link.CHUNK_BYTES, 8192  # a bucket takes both d2h streams
    try:
        clean = VirtualMachine(check=True)
        programs.everything(clean, step_device)
        for label in clean.labels:
            machine = VirtualMachine(check=True)
            machine.dropped_waits.add(label)
            try:
                programs.everything(machine, step_device)
            except OrderingError:
                continue
            raise Difference(f"without the wait {label!r} nothing was reported")
    finally:
        link.CHUNK_BYTES = chunk_bytes
    return f"{len(clean.labels)} waits, no false alarm"


def _orders(step_device: str, seeds: int) -> str:
    wide, small = programs.wide_linear(None), programs.many_layers(None)
    for seed in range(seeds):
        for run, expected in ((programs.wide_linear, wide), (programs.many_layers, small)):
            machine = VirtualMachine(order="adversarial", seed=seed, check=True)
            if not programs.same_bits(run(machine, step_device), expected):
                raise Difference(f"{run.__name__} with seed {seed} gave other bits")
    return "two programs each"


def _streamed(machine: Machine) -> str:
    runs = 0
    unpinned = sorted(machine.memory_kinds & {"managed", "system"})
    in_place: list[dict[str, Any]] = []
    if machine.compute_capability >= BULK_COPIES:
        in_place += [{"transfer": "kernel", "bucket_bytes": 16384}]
        in_place += [{"memory_kind": kind} for kind in unpinned]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for amsgrad in (False, True):
            expected = programs.synthetic("cpu", {}, machine="cpu", dtype=dtype, amsgrad=amsgrad)
            configs: tuple[dict[str, Any], ...] = (
                {"bucket_bytes": 16384, "staging_buffers": 2},
                {"bucket_bytes": 1 << 20},
                {"memory_kind": "device"},
                {"bucket_bytes": 65536, "step_device": "cpu"},
                *in_place,
            )
            for config in configs:
                found = programs.synthetic(
                    machine.device, config, machine=machine, dtype=dtype, amsgrad=amsgrad
                )
                if not programs.same_bits(found, expected):
                    raise Difference(f"{config} with {dtype} and amsgrad={amsgrad}: other bits")
                runs += 1
    return f"{runs} settings"


class _DelayedMachine(CudaMachine):
    """Spins for a random time before copies and launches, so that a missing wait shows."""

    def __init__(self, device: torch.device | str | int, seed: int) -> None:
        super().__init__(device)
        self._random = random.Random(seed)

    def _delay(self, stream: Any) -> None:
        if self._random.random() < 0.5:
            with torch.cuda.stream(stream.torch_stream):
                torch.cuda._sleep(self._random.randrange(1, 2_000_000))

    def copy(self, destination: Tensor, source: Tensor, *, stream: Stream) -> None:
        self._delay(stream)
        super().copy(destination, source, stream=stream)

    def launch(self, launch: Launch, *, stream: Stream) -> None:
        self._delay(stream)
        super().launch(launch, stream=stream)


def _delayed(seeds: int) -> str:
    expected = programs.synthetic("cpu", {}, machine="cpu")
    for seed in range(seeds):
        machine = _DelayedMachine("cuda", seed)
        config: dict[str, Any] = {"bucket_bytes": 32768, "staging_buffers": 2 + seed % 3}
        config |= {"step_device": STEP_DEVICES[seed % 5 == 4]}
        found = programs.synthetic(machine.device, config, machine=machine)
        if not programs.same_bits(found, expected):
            raise Difference(f"seed {seed} gave other bits")
    return f"{seeds} seeds"


def _training(device: str, machine: Machine | None) -> dict[str, Any]:
    """The same small model from the same seed, fp32, with our AdamW and torch's."""

    def run(make: Callable[[Any], torch.optim.Optimizer]) -> list[float]:
        generator = torch.Generator().manual_seed(11)
        torch.manual_seed(11)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).to(device)
        inputs = torch.randn(512, 64, generator=generator).to(device)
        labels = torch.randint(0, 10, (512,), generator=generator).to(device)
        optimizer = make(model.parameters())
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    ours = run(
        lambda parameters: OffloadAdamW(
            parameters, lr=3e-3, config={"bucket_bytes": 16384}, machine=machine or "cpu"
        )
    )
    theirs = run(lambda parameters: torch.optim.AdamW(parameters, lr=3e-3))
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    if not (ours[-1] < 0.7 * ours[0] and worst < 1e-3):
        raise Difference(f"loss {ours[0]} -> {ours[-1]}, torch {theirs[-1]}, apart by {worst}")
    return {"loss": ours[-1], "torch": theirs[-1], "largest_difference": worst}


def _link(machine: CudaMachine) -> dict[str, float]:
    """Copy rates and what a small read waits for beneath 2 GB of write-back. Medians of 5."""
    nbytes = 1 << 30
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arena = HostArena(2 * nbytes, machine=machine, owner="ghoffload check")
    hbm = [machine.empty((nbytes,), torch.uint8) for _ in range(2)]
    try:
        host = [arena.carve(nbytes, torch.uint8) for _ in range(2)]
        write_back, done = WriteBack(machine), machine.event("check")
        chunks = chunked([(host[0], hbm[0])])
        loss = torch.ones((), device=machine.device)
        rates: dict[str, list[float]] = {}

        def timed(name: str, directions: str) -> None:
            machine.synchronize_all()
            start = time.perf_counter()
            if "d" in directions:
                write_back.copy(chunks, after=machine.current_stream(), done=done)
            if "u" in directions:
                for first in range(0, nbytes, 64 << 20):
                    part = slice(first, first + (64 << 20))
                    machine.copy(hbm[1][part], host[1][part], stream=machine.h2d)
            machine.synchronize_all()
            seconds = time.perf_counter() - start
            rates.setdefault(name, []).append(len(directions) * nbytes / seconds / 1e9)

        for _ in range(6):
            timed("h2d GB/s", "u")
            timed("d2h GB/s, paced", "d")
            timed("both ways GB/s", "ud")
            machine.synchronize_all()
            write_back.copy(chunks, after=machine.current_stream(), done=done)
            write_back.copy(chunks, after=machine.current_stream(), done=done)
            start = time.perf_counter()
            loss.item()
            waited = (time.perf_counter() - start) * 1e3
            rates.setdefault("item() beneath 2 GB of write-back, ms", []).append(waited)
        return {name: round(statistics.median(values[1:]), 2) for name, values in rates.items()}
    finally:
        machine.synchronize_all()
        for tensor in hbm:
            machine.free(tensor)
        arena.close()
