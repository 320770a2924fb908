"""csrc's CUDA C++ to machine code: finding the sources, NVRTC, the cache of its results.

NVRTC is called through ctypes: nine functions of a stable C interface. cuda.bindings would insist
on the NVRTC of its own CUDA major version, and what an environment has is the one torch brought.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ghoffload.errors import KernelBuildError
from ghoffload.kernels import cache

OPTIONS = ("--std=c++17", "-default-device", "--fmad=false")

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
    """NVRTC's name of a compute capability; Hopper's with its own instructions."""
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


@dataclass(frozen=True)
class Cubin:
    """Machine code of one source file.

    Attributes:
        code: the ELF image.
        log: what the compiler said; empty where the code came from the cache.
        compiler: NVRTC's version.
    """

    code: bytes
    log: str
    compiler: tuple[int, int]


def cubin(name: str, arch: str) -> Cubin:
    """Machine code of ``csrc/<name>.cu``, from the cache or from NVRTC.

    Raises:
        KernelBuildError: the source does not compile, or NVRTC is missing.
    """
    path = source_directory() / f"{name}.cu"
    source = read_source(path)
    version = nvrtc_version()
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
    return Cubin(code, "", version)


class _Nvrtc:
    """libnvrtc and its functions."""

    def __init__(self) -> None:
        errors = []
        for candidate in _library_candidates():
            try:
                self._library = ctypes.CDLL(candidate)
                break
            except OSError as error:
                errors.append(str(error))
        else:
            raise KernelBuildError(
                "NVRTC, which compiles the CUDA kernels, was not found. CUDA builds of torch bring "
                "it; otherwise: pip install nvidia-cuda-nvrtc. " + "; ".join(errors)
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


def _library_candidates() -> Iterator[str]:
    with contextlib.suppress(Exception):  # not there, or it finds none: its errors are many
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("nvrtc").abs_path
        if path:
            yield path
    for entry in sys.path:  # wheels beside torch, of whichever CUDA it was built for
        for found in sorted(Path(entry).glob("nvidia/*/lib/libnvrtc.so.*"), reverse=True):
            if "builtins" not in found.name:
                yield str(found)
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
            raise KernelBuildError(f"{name} for {arch} with NVRTC {version}: {failure}\n{text}")
        code = nvrtc.text("nvrtcGetCUBINSize", "nvrtcGetCUBIN", program)
        return Cubin(code, text, nvrtc_version())
    finally:
        nvrtc.call("nvrtcDestroyProgram", ctypes.byref(program))
