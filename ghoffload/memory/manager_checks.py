"""What the tensor manager asks before it acts: machines, locations, streams, kinds."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from ghoffload.machine.managed import Driver
from ghoffload.machine.protocol import Launch, Machine, Stream
from ghoffload.machine.select import ENVIRONMENT_VARIABLE, active_machine, machine_for, use_machine


def machine_or_default(machine: Machine | str | None) -> Machine | None:
    """The machine meant by an argument, by ``use_machine``, the environment, or what is there."""
    if machine is None:
        machine = active_machine()
    if isinstance(machine, Machine):
        return machine
    asked = machine or os.environ.get(ENVIRONMENT_VARIABLE, "").lower()
    if asked == "cuda":
        with use_machine("cuda") as found:  # or the reason why there is none
            return found
    on_gpu = torch.cuda.is_available() and asked not in ("cpu", "virtual")
    return machine_for(torch.device("cuda" if on_gpu else "cpu"), machine)


def require_kind(kind: str, kinds: Sequence[str]) -> None:
    """Refuse what is no memory kind."""
    if kind not in kinds:
        raise ValueError(f"kind expects one of {', '.join(map(repr, kinds))}, got {kind!r}")


def location_of(location: str | torch.device, machine: Machine | None) -> tuple[bool, int | None]:
    """(whether it is the device, the host's NUMA node if one is named)."""
    own = machine.device if machine is not None else None
    if isinstance(location, torch.device):
        if location.type == "cpu":
            return False, None
        if own is not None and location.type == own.type and location.index in (None, own.index):
            return True, None
    elif location in ("device", "host"):
        return location == "device", None
    elif location.startswith("host:") and location[5:].isdigit():
        return False, int(location[5:])
    raise ValueError(
        f"location expects 'device', 'host', 'host:N' or a torch.device of this machine ({own}), "
        f"got {location!r}"
    )


def own_stream(stream: Stream | torch.cuda.Stream, machine: Machine | None) -> Stream:
    """The stream as one of the machine's.

    Raises:
        TypeError: it is no stream, or one of another machine's.
    """
    if machine is not None and machine.kind == "cuda":
        from ghoffload.machine.cuda import CudaStream

        if isinstance(stream, torch.cuda.Stream):
            return CudaStream("the caller's", stream)
        if isinstance(stream, CudaStream):
            return stream
    elif isinstance(stream, Stream) and (machine is None or type(stream) is type(machine.h2d)):
        return stream
    raise TypeError(
        f"stream expects one of the machine's streams or a torch.cuda.Stream on a CUDA machine, "
        f"got {type(stream).__name__}"
    )


def forget(
    machine: Machine, driver: Driver | None, tensors: Sequence[Tensor], stream: Stream
) -> None:
    """Queue the discard of managed tensors; on the virtual machine they are scribbled over.

    Raises:
        RuntimeError: CUDA is too old for it.
    """
    if driver is None:
        machine.launch(Launch("discard", (), tuple(tensors), _no_device, _scribble), stream=stream)
        return
    if not driver.batched:
        raise RuntimeError(
            "discard needs a driver and cuda-bindings of CUDA 13.0 or later; without, write the "
            "tensor where it is next needed instead"
        )
    ranges = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
    handle: int = stream.handle  # type: ignore[attr-defined]
    if handle != 0:
        driver.discard_batch(ranges, stream=handle)
        return
    # The legacy default stream, torch's own, takes no batch: another one does it in its place.
    there, back = machine.event("before a discard"), machine.event("after a discard")
    machine.record(there, stream)
    machine.wait(machine.h2d, there, label="discard after earlier work")
    driver.discard_batch(ranges, stream=machine.h2d.handle)  # type: ignore[attr-defined]
    machine.record(back, machine.h2d)
    machine.wait(stream, back, label="later work after a discard")


def _scribble(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
    for tensor in writes:
        tensor.view(-1).view(torch.uint8).fill_(0xCB)


def _no_device(stream: int) -> None:
    raise AssertionError("the virtual machine launches on the host")
