"""What every test gets: a clean environment, fixed seeds, a machine without a GPU, a GPU guard."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# OpenMP reads it once: its threads otherwise spin between operations, against those of others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from ghoffload.machine.virtual import VirtualMachine

ROOT = Path(__file__).resolve().parents[1]

# Before anything of ghoffload is imported: a caller's settings must not decide a test.
for _name in [name for name in os.environ if name.startswith("GHOFFLOAD_")]:
    del os.environ[_name]
# Compiled kernels stay between runs, named by a hash of their sources, and out of the user's own.
os.environ["GHOFFLOAD_CACHE_DIR"] = str(ROOT / ".cache" / "ghoffload")
# What other processes hold and were promised must not decide a test either.
os.environ["GHOFFLOAD_GROUP"] = f"-tests-{os.getpid()}"

hypothesis.settings.register_profile(
    "ghoffload",
    deadline=None,  # the first example compiles kernels
    derandomize=True,
    database=None,
)
# Chosen by --hypothesis-profile thorough: tests that do not say how many examples they take.
hypothesis.settings.register_profile(
    "thorough", hypothesis.settings.get_profile("ghoffload"), max_examples=10_000
)
hypothesis.settings.load_profile("ghoffload")


def _no_gpu() -> str | None:
    """Why GPU tests cannot run here; ``None`` where they can."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"needs a CUDA GPU: torch {torch.__version__} is built without CUDA"
    return f"needs a CUDA GPU: torch {torch.__version__} finds none"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and (reason := _no_gpu()) is not None:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - libraries under test may use the global generator
    torch.manual_seed(0)


@pytest.fixture
def virtual(request: pytest.FixtureRequest) -> Iterator[VirtualMachine]:
    """A checking virtual machine in use; parametrize it indirectly with another seed than 0."""
    import ghoffload
    from ghoffload.machine.virtual import VirtualMachine

    seed = getattr(request, "param", 0)
    machine = VirtualMachine(order="adversarial", seed=seed, check=True)
    with ghoffload.use_machine(machine):
        yield machine
