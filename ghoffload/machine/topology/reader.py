"""The one door through which a probe looks at the machine; tests put their own behind it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ghoffload.machine.topology.evidence import GpuEvidence
from ghoffload.machine.topology.files import ROOT, page_size


class Cuda(Protocol):
    """What a probe asks of CUDA. No call makes a context; any may raise."""

    def driver_version(self) -> int:
        """The newest CUDA that the driver serves, 13000 for 13.0; 0 without a driver."""

    def count(self) -> int:
        """Devices that this process may use."""

    def name(self, index: int) -> str:
        """A device's name."""

    def bus_id(self, index: int) -> str:
        """Its address on the PCI bus."""

    def memory_bytes(self, index: int) -> int:
        """Its memory."""

    def attribute(self, name: str, index: int) -> int | None:
        """A ``cudaDeviceAttr`` without its prefix; ``None`` if this CUDA does not know it."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Where a probe's facts come from.

    Attributes:
        root: the file system that has ``/proc`` and ``/sys``.
        nvml: the module ``pynvml``, or what stands in for it; ``None`` where there is none.
        cuda: the CUDA runtime; ``None`` without bindings.
        page_bytes: of an ordinary page.
        evidence: what speaks for a GPU; its ``architecture`` is the host's.
    """

    root: Path = ROOT
    nvml: Any = None
    cuda: Cuda | None = None
    page_bytes: int = 4096
    evidence: GpuEvidence = dataclasses.field(default_factory=GpuEvidence)

    @classmethod
    def of_this_machine(cls) -> Reader:
        """The real one."""
        return cls(
            nvml=_nvml(), cuda=_cuda(), page_bytes=page_size(), evidence=GpuEvidence.gather()
        )


class _Bindings:
    """CUDA by cuda-bindings."""

    def __init__(self, runtime: Any, driver: Any) -> None:
        self._runtime = runtime
        self._driver = driver

    def driver_version(self) -> int:
        return int(_value(self._runtime.cudaDriverGetVersion()))

    def count(self) -> int:
        return int(_value(self._runtime.cudaGetDeviceCount()))

    def name(self, index: int) -> str:
        text: bytes = _value(self._driver.cuDeviceGetName(256, self._device(index)))
        return text.split(b"\0", 1)[0].decode(errors="replace")

    def bus_id(self, index: int) -> str:
        text: bytes | str = _value(self._runtime.cudaDeviceGetPCIBusId(32, index))
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        return text.split("\0", 1)[0]

    def memory_bytes(self, index: int) -> int:
        return int(_value(self._driver.cuDeviceTotalMem(self._device(index))))

    def attribute(self, name: str, index: int) -> int | None:
        attribute = getattr(self._runtime.cudaDeviceAttr, f"cudaDevAttr{name}", None)
        if attribute is None:
            return None
        return int(_value(self._runtime.cudaDeviceGetAttribute(attribute, index)))

    def _device(self, index: int) -> Any:
        _value(self._driver.cuInit(0))
        return _value(self._driver.cuDeviceGet(index))


def _value(result: tuple[Any, ...]) -> Any:
    if int(result[0]) != 0:
        raise RuntimeError(f"CUDA answered {result[0]!r}")
    return result[1] if len(result) > 1 else None


def _cuda() -> Cuda | None:
    try:
        from cuda.bindings import driver, runtime
    except Exception:  # not installed, or not for this system: CUDA has nothing to say
        return None
    return _Bindings(runtime, driver)


def _nvml() -> Any:
    try:
        import pynvml
    except Exception:
        return None
    return pynvml
