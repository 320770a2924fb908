"""The csrc gate passes what is there and reports what is broken."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ghoffload.errors import KernelBuildError
from ghoffload.kernels import build, compiling, gate

SPILL = """
extern "C" __global__ void pack_spilled(float* x, int n) {
    float local[64];
    for (int i = 0; i < 64; ++i) local[i] = x[i];
    for (int i = 0; i < n; ++i) x[i] = local[(i * 7 + n) & 63];
}
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of csrc with the quick source and its manifest only."""
    try:
        build.nvrtc_version()
        gate._find_tool("cuobjdump")
    except KernelBuildError as error:
        pytest.skip(f"needs the compiler and the disassembler: {error}")
    source = build.source_directory()
    for path in (source / "pack.cu", *source.glob("*.cuh")):
        shutil.copy(path, tmp_path)
    manifest = json.loads((source / "manifest.json").read_text())
    write(tmp_path, {"pack": manifest["pack"]})
    return tmp_path


def write(directory: Path, manifest: object) -> None:
    (directory / "manifest.json").write_text(json.dumps(manifest))


def read(directory: Path) -> dict:
    return json.loads((directory / "manifest.json").read_text())


def test_the_sources_as_they_are_pass(directory: Path) -> None:
    assert gate.check(directory) == []
    assert gate.check(build.source_directory()) == []


def test_a_local_array_that_needs_a_stack_is_reported(directory: Path) -> None:
    path = directory / "pack.cu"
    path.write_text(path.read_text() + SPILL)
    manifest = read(directory)
    manifest["pack"]["pack_spilled"] = {"registers": 255}
    write(directory, manifest)
    findings = "\n".join(gate.check(directory))
    assert "pack_spilled expects no stack, got 256 bytes" in findings
    assert "pack_spilled expects no LDL" in findings
    assert "pack_spilled expects no STL" in findings
    assert "copy_pieces" not in findings


def test_more_registers_than_the_manifest_allows_are_reported(directory: Path) -> None:
    manifest = read(directory)
    manifest["pack"]["copy_pieces_small"]["registers"] = 16
    write(directory, manifest)
    (finding,) = gate.check(directory)
    assert finding.startswith("pack.cu: copy_pieces_small expects 16 registers or fewer, got ")


def test_a_lost_vector_load_is_reported(directory: Path) -> None:
    path = directory / "pack.cu"
    narrow = path.read_text().replace("copy_words<uint4>", "copy_words<u32>")
    assert narrow != path.read_text()
    path.write_text(narrow)
    findings = gate.check(directory)
    assert "pack.cu: copy_pieces_large expects LDG.E.128, and has none" in findings
    assert "pack.cu: copy_pieces_small expects STG.E.128, and has none" in findings


def test_generic_stores_are_reported(directory: Path) -> None:
    path = directory / "pack.cu"
    kernel = 'extern "C" __global__ void lost(u64 at) { *(float*)(at + threadIdx.x) = 1; }'
    path.write_text(f"{path.read_text()}\n{kernel}\n")
    manifest = read(directory)
    manifest["pack"]["lost"] = {"registers": 32}
    write(directory, manifest)
    assert gate.check(directory) == ["pack.cu: lost expects no ST, got ST.E"]


def test_kernels_and_manifest_must_name_the_same(directory: Path) -> None:
    manifest = read(directory)
    manifest["pack"]["gone"] = manifest["pack"].pop("copy_pieces_large")
    write(directory, manifest | {"nowhere": {}})
    findings = gate.check(directory)
    assert "manifest.json lists nowhere, and there is no nowhere.cu" in findings
    assert "pack.cu: gone is in manifest.json and not in the source" in findings
    assert "pack.cu: copy_pieces_large expects an entry in manifest.json, and has none" in findings


def test_the_command_exits_with_one_and_says_why(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "source_directory", lambda: directory)
    assert gate._main([]) == 0
    (directory / "pack.cu").write_text("not a kernel")
    assert gate._main([]) == 1
    assert "pack.cu for sm_90a" in capsys.readouterr().err


def test_wrong_source_code_is_a_build_error_with_the_compilers_log() -> None:
    try:
        build.nvrtc_version()
    except KernelBuildError as error:
        pytest.skip(f"needs the compiler: {error}")
    with pytest.raises(KernelBuildError, match=r"broken\.cu\(1\): error"):
        build.compile_source(b"int = 3;", "broken.cu", "sm_90a")


def test_the_gate_compiles_with_the_nvrtc_it_is_given(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "source_directory", lambda: directory)
    known = next(build.wheel_libraries(sys.path), None)
    if known is None:
        pytest.skip("needs NVRTC from a wheel")
    assert gate._main(["--nvrtc", known]) == 0
    assert f"compiled by {known}" in capsys.readouterr().out
    assert gate._main(["--nvrtc", "/dev/null/libnvrtc.so"]) == 1
    assert "/dev/null/libnvrtc.so" in capsys.readouterr().err


# --- compilers that do not exist -----------------------------------------------------------------


def made_up_nvrtc(directory: Path, code: str, *flags: str, name: str = "libnvrtc.so.99") -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    source = directory / "nvrtc.c"
    source.write_text(code)
    library = directory / name
    command = ["gcc", "-shared", "-fPIC", "-o", str(library), str(source), *flags]
    subprocess.run(command, check=True)
    return library


def test_a_compiler_that_does_not_come_back_is_ended(tmp_path: Path) -> None:
    code = """
    #include <unistd.h>
    int nvrtcCreateProgram() { for (;;) pause(); }
    """
    library = made_up_nvrtc(tmp_path, code)
    source = tmp_path / "endless.cu"
    source.touch()
    begin = time.monotonic()
    with pytest.raises(KernelBuildError) as caught:
        compiling.compile_apart(source, "sm_90a", nvrtc=library, limit=2.0)
    assert str(caught.value) == f"endless.cu for sm_90a: {library} did not finish in 2 s"
    assert 2 <= time.monotonic() - begin < 20


def test_a_compiler_that_dies_is_an_error(tmp_path: Path) -> None:
    code = """
    #include <unistd.h>
    int nvrtcCreateProgram() { _exit(7); }
    """
    library = made_up_nvrtc(tmp_path, code)
    source = tmp_path / "deadly.cu"
    source.touch()
    with pytest.raises(KernelBuildError, match=r"deadly\.cu for sm_90a: .* exited with 7"):
        compiling.compile_apart(source, "sm_90a", nvrtc=library)


def test_the_second_library_of_nvrtc_is_found_beside_the_first(tmp_path: Path) -> None:
    builtins = "libnvrtc-builtins.so.99.1"
    made_up_nvrtc(tmp_path, "", f"-Wl,-soname,{builtins}", name=builtins)
    code = f"""
    #include <dlfcn.h>
    int nvrtcVersion(int* major, int* minor) {{
        *major = 99;
        *minor = dlopen("{builtins}", RTLD_NOW) != 0;
        return 0;
    }}
    """
    library = made_up_nvrtc(tmp_path, code, "-ldl")
    say = "from pathlib import Path; from ghoffload.kernels import build; "
    say += f"build.use_nvrtc(Path({str(library)!r})); print(build.nvrtc_version())"
    root = Path(__file__).resolve().parents[1]
    said = subprocess.run([sys.executable, "-c", say], cwd=root, capture_output=True, text=True)
    assert said.stdout.strip() == "(99, 1)", said.stderr
