"""Imports go one way: a module imports from layers below its own, and never from beside or above.

Imports inside functions and under ``TYPE_CHECKING`` count too: they make the same reader jump.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the bottom to the top. "ghoffload" is the package itself with its lazy names: what a user
# imports, so the commands may.
LAYERS = (
    ("_version", "errors"),
    ("config",),
    ("machine",),
    ("memory",),
    ("transfer",),
    ("kernels",),
    ("measure",),
    ("activations", "optim"),
    ("report", "sweeping", "tracing"),
    ("ghoffload",),
    ("bandwidth", "check", "demo", "doctor", "watch"),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> str:
    """``ghoffload.machine.virtual`` belongs to ``machine``, ``ghoffload`` to itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def imported(tree: ast.AST, module: str, is_package: bool, known: set[str]) -> Iterator[str]:
    """The modules of ghoffload that ``tree`` imports, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*parts, base] if base else parts)
            # `from ghoffload import memory` means the module, `from ghoffload import X` the package
            names = [
                name if (name := f"{base}.{alias.name}") in known else base for alias in node.names
            ]
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else None
            called = node.func.id if isinstance(node.func, ast.Name) else called
            literal = node.args[0].value if node.args and _is_text(node.args[0]) else None
            names = [literal] if called in ("import_module", "__import__") and literal else []
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "ghoffload")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def violations(root: Path) -> list[str]:
    """A line for each import under ``root`` that goes up or sideways, naming both modules."""
    files = {module_name(path, root): path for path in sorted(root.glob("ghoffload/**/*.py"))}
    found = []
    for module, path in files.items():
        own = layer(module)
        if own not in RANK:
            found.append(f"{module} is in no layer: give {own!r} its place in LAYERS")
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for target in imported(tree, module, path.name == "__init__.py", set(files)):
            other = layer(target)
            if other not in RANK:
                found.append(f"{module} imports {target}, which is in no layer")
            elif other != own and RANK[other] >= RANK[own]:
                found.append(f"{module} imports {target}, which is not below it")
    return found


def test_imports_go_one_way() -> None:
    assert (ROOT / "ghoffload" / "config.py").exists()
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("memory/x.py", "import ghoffload.optim", "ghoffload.memory.x imports ghoffload.optim"),
        ("memory/x.py", "from ghoffload.optim.adam import A", "imports ghoffload.optim.adam"),
        ("memory/x.py", "from ghoffload import optim", "imports ghoffload.optim"),
        ("memory/x.py", "from ghoffload import Thing", "imports ghoffload, "),
        ("memory/x.py", "from .. import optim", "imports ghoffload.optim"),
        ("memory/__init__.py", "from ..optim import A", "ghoffload.memory imports ghoffload.optim"),
        ("memory/x.py", "def f():\n    from ghoffload import optim", "imports ghoffload.optim"),
        ("memory/x.py", "import importlib as i\ni.import_module('ghoffload.optim')", "optim"),
        ("memory/x.py", "from ghoffload.surprise import y", "which is in no layer"),
        ("errors.py", "import ghoffload.config", "ghoffload.errors imports ghoffload.config"),
        ("check.py", "import ghoffload.demo", "ghoffload.check imports ghoffload.demo"),
        ("surprise.py", "", "ghoffload.surprise is in no layer"),
        ("optim/x.py", "from ghoffload.memory import x\nfrom . import adam", None),
        ("memory/x.py", "import torch\nfrom ghoffload.memory import y", None),
        ("check.py", "import ghoffload", None),
    ],
)
def test_an_import_upwards_is_named(
    tmp_path: Path, module: str, source: str, expected: str | None
) -> None:
    for name in ("optim/__init__.py", "optim/adam.py", "memory/__init__.py", "__init__.py", module):
        path = tmp_path / "ghoffload" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source) if name == module else "")
    found = violations(tmp_path)
    assert len(found) == (expected is not None)
    assert expected is None or expected in found[0]
