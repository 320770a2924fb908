"""``probe()``: the host, the GPUs and the driver in one frozen result."""

from __future__ import annotations

from ghoffload.machine.topology.facts import Topology
from ghoffload.machine.topology.gpu import Nvml, gather_gpus, quiet
from ghoffload.machine.topology.host import gather_host
from ghoffload.machine.topology.reader import Reader


def probe(reader: Reader | None = None) -> Topology:
    """What this machine is now. Makes no CUDA context and never raises for what is missing.

    Args:
        reader: where to look; this machine where ``None``.
    """
    if reader is None:
        reader = Reader.of_this_machine()
    nvml = Nvml(reader.nvml)
    started = reader.nvml is not None and quiet(_start, reader.nvml) is True
    if not started:
        nvml = Nvml(None)
    try:
        host = gather_host(reader)
        # The CUDA runtime says 0 where there is no driver.
        version = quiet(reader.cuda.driver_version) if reader.cuda is not None else None
        version = version or nvml("SystemGetCudaDriverVersion")
        driver = nvml("SystemGetDriverVersion")
        driver = driver.decode(errors="replace") if isinstance(driver, bytes) else driver
        return Topology(
            driver=driver,
            driver_cuda=(version // 1000, version % 1000 // 10) if version else None,
            gpus=gather_gpus(reader, nvml, host),
            host=host,
            evidence=reader.evidence,
            unasked=_unasked(reader, started),
        )
    finally:
        if started:
            nvml("Shutdown")


def _start(module: object) -> bool:
    module.nvmlInit()  # type: ignore[attr-defined]
    return True


def _unasked(reader: Reader, nvml_started: bool) -> tuple[str, ...]:
    found = []
    if reader.nvml is None:
        found.append("NVML (nvidia-ml-py is not installed)")
    elif not nvml_started:
        found.append("NVML (it does not start: no driver, or no access to it)")
    if reader.cuda is None:
        found.append("CUDA (cuda-bindings is not installed)")
    return tuple(found)
