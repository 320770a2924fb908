"""csrc/prepare.cu as C++ on the CPU: the clip factor and the random keys, against numpy's."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from test_csrc_host import compile_for_host

from ghoffload.kernels import cuda
from ghoffload.kernels.adam import SCALARS, Hyper, prepare


def test_clip_scale_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = compile_for_host("prepare", tmp_path)

    def launch(source, kernel, device, *, blocks, threads, parameters, stream):  # type: ignore[no-untyped-def]
        addresses = (ctypes.c_void_p * len(parameters))(*(p.ctypes.data for p in parameters))
        getattr(library, f"run_{kernel}")(addresses, blocks, threads)

    monkeypatch.setattr(cuda, "launch", launch)
    monkeypatch.setattr(cuda, "device_index", lambda tensor: 0)
    hyper = Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, False, True, True)
    indices = np.arange(100, dtype=np.uint32)[::-1]
    for clip, scale, seed in (
        (None, None, 0),
        (0.3, None, -1),
        (0.3, 3.0, 2**63 + 1),
        (1.0, 65536.0, 2**40),
        (1e-30, 1e20, 7),
        (math.nan, 2.0, 7),
    ):
        results = []
        for on_host in (True, False):
            steps, scalars = torch.arange(100.0), torch.full((100, SCALARS), 5.0)
            for one in prepare(
                indices,
                hyper,
                steps=steps,
                scalars=scalars,
                clip=None if clip is None else torch.tensor(clip),
                grad_scale=None if scale is None else torch.tensor([scale]),
                seed=seed,
            ):
                if on_host:
                    one.run_on_host()
                else:
                    one.device(0)
            results.append(scalars.view(torch.int32))
        assert torch.equal(*results), (clip, scale, seed)
        assert len(results[0][:, 11].unique()) == 100
