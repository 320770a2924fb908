"""One examination of one machine, as a value."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ghoffload._version import __version__
from ghoffload.config import OffloadConfig
from ghoffload.doctor.checks import examine
from ghoffload.doctor.choices import Choice, choices
from ghoffload.doctor.findings import Finding, Readings, Severity
from ghoffload.machine.topology import Reader, Topology, probe


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that the doctor has to say.

    Attributes:
        topology: the machine, while copies ran if they did.
        readings: what else was read.
        choices: what will be used.
        findings: what is wrong, what hurts first.
    """

    topology: Topology
    readings: Readings
    choices: list[Choice]
    findings: list[Finding]

    @property
    def hurts(self) -> bool:
        """Whether anything found will hurt."""
        return any(finding.severity is Severity.HURTS for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        copies = self.readings.copies
        return {
            "ghoffload": __version__,
            "topology": self.topology.to_dict(),
            "nvrtc": self.readings.nvrtc,
            "copies": None if copies is None else dataclasses.asdict(copies),
            "choices": [dataclasses.asdict(choice) for choice in self.choices],
            "findings": [
                {**dataclasses.asdict(finding), "severity": finding.severity.value}
                for finding in self.findings
            ],
            "hurts": self.hurts,
        }


def examine_machine(reader: Reader, *, copies: bool = True) -> Report:
    """Probe, measure and check.

    Args:
        reader: where to look.
        copies: whether to measure copies where torch can use a GPU (under 3 seconds).
    """
    config, problem = _config()
    topology = probe(reader)
    readings = Readings(before=topology)
    if topology.gpus:
        readings = dataclasses.replace(readings, **_compiler())
    if topology.evidence.cuda_available and copies:
        from ghoffload.doctor.measure import measure_copies

        try:
            measured, topology = measure_copies(lambda: probe(reader))
            readings = dataclasses.replace(readings, copies=measured)
        except Exception as error:  # whatever stops a copy stops training, too: say so, go on
            said = f"{type(error).__name__}: {error}"
            readings = dataclasses.replace(readings, copies_error=said)
    findings = examine(topology, readings)
    if problem is not None:
        findings.insert(0, problem)
    return Report(
        topology=topology,
        readings=readings,
        choices=choices(topology, config, readings),
        findings=findings,
    )


def _config() -> tuple[OffloadConfig, Finding | None]:
    """The configuration of an optimizer that is given none, from the environment."""
    try:
        return OffloadConfig.of(None), None
    except ValueError as error:
        return OffloadConfig(), Finding(
            check="settings",
            severity=Severity.HURTS,
            what=f"an environment variable stops every optimizer: {error}",
            mend="unset it or correct it",
        )


def _compiler() -> dict[str, Any]:
    from ghoffload.errors import KernelBuildError
    from ghoffload.kernels.build import nvrtc_version

    try:
        return {"nvrtc": nvrtc_version()}
    except KernelBuildError as error:
        return {"nvrtc_error": str(error)}
