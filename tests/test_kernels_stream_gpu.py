"""The streaming kernel on a GPU: the golden hashes, many chunks, and what it refuses.

Drawn launches are in test_kernels_cases.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from kernel_cases import SHAPES
from test_kernels_cuda import same, start
from torch import Tensor

from ghoffload.kernels import adam, adam_cuda, adam_stream_cuda, cuda, golden
from ghoffload.kernels.adam_stream_cuda import Shape
from ghoffload.machine.cuda import CudaMachine
from ghoffload.memory import HostArena


def _no_bulk_copies() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_no_bulk_copies(), reason="needs compute capability 9.0"),
]


@pytest.fixture(scope="module")
def pinned() -> Iterator[Tensor]:
    """Floats in pinned memory, as host state lies there."""
    machine = CudaMachine.of("cuda")
    arena = HostArena(64 << 20, machine=machine, owner="test", threads=1)
    assert arena.pinned
    yield arena.carve(16 << 20, torch.float32)
    machine.synchronize_all()
    arena.close()


def test_golden_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in golden.names() if name.startswith("adam ")]
    for ctas, shape in zip((1, 3, 8, 132, 5), SHAPES, strict=True):
        monkeypatch.setattr(
            adam_cuda,
            "Update",
            lambda *operands, c=ctas, s=shape: adam_stream_cuda.Update(*operands, ctas=c, shape=s),
        )
        got = golden.run("cuda", only=names)
        assert got == {name: golden.expected()[name] for name in names}, (ctas, shape)


@pytest.mark.parametrize("ctas", [1, 4, 132])
def test_many_chunks_of_pinned_state(pinned: Tensor, ctas: int) -> None:
    """More chunks than the ring of descriptions and the stages, several times."""
    count = (3 << 20) + 8
    generator = torch.Generator(device="cuda").manual_seed(3)
    weight = torch.randn(count, generator=generator, device="cuda").bfloat16()
    grad = torch.randn(count, generator=generator, device="cuda").bfloat16()
    scalars = torch.zeros(1, adam.SCALARS, device="cuda")
    steps = torch.zeros(1, device="cuda")
    h = adam.Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, False, False, True)
    (launch,) = adam.prepare(np.zeros(1, np.uint32), h, steps=steps, scalars=scalars)
    start(launch)
    table = adam.PieceTable([(0, 0, count, 0, 0)])
    names = ("exp_avg", "exp_avg_sq", "master")
    in_hbm = {name: torch.zeros(count, device="cuda") for name in names}
    on_host = {name: pinned[k * (5 << 20) :][:count] for k, name in enumerate(names)}
    for array in on_host.values():
        array.zero_()
    expected = weight.clone()
    for _ in range(3):
        for w, state, how in ((expected, in_hbm, None), (weight, on_host, ctas)):
            start(
                adam.update(
                    table, weights=[w], grads=[grad], state=state, scalars=scalars, ctas=how
                )
            )
    torch.cuda.synchronize()
    assert same(weight, expected.cpu())
    for name in names:
        assert same(on_host[name], in_hbm[name].cpu()), name


def test_more_than_two_to_the_31_elements() -> None:
    count, far = (1 << 31) + 4096 + 3, 5003
    free, _ = torch.cuda.mem_get_info()
    if free < 13 * count:
        pytest.skip(f"needs {13 * count:,} bytes of HBM, has {free:,} free")
    weight = torch.zeros(count, dtype=torch.bfloat16, device="cuda")
    grad = torch.zeros(count, dtype=torch.bfloat16, device="cuda")
    grad[-far:] = torch.arange(far, device="cuda")
    state = {name: torch.zeros(count, device="cuda") for name in ("exp_avg", "exp_avg_sq")}
    scalars, steps = torch.zeros(1, adam.SCALARS, device="cuda"), torch.zeros(1, device="cuda")
    h = adam.Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, False, False, True)
    (launch,) = adam.prepare(np.zeros(1, np.uint32), h, steps=steps, scalars=scalars)
    start(launch)
    tail = {name: array[-far:].clone() for name, array in state.items()}
    w = weight[-far:].clone()
    for table, weights, grads, arrays in (
        (adam.PieceTable([(0, 0, count, 0, 0)]), [weight], [grad], state),
        (adam.PieceTable([(0, 0, far, 0, 0)]), [w], [grad[-far:].clone()], tail),
    ):
        start(
            adam.update(
                table, weights=weights, grads=grads, state=arrays, scalars=scalars, ctas=132
            )
        )
    assert torch.equal(weight[-far:], w)
    for name, array in state.items():
        assert torch.equal(array[-far:], tail[name])
        assert not array[:-far].any()


def test_a_shape_that_does_not_fit_is_refused_before_anything_runs() -> None:
    x = torch.zeros(8, device="cuda")
    scalars = torch.zeros(1, adam.SCALARS, device="cuda")
    launch = adam.update(
        adam.PieceTable([(0, 0, 8, 0, 0)]),
        weights=[x],
        grads=[x],
        state={"exp_avg": x.clone(), "exp_avg_sq": x.clone()},
        scalars=scalars,
        ctas=1,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam_stream_cuda, "SHAPE", Shape(chunk=16384))
        with pytest.raises(adam_stream_cuda.KernelBuildError, match="shared memory"):
            start(launch)


def test_it_is_captured_in_a_graph() -> None:
    cuda.preload(torch.cuda.current_device(), adam_stream_cuda.SOURCES)
    x, g = torch.ones(5000, device="cuda"), torch.ones(5000, device="cuda")
    state = {name: torch.zeros(5000, device="cuda") for name in ("exp_avg", "exp_avg_sq")}
    scalars, steps = torch.zeros(1, adam.SCALARS, device="cuda"), torch.zeros(1, device="cuda")
    h = adam.Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, False, False, True)
    (launch,) = adam.prepare(np.zeros(1, np.uint32), h, steps=steps, scalars=scalars)
    start(launch)
    table = adam.PieceTable([(0, 0, 5000, 0, 0)])
    expected, theirs = x.clone(), {name: array.clone() for name, array in state.items()}
    for _ in range(2):
        start(adam.update(table, weights=[expected], grads=[g], state=theirs, scalars=scalars))
    launch = adam.update(table, weights=[x], grads=[g], state=state, scalars=scalars, ctas=3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        start(launch)
    graph.replay()
    graph.replay()
    assert same(x, expected.cpu())
