"""Checks of the GPUs and their links. Each is a function of the topology alone."""

from __future__ import annotations

from collections.abc import Iterable

from ghoffload.doctor.findings import Finding, Severity
from ghoffload.doctor.units import gb
from ghoffload.machine.topology import Gpu, Topology, unusable_gpu

_IDLE_STATE = 5
"""From this performance state on, a GPU may have slowed its link to save power."""

_PAGE_CACHE_SHARE = 0.05
"""Of HBM. Less is not worth a word: files that a program maps lie there by right."""

_DAMAGING = {
    "hw_slowdown": "the hardware slows it",
    "hw_thermal_slowdown": "it is too hot",
    "sw_thermal_slowdown": "it is too hot",
    "hw_power_brake_slowdown": "the power supply brakes it",
}


def gpu_unusable(topology: Topology) -> Finding | None:
    """There is a GPU and torch cannot use it, mostly a build without CUDA."""
    sentence = unusable_gpu(topology.evidence)
    if sentence is None:
        return None
    what, _, mend = sentence.partition(". ")
    return Finding(check="gpu_unusable", severity=Severity.HURTS, what=what, mend=mend)


def bindings_missing(topology: Topology) -> Finding | None:
    """Torch could use the GPU, ghoffload cannot: it needs cuda-bindings."""
    missing = [name for name in topology.unasked if name.startswith("CUDA")]
    if not missing or not topology.evidence.cuda_available:
        return None
    return Finding(
        check="bindings_missing",
        severity=Severity.HURTS,
        what="cuda-bindings is not installed, and ghoffload reaches the GPU through it",
        mend="pip install 'cuda-bindings>=12.9,<14'",
    )


def link_degraded(topology: Topology) -> Finding | None:
    """The link runs below what GPU and slot can do."""
    faults = [fault for gpu in topology.gpus for fault in _link_faults(gpu)]
    if not faults:
        return None
    return Finding(
        check="link_degraded",
        severity=Severity.HURTS,
        what="; ".join(faults),
        mend="every transfer is slower by that much: reseat the card or its riser, check the "
        "BIOS's setting for the slot, or have the machine serviced",
    )


def _link_faults(gpu: Gpu) -> Iterable[str]:
    link = gpu.link
    if link.kind == "c2c":
        # What NVML says of PCIe there is about another link than the one data takes.
        if link.c2c_links and link.c2c_links_up is not None and link.c2c_links_up < link.c2c_links:
            yield f"{gpu.label}: {link.c2c_links_up} of {link.c2c_links} C2C links are up"
        return
    if link.width and link.max_width and link.width < link.max_width:
        yield f"{gpu.label}: PCIe runs with {link.width} of {link.max_width} lanes"
    if (
        link.generation
        and link.max_generation
        and link.generation < link.max_generation
        and not _idles(gpu)
    ):
        yield (
            f"{gpu.label}: PCIe runs at generation {link.generation}, and generation "
            f"{link.max_generation} is possible"
        )


def _idles(gpu: Gpu) -> bool:
    if gpu.performance_state is not None:
        return gpu.performance_state >= _IDLE_STATE
    return "gpu_idle" in gpu.clock_reasons


def slot_too_old(topology: Topology) -> Finding | None:
    """The GPU could do a newer PCIe than its slot."""
    found = [
        f"{gpu.label} can do PCIe generation {gpu.link.gpu_max_generation}, its slot "
        f"generation {gpu.link.max_generation}"
        for gpu in topology.gpus
        if gpu.link.kind == "pcie"
        and gpu.link.max_generation
        and (gpu.link.gpu_max_generation or 0) > gpu.link.max_generation
    ]
    if not found:
        return None
    return Finding(
        check="slot_too_old",
        severity=Severity.NOTE,
        what="; ".join(found),
        mend="a newer slot, if the machine has one; check the BIOS's limit for this one",
    )


def mig(topology: Topology) -> Finding | None:
    """A slice has a share of the copy engines, and the link is everyone's."""
    sliced = [gpu for gpu in topology.gpus if gpu.mig]
    if not sliced:
        return None
    single = [gpu for gpu in sliced if gpu.copy_engines is not None and gpu.copy_engines < 2]
    names = ", ".join(gpu.label for gpu in sliced)
    if single:
        cost = "its slice has one copy engine, so state cannot come in and go out at once"
    else:
        cost = "slices share the link to the host, so transfers depend on the neighbours"
    return Finding(
        check="mig",
        severity=Severity.HURTS if single else Severity.NOTE,
        what=f"MIG is on for {names}: {cost}",
        mend="use the entire GPU where you may: 'sudo nvidia-smi -mig 0' turns MIG off",
    )


def hbm_page_cache(topology: Topology) -> Finding | None:
    """In NUMA mode HBM is ordinary memory to the kernel, which may cache files there."""
    found = []
    for gpu in topology.gpus:
        node = topology.host.node(gpu.numa_id) if gpu.coherent_memory == "numa" else None
        if node is None or not node.total_bytes:
            continue
        if node.file_bytes > _PAGE_CACHE_SHARE * node.total_bytes:
            found.append(
                f"{gb(node.file_bytes)} of the {gb(node.total_bytes)} HBM of {gpu.label} "
                f"(node {node.index}) are page cache"
            )
    if not found:
        return None
    return Finding(
        check="hbm_page_cache",
        severity=Severity.HURTS,
        what="; ".join(found),
        mend="'sync; echo 1 | sudo tee /proc/sys/vm/drop_caches' empties it now; driver 570 and "
        "newer keep files out of HBM, and so does CDMM (NVreg_CoherentGPUMemoryMode=driver)",
    )


def ecc_errors(topology: Topology) -> Finding | None:
    """Memory errors that could not be corrected."""
    bad = [gpu for gpu in topology.gpus if gpu.ecc_uncorrected]
    if not bad:
        return None
    found = ", ".join(f"{gpu.label}: {gpu.ecc_uncorrected:,}" for gpu in bad)
    return Finding(
        check="ecc_errors",
        severity=Severity.HURTS,
        what=f"memory errors that ECC could not correct since the driver was loaded ({found})",
        mend="save your work, reset the GPU or reboot; if it comes back, have the GPU replaced "
        "('nvidia-smi -q -d ECC,ROW_REMAPPER' has the details)",
    )


def throttled(topology: Topology) -> Finding | None:
    """Clocks held down by heat or power."""
    worst: list[str] = []
    capped: list[str] = []
    for gpu in topology.gpus:
        causes = {_DAMAGING[name] for name in gpu.clock_reasons if name in _DAMAGING}
        if len(causes) > 1:  # "slows it" says no more than the cause beside it
            causes.discard(_DAMAGING["hw_slowdown"])
        if causes:
            worst.append(f"{gpu.label} is throttled: {' and '.join(sorted(causes))}")
        elif "sw_power_cap" in gpu.clock_reasons:
            capped.append(f"{gpu.label} is at its power limit")
    if not worst and not capped:
        return None
    return Finding(
        check="throttled",
        severity=Severity.HURTS if worst else Severity.NOTE,
        what="; ".join(worst + capped),
        mend=(
            "check fans, airflow, coolant and power cables ('nvidia-smi -q -d PERFORMANCE')"
            if worst
            else "normal under full load; otherwise see 'nvidia-smi -q -d POWER' for a limit that "
            "was set low"
        ),
    )
