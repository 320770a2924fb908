"""csrc/adamw_stream.cu as C++ on the CPU: a thread for each CUDA thread, copies late and unordered.

Finds wrong indices, parities, stages used too early or loaded too soon, tails, deadlocks. What it
cannot see: proxies (the fences), and what the instructions do (tests/test_kernels_stream_gpu.py).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from csrc_on_cpu import ARITHMETIC, library_of, translated

from ghoffload.errors import KernelBuildError
from ghoffload.kernels import adam, adam_cuda, adam_stream_cuda, cuda, golden
from ghoffload.kernels.adam_cuda import Operands
from ghoffload.kernels.adam_stream_cuda import Shape
from ghoffload.machine.protocol import Launch

VARIANTS = {
    "adamw_stream": [m + a for m in ("", "_master", "_split") for a in ("", "_amsgrad")],
    "adamw_stream_coded": [m + c for m in ("", "_master", "_split") for c in ("_bf16", "_int8")],
}


def compile_for_host(name: str, directory: Path) -> ctypes.CDLL:
    source = translated(name)
    header = r'#line \d+ "bulk\.cuh"\n(?:(?!#line).*\n)*'  # the shim has its own
    source, headers = re.subn(header, "", source)
    source, arrays = re.subn(r"extern __shared__ .*? stages\[\];", "", source)
    assert headers >= 1
    assert arrays == 1
    launchers = "".join(
        f"""
extern "C" void run_adam_stream_{size}{variant}(
    void* parameter, unsigned blocks, unsigned threads, unsigned shared_bytes) {{
    const auto& table = *(StreamTable<{size.upper()}_PIECES>*)parameter;
    run_grid([&] {{ adam_stream_{size}{variant}(table); }}, blocks, threads, shared_bytes);
}}"""
        for size in ("small", "large")
        for variant in VARIANTS[name]
    )
    shim = (Path(__file__).parent / "stream_shim.h").read_text()
    return library_of(directory / name, shim, ARITHMETIC, source, launchers)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    directory = tmp_path_factory.mktemp("stream")
    return {name: compile_for_host(name, directory) for name in VARIANTS}


def pretend_hopper(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]) -> None:
    """There is a device 0 of compute capability 9.0; ``make`` stands for what starts kernels."""
    monkeypatch.setattr(cuda, "Start", make)
    monkeypatch.setattr(cuda, "device_index", lambda tensor: 0)
    monkeypatch.setattr(cuda, "capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda, "shared_memory", lambda device: 227 << 10)


@pytest.fixture
def started(libraries: dict[str, ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Update launches run the CPU build of the streaming kernel; the names of the kernels."""
    started: set[str] = set()

    def make(source, kernel, device, *, blocks, threads, parameters, shared_bytes):  # type: ignore[no-untyped-def]
        (parameter,) = parameters

        def start(stream: int) -> None:
            started.add(kernel)
            getattr(libraries[source], f"run_{kernel}")(
                ctypes.c_void_p(parameter.ctypes.data), blocks, threads, shared_bytes
            )

        return start

    pretend_hopper(monkeypatch, make)
    original = Launch.run_on_host

    def run_on_host(launch: Launch) -> None:
        launch.device(0) if launch.name == "adam_update" else original(launch)

    monkeypatch.setattr(Launch, "run_on_host", run_on_host)
    return started


@pytest.mark.parametrize(
    ("shape", "ctas", "part"),
    [(Shape(256, 2, 1), 2, 0), (Shape(512, 5, 3), 3, 1), (Shape(1024, 16, 2), 1, 2)],
    ids=str,
)
def test_golden_hashes(
    started: set[str], monkeypatch: pytest.MonkeyPatch, shape: Shape, ctas: int, part: int
) -> None:
    monkeypatch.setattr(
        adam_cuda,
        "Update",
        lambda *operands: adam_stream_cuda.Update(*operands, ctas=ctas, shape=shape),
    )
    only = [name for name in golden.names() if name.startswith("adam ")][part::3]
    assert golden.run("cpu", only=only) == {name: golden.expected()[name] for name in only}
    assert {name.split("_")[2] for name in started} == {"small", "large"}


def table_of(
    monkeypatch: pytest.MonkeyPatch,
    pieces: list[tuple[int, int, int, int, int]],
    shape: Shape,
    shift: int = 0,
) -> tuple[int, np.void]:
    """The kernel parameter for one bf16 weight with fp32 gradient, and the weight's address."""
    weight = torch.zeros(5000, dtype=torch.bfloat16)
    state = {name: torch.zeros(5008)[shift:] for name in ("exp_avg", "exp_avg_sq")}
    pretend_hopper(monkeypatch, lambda *given, **named: None)
    scalars = torch.zeros(8, adam.SCALARS)
    kernel = adam_stream_cuda.Update(adam.PieceTable(pieces), state, scalars, ctas=1, shape=shape)
    addresses = (np.array([tensor.data_ptr()]) for tensor in (weight, torch.zeros(5000)))
    kernel.bind(Operands(*addresses, np.array([1]), np.array([0])))
    assert weight.data_ptr() % 16 == 0
    return weight.data_ptr(), kernel.parameter[0]


def test_chunks_are_numbered_through_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    address, head = table_of(
        monkeypatch,
        [(0, 0, 257, 0, 3), (0, 264, 256, 512, 0), (0, 4000, 1, 1024, 1)],
        Shape(chunk=256),
    )
    pieces = head["piece"][: head["pieces"]]
    assert pieces["first_chunk"].tolist() == [0, 2, 3]
    assert head["chunks"] == 4
    assert pieces["weight"].tolist() == [address, address + 528, address + 8000]
    assert (pieces["count_and_codes"] >> 8).tolist() == [257, 256, 1]
    assert pieces["offset"].tolist() == [0, 512, 1024]
    assert pieces["scalars_row"].tolist() == [3, 0, 1]
    assert (head["weight_bytes"], head["grad_bytes"]) == (2, 4)


@pytest.mark.parametrize(
    ("start", "offset", "shift", "flags"),
    [
        (0, 0, 0, 0x70),
        (8, 4, 0, 0x70),
        (4, 0, 0, 0x50),  # 8 bytes of bf16 weight
        (2, 0, 0, 0x10),
        (0, 2, 0, 0x60),
        (0, 0, 1, 0x60),
    ],
)
def test_what_bulk_copies_can_move(
    monkeypatch: pytest.MonkeyPatch, start: int, offset: int, shift: int, flags: int
) -> None:
    _, head = table_of(monkeypatch, [(0, start, 100, offset, 0)], Shape(), shift)
    codes = int(head["piece"][0]["count_and_codes"]) & 0xFF
    assert codes & 0xF == 1  # bf16 weight, fp32 gradient
    assert codes & 0x70 == flags


def test_stages_are_what_shared_memory_has_room_for() -> None:
    assert Shape(2048, 16, 16).fit(2048 * 16, 227 << 10) == 6
    assert Shape(2048, 4, 16).fit(2048 * 16, 227 << 10) == 4
    with pytest.raises(KernelBuildError, match=r"expects 69,376 bytes .* has 49,152$"):
        Shape(2048, 16, 16).fit(2048 * 16, 48 << 10)


@pytest.mark.parametrize(
    "wrong", [{"chunk": 0}, {"chunk": 100}, {"stages": 1}, {"stages": 17}, {"warps": 24}]
)
def test_shapes_that_the_kernel_does_not_have(wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} expects"):
        Shape(**wrong)


def test_ctas_and_older_chips_are_refused(
    started: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(8)
    operands = {
        "weights": [x],
        "grads": [x],
        "state": {"exp_avg": x.clone(), "exp_avg_sq": x.clone()},
        "scalars": torch.zeros(1, adam.SCALARS),
    }
    table = adam.PieceTable([(0, 0, 8, 0, 0)])
    with pytest.raises(ValueError, match="ctas expects 1 or more, got 0"):
        adam.update(table, ctas=0, **operands)
    monkeypatch.setattr(cuda, "capability", lambda device: (8, 0))
    with pytest.raises(KernelBuildError, match=r"9\.0 or later, cuda:0 has 8\.0"):
        adam.update(table, ctas=1, **operands).device(0)
