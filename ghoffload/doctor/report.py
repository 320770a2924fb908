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
from ghoffload.measure import measuring_is_on


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
        rates = self.readings.rates
        return {
            "ghoffload": __version__,
            "topology": self.topology.to_dict(),
            "nvrtc": self.readings.nvrtc,
            "packaged_nvrtc": self.readings.packaged,
            "rates": None if rates is None else rates.to_dict(),
            "rates_age_seconds": self.readings.age,
            "choices": [dataclasses.asdict(choice) for choice in self.choices],
            "findings": [
                {**dataclasses.asdict(finding), "severity": finding.severity.value}
                for finding in self.findings
            ],
            "hurts": self.hurts,
        }


def examine_machine(reader: Reader, *, copies: bool = True, fresh: bool = False) -> Report:
    """Probe, measure and check.

    Args:
        reader: where to look.
        copies: whether to measure copies, or take what was measured before, and to look at the
            link while copies run, where torch can use a GPU (under 3 seconds).
        fresh: measure in any case.
    """
    config, problem = _config()
    topology = probe(reader)
    readings = Readings(before=topology)
    if topology.gpus:
        readings = dataclasses.replace(readings, **_compiler())
    if topology.evidence.cuda_available and copies:
        from ghoffload.doctor import link

        try:
            measured, topology = link.read(lambda: probe(reader), fresh=fresh)
            readings = dataclasses.replace(readings, **measured)
        except Exception as error:  # whatever stops a copy stops training, too: say so, go on
            said = f"{type(error).__name__}: {error}"
            readings = dataclasses.replace(readings, copies_error=said)
    findings = examine(topology, readings)
    try:
        chosen = choices(topology, config, readings)
    except ValueError as error:
        problem = _bad_settings(error)
        chosen = choices(topology, OffloadConfig(), readings)
    if problem is not None:
        findings.insert(0, problem)
    return Report(topology=topology, readings=readings, choices=chosen, findings=findings)


def _config() -> tuple[OffloadConfig, Finding | None]:
    """The configuration of an optimizer that is given none, from the environment."""
    try:
        config = OffloadConfig.of(None)
        measuring_is_on()
        return config, None
    except ValueError as error:
        return OffloadConfig(), _bad_settings(error)


def _bad_settings(error: ValueError) -> Finding:
    return Finding(
        check="settings",
        severity=Severity.HURTS,
        what=f"an environment variable stops every optimizer: {error}",
        mend="unset it or correct it",
    )


def _compiler() -> dict[str, Any]:
    from ghoffload.errors import KernelBuildError
    from ghoffload.kernels.build import nvrtc_version, packaged_nvrtc

    packaged = None
    try:
        packaged = packaged_nvrtc("sm_90a")
        return {"nvrtc": nvrtc_version(), "packaged": packaged}
    except KernelBuildError as error:
        return {"nvrtc_error": str(error), "packaged": packaged}
