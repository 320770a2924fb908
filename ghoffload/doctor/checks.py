"""The table of checks. A check's name is its function's name."""

from __future__ import annotations

from collections.abc import Callable

from ghoffload.doctor import gpu_checks, host_checks, reading_checks
from ghoffload.doctor.findings import Finding, Readings, Severity
from ghoffload.machine.topology import Topology

TOPOLOGY_CHECKS: tuple[Callable[[Topology], Finding | None], ...] = (
    gpu_checks.gpu_unusable,
    gpu_checks.bindings_missing,
    gpu_checks.link_degraded,
    gpu_checks.slot_too_old,
    gpu_checks.mig,
    gpu_checks.hbm_page_cache,
    gpu_checks.ecc_errors,
    gpu_checks.throttled,
    host_checks.process_far_from_gpu,
    host_checks.process_spread_over_nodes,
    host_checks.numa_balancing,
    host_checks.small_cgroup,
    host_checks.large_pages,
    host_checks.huge_pages_off,
)
READING_CHECKS: tuple[Callable[[Topology, Readings], Finding | None], ...] = (
    reading_checks.driver_too_old,
    reading_checks.compiler_missing,
    reading_checks.locked_memory,
    reading_checks.slow_copies,
    reading_checks.copies_failed,
    reading_checks.errors_growing,
)


def examine(topology: Topology, readings: Readings | None = None) -> list[Finding]:
    """Every finding, what hurts first."""
    readings = Readings() if readings is None else readings
    answers = [check(topology) for check in TOPOLOGY_CHECKS]
    answers += [check(topology, readings) for check in READING_CHECKS]
    found = [finding for finding in answers if finding is not None]
    return sorted(found, key=lambda finding: finding.severity is not Severity.HURTS)
