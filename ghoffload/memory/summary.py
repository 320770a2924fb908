"""memory_summary: what this process holds, by memory kind and owner, on one page."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, overload

import torch

from ghoffload.memory.ledger import ledger
from ghoffload.memory.limits import available_host_bytes, cgroup_available_bytes, memlock_limit
from ghoffload.memory.manager_registry import managers

_WIDTH = 78


@overload
def memory_summary(*, as_dict: Literal[False] = False) -> str: ...
@overload
def memory_summary(*, as_dict: Literal[True]) -> dict[str, Any]: ...
def memory_summary(*, as_dict: bool = False) -> str | dict[str, Any]:
    """What the runtime holds by memory kind and owner, torch's HBM, and the host's limits.

    In the spirit of ``torch.cuda.memory_summary``. Asks no GPU that torch has not started yet.

    Args:
        as_dict: give plain values, in bytes, instead of text.

    Returns:
        The page; or a dict with ``"held"`` (rows of kind, owner, bytes), ``"managers"`` (by owner
        and kind, the fields of ``TensorManager.statistics``), ``"devices"`` and ``"host"``.
    """
    found = {
        "managers": _managers(),  # first: it counts out what has died
        "held": [row._asdict() for row in ledger.rows()],
        "devices": _devices(),
        "host": {
            "available": available_host_bytes(),
            "cgroup_available": cgroup_available_bytes(),
            "memlock": memlock_limit(),
        },
    }
    return found if as_dict else _page(found)


def _managers() -> list[dict[str, Any]]:
    return [
        {"owner": manager.owner, "kind": kind, **dataclasses.asdict(figures)}
        for manager in sorted(managers, key=lambda manager: manager.owner)
        if not manager.closed and not manager.inherited
        for kind, figures in sorted(manager.statistics().items())
    ]


def _devices() -> list[dict[str, Any]]:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        reserved = torch.cuda.memory_reserved(index)
        if reserved == 0 and index != torch.cuda.current_device():
            continue  # asking it for more would make a context there
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "allocated": torch.cuda.memory_allocated(index),
                "peak": torch.cuda.max_memory_allocated(index),
                "reserved": reserved,
                "free": free,
                "total": total,
            }
        )
    return found


def _page(found: dict[str, Any]) -> str:
    lines = [_title("ghoffload memory summary")]
    lines += _table(
        "held by",
        ("bytes",),
        [(f"{row['kind']}: {row['owner']}", row["nbytes"]) for row in found["held"]],
    )
    by_kind: dict[str, int] = {}
    for row in found["held"]:
        by_kind[row["kind"]] = by_kind.get(row["kind"], 0) + row["nbytes"]
    lines += [_row(f"all {kind}", (nbytes,)) for kind, nbytes in by_kind.items()]
    for title, key, columns in (
        ("tensor manager", "managers", ("in_use", "peak", "reserved")),
        ("torch, HBM", "devices", ("allocated", "peak", "reserved")),
    ):
        rows = [
            (
                row.get("device") or f"{row['kind']}: {row['owner']}",
                *(row[column] for column in columns),
            )
            for row in found[key]
        ]
        if rows:
            lines += _table(title, tuple(column.replace("_", " ") for column in columns), rows)
    host = found["host"]
    lines += _table(
        "host",
        ("bytes",),
        [
            ("available", host["available"]),
            ("left by the cgroup's limit", host["cgroup_available"]),
            ("RLIMIT_MEMLOCK", host["memlock"]),
        ],
        missing={1: "unknown", 2: "no limit", 3: "unlimited"},
    )
    return "\n".join([*lines, "=" * _WIDTH])


def _title(text: str) -> str:
    return f"{'=' * _WIDTH}\n{text:^{_WIDTH}}".rstrip()


def _table(
    title: str,
    columns: tuple[str, ...],
    rows: list[tuple[Any, ...]],
    missing: dict[int, str] | None = None,
) -> list[str]:
    lines = ["-" * _WIDTH, _row(title, columns), "-" * _WIDTH]
    for number, (name, *values) in enumerate(rows, 1):
        shown = ((missing or {}).get(number, "") if v is None else v for v in values)
        lines.append(_row(name, tuple(shown)))
    return lines if rows else [*lines, "nothing"]


def _row(name: str, values: tuple[Any, ...]) -> str:
    cells = "".join(f" {f'{v:,}' if isinstance(v, int) else v:>16}" for v in values)
    room = _WIDTH - len(cells)
    return f"{name if len(name) <= room else name[: room - 3] + '...':<{room}}{cells}"
