"""The same sources for chips that are not Hopper: everything but the bulk-copy kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import pytest

from ghoffload.errors import KernelBuildError
from ghoffload.kernels import build, gate

AMPERE, ADA, BLACKWELL = "sm_80", "sm_89", ("sm_100", "sm_120")
EVERY_SOURCE = sorted(path.stem for path in build.source_directory().glob("*.cu"))
STREAMING = [name for name in EVERY_SOURCE if name.startswith("adamw_stream")]
PORTABLE = [
    pytest.param(name, marks=pytest.mark.slow) if name.startswith("adamw") else name
    for name in EVERY_SOURCE
    if name not in STREAMING
]


def supported() -> frozenset[str]:
    """What this NVRTC compiles for; empty where there is none."""
    try:
        nvrtc = build._nvrtc()
        count = ctypes.c_int()
        nvrtc.call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        nvrtc.call("nvrtcGetSupportedArchs", numbers)
    except KernelBuildError:
        return frozenset()
    return frozenset(f"sm_{number}" for number in numbers)


def compiled(source: str, arch: str) -> Mapping[str, gate.Compiled]:
    if arch.rstrip("a") not in supported():
        pytest.skip(f"needs an NVRTC that compiles for {arch}")
    try:
        gate._find_tool("cuobjdump")
    except KernelBuildError as error:
        pytest.skip(f"needs the disassembler: {error}")
    return gate.inspect(build.cubin(source, arch).code)


@pytest.mark.parametrize("arch", [AMPERE, BLACKWELL[0]])
@pytest.mark.parametrize("source", PORTABLE)
def test_every_kernel_is_there_and_keeps_to_registers(source: str, arch: str) -> None:
    kernels = compiled(source, arch)
    missing = set(compiled(source, gate.ARCHITECTURE)) - set(kernels)
    assert missing == ({"move_bulk"} if (source, arch) == ("bandwidth", AMPERE) else set())
    for name, kernel in kernels.items():
        # Registers are allotted by heuristics that differ from chip to chip: a few of them on the
        # stack are nothing that a pass over memory would feel.
        assert kernel.stack <= 32, name


def test_e4m3_is_converted_by_instructions_where_there_are_some() -> None:
    for arch in (AMPERE, ADA, *BLACKWELL):
        for name, kernel in compiled("coding", arch).items():
            by_instruction = any("E4M3" in opcode for opcode in kernel.opcodes)
            assert by_instruction == ("fp8" in name and arch != AMPERE), (arch, name)


def test_the_streaming_kernels_compile_to_nothing_where_there_are_no_bulk_copies() -> None:
    if AMPERE not in supported():
        pytest.skip(f"needs an NVRTC that compiles for {AMPERE}")
    for source in STREAMING:
        assert b"adam_" not in build.cubin(source, AMPERE).code
        if "sm_90" in supported():
            assert b"adam_" in build.cubin(source, gate.ARCHITECTURE).code


def test_a_chip_is_named_as_nvrtc_names_it() -> None:
    names = {build.architecture(*chip) for chip in ((8, 0), (8, 9), (10, 0), (12, 0))}
    assert names == {AMPERE, ADA, *BLACKWELL}
    assert build.architecture(9, 0) == "sm_90a"
