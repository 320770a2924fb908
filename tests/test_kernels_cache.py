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


def test_a_cubin_is_compiled_once_and_again_when_its_source_changes(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        build.nvrtc_version()
    except KernelBuildError as error:
        pytest.skip(f"needs the compiler: {error}")
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    source = csrc / "tiny.cu"
    source.write_text('extern "C" __global__ void tiny(int* x) { *x = 1; }')
    compiled = []
    original = build.compile_source
    monkeypatch.setattr(build, "source_directory", lambda: csrc)
    monkeypatch.setattr(
        build, "compile_source", lambda *args: compiled.append(args[2]) or original(*args)
    )
    first = build.cubin("tiny", "sm_90a").code
    assert build.cubin("tiny", "sm_90a").code == first
    assert compiled == ["sm_90a"]
    (entry,) = root.glob("*.cubin")
    entry.write_bytes(entry.read_bytes()[:-8])
    assert build.cubin("tiny", "sm_90a").code == first
    build.cubin("tiny", "sm_80")
    source.write_text(source.read_text().replace("= 1", "= 2"))
    assert build.cubin("tiny", "sm_90a").code != first
    assert compiled == ["sm_90a", "sm_90a", "sm_80", "sm_90a"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_driver_the_error_says_so() -> None:
    with pytest.raises(KernelBuildError, match=r"driver|cuInit|cuDeviceGet|cuda-bindings"):
        cuda.preload(0)
