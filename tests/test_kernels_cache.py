"""The cache of compiled kernels: hit, miss, damage, and nobody else's directory."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path

import pytest
import torch

from ghoffload.errors import KernelBuildError
from ghoffload.kernels import build, cache, cuda


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_written_is_read_and_damage_is_a_miss(root: Path) -> None:
    assert cache.read("entry") is None
    cache.write("entry", b"payload")
    assert cache.read("entry") == b"payload"
    assert [path.name for path in root.iterdir()] == ["entry"]  # no temporary file left
    data = (root / "entry").read_bytes()
    for damaged in (data[:-1], data[:-1] + b"x", b""):
        (root / "entry").write_bytes(damaged)
        assert cache.read("entry") is None


def test_the_directory_is_private(root: Path) -> None:
    assert cache.directory() == root
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_another_users_or_a_shared_directory_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(cache.ENVIRONMENT_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    shared = tmp_path / "xdg" / "ghoffload"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    assert cache.directory() == tmp_path / "home" / ".cache" / "ghoffload"
    if os.getuid() == 0:
        theirs = tmp_path / "home2" / ".cache" / "ghoffload"
        theirs.mkdir(parents=True, mode=0o700)
        os.chown(theirs, 12345, 12345)
        monkeypatch.setenv("HOME", str(tmp_path / "home2"))
        assert cache.directory() != theirs


def test_digests_tell_lists_apart() -> None:
    assert len({cache.digest("ab", "c"), cache.digest("a", "bc"), cache.digest("abc")}) == 3


def test_locks_keep_threads_apart(root: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        with cache.locked("key"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source directory of its own, where the compiler is installed."""
    try:
        build.nvrtc_version()
    except KernelBuildError as error:
        pytest.skip(f"needs the compiler: {error}")
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    monkeypatch.setattr(build, "source_directory", lambda: csrc)
    return csrc


def test_a_cubin_is_compiled_once_and_again_when_its_source_changes(
    root: Path, csrc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = csrc / "tiny.cu"
    source.write_text('extern "C" __global__ void tiny(int* x) { *x = 1; }')
    compiled = []
    original = build.compile_source
    monkeypatch.setattr(
        build, "compile_source", lambda *args: compiled.append(args[2]) or original(*args)
    )
    first, again = (build.cubin("tiny", "sm_90a") for _ in range(2))
    assert (first.origin, again.origin) == ("nvrtc", "cache")
    assert again.code == first.code
    assert again.compiler == first.compiler
    assert compiled == ["sm_90a"]
    first = first.code
    (entry,) = root.glob("*.cubin")
    entry.write_bytes(entry.read_bytes()[:-8])
    assert build.cubin("tiny", "sm_90a").code == first
    build.cubin("tiny", "sm_80")
    source.write_text(source.read_text().replace("= 1", "= 2"))
    assert build.cubin("tiny", "sm_90a").code != first
    assert compiled == ["sm_90a", "sm_90a", "sm_80", "sm_90a"]


def test_an_included_file_is_part_of_the_source_and_of_the_key(root: Path, csrc: Path) -> None:
    (csrc / "one.cuh").write_text("constexpr int ONE = 1;\n")
    (csrc / "two.cuh").write_text(
        '#include "one.cuh"\n#include "two.cuh"\nconstexpr int TWO = ONE + ONE;'
    )
    (csrc / "sum.cu").write_text(
        '#include "one.cuh"\n  # include "two.cuh"  // again\n'
        'extern "C" __global__ void sum(int* x) { *x = ONE + TWO; }'
    )
    first = build.cubin("sum", "sm_90a").code
    (csrc / "one.cuh").write_text("constexpr int ONE = 2;\n")
    assert build.cubin("sum", "sm_90a").code != first
    assert len(list(root.glob("*.cubin"))) == 2


def test_messages_name_the_file_and_line_that_was_written(root: Path, csrc: Path) -> None:
    (csrc / "good.cuh").write_text("constexpr int GOOD = 1;\n\n\n")
    (csrc / "bad.cuh").write_text("\nint = 3;\n")
    (csrc / "a.cu").write_text('#include "good.cuh"\n#include "bad.cuh"\n')
    (csrc / "b.cu").write_text('#include "good.cuh"\n\nint = 3;')
    with pytest.raises(KernelBuildError, match=r"bad\.cuh\(2\): error"):
        build.cubin("a", "sm_90a")
    with pytest.raises(KernelBuildError, match=r"b\.cu\(3\): error"):
        build.cubin("b", "sm_90a")


def test_a_chip_that_the_compiler_does_not_know_is_named(root: Path, csrc: Path) -> None:
    (csrc / "tiny.cu").touch()
    with pytest.raises(KernelBuildError, match=r"it knows no sm_999; .* pip install nvidia-cuda"):
        build.cubin("tiny", "sm_999")


@pytest.mark.parametrize("name", ["gone.cuh", "../outside.cuh", "outside.h", "/etc/passwd", ""])
def test_only_headers_beside_the_source_are_included(tmp_path: Path, name: str) -> None:
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    (tmp_path / "outside.cuh").touch()
    (csrc / "outside.h").touch()
    (csrc / "a.cu").write_text(f'\n#include "{name}"\n')
    with pytest.raises(KernelBuildError) as caught:
        build.read_source(csrc / "a.cu")
    assert str(caught.value) == (
        f"a.cu(2): #include expects the name of a .cuh file in {csrc}, got {name}"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_driver_the_error_says_so() -> None:
    with pytest.raises(KernelBuildError, match=r"driver|cuInit|cuDeviceGet|cuda-bindings"):
        cuda.preload(0)
