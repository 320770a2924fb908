"""Parameters and gradients of every size and memory layout."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from optim_tools import (
    CPU,
    Place,
    assert_near,
    everywhere,
    parameters,
    raw,
    same_weights,
    set_grads,
    train,
)
from torch import Tensor

import ghoffload
from ghoffload import OffloadAdamW
from ghoffload.kernels.adam import MAX_PIECES

LR = 0.05


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


PARAMETERS: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: _numbers(0),
    "empty 2-D": lambda: _numbers(3, 0),
    "one": lambda: _numbers(1),
    "seven": lambda: _numbers(7),
    "0-dim": lambda: _numbers(),
    "large": lambda: _numbers(5000),
    "transposed": lambda: _numbers(40, 60).t(),
    "channels last": lambda: _numbers(8, 6, 5, 7).to(memory_format=torch.channels_last),
    "permuted": lambda: _numbers(10, 11, 12).permute(2, 0, 1),
    "every other column": lambda: _numbers(50, 60)[:, ::2],
    "every other row": lambda: _numbers(50, 60)[1::2],
    "a column": lambda: _numbers(2000, 3)[:, 1:2],
    "the middle": lambda: _numbers(30, 40, 3)[5:20, 3:9, 1],
    "diagonal": lambda: _numbers(50, 50).diagonal(),
    "an odd start": lambda: _numbers(3001)[1:],
}


@everywhere
@pytest.mark.parametrize("make", PARAMETERS.values(), ids=PARAMETERS.keys())
def test_layouts_of_parameters(make: Callable[[], Tensor], place: Place) -> None:
    ours, theirs = (torch.nn.Parameter(make()) for _ in range(2))
    memory = ours.detach().as_strided(
        (ours.untyped_storage().nbytes() // 4,), (1,), 0
    )  # what the parameter is part of
    before = memory.clone()
    optimizer = OffloadAdamW([ours], lr=LR, config=place.config())
    reference = torch.optim.AdamW([theirs], lr=LR, foreach=False)
    pointer = ours.data_ptr()
    train(optimizer)
    train(reference)
    assert_near([ours], [theirs], 1e-5)
    assert ours.data_ptr() == pointer
    mask = torch.ones_like(memory, dtype=torch.bool)
    mask.as_strided(ours.shape, ours.stride(), ours.storage_offset()).fill_(False)
    assert torch.equal(memory[mask], before[mask])  # nothing between the elements was written
    assert_near(optimizer.state[ours].values(), reference.state[theirs].values(), 1e-5)


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda g: g.t().contiguous().t(),
    "expanded": lambda g: g[:, :1].expand_as(g),
    "expanded twice": lambda g: g[:1, :1].expand_as(g),
    "every other column": lambda g: torch.cat([g, -g], 1)[:, : g.shape[1]],
    "strided": lambda g: torch.stack([g, -g], 2)[..., 0],
    "negative view": lambda g: torch._neg_view(-g),
    "zero tensor": lambda g: torch._efficientzerotensor(g.shape),
    "an odd start": lambda g: torch.cat([g.new_zeros(1), g.flatten()])[1:].view(g.shape),
}


@everywhere
@pytest.mark.parametrize("make", GRADIENTS.values(), ids=GRADIENTS.keys())
@pytest.mark.parametrize("transposed", [False, True], ids=["row-major", "transposed"])
def test_layouts_of_gradients(
    make: Callable[[Tensor], Tensor], transposed: bool, place: Place
) -> None:
    first, second = _numbers(50, 60), _numbers(50, 60)
    ours, theirs = (torch.nn.Parameter(t.t() if transposed else t) for t in (first, second))
    optimizer = OffloadAdamW([ours], lr=LR, config=place.config())
    reference = torch.optim.AdamW([theirs], lr=LR, foreach=False)
    for step in range(3):
        set_grads([theirs], step)
        theirs.grad = make(theirs.grad)
        ours.grad = theirs.grad
        kept = raw(ours.grad)
        theirs.grad = theirs.grad.resolve_neg().clone(memory_format=torch.contiguous_format)
        optimizer.step()
        reference.step()
        assert raw(ours.grad) == kept
    assert_near([ours], [theirs], 1e-5)


@everywhere
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("master", ["fp32", "none"])
def test_layouts_of_half_parameters(dtype: torch.dtype, master: str, place: Place) -> None:
    names = ("transposed", "channels last", "every other column", "0-dim", "empty")
    odd = [torch.nn.Parameter(PARAMETERS[name]().to(dtype)) for name in names]
    dense = [torch.nn.Parameter(p.detach().clone().contiguous()) for p in odd]
    train(OffloadAdamW(odd, lr=LR, config=place.config(master=master)))
    train(OffloadAdamW(dense, lr=LR, config=CPU.config(master=master)))
    assert same_weights(odd, dense)


@st.composite
def _strided(draw: st.DrawFn) -> Tensor:
    """A tensor of up to four dimensions, in any order, sliced any way."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    steps = draw(st.lists(st.integers(1, 3), min_size=len(sizes), max_size=len(sizes)))
    starts = draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes)))
    full = _numbers(
        *(start + n * step for n, step, start in zip(sizes, steps, starts, strict=True))
    )
    parts = tuple(
        slice(start, start + n * step, step)
        for n, step, start in zip(sizes, steps, starts, strict=True)
    )
    return full[parts].permute(draw(st.permutations(range(len(sizes)))))


@hypothesis.given(_strided(), st.data())
@hypothesis.settings(max_examples=40)
def test_any_layout(tensor: Tensor, data: st.DataObject) -> None:
    ours = torch.nn.Parameter(tensor)
    theirs = torch.nn.Parameter(tensor.detach().clone(memory_format=torch.contiguous_format))
    ours.grad = _numbers(*ours.shape, seed=1)
    order = data.draw(st.permutations(range(ours.dim())))
    inverse = [order.index(i) for i in range(ours.dim())]
    theirs.grad = ours.grad.clone()
    ours.grad = ours.grad.permute(order).contiguous().permute(inverse)
    optimizer = OffloadAdamW([ours], lr=LR)
    plain = OffloadAdamW([theirs], lr=LR)
    for _ in range(2):
        optimizer.step()
        plain.step()
    assert raw(ours) == raw(theirs)
    assert raw(optimizer.state[ours]["exp_avg"]) == raw(plain.state[theirs]["exp_avg"])


@everywhere
def test_memory_format_changed_after_construction(place: Place) -> None:
    torch.manual_seed(0)
    models = [torch.nn.Conv2d(6, 8, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizer = OffloadAdamW(models[0].parameters(), lr=LR, config=place.config())
    reference = torch.optim.AdamW(models[1].parameters(), lr=LR, foreach=False)
    train(optimizer)
    train(reference)
    models[0].to(memory_format=torch.channels_last)
    assert not models[0].weight.is_contiguous()
    train(optimizer, start=3)
    train(reference, start=3)
    assert_near(models[0].parameters(), models[1].parameters(), 1e-5)


@everywhere
def test_a_parameter_given_new_memory(place: Place) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = OffloadAdamW(ours, lr=LR, config=place.config())
    reference = torch.optim.AdamW(theirs, lr=LR)
    train(optimizer)
    train(reference)
    for p in ours:
        p.data = p.data.clone() + 1
    for p in theirs:
        p.data = p.data.clone() + 1
    train(optimizer, start=3)
    train(reference, start=3)
    assert_near(ours, theirs, 1e-5)


@pytest.mark.parametrize("machine", [None, "virtual"])
def test_more_small_parameters_than_one_launch_takes(machine: str | None) -> None:
    shapes = [(3,)] * (MAX_PIECES + 60)
    ours, theirs = parameters(*shapes), parameters(*shapes)
    optimizer = OffloadAdamW(ours, lr=LR, config={"bucket_bytes": 1 << 20}, machine=machine)
    train(optimizer, steps=2)
    train(torch.optim.AdamW(theirs, lr=LR), steps=2)
    assert_near([torch.cat(list(ours))], [torch.cat(list(theirs))], 1e-5)
    assert [s["step"].item() for s in optimizer.state.values()] == [2] * len(shapes)


def test_launches_go_by_the_bucket_not_by_the_tensor() -> None:
    shapes = [(256,)] * 400  # 1 KB each
    with ghoffload.use_machine("virtual") as machine:
        optimizer = OffloadAdamW(parameters(*shapes), config={"bucket_bytes": 1 << 20})
        train(optimizer, steps=1)
        before = machine.traffic.launches, machine.traffic.copies
        train(optimizer, start=1, steps=1)
        launches, copies = (
            machine.traffic.launches - before[0],
            machine.traffic.copies - before[1],
        )
    assert launches == 2  # prepare, and one update
    assert copies == 4  # two moments, each way


def test_gradients_of_a_real_model_in_channels_last() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    ends = []
    for kind in (OffloadAdamW, torch.optim.AdamW):
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, bias=False),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.Conv2d(8, 2, 3),
        ).to(memory_format=torch.channels_last)
        optimizer = kind(model.parameters(), lr=0.01)
        for _ in range(4):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        ends.append([p.detach().clone() for p in model.parameters()])
    assert_near(ends[0], ends[1], 1e-4)
