"""What is installed, and what importing it does to the process."""

from __future__ import annotations

import configparser
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ghoffload.errors import KernelBuildError
from ghoffload.kernels import build as compiler

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("csrc", "ghoffload", "CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md")
SOURCES += ("pyproject.toml", "setup.cfg", "setup.py")
UNWRITABLE_HOME = "/dev/null/home"  # root, too, cannot make it


def python(
    code: str,
    *,
    path: Path | str | None = ROOT,
    cwd: Path | None = None,
    options: tuple[str, ...] = (),
    **environment: str,
) -> str:
    """What a new interpreter prints, with ``path`` to import from and almost nothing inherited."""
    kept = ("PATH", "LD_LIBRARY_PATH")
    inherited = {name: os.environ[name] for name in kept if name in os.environ}
    environment = {**inherited, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=cwd or "/",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the repository holds, so that building leaves nothing in the real one."""
    clone = tmp_path_factory.mktemp("clone")
    junk = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, clone / name, ignore=junk)
        else:
            shutil.copy(ROOT / name, clone / name)
    return clone


def build(kind: str, clone: Path, destination: Path, cubins: str = "off") -> Path:
    """Build a ``wheel`` or ``editable`` of ``clone`` without network and unpack it."""
    destination.mkdir()
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(destination)!r})"
    python(code, path=None, cwd=clone, GHOFFLOAD_CUBINS=cubins)
    (built,) = destination.glob("*.whl")
    site = destination / "site"
    zipfile.ZipFile(built).extractall(site)
    return site


@pytest.fixture(scope="module")
def wheel(clone: Path) -> Path:
    return build("wheel", clone, clone / "built-wheel")


@pytest.fixture(scope="module")
def requirements(wheel: Path) -> list[Requirement]:
    """As pip reads them: from the metadata of the wheel."""
    (distribution,) = importlib.metadata.distributions(path=[str(wheel)])
    return [Requirement(line) for line in distribution.requires or ()]


def applying(requirements: list[Requirement], **environment: str) -> dict[str, Requirement]:
    environment = {"sys_platform": "linux", "python_version": "3.12", "extra": "", **environment}
    return {r.name: r for r in requirements if r.marker is None or r.marker.evaluate(environment)}


# --- what is in it -------------------------------------------------------------------------------


def options() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def test_every_directory_with_modules_is_a_package() -> None:
    modules = (ROOT / "ghoffload").glob("**/*.py")
    expected = {".".join(path.parent.relative_to(ROOT).parts) for path in modules}
    assert set(options()["options"]["packages"].split()) == expected | {"ghoffload.csrc"}


def test_every_data_file_is_in_the_wheel(wheel: Path) -> None:
    patterns = ("*.cu", "*.cuh", "*.h", "*.json", "*.toml", "py.typed", "*.py")
    expected = set()
    for folder in ("csrc", "ghoffload"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert any(fnmatch(path.name, pattern) for pattern in patterns), path
                expected.add(path.relative_to(ROOT / "ghoffload" if folder != "csrc" else ROOT))
    installed = {path.relative_to(wheel / "ghoffload") for path in wheel.glob("ghoffload/**/*.*")}
    assert any(path.suffix == ".cu" for path in installed)
    assert installed == expected


def test_metadata(wheel: Path) -> None:
    from ghoffload._version import __version__

    (distribution,) = importlib.metadata.distributions(path=[str(wheel)])
    assert distribution.version == __version__
    assert distribution.metadata["License-Expression"] == "Apache-2.0"
    assert distribution.metadata["Requires-Python"] == ">=3.10"
    assert distribution.read_text("licenses/LICENSE") == (ROOT / "LICENSE").read_text()
    (script,) = distribution.entry_points
    assert (script.name, script.value) == ("ghoffload", "ghoffload.cli:main")


# --- machine code --------------------------------------------------------------------------------


@pytest.fixture
def small(clone: Path, tmp_path: Path) -> Path:
    """A clone with one quick kernel."""
    junk = shutil.ignore_patterns("built-*", "build", "*.egg-info", "__pycache__")
    shutil.copytree(clone, tmp_path / "small", ignore=junk)
    csrc = tmp_path / "small" / "csrc"
    for path in csrc.glob("*.cu"):
        path.unlink()
    (csrc / "adamw.cu").write_text('extern "C" __global__ void tiny(int* x) { *x = 1; }')
    return tmp_path / "small"


def cubins(site: Path) -> list[str]:
    return sorted(path.name for path in (site / "ghoffload" / "csrc").glob("cubin/*"))


FROM = """
from ghoffload.kernels import build
print(build.cubin("adamw", "sm_90a").origin, build.packaged_nvrtc("sm_90a") is not None)
"""


def test_a_wheel_has_machine_code_where_there_is_nvrtc(small: Path, tmp_path: Path) -> None:
    try:
        compiler.nvrtc_version()
    except KernelBuildError as error:
        pytest.skip(f"needs the compiler: {error}")
    for cubins_asked in ("auto", "require"):
        site = build("wheel", small, tmp_path / cubins_asked, cubins_asked)
        assert cubins(site) == ["adamw-sm_90a.cubin", "manifest.json"]
        assert python(FROM, path=site, HOME=UNWRITABLE_HOME) == "package True"
    editable = build("editable", small, tmp_path / "editable", "auto")
    assert cubins(editable) == []
    assert not (small / "csrc" / "cubin").exists()
    # The build directory still has those of before.
    assert cubins(build("wheel", small, tmp_path / "off", "off")) == []


def test_a_wheel_is_built_without_machine_code_where_that_fails(
    small: Path, tmp_path: Path
) -> None:
    (small / "csrc" / "adamw.cu").write_text("int = 3;")  # what stops the compiler matters not
    assert cubins(build("wheel", small, tmp_path / "auto", "auto")) == []
    build("editable", small, tmp_path / "editable", "require")  # does not try
    with pytest.raises(AssertionError, match="no machine code for Hopper in this wheel"):
        build("wheel", small, tmp_path / "require", "require")


def test_only_a_release_asks_for_nvrtc(small: Path) -> None:
    code = "from setuptools import build_meta; print(build_meta.get_requires_for_build_wheel())"
    for asked, expected in (("auto", False), ("off", False), ("require", True)):
        said = python(code, path=None, cwd=small, GHOFFLOAD_CUBINS=asked).splitlines()[-1]
        assert ("nvidia-cuda-nvrtc-cu12==12.9." in said) == expected
    with pytest.raises(AssertionError, match="expects auto, require or off, got 'yes'"):
        python(code, path=None, cwd=small, GHOFFLOAD_CUBINS="yes")


# --- what it asks for ----------------------------------------------------------------------------


def test_requirement_ranges(requirements: list[Requirement]) -> None:
    """Each range lets the torch and CUDA packages stay that an environment may already have."""
    needed = applying(requirements)
    expected = "cuda-bindings numba numpy nvidia-ml-py psutil rich torch"
    assert sorted(needed) == expected.split()
    for name, kept, refused in (
        # torch pins cuda-bindings exactly (2.9: 12.9.4) or from below (2.11: >= 13.0.3)
        ("cuda-bindings", ["12.9.0", "12.9.4", "13.0.3", "13.3.1", "13.99"], ["12.8.0", "14.0.0"]),
        ("torch", ["2.9.0", "2.9.1+cu128", "2.13.0+cpu", "3.0"], ["2.8.0"]),
    ):
        specifier = needed[name].specifier
        assert [v for v in kept if v not in specifier] == []
        assert [v for v in refused if v in specifier] == []
    others = [r for name, r in needed.items() if name != "cuda-bindings"]
    assert [str(r) for r in others if any(s.operator != ">=" for s in r.specifier)] == []


def test_requirements_by_platform(requirements: list[Requirement]) -> None:
    assert "cuda-bindings" not in applying(requirements, sys_platform="darwin")
    assert "tomli" in applying(requirements, python_version="3.10")
    assert "tomli" not in applying(requirements, python_version="3.11")


def test_cuda_python_is_an_extra_only(requirements: list[Requirement]) -> None:
    """It pins its own minor of cuda-bindings, which replaces the one that is there (setup.cfg)."""
    for extra in ("", "demo", "nvrtc", "test", "dev"):
        assert "cuda-python" not in applying(requirements, extra=extra)
    asked = applying(requirements, extra="cuda-python")["cuda-python"].specifier
    versions = ("12.8.0", "12.9.0", "13.4.4", "14.0.0")
    assert [version for version in versions if version in asked] == ["12.9.0", "13.4.4"]


def test_the_test_extra_brings_nvrtc_for_machines_without_a_gpu(
    requirements: list[Requirement],
) -> None:
    needed = applying(requirements, extra="nvrtc")
    assert "13.0.88" in needed["nvidia-cuda-nvrtc"].specifier  # what torch 2.11-2.14 pins
    assert applying(requirements, extra="test")["ghoffload"].extras == {"demo", "nvrtc"}


# --- where csrc is found -------------------------------------------------------------------------

WHERE = """
import json, ghoffload.kernels.build as build
print(json.dumps([build.__file__, str(build.source_directory())]))
"""


def csrc_found(code: str = WHERE, **keywords: object) -> list[Path]:
    package, csrc = map(Path, json.loads(python(code, **keywords)))  # type: ignore[arg-type]
    assert list(csrc.glob("*.cu"))
    return [package.parents[2], csrc.resolve()]


def test_csrc_of_a_wheel(wheel: Path) -> None:
    assert csrc_found(path=wheel) == [wheel, wheel / "ghoffload" / "csrc"]


def test_csrc_of_an_editable_install(clone: Path) -> None:
    site = build("editable", clone, clone / "built-editable")
    # -S: without site-packages, where a ghoffload that is installed for real may stand in front.
    code = f"import site; site.addsitedir({str(site)!r})\n" + WHERE
    for cwd in (clone, None):
        found = csrc_found(code, path=None, cwd=cwd, options=("-S",))
        assert found == [clone, clone / "csrc"]


def test_csrc_of_a_clone_on_pythonpath(clone: Path) -> None:
    assert csrc_found(path=".", cwd=clone) == [clone, clone / "csrc"]


# --- what importing does -------------------------------------------------------------------------

EFFECTS = """
import os, signal, sys, threading, time
def state():
    return {
        "threads": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0,
        "python threads": threading.active_count(),
        "interrupt": str(signal.getsignal(signal.SIGINT)),
        "environment": dict(os.environ),
        "torch threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "random": torch.initial_seed(),
    }
import cuda.bindings.driver, llvmlite, numba, numpy, psutil, pynvml, torch, torch.cuda
before = state()
import ghoffload
for name in ghoffload.__all__:
    getattr(ghoffload, name)
import ghoffload.cli
print(before == state(), torch.cuda.is_initialized(), before, state())
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no cuda-bindings")
def test_import_changes_nothing(tmp_path: Path) -> None:
    said = python(EFFECTS, cwd=tmp_path, HOME=str(tmp_path), TMPDIR=str(tmp_path))
    assert said.startswith("True False"), said
    assert list(tmp_path.iterdir()) == []


ALL_MODULES = """
import importlib, pkgutil, ghoffload
names = [m.name for m in pkgutil.walk_packages(ghoffload.__path__, "ghoffload.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names))
"""


def test_every_module_imports_with_no_gpu_and_no_home(tmp_path: Path) -> None:
    environment = {"HOME": UNWRITABLE_HOME, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": UNWRITABLE_HOME}
    assert int(python(ALL_MODULES, cwd=tmp_path, **environment)) > 20


STEP = """
import torch, ghoffload
from ghoffload.kernels import cache
weight = torch.nn.Parameter(torch.ones(8))
weight.grad = torch.ones(8)
ghoffload.OffloadAdamW([weight], lr=0.5, weight_decay=0.0).step()
print(ghoffload.__file__, cache.directory(), bool((weight - 0.5).abs().max() < 1e-6))
"""


def test_a_step_with_no_place_for_a_cache(wheel: Path, tmp_path: Path) -> None:
    """numba's own cache gives up at import there. A file in the way stops even root."""
    site, temporary = tmp_path / "site", tmp_path / "tmp"
    shutil.copytree(wheel, site, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [path for path in (site / "ghoffload").rglob("*") if path.is_dir()]:
        (folder / "__pycache__").touch()
    temporary.mkdir()  # torch itself asks for a temporary directory
    (temporary / f"ghoffload-{os.getuid()}").touch()
    said = python(STEP, path=site, cwd=tmp_path, HOME=UNWRITABLE_HOME, TMPDIR=str(temporary))
    assert said == f"{site / 'ghoffload' / '__init__.py'} None True"


QUICK = """
import sys, time
start = time.perf_counter()
import ghoffload, ghoffload.cli
print(time.perf_counter() - start, "torch" in sys.modules, "numba" in sys.modules)
"""


def test_import_is_quick() -> None:
    """Names are looked up when they are used, so the command line answers before torch loads."""
    seconds, *loaded = python(QUICK).split()
    assert float(seconds) < 1.0
    assert loaded == ["False", "False"]
