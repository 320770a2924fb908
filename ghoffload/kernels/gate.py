"""The csrc gate: what the CUDA kernels compile to, checked without a GPU.

``python -m ghoffload.kernels.gate`` compiles every ``csrc/*.cu`` for Hopper, disassembles it, and
holds it against ``csrc/manifest.json``: for each kernel the most registers, the opcodes it must
have and those it must not have. No kernel may use a stack, local memory (LDL, STL) or generic loads
and stores (the compiler lost track of where a pointer points). Exit code 1, one line a finding.

``--nvrtc LIBRARY`` compiles with that NVRTC. Each source is compiled in a process of its own, which
is ended after two minutes: a compiler may not come back.

Needs NVRTC, cuobjdump and nvdisasm (wheels nvidia-cuda-nvrtc, nvidia-cuda-cuobjdump,
nvidia-cuda-nvdisasm, or a CUDA toolkit on PATH).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ghoffload.errors import KernelBuildError
from ghoffload.kernels import build, compiling

ARCHITECTURE = "sm_90a"
_FORBIDDEN = ("LDL", "STL", "LD", "ST")
# setmaxnreg ignored, wgmma serialised, wait injected
_FATAL_WARNINGS = ("C7508", "C7510", "C7517")


@dataclass(frozen=True)
class Compiled:
    """What one kernel compiled to.

    Attributes:
        registers: registers of a thread.
        stack: bytes of stack of a thread.
        opcodes: full opcodes, such as ``LDG.E.128``.
    """

    registers: int
    stack: int
    opcodes: frozenset[str]


def check(
    directory: Path, *, nvrtc: Path | None = None, limit: float = compiling.LIMIT_SECONDS
) -> list[str]:
    """Findings for every source in ``directory`` against its ``manifest.json``; empty is good.

    Args:
        directory: csrc.
        nvrtc: the library to compile with; ``None`` takes what ``build`` finds.
        limit: seconds for compiling one source.

    Raises:
        KernelBuildError: a source does not compile in time, or a tool is missing.
    """
    manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
    sources = sorted(directory.glob("*.cu"))
    findings = [
        f"manifest.json lists {name}, and there is no {name}.cu"
        for name in sorted(set(manifest) - {source.stem for source in sources})
    ]
    cubins = compiling.compile_all(sources, ARCHITECTURE, nvrtc=nvrtc, limit=limit)
    for source, cubin in zip(sources, cubins, strict=True):
        findings += [
            f"{source.name}: the compiler warns of {code}: {cubin.log}"
            for code in _FATAL_WARNINGS
            if code in cubin.log
        ]
        findings += compare(source.name, inspect(cubin.code), manifest.get(source.stem, {}))
    return findings


def compare(
    source: str, kernels: Mapping[str, Compiled], limits: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Findings for the kernels of one source."""
    findings = [
        f"{source}: {name} is in manifest.json and not in the source"
        for name in sorted(set(limits) - set(kernels))
    ]
    for name, kernel in sorted(kernels.items()):
        if name not in limits:
            findings.append(f"{source}: {name} expects an entry in manifest.json, and has none")
            continue
        most = limits[name]["registers"]
        if kernel.registers > most:
            findings.append(
                f"{source}: {name} expects {most} registers or fewer, got {kernel.registers}"
            )
        if kernel.stack:
            findings.append(f"{source}: {name} expects no stack, got {kernel.stack} bytes")
        findings += [
            f"{source}: {name} expects {wanted}, and has none"
            for wanted in limits[name].get("require", ())
            if not any(_matches(opcode, wanted) for opcode in kernel.opcodes)
        ]
        for unwanted in (*_FORBIDDEN, *limits[name].get("forbid", ())):
            found = sorted(opcode for opcode in kernel.opcodes if _matches(opcode, unwanted))
            if found:
                findings.append(f"{source}: {name} expects no {unwanted}, got {', '.join(found)}")
    return findings


def _matches(opcode: str, pattern: str) -> bool:
    """Whether an opcode is the pattern or begins with it up to a dot."""
    return opcode == pattern or opcode.startswith(pattern + ".")


def inspect(cubin: bytes) -> dict[str, Compiled]:
    """Registers, stack and opcodes of every kernel in a cubin.

    Raises:
        KernelBuildError: cuobjdump is missing or fails.
    """
    tool = _find_tool("cuobjdump")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernels.cubin"
        path.write_bytes(cubin)
        usage, code = (_output(tool, option, path) for option in ("-res-usage", "-sass"))
    opcodes: dict[str, set[str]] = {}
    name = ""
    for line in code.splitlines():
        if (begin := re.search(r"Function : (\S+)", line)) is not None:
            name = begin[1]
            opcodes[name] = set()
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\S*)", line):
            opcodes[name].add(instruction[1].rstrip(";"))
    resources = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", usage)
    if set(opcodes) != {found[0] for found in resources} or not opcodes:
        raise KernelBuildError(f"cuobjdump's output is not what this gate can read:\n{usage}")
    return {
        name: Compiled(int(registers), int(stack), frozenset(opcodes[name]))
        for name, registers, stack in resources
    }


def _find_tool(name: str) -> str:
    for entry in sys.path:
        for found in sorted(Path(entry).glob(f"nvidia/*/bin/{name}"), reverse=True):
            return str(found)
    found_on_path = shutil.which(name)
    if found_on_path is None:
        raise KernelBuildError(
            f"{name} was not found; pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        )
    return found_on_path


def _output(tool: str, option: str, path: Path) -> str:
    # cuobjdump looks for nvdisasm on PATH; the wheels put both into one directory.
    environment = {"PATH": f"{Path(tool).parent}:/usr/local/bin:/usr/bin:/bin"}
    done = subprocess.run(
        [tool, option, str(path)],
        capture_output=True,
        env=environment,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise KernelBuildError(f"{tool} {option} failed: {done.stderr.strip()}")
    return done.stdout


def _main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ghoffload.kernels.gate")
    parser.add_argument("--nvrtc", type=Path, metavar="LIBRARY", help="compile with this one")
    nvrtc = parser.parse_args(arguments).nvrtc
    try:
        directory = build.source_directory()
        findings = check(directory, nvrtc=nvrtc)
    except (KernelBuildError, OSError, ValueError) as error:
        findings = [str(error)]
    for finding in findings:
        print(finding, file=sys.stderr)
    if findings:
        return 1
    by = "" if nvrtc is None else f", compiled by {nvrtc}"
    print(f"gate: the kernels of {directory} keep to manifest.json{by}")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
