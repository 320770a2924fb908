"""The part of the build that setup.cfg cannot say: machine code for Hopper goes into the wheel.

``GHOFFLOAD_CUBINS`` decides. ``auto``, the default, compiles it where NVRTC is at hand; where there
is none, the wheel is built without, with a warning, and the kernels are compiled at first use.
``require``, for a release, has the build bring NVRTC and fails without it; 90 MB are too much to
ask of everyone who installs from source. ``off`` leaves machine code out. An editable install has
none: its sources change.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# 12.9 is the newest whose machine code loads on drivers from 525 on; 13 needs 580.
NVRTC = "nvidia-cuda-nvrtc-cu12==12.9.86; sys_platform == 'linux'"
CUBINS = os.environ.get("GHOFFLOAD_CUBINS", "auto")
if CUBINS not in ("auto", "require", "off"):
    sys.exit(f"GHOFFLOAD_CUBINS expects auto, require or off, got {CUBINS!r}")


class BuildWithCubins(build_py):
    """build_py, and then csrc/cubin beside the sources that it has copied."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        cubin = Path(self.build_lib).resolve() / "ghoffload" / "csrc" / "cubin"
        shutil.rmtree(cubin, ignore_errors=True)  # of an earlier build in the same directory
        if CUBINS == "off":
            return
        path = [str(ROOT), *(os.path.abspath(entry) for entry in sys.path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        done = subprocess.run(
            [sys.executable, "-m", "ghoffload.kernels.pack_cubins", str(cubin)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode == 0:
            self.announce(done.stdout.strip(), level=2)
            return
        shutil.rmtree(cubin, ignore_errors=True)
        said = f"no machine code for Hopper in this wheel: {done.stderr.strip()}"
        if CUBINS == "require":
            sys.exit(said)
        self.warn(f"{said}\nThe kernels will be compiled at first use")


setup(
    cmdclass={"build_py": BuildWithCubins},
    setup_requires=[NVRTC] if CUBINS == "require" else [],
)
