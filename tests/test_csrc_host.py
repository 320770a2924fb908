"""csrc's kernels compiled as C++ for the CPU, thread after thread, against the golden hashes.

Finds wrong indices, layouts, tails and orders of operations without a GPU. What it cannot see: what
nvcc's instructions do (tests/test_kernels_cuda.py) and races (the kernels' threads share nothing).
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import numpy as np
import pytest
from csrc_on_cpu import ARITHMETIC, THREADS, WARP, library_of, translated

from ghoffload.kernels import build, cuda, golden
from ghoffload.machine.protocol import Launch

SOURCES = ("prepare", "adamw", "adamw_coded", "pack")
vectors: list[int] = []


def compile_for_host(name: str, directory: Path) -> ctypes.CDLL:
    return library_of(
        directory / name, THREADS, ARITHMETIC, WARP, translated(name), _launchers(name)
    )


def _launchers(name: str) -> str:
    """One C function for each kernel that runs all of its threads in turn."""
    masters = ("", "_master", "_split")
    moments = ("_bf16", "_int8") if name == "adamw_coded" else ("", "_amsgrad")
    variants = [master + kind for master in masters for kind in moments]
    kernels = []
    for size in ("small", "large"):
        pieces, indices = f"{size.upper()}_PIECES", f"{size.upper()}_INDICES"
        if name == "pack":
            kernels.append((f"copy_pieces_{size}", [f"Table<{pieces}>"]))
        elif name == "prepare":
            kernels.append((f"adam_prepare_{size}", ["Hyper", f"Indices<{indices}>"]))
        else:
            kernels += [(f"adam_update_{size}{v}", [f"Table<{pieces}>"]) for v in variants]
    text = ""
    for kernel, types in kernels:
        arguments = ", ".join(f"*({type_}*)parameters[{k}]" for k, type_ in enumerate(types))
        text += f"""
extern "C" void run_{kernel}(void** parameters, unsigned blocks, unsigned threads) {{
    if ({int(kernel.endswith("_int8"))})
        return run(blocks, threads, [=] {{ {kernel}({arguments}); }});
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {kernel}({arguments});
}}"""
    return text


def check_alignment(kernel: str, table: np.void) -> None:
    """Vector accesses only where all that they touch is aligned: x86 would not notice."""
    if kernel.startswith("adam_update"):
        pieces = table["piece"][: table["pieces"]]
        pieces = pieces[pieces["vector"] == 1]
        arrays = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")
        assert len(pieces) == 0 or all(table[array] % 16 == 0 for array in arrays)
        assert (pieces["offset"] % 4 == 0).all()
        for operand in ("weight", "grad"):
            width = np.where(pieces[f"{operand}_code"] == 0, 16, 8)
            assert (pieces[operand] % width == 0).all()
        vectors.append(len(pieces))
    if kernel.startswith("copy_pieces"):
        pieces = table["piece"][: table["pieces"]]
        assert ((pieces["source"] | pieces["destination"]) % pieces["width"] == 0).all()
        vectors.append(int((pieces["width"] == 16).sum()))


def test_the_cuda_sources_give_the_golden_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = {name: compile_for_host(name, tmp_path) for name in SOURCES}
    started = set()
    vectors.clear()

    def launch(source, kernel, device, *, blocks, threads, parameters, stream):  # type: ignore[no-untyped-def]
        started.add(kernel)
        check_alignment(kernel, parameters[0][0])
        addresses = (ctypes.c_void_p * len(parameters))(*(p.ctypes.data for p in parameters))
        getattr(libraries[source], f"run_{kernel}")(addresses, blocks, threads)

    monkeypatch.setattr(cuda, "launch", launch)
    monkeypatch.setattr(
        cuda, "Start", lambda *what, **how: lambda stream: launch(*what, stream=stream, **how)
    )
    monkeypatch.setattr(cuda, "device_index", lambda tensor: 0)
    monkeypatch.setattr(Launch, "run_on_host", lambda self: self.device(0))
    assert golden.run("cpu") == golden.expected()
    manifest = json.loads((build.source_directory() / "manifest.json").read_text())
    # And no kernel was left out.
    assert started == {kernel for source in SOURCES for kernel in manifest[source]}
    assert sum(vectors) > 100
