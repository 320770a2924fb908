"""Checks that need a reading beside the topology: copies, two points in time, the compiler.

Note [expected copies]
    A PCIe link carries about 0.85 of its raw rate (55.0 of 63.0 GB/s measured on an H200 is
    0.87). Over C2C no figure follows from a version number: healthy GH200s write back by copy
    engine at 170 to 297 GB/s, by their memory; memory on the wrong node gets about 88. So what is
    below 120 there is ill.
"""

from __future__ import annotations

from ghoffload.doctor.findings import Finding, Readings, Severity
from ghoffload.doctor.units import age, gb, rate, size, version
from ghoffload.machine.topology import Gpu, Topology
from ghoffload.measure.measuring import COPY_BYTES

_PCIE_EFFECTIVE = 0.85
_C2C_LEAST = 120e9
_TOLERANCE = 0.85
"""Of the expectation: what neighbours on a shared host may take without being an illness."""


def locked_memory(topology: Topology, readings: Readings) -> Finding | None:
    """Pinning was refused, or may be, by ``RLIMIT_MEMLOCK``."""
    limit = topology.host.limits.memlock_bytes
    rates = readings.rates
    if rates is not None and rates.pin_refusal is not None:
        asked = 2 * COPY_BYTES
        bound = (
            f"RLIMIT_MEMLOCK is {size(limit)}"
            if limit is not None and limit < asked
            else "the driver could lock no more memory"
        )
        return Finding(
            check="locked_memory",
            severity=Severity.HURTS,
            what=f"pinning {gb(asked)} of host memory was refused ({rates.pin_refusal}): {bound}. "
            "Copies from memory that is not pinned are slow and block the host",
            mend="'ulimit -l unlimited', memlock in /etc/security/limits.conf, "
            "'--ulimit memlock=-1' for a container",
        )
    if rates is not None and limit is not None and limit < rates.pinned_bytes:
        return None  # more than the limit was pinned here: the driver does not count it
    room = topology.host.limits.room_bytes
    if limit is None or not topology.gpus or (room is not None and limit >= room):
        return None
    return Finding(
        check="locked_memory",
        severity=Severity.NOTE,
        what=f"RLIMIT_MEMLOCK is {size(limit)}, less than the host memory there is; many drivers "
        "do not heed it, and this one was not tried beyond it",
        mend="if pinning is refused: 'ulimit -l unlimited', memlock in "
        "/etc/security/limits.conf, '--ulimit memlock=-1' for a container",
    )


def slow_copies(topology: Topology, readings: Readings) -> Finding | None:
    """Pinned copies run well below what the link should carry: Note [expected copies]."""
    rates = readings.rates
    gpu = next((gpu for gpu in topology.gpus if gpu.index == readings.gpu), None)
    if rates is None or gpu is None:
        return None
    expected = expected_rate(gpu)
    if expected is None:
        return None
    least = expected if gpu.link.kind == "c2c" else _TOLERANCE * expected
    slow = [
        f"{rate(measured)} {direction}"
        for measured, direction in ((rates.h2d, "to the GPU"), (rates.d2h, "from it"))
        if measured is not None and measured < least
    ]
    if not slow:
        return None
    return Finding(
        check="slow_copies",
        severity=Severity.HURTS,
        what=f"copies from pinned memory ran at {' and '.join(slow)}, expected "
        f"{rate(expected)}{' or more' if gpu.link.kind == 'c2c' else ''} (measured "
        f"{age(readings.age or 0)})",
        mend="look for other load on the machine and measure again with 'ghoffload doctor "
        "--fresh'; then check that the process and its memory are on the node nearest to the GPU, "
        "and the link itself",
    )


def expected_rate(gpu: Gpu) -> float | None:
    """Bytes a second that a pinned copy should reach; ``None`` where nothing is known."""
    if gpu.link.kind == "c2c":
        return _C2C_LEAST
    raw = gpu.link.pcie_bytes_per_second()
    return None if raw is None else _PCIE_EFFECTIVE * raw


def copies_failed(topology: Topology, readings: Readings) -> Finding | None:
    """There is a GPU, and the measurement on it failed."""
    if readings.copies_error is None:
        return None
    return Finding(
        check="copies_failed",
        severity=Severity.HURTS,
        what=f"measuring copies between host and GPU failed: {readings.copies_error}",
        mend="make sure that the GPU has 1 GB free and is not in exclusive use ('nvidia-smi'), "
        "then run this again",
    )


def errors_growing(topology: Topology, readings: Readings) -> Finding | None:
    """Error counters rose while the copies ran."""
    if readings.before is None:
        return None
    earlier = {gpu.bus_id: gpu for gpu in readings.before.gpus}
    found = []
    for gpu in topology.gpus:
        then = earlier.get(gpu.bus_id)
        if then is None:
            continue
        for what, now, before in (
            ("PCIe replays", gpu.link.replays, then.link.replays),
            ("corrected ECC errors", gpu.ecc_corrected, then.ecc_corrected),
        ):
            if now is not None and before is not None and now > before:
                found.append(f"{gpu.label}: {now - before:,} more {what} ({now:,} in all)")
    if not found:
        return None
    return Finding(
        check="errors_growing",
        severity=Severity.HURTS,
        what=f"error counters rose while copies ran: {'; '.join(found)}",
        mend="replays are a bad contact or riser: reseat the card; ECC errors that go on growing "
        "are a case for the vendor",
    )


def driver_too_old(topology: Topology, readings: Readings) -> Finding | None:
    """All that kernels could come from is of a newer CUDA major version than the driver."""
    driver = topology.driver_cuda
    compilers = [readings.packaged] if _all_hopper(topology) else []
    found = [version for version in (*compilers, readings.nvrtc) if version is not None]
    if driver is None or not found or not topology.gpus:
        return None
    compiler = min(found)
    if driver[0] >= compiler[0]:
        return None
    return Finding(
        check="driver_too_old",
        severity=Severity.HURTS,
        what=f"driver {topology.driver or 'of unknown version'} serves CUDA {version(driver)}, and "
        f"NVRTC {version(compiler)} builds the kernels: they will not load",
        mend=f"update the driver to one for CUDA {compiler[0]}, or install "
        f"'nvidia-cuda-nvrtc-cu{driver[0]}' and a torch for CUDA {driver[0]}",
    )


def _all_hopper(topology: Topology) -> bool:
    """Whether packaged kernels serve every GPU."""
    return all(gpu.compute_capability == (9, 0) for gpu in topology.gpus)


def compiler_missing(topology: Topology, readings: Readings) -> Finding | None:
    """A GPU whose kernels the package does not bring, and nothing to build them with."""
    if readings.nvrtc_error is None or not topology.gpus:
        return None
    if readings.packaged is not None and _all_hopper(topology):
        return None
    return Finding(
        check="compiler_missing",
        severity=Severity.HURTS,
        what="NVRTC, which builds the CUDA kernels, was not found",
        mend="install a CUDA build of torch, which brings it, or 'pip install nvidia-cuda-nvrtc'",
    )
