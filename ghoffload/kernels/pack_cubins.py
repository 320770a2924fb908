"""Machine code for Hopper, for a wheel: ``python -m ghoffload.kernels.pack_cubins DIRECTORY``.

setup.py runs it. NVRTC 12 is preferred where there is one: what it compiles loads on drivers from
525 on, what NVRTC 13 compiles on drivers from 580 on. Exit code 1 where nothing could be compiled;
the directory is then empty.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from ghoffload.errors import KernelBuildError
from ghoffload.kernels import build, compiling, packaged

ARCHITECTURE = "sm_90a"


def preferred_nvrtc(entries: Iterable[str]) -> Path | None:
    """The NVRTC of the oldest CUDA from 12 on among the wheels in these directories."""
    found = [
        (int(library.name.split(".")[2]), library)  # libnvrtc.so.12
        for library in map(Path, build.wheel_libraries(entries))
    ]
    return min(((major, library) for major, library in found if major >= 12), default=(0, None))[1]


def pack(
    directory: Path, *, nvrtc: Path | None = None, limit: float = compiling.LIMIT_SECONDS
) -> packaged.Manifest:
    """Compile every ``csrc/*.cu`` into ``directory``, which is emptied first.

    Args:
        directory: for the files and their manifest.
        nvrtc: the library to compile with; ``None`` takes what ``build`` finds.
        limit: seconds for one source.

    Raises:
        KernelBuildError: there is no NVRTC, or a source does not compile.
    """
    shutil.rmtree(directory, ignore_errors=True)
    sources = sorted(build.source_directory().glob("*.cu"))
    cubins = compiling.compile_all(sources, ARCHITECTURE, nvrtc=nvrtc, limit=limit)
    return packaged.write(
        directory,
        cubins[0].compiler,
        ARCHITECTURE,
        {
            source.stem: (build.digest(build.read_source(source), ARCHITECTURE), cubin.code)
            for source, cubin in zip(sources, cubins, strict=True)
        },
    )


def _main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ghoffload.kernels.pack_cubins")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--nvrtc", type=Path, metavar="LIBRARY", help="compile with this one")
    chosen = parser.parse_args(arguments)
    # A build in an environment of pip's own does not have that of the interpreter on sys.path.
    installed = (sysconfig.get_path(name) for name in ("purelib", "platlib"))
    nvrtc = chosen.nvrtc or preferred_nvrtc([*sys.path, *installed])
    try:
        made = pack(chosen.directory, nvrtc=nvrtc)
    except KernelBuildError as error:
        print(error, file=sys.stderr)
        return 1
    version = ".".join(map(str, made.nvrtc))
    print(f"{len(made.entries)} sources for {ARCHITECTURE} by NVRTC {version}: {chosen.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
