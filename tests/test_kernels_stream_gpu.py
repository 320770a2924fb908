"""The streaming kernel against the kernel of loads and stores and the CPU, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels_cuda import DTYPES, same, some_values, start
from torch import Tensor

from ghoffload.kernels import adam, adam_cuda, adam_stream_cuda, cuda, golden
from ghoffload.kernels.adam_stream_cuda import Shape
from ghoffload.machine.cuda import CudaMachine
from ghoffload.memory import HostArena

SHAPES = [Shape(), Shape(128, 2, 1), Shape(512, 3, 23), Shape(1024, 16, 4), Shape(4096, 2, 8)]


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


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**31),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    flags=st.tuples(st.booleans(), st.booleans()),
    pieces=st.lists(
        st.tuples(
            st.sampled_from([0, 0, 8, 1, 3, 4]),  # start
            st.one_of(st.integers(0, 40), st.integers(4000, 9000), st.just(8192)),  # count
            st.sampled_from([0, 0, 8, 1, 4]),  # gap before it in the state
        ),
        min_size=1,
        max_size=9,
    ),
    many=st.booleans(),
    wild=st.booleans(),
    found=st.sampled_from([0.0, 0.0, 0.0, 1.0]),
    on_host=st.booleans(),
    shift=st.sampled_from([0, 0, 1, 2]),
    ctas=st.sampled_from([1, 2, 3, 8, 200]),
    shape=st.sampled_from(SHAPES),
)
def test_update_is_bit_identical(
    pinned: Tensor,
    seed: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    flags: tuple[bool, bool],
    pieces: list[tuple[int, int, int]],
    many: bool,
    wild: bool,
    found: float,
    on_host: bool,
    shift: int,
    ctas: int,
    shape: Shape,
) -> None:
    master, amsgrad = flags
    generator = torch.Generator().manual_seed(seed)
    rows, offset = [], 0
    for index, (begin, count, gap) in enumerate(pieces):
        offset = -(-offset // 8) * 8 + gap
        pitch = 104 if many else 1 << 30
        rows += [
            (index, begin + done, min(pitch, count - done), offset + done, index)
            for done in range(0, max(count, 1), pitch)
        ]
        offset += count
    rows = rows[: adam.MAX_PIECES]
    table = adam.PieceTable(rows)
    names = ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * amsgrad]
    names += ["master"] * (master and dtypes[0] != torch.float32)
    size = offset + 11
    first = {name: some_values(size, torch.float32, generator, wild) for name in names}
    if not wild:
        first["exp_avg_sq"].abs_()
    sizes = [begin + count + 3 for begin, count, _ in pieces]
    weights = [some_values(size, dtypes[0], generator, wild) for size in sizes]
    grads = [some_values(size, dtypes[1], generator, wild) for size in sizes]
    h = adam.Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, amsgrad, False, seed % 2 == 0)
    steps = torch.arange(len(pieces), dtype=torch.float32).cuda()
    scalars = torch.zeros(len(pieces), adam.SCALARS, device="cuda")
    for launch in adam.prepare(
        np.arange(len(pieces), dtype=np.uint32),
        h,
        steps=steps,
        scalars=scalars,
        found_inf=torch.tensor(found, device="cuda"),
    ):
        start(launch)
    results = []
    for how in ("cpu", "stores", "stream"):
        place = "cpu" if how == "cpu" else "cuda"
        if how == "stream" and on_host:
            pitch = -(-(size + shift) // 64) * 64
            state = {}
            for k, (name, values) in enumerate(first.items()):
                state[name] = pinned[k * pitch + shift : k * pitch + shift + size]
                state[name].copy_(values)
        elif how == "stream":
            state = {}
            for name, values in first.items():
                state[name] = torch.empty(size + shift, device="cuda")[shift:]
                state[name].copy_(values)
        else:
            state = {name: values.to(place, copy=True) for name, values in first.items()}
        here = [weight.to(place, copy=True) for weight in weights]
        launch = adam.update(
            table,
            weights=here,
            grads=[grad.to(place) for grad in grads],
            state=state,
            scalars=scalars.to(place),
            ctas=ctas if how == "stream" else None,
        )
        if how == "cpu":
            launch.run_on_host()
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(adam_stream_cuda, "SHAPE", shape)
                start(launch)
        torch.cuda.synchronize()
        results.append([*here, *(array.clone() for array in state.values())])
    for others in results[1:]:
        for expected, got in zip(results[0], others, strict=True):
            assert same(got, expected)


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
