from __future__ import annotations

from pathlib import Path

import pytest

from ghoffload.memory import available_host_bytes, cgroup_available_bytes

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_v2_limit_with_page_cache(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step\n",
            "proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {64 * GIB // 1024} kB\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/step/memory.current": "5\n",
            "sys/fs/cgroup/job/memory.max": f"{16 * GIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{10 * GIB}\n",
            "sys/fs/cgroup/job/memory.stat": (
                f"anon 7\ninactive_file {2 * GIB}\nactive_file {GIB}\n"
            ),
        },
    )
    assert cgroup_available_bytes(root) == 9 * GIB
    assert available_host_bytes(root) == 9 * GIB


def test_v1_limit_of_the_innermost_group(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "7:cpu,cpuacct:/box\n4:memory:/box\n0::/\n",
            "proc/meminfo": f"MemAvailable: {3 * GIB // 1024} kB\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "77\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{8 * GIB}\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{6 * GIB}\n",
            "sys/fs/cgroup/memory/box/memory.stat": f"active_file 9\ntotal_inactive_file {GIB}\n",
        },
    )
    assert cgroup_available_bytes(root) == 3 * GIB


@pytest.mark.parametrize(("inner", "outer"), [(3, 8), (8, 3)])
def test_the_tightest_level_counts(tmp_path: Path, inner: int, outer: int) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": f"{inner * GIB}\n",
            "sys/fs/cgroup/a/b/memory.current": "0\n",
            "sys/fs/cgroup/a/memory.max": f"{outer * GIB}\n",
            "sys/fs/cgroup/a/memory.current": "0\n",
        },
    )
    assert cgroup_available_bytes(root) == 3 * GIB


def test_v1_without_a_limit(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "77\n",
        },
    )
    assert cgroup_available_bytes(root) is None


def test_a_path_out_of_the_namespace_is_not_followed(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../other\n",
            "sys/fs/other/memory.max": "1\n",
            "sys/fs/other/memory.current": "0\n",
            "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{GIB}\n",
        },
    )
    assert cgroup_available_bytes(root) == 3 * GIB


def test_host_path_seen_from_a_container_falls_back_to_the_mount(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/docker/of/the/host\n",
            "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{5 * GIB}\n",
        },
    )
    assert cgroup_available_bytes(root) == 0


@pytest.mark.parametrize("meminfo", ["", "MemAvailable: many kB\n", None])
def test_no_limit_and_no_figure(tmp_path: Path, meminfo: str | None) -> None:
    if meminfo is not None:
        write(tmp_path, {"proc/meminfo": meminfo})
    assert cgroup_available_bytes(tmp_path) is None
    assert available_host_bytes(tmp_path) is None


def test_this_machine() -> None:
    available = available_host_bytes()
    assert available is not None
    assert 1 << 20 < available < 1 << 50
