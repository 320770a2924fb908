"""csrc's CUDA C++ to machine code: the sources, what a wheel brings, the cache, NVRTC.

NVRTC is called through ctypes: nine functions of a stable C interface. cuda.bindings would insist
on the NVRTC of its own CUDA major version, and what an environment has is the one torch brought.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from ghoffload.errors import KernelBuildError
from ghoffload.kernels import cache, packaged

OPTIONS = ("--std=c++17", "-default-device", "--fmad=false")
LEAST_CAPABILITY = (8, 0)
"""The oldest chips that the kernels are written for: Ampere."""
BULK_COPIES = (9, 0)
"""The first compute capability with bulk copies, by which state is updated in place: Hopper."""

INSTALL_NVRTC = (
    "pip install nvidia-cuda-nvrtc (for a driver from 580 on; nvidia-cuda-nvrtc-cu12 before)"
)

_INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]*)"')
_HEADER_NAME = re.compile(r"\w+\.cuh")


def source_directory() -> Path:
    """csrc: inside the installed package, else beside it in a clone.

    Raises:
        KernelBuildError: neither is there.
    """
    package = Path(__file__).resolve().parents[1]
    for directory in (package / "csrc", package.parent / "csrc"):
        if (directory / "adamw.cu").is_file():
            return directory
    raise KernelBuildError(
        f"the CUDA sources expect to be in {package / 'csrc'} or {package.parent / 'csrc'}, "
        "and are in neither; reinstall ghoffload"
    )


def read_source(path: Path) -> bytes:
    """A source with its ``#include "name.cuh"`` lines replaced by those files, each once.

    The result needs no include path, and its digest covers every file that went into it. ``#line``
    directives keep the compiler's messages true.

    Raises:
        KernelBuildError: an included file is not a ``.cuh`` beside the source.
    """
    return _with_includes(path, {path.name}).encode()


def _with_includes(path: Path, seen: set[str]) -> str:
    lines = [f'#line 1 "{path.name}"']
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        include = _INCLUDE.match(line)
        if include is None:
            lines.append(line)
            continue
        name = include[1]
        header = path.parent / name
        if not _HEADER_NAME.fullmatch(name) or not header.is_file():
            raise KernelBuildError(
                f"{path.name}({number}): #include expects the name of a .cuh file in "
                f"{path.parent}, got {name}"
            )
        if name not in seen:
            seen.add(name)
            lines.append(_with_includes(header, seen).rstrip("\n"))
        lines.append(f'#line {number + 1} "{path.name}"')
    return "\n".join(lines) + "\n"


def architecture(major: int, minor: int) -> str:
    """NVRTC's name of a compute capability; Hopper's with its own instructions.

    Raises:
        KernelBuildError: the chip is older than the kernels allow.
    """
    if (major, minor) < LEAST_CAPABILITY:
        raise KernelBuildError(f"the CUDA kernels expect {too_old(major, minor)}")
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


def too_old(major: int, minor: int) -> str:
    """What is expected of a chip that is too old, and what it is."""
    least = ".".join(map(str, LEAST_CAPABILITY))
    return f"a GPU of compute capability {least} (Ampere) or later, got one of {major}.{minor}"


@dataclass(frozen=True)
class Cubin:
    """Machine code of one source file.

    Attributes:
        code: the ELF image.
        log: what the compiler said; empty where it was not run.
        compiler: NVRTC's version.
        origin: the installed package, the user's cache, or NVRTC now.
    """

    code: bytes
    log: str
    compiler: tuple[int, int]
    origin: Literal["package", "cache", "nvrtc"] = "nvrtc"


def digest(source: bytes, arch: str) -> str:
    """Of all that machine code depends on but the compiler's version."""
    return cache.digest(source, arch, *OPTIONS)


def cubin(name: str, arch: str, *, use_packaged: bool = True) -> Cubin:
    """Machine code of ``csrc/<name>.cu``: what the package brings, else the cache, else NVRTC.

    Args:
        name: of the source.
        arch: as NVRTC names it.
        use_packaged: ``False`` where the driver would not have the package's.

    Raises:
        KernelBuildError: the source does not compile, or there is nothing to compile it with.
    """
    path = source_directory() / f"{name}.cu"
    source = read_source(path)
    if use_packaged and (found := _packaged(path, source, arch)) is not None:
        return found
    try:
        version = nvrtc_version()
    except KernelBuildError as error:
        raise KernelBuildError(
            f"{path.name} for {arch}: NVRTC, which would compile it, was not found, and this "
            f"installation has no machine code for {arch} that could be used instead; a CUDA build "
            f"of torch brings NVRTC, or {INSTALL_NVRTC}"
        ) from error
    key = cache.digest(source, arch, *OPTIONS, repr(version))
    entry = f"{name}-{arch}-{key}.cubin"
    code = cache.read(entry)
    if code is None:
        with cache.locked(entry):
            code = cache.read(entry)  # another process may have been first
            if code is None:
                built = compile_source(source, path.name, arch)
                cache.write(entry, built.code)
                return built
    return Cubin(code, "", version, "cache")


def _packaged(path: Path, source: bytes, arch: str) -> Cubin | None:
    directory = path.parent / packaged.DIRECTORY
    manifest = packaged.manifest(directory)
    if manifest is None:
        return None
    entry = manifest.find(digest(source, arch))
    code = None if entry is None else packaged.read(directory, entry)
    return None if code is None else Cubin(code, "", manifest.nvrtc, "package")


def packaged_nvrtc(arch: str) -> tuple[int, int] | None:
    """The NVRTC that the package's machine code is of; ``None`` where any source's is missing.

    Raises:
        KernelBuildError: the sources are not to be found.
    """
    version = None
    for path in source_directory().glob("*.cu"):
        found = _packaged(path, read_source(path), arch)
        if found is None:
            return None
        version = found.compiler
    return version


class _Nvrtc:
    """libnvrtc and its functions."""

    def __init__(self) -> None:
        errors = []
        for candidate in _library_candidates():
            try:
                self._library = _load(candidate)
                break
            except OSError as error:
                errors.append(str(error))
        else:
            raise KernelBuildError(
                "NVRTC, which compiles the CUDA kernels, was not found. CUDA builds of torch bring "
                f"it; otherwise: {INSTALL_NVRTC}. " + "; ".join(errors)
            )

    def call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != 0:
            describe = self._library.nvrtcGetErrorString
            describe.restype = ctypes.c_char_p
            raise KernelBuildError(f"{function} failed: {describe(status).decode()}")

    def text(self, size: str, get: str, program: ctypes.c_void_p) -> bytes:
        count = ctypes.c_size_t()
        self.call(size, program, ctypes.byref(count))
        buffer = ctypes.create_string_buffer(count.value)
        self.call(get, program, buffer)
        return buffer.raw


def _load(library: str) -> ctypes.CDLL:
    # Wheels of NVRTC 13.0 do not look for their second library beside the first; where it is loaded
    # by then, they find it.
    if os.path.isabs(library):
        for beside in sorted(Path(library).parent.glob("libnvrtc-builtins.so.*")):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(beside))
    return ctypes.CDLL(library)


def wheel_libraries(entries: Iterable[str]) -> Iterator[str]:
    """NVRTC in NVIDIA's wheels below these directories, of whichever CUDA."""
    for entry in entries:
        for found in sorted(Path(entry).glob("nvidia/*/lib/libnvrtc.so.*"), reverse=True):
            yield str(found)


_chosen: list[str] = []


def use_nvrtc(library: Path) -> None:
    """Compile with this NVRTC and no other. For a process that has compiled nothing yet."""
    _chosen[:] = [str(library)]


def _library_candidates() -> Iterator[str]:
    if _chosen:
        yield from _chosen
        return
    with contextlib.suppress(Exception):  # not there, or it finds none: its errors are many
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("nvrtc").abs_path
        if path:
            yield path
    yield from wheel_libraries(sys.path)  # beside torch, of the CUDA that it was built for
    for major in (13, 12):
        yield f"libnvrtc.so.{major}"


@lru_cache(None)
def _nvrtc() -> _Nvrtc:
    return _Nvrtc()


@lru_cache(None)
def nvrtc_version() -> tuple[int, int]:
    """NVRTC's major and minor version.

    Raises:
        KernelBuildError: there is no NVRTC.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _knows(arch: str) -> bool:
    count = ctypes.c_int()
    _nvrtc().call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
    numbers = (ctypes.c_int * count.value)()
    _nvrtc().call("nvrtcGetSupportedArchs", numbers)
    return arch.rstrip("a") in {f"sm_{number}" for number in numbers}


def compile_source(
    source: bytes, name: str, arch: str, extra_options: tuple[str, ...] = ()
) -> Cubin:
    """Compile CUDA C++ now. Needs no GPU and no driver.

    Raises:
        KernelBuildError: with the compiler's log.
    """
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    nvrtc.call("nvrtcCreateProgram", ctypes.byref(program), source, name.encode(), 0, None, None)
    try:
        options = [f"--gpu-architecture={arch}", *OPTIONS, *extra_options]
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failure: KernelBuildError | None = None
        try:
            nvrtc.call("nvrtcCompileProgram", program, len(options), array)
        except KernelBuildError as error:
            failure = error
        log = nvrtc.text("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program)
        text = log.rstrip(b"\0").decode(errors="replace").strip()
        if failure is not None:
            version = ".".join(map(str, nvrtc_version()))
            if not _knows(arch):
                failure = KernelBuildError(f"it knows no {arch}; a newer one may: {INSTALL_NVRTC}")
            raise KernelBuildError(f"{name} for {arch} with NVRTC {version}: {failure}\n{text}")
        code = nvrtc.text("nvrtcGetCUBINSize", "nvrtcGetCUBIN", program)
        return Cubin(code, text, nvrtc_version())
    finally:
        nvrtc.call("nvrtcDestroyProgram", ctypes.byref(program))
