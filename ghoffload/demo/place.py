"""Where the demo runs: on the GPU, or on a virtual machine where there is none."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ghoffload.demo.presets import PRESETS, STATE_BYTES, Preset
from ghoffload.machine import VirtualMachine, machine_for, use_machine
from ghoffload.machine.topology import cpu_count
from ghoffload.machine.traffic import Traffic


class Place:
    """A device with its memory, the same for both runs.

    Attributes:
        device: where the model is.
        compute: dtype of activations. Most CPUs without bf16 instructions are an order of
            magnitude slower in bf16, so on the CPU bf16 weights are computed with in fp32.
        simulated: HBM is a virtual machine's.
        hbm: what HBM is called here.
        name: what the whole is called in a title.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.simulated = device.type == "cpu"
        self.compute = torch.float32 if self.simulated else torch.bfloat16
        self.hbm = "virtual HBM" if self.simulated else "HBM"
        self.name = (
            "a virtual machine: bytes are simulated, not measured"
            if self.simulated
            else torch.cuda.get_device_properties(device).name
        )

    @classmethod
    def find(cls) -> Place:
        """The GPU if torch can use one and the environment does not say otherwise.

        Raises:
            MachineUnavailableError: there is a GPU that torch cannot use, or one was asked for.
        """
        wanted = os.environ.get("GHOFFLOAD_MACHINE", "").lower()
        if wanted == "cuda" or (torch.cuda.is_available() and not wanted):
            with use_machine("cuda") as machine:
                return cls(machine.device)
        machine_for(torch.device("cpu"))  # raises where a GPU is there and torch cannot use it
        return cls(torch.device("cpu"))

    def choose(self) -> str:
        """The preset that fits: 1 B or more wants room on the GPU and for its state on the host."""
        if self.simulated:
            return "laptop"
        # weights, gradients and activations of "1b"
        room = torch.cuda.get_device_properties(self.device).total_memory >= 22 * 10**9
        host = psutil.virtual_memory().available >= 1.25 * STATE_BYTES * PRESETS["1b"].parameters
        return "1b" if room and host else "laptop"

    @contextlib.contextmanager
    def enter(self, preset: Preset) -> Iterator[Meter]:
        """Run on a machine whose counts begin at zero."""
        if self.simulated:
            machine = VirtualMachine(hbm_bytes=preset.hbm_bytes, host_bytes=preset.host_bytes)
            with use_machine(machine):
                yield VirtualMeter(machine)
        else:
            with use_machine("cuda"):
                yield Meter(self.device)

    def describe(self, preset: Preset) -> dict[str, Any]:
        """This machine, for the JSON file."""
        facts: dict[str, Any] = {
            "kind": "virtual" if self.simulated else "cuda",
            "system": platform.platform(),
            "architecture": platform.machine(),
            "cpus": cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "host_memory_bytes": psutil.virtual_memory().total,
        }
        if self.simulated:
            facts |= {
                "virtual_hbm_bytes": preset.hbm_bytes,
                "virtual_host_bytes": preset.host_bytes,
            }
        else:
            properties = torch.cuda.get_device_properties(self.device)
            facts |= {"gpu": self.name, "hbm_bytes": properties.total_memory}
        return facts


class Meter:
    """Reads the real machine: bytes moved and peak HBM since it was made."""

    def __init__(self, device: torch.device) -> None:
        machine = machine_for(device)
        assert machine is not None, "a CUDA device has a machine"
        self.machine: Any = machine
        self.device = device
        machine.traffic.reset()  # the run before counted on the same machine
        torch.cuda.reset_peak_memory_stats(device)

    def traffic(self) -> Traffic:
        """What was moved so far."""
        counted: Traffic = self.machine.traffic
        return dataclasses.replace(counted)

    def watch(self) -> contextlib.AbstractContextManager[object]:
        """Around one step, which is then slower: make sure ``peak`` has seen it."""
        return contextlib.nullcontext()

    def peak(self) -> int:
        """Highest number of bytes in HBM so far."""
        return torch.cuda.max_memory_allocated(self.device)


class VirtualMeter(Meter):
    """Reads a virtual machine, whose peak is known of the steps that were watched."""

    def __init__(self, machine: VirtualMachine) -> None:
        self.machine = machine
        self._mode = _PeakMode(machine)

    def watch(self) -> contextlib.AbstractContextManager[object]:
        return self._mode

    def peak(self) -> int:
        return self._mode.peak


class _PeakMode(TorchDispatchMode):
    """Looks at the memory after every operation."""

    def __init__(self, machine: VirtualMachine) -> None:
        super().__init__()
        self.machine = machine
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, self.machine.memory_allocated())
        return result
