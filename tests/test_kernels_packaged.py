"""Machine code from the package, the cache or NVRTC; and what is said where there is none."""

from __future__ import annotations

import enum
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ghoffload.errors import KernelBuildError
from ghoffload.kernels import build, cache, cuda, pack_cubins, packaged

SOURCE = 'extern "C" __global__ void tiny(int* x) { *x = 1; }'


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of which the package has the machine code, for Hopper."""
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    monkeypatch.setattr(build, "source_directory", lambda: csrc)
    cubins = {}
    for name in ("tiny", "other"):
        path = csrc / f"{name}.cu"
        path.write_text(SOURCE)
        digest = build.digest(build.read_source(path), "sm_90a")
        cubins[name] = (digest, f"packaged {name}".encode())
    packaged.write(csrc / packaged.DIRECTORY, (12, 9), "sm_90a", cubins)
    return csrc


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A compiler whose code is its version; the chips that it was asked for."""
    compiled: list[str] = []

    def compile_source(source: bytes, name: str, arch: str) -> build.Cubin:
        compiled.append(arch)
        return build.Cubin(b"by NVRTC 13.0", "", (13, 0))

    monkeypatch.setattr(build, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(build, "compile_source", compile_source)
    return compiled


@pytest.fixture
def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise KernelBuildError("NVRTC was not found")

    monkeypatch.setattr(build, "nvrtc_version", missing)


def origins(name: str = "tiny", arch: str = "sm_90a", **keywords: Any) -> list[str]:
    return [build.cubin(name, arch, **keywords).origin for _ in range(2)]


# --- the order -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_nvrtc")
def test_packaged_code_needs_no_compiler(csrc: Path) -> None:
    found = build.cubin("tiny", "sm_90a")
    assert found == build.Cubin(b"packaged tiny", "", (12, 9), "package")
    assert build.packaged_nvrtc("sm_90a") == (12, 9)


def test_other_chips_and_refused_code_come_from_the_cache_and_the_compiler(
    csrc: Path, nvrtc: list[str]
) -> None:
    assert origins() == ["package", "package"]
    assert origins(arch="sm_80") == ["nvrtc", "cache"]
    assert origins(use_packaged=False) == ["nvrtc", "cache"]
    assert nvrtc == ["sm_80", "sm_90a"]
    assert build.packaged_nvrtc("sm_80") is None


def _edit_source(csrc: Path) -> None:
    (csrc / "tiny.cu").write_text(SOURCE.replace("1", "2"))


def _cut_file(csrc: Path) -> None:
    path = csrc / "cubin" / "tiny-sm_90a.cubin"
    path.write_bytes(path.read_bytes()[:-1])


def _drop_file(csrc: Path) -> None:
    (csrc / "cubin" / "tiny-sm_90a.cubin").unlink()


def _drop_manifest(csrc: Path) -> None:
    (csrc / "cubin" / "manifest.json").unlink()


def _break_manifest(csrc: Path) -> None:
    (csrc / "cubin" / "manifest.json").write_text("{")


def _foreign_manifest(csrc: Path) -> None:
    (csrc / "cubin" / "manifest.json").write_text('{"nvrtc": [12, 9], "entries": [{}]}')


@pytest.mark.parametrize(
    "damage",
    [_edit_source, _cut_file, _drop_file, _drop_manifest, _break_manifest, _foreign_manifest],
)
def test_code_of_another_source_or_damaged_code_is_not_used(
    csrc: Path, nvrtc: list[str], damage: Callable[[Path], None]
) -> None:
    damage(csrc)
    assert origins() == ["nvrtc", "cache"]
    assert build.packaged_nvrtc("sm_90a") is None


def test_options_are_part_of_what_packaged_code_is_of(
    csrc: Path, nvrtc: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "OPTIONS", (*build.OPTIONS, "--use_fast_math"))
    assert origins() == ["nvrtc", "cache"]


# --- what the driver makes of it -----------------------------------------------------------------


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_IMAGE = 200


class Driver:
    """A driver that refuses what it is told to."""

    CUresult = Result

    def __init__(self, *refused: bytes) -> None:
        self.refused, self.loaded = refused, []

    def cuModuleLoadData(self, code: bytes) -> tuple[Result, str]:
        if code in self.refused:
            return Result.CUDA_ERROR_INVALID_IMAGE, ""
        self.loaded.append(code)
        return Result.CUDA_SUCCESS, f"module of {code.decode()}"

    def cuCtxGetCurrent(self) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, 5

    def cuGetErrorName(self, status: Result) -> tuple[Result, bytes]:
        return Result.CUDA_SUCCESS, status.name.encode()

    def cuGetErrorString(self, status: Result) -> tuple[Result, bytes]:
        return Result.CUDA_SUCCESS, b"device kernel image is invalid"


def device(driver: Driver, capability: tuple[int, int] = (9, 0)) -> Any:
    made: Any = object.__new__(cuda._Device)
    made.driver, made.capability = driver, capability
    made._context, made._index = 5, 0
    made._lock, made._modules = threading.RLock(), {}
    return made


@pytest.mark.usefixtures("no_nvrtc")
def test_a_module_is_loaded_once_from_the_package(csrc: Path) -> None:
    driver = Driver()
    one = device(driver)
    assert [one.module("tiny") for _ in range(2)] == ["module of packaged tiny"] * 2
    assert driver.loaded == [b"packaged tiny"]


def test_what_an_older_driver_refuses_is_compiled_here(csrc: Path, nvrtc: list[str]) -> None:
    assert device(Driver(b"packaged tiny")).module("tiny") == "module of by NVRTC 13.0"
    assert nvrtc == ["sm_90a"]


def test_code_refused_from_everywhere_is_an_error_with_the_compilers_version(
    csrc: Path, nvrtc: list[str]
) -> None:
    driver = Driver(b"packaged tiny", b"by NVRTC 13.0")
    with pytest.raises(KernelBuildError) as caught:
        device(driver).module("tiny")
    assert str(caught.value) == (
        "loading tiny.cu (built by NVRTC 13.0, which needs a driver of its CUDA major version or "
        "newer) on cuda:0 failed: CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid"
    )


@pytest.mark.usefixtures("no_nvrtc")
def test_refused_and_no_compiler_says_both(csrc: Path) -> None:
    with pytest.raises(KernelBuildError) as caught:
        device(Driver(b"packaged tiny")).module("tiny")
    for part in (
        "loading the packaged tiny.cu (built by NVRTC 12.9",
        "on cuda:0 failed: CUDA_ERROR_INVALID_IMAGE",
        "and it could not be compiled here: tiny.cu for sm_90a: NVRTC",
        "pip install nvidia-cuda-nvrtc",
    ):
        assert part in str(caught.value)


@pytest.mark.usefixtures("no_nvrtc")
def test_no_code_and_no_compiler_names_the_chip_and_the_command(csrc: Path) -> None:
    with pytest.raises(KernelBuildError) as caught:
        device(Driver(), (8, 9)).module("tiny")
    assert str(caught.value) == (
        "tiny.cu for sm_89: NVRTC, which would compile it, was not found, and this installation "
        "has no machine code for sm_89 that could be used instead; a CUDA build of torch brings "
        "NVRTC, or pip install nvidia-cuda-nvrtc (for a driver from 580 on; "
        "nvidia-cuda-nvrtc-cu12 before)"
    )


def test_a_chip_before_ampere_is_refused(csrc: Path, nvrtc: list[str]) -> None:
    with pytest.raises(KernelBuildError) as caught:
        device(Driver(), (7, 5)).module("tiny")
    assert str(caught.value) == (
        "the CUDA kernels expect a GPU of compute capability 8.0 (Ampere) or later, got one of 7.5"
    )
    assert nvrtc == []


@pytest.mark.gpu
def test_the_driver_loads_all_that_is_packaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper")
    csrc = tmp_path / "csrc"
    shutil.copytree(build.source_directory(), csrc)
    monkeypatch.setattr(build, "source_directory", lambda: csrc)
    pack_cubins.pack(csrc / packaged.DIRECTORY)
    monkeypatch.delattr(build, "compile_source")
    one = cuda._Device(torch.cuda.current_device())
    for path in csrc.glob("*.cu"):
        assert build.cubin(path.stem, "sm_90a").origin == "package"
        one.module(path.stem)


# --- making it -----------------------------------------------------------------------------------


def test_packing_compiles_every_source_and_removes_what_was_there(csrc: Path) -> None:
    try:
        version = build.nvrtc_version()
    except KernelBuildError as error:
        pytest.skip(f"needs the compiler: {error}")
    directory = csrc / packaged.DIRECTORY
    (directory / "old-sm_90a.cubin").touch()
    made = pack_cubins.pack(directory)
    assert made == packaged.manifest(directory)
    assert made.nvrtc == version
    files = {"manifest.json", "other-sm_90a.cubin", "tiny-sm_90a.cubin"}
    assert {path.name for path in directory.iterdir()} == files
    found = build.cubin("tiny", "sm_90a")
    assert (found.origin, found.code[:4]) == ("package", b"\x7fELF")
    assert found.code == build.compile_source(SOURCE.encode(), "tiny.cu", "sm_90a").code


def test_packing_that_fails_leaves_nothing(csrc: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (csrc / "tiny.cu").write_text("int = 3;")
    assert pack_cubins._main([str(csrc / "cubin"), "--nvrtc", "/dev/null/libnvrtc.so"]) == 1
    assert "/dev/null/libnvrtc.so" in capsys.readouterr().err
    assert not (csrc / "cubin").exists()


def test_nvrtc_12_is_preferred(tmp_path: Path) -> None:
    names = ("a/nvidia/cu13/lib/libnvrtc.so.13", "b/nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
    others = (
        "a/nvidia/cu13/lib/libnvrtc.alt.so.13",
        "b/nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12.9",
    )
    for name in (*names, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    old = tmp_path / "c/nvidia/cuda_nvrtc/lib/libnvrtc.so.11.2"  # knows no Hopper
    old.parent.mkdir(parents=True)
    old.touch()
    assert pack_cubins.preferred_nvrtc([str(tmp_path / "c")]) is None
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert pack_cubins.preferred_nvrtc([a, str(tmp_path / "c"), b]) == tmp_path / names[1]
    assert pack_cubins.preferred_nvrtc([a]) == tmp_path / names[0]
    assert pack_cubins.preferred_nvrtc([str(tmp_path)]) is None
