"""Compiling a source in a process of its own, with a limit of time.

A compiler may not come back: NVRTC 13.0 did not on a source of ours once. In a process of its own
it can be ended, so that neither an installation nor CI waits for ever; and each process can take
another NVRTC.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ghoffload.errors import KernelBuildError
from ghoffload.kernels import build

LIMIT_SECONDS = 120.0
"""For one source, which takes under 5 seconds: a multiple that a slow machine needs."""


def compile_apart(
    source: Path, arch: str, *, nvrtc: Path | None = None, limit: float = LIMIT_SECONDS
) -> build.Cubin:
    """Machine code of a ``.cu`` file.

    Args:
        source: the file; its includes are beside it.
        arch: as NVRTC names it.
        nvrtc: the library to compile with; ``None`` takes what ``build`` finds.
        limit: seconds, after which the compiler is ended.

    Raises:
        KernelBuildError: it does not compile, NVRTC is missing, or the limit has passed.
    """
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "cubin"
        command = [sys.executable, "-m", __name__, os.path.abspath(source), arch, str(output)]
        command += [] if nvrtc is None else [os.path.abspath(nvrtc)]
        # A build's own sys.path is not what a new interpreter would have.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command,
                env=environment,
                cwd=directory,  # "-m" imports from it first: nothing of ours is there
                capture_output=True,
                text=True,
                errors="replace",
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            which = "NVRTC" if nvrtc is None else str(nvrtc)
            raise KernelBuildError(
                f"{source.name} for {arch}: {which} did not finish in {limit:g} s"
            ) from None
        if done.returncode != 0:
            died = f"{source.name} for {arch}: the compiler exited with {done.returncode}"
            raise KernelBuildError(done.stderr.strip() or died)
        said = json.loads(done.stdout)
        major, minor = said["compiler"]
        return build.Cubin(output.read_bytes(), said["log"], (major, minor))


def compile_all(
    sources: Sequence[Path],
    arch: str,
    *,
    nvrtc: Path | None = None,
    limit: float = LIMIT_SECONDS,
) -> list[build.Cubin]:
    """As ``compile_apart`` for each source, as many at once as there are CPUs."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda s: compile_apart(s, arch, nvrtc=nvrtc, limit=limit), sources))


def _main(source: str, arch: str, output: str, nvrtc: str | None = None) -> int:
    if nvrtc is not None:
        build.use_nvrtc(Path(nvrtc))
    path = Path(source)
    try:
        cubin = build.compile_source(build.read_source(path), path.name, arch)
    except KernelBuildError as error:
        print(error, file=sys.stderr)
        return 1
    Path(output).write_bytes(cubin.code)
    print(json.dumps({"log": cubin.log, "compiler": cubin.compiler}))
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
