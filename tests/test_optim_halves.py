"""bf16 and fp16 parameters, with an fp32 master and without, against references written here."""

from __future__ import annotations

import pytest
import torch
from optim_tools import CPU, Place, assert_near, everywhere, parameters, raw, set_grads, train

from ghoffload import OffloadAdam, OffloadAdamW

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
OPTIONS = {"lr": 3e-3, "weight_decay": 0.1}
SHAPES = ((1500, 2), (7,), (), (0, 3), (1025,))


class _Reference:
    """AdamW on fp32 values: masters that last, or without ``keep`` the weights, widened."""

    def __init__(self, params: list[torch.nn.Parameter], *, keep: bool) -> None:
        self.params, self.keep = params, keep
        self.masters = [torch.nn.Parameter(p.detach().float()) for p in params]
        self.inner = torch.optim.AdamW(self.masters, **OPTIONS)

    @torch.no_grad()
    def step(self) -> None:
        for p, master in zip(self.params, self.masters, strict=True):
            if not self.keep:
                master.copy_(p)
            master.grad = None if p.grad is None else p.grad.float()
        self.inner.step()
        for p, master in zip(self.params, self.masters, strict=True):
            p.copy_(master)


@everywhere
@HALVES
def test_with_a_master(dtype: torch.dtype, place: Place) -> None:
    ours, theirs = parameters(*SHAPES, dtype=dtype), parameters(*SHAPES, dtype=dtype)
    optimizer = OffloadAdamW(ours, **OPTIONS, config=place.config(master="fp32"))
    reference = _Reference(theirs, keep=True)
    for step in range(5):
        set_grads(ours, step)
        set_grads(theirs, step)
        optimizer.step()
        reference.step()
    masters = [optimizer.state[p]["master"] for p in ours]
    assert_near(masters, reference.masters, 1e-5)
    for p, master in zip(ours, masters, strict=True):
        assert master.dtype == torch.float32
        assert raw(p) == raw(master.to(dtype))  # rounded to nearest even, as torch rounds
    # the master is what makes small steps add up
    assert any(not torch.equal(m, p.float()) for m, p in zip(masters, ours, strict=True))


@everywhere
@HALVES
def test_without_a_master(dtype: torch.dtype, place: Place) -> None:
    ours, theirs = parameters(*SHAPES, dtype=dtype), parameters(*SHAPES, dtype=dtype)
    optimizer = OffloadAdamW(ours, **OPTIONS, config=place.config(master="none"))
    reference = _Reference(theirs, keep=False)
    for step in range(5):
        set_grads(ours, step)
        set_grads(theirs, step)
        optimizer.step()
        reference.step()
        for p, q in zip(ours, theirs, strict=True):
            # both round the same fp32 value but for its last bits
            ulp = torch.finfo(dtype).eps
            torch.testing.assert_close(p, q, rtol=2 * ulp, atol=0)
            assert (p == q).float().mean() > 0.99 or p.numel() == 0
        with torch.no_grad():
            for p, q in zip(ours, theirs, strict=True):
                q.copy_(p)
    assert all("master" not in optimizer.state[p] for p in ours)


@everywhere
@HALVES
@pytest.mark.parametrize("master", ["fp32", "none"])
def test_mixed_with_fp32_parameters(dtype: torch.dtype, master: str, place: Place) -> None:
    mixed = [*parameters((1500, 2), (7,)), *parameters((900, 3), (5,), dtype=dtype, seed=1)]
    alone = [*parameters((1500, 2), (7,)), *parameters((900, 3), (5,), dtype=dtype, seed=1)]
    optimizer = OffloadAdamW(mixed, **OPTIONS, config=place.config(master=master))
    parts = [OffloadAdamW([p], **OPTIONS, config=CPU.config(master=master)) for p in alone]
    for step in range(3):
        set_grads(mixed, step)
        set_grads(alone, step)
        optimizer.step()
        for part in parts:
            part.step()
    for p, q, part in zip(mixed, alone, parts, strict=True):
        assert raw(p) == raw(q)
        assert {n: raw(t) for n, t in optimizer.state[p].items()} == {
            n: raw(t) for n, t in part.state[q].items()
        }


@everywhere
@HALVES
def test_an_outside_edit_wins_where_it_was_made(dtype: torch.dtype, place: Place) -> None:
    (p,) = parameters((2000,), dtype=dtype)
    optimizer = OffloadAdamW([p], **OPTIONS, config=place.config(master="fp32"))
    train(optimizer)
    master = optimizer.state[p]["master"].clone()
    with torch.no_grad():
        p[100:200] = 5.0
        p[300] = -p[300]
        p[400:500] = p[400:500].clone()  # written, but the same
    edited = p.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    train(optimizer, start=3, steps=1)
    assert torch.equal(p, edited)
    expected = master.clone()
    expected[100:200] = 5.0
    expected[300] = edited[300].float()
    assert torch.equal(optimizer.state[p]["master"], expected)


@everywhere
def test_an_edit_of_a_split_weight_keeps_the_old_rest(place: Place) -> None:
    (p,) = parameters((2000,), dtype=torch.bfloat16)
    optimizer = OffloadAdamW([p], **OPTIONS, config=place.config(master="split"))
    train(optimizer)
    rest = optimizer.state[p]["master"].view(torch.int32) - (p.view(torch.int16).int() << 16)
    with torch.no_grad():
        p[100:200] = 5.0
        p[300] = -p[300]
        p[400] = 0.0
    edited = p.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    train(optimizer, start=3, steps=1)
    assert torch.equal(p, edited)
    expected = (edited.view(torch.int16).int() << 16) + rest
    if rest[400] < 0:
        expected[400] = 0
    assert torch.equal(optimizer.state[p]["master"].view(torch.int32), expected)


@everywhere
@HALVES
def test_loaded_weights_are_noticed(dtype: torch.dtype, place: Place) -> None:
    model = torch.nn.Linear(60, 40, dtype=dtype)
    other = torch.nn.Linear(60, 40, dtype=dtype)
    optimizer = OffloadAdamW(model.parameters(), **OPTIONS, config=place.config(master="fp32"))
    train(optimizer)
    loaded = [
        p != q for p, q in zip(model.parameters(), other.parameters(), strict=True)
    ]  # where a weight happens to be what it was, its master stays
    model.load_state_dict(other.state_dict())
    moments = [{n: t.clone() for n, t in optimizer.state[p].items()} for p in model.parameters()]
    fresh = OffloadAdamW(other.parameters(), **OPTIONS, config=place.config(master="fp32"))
    for p, entries in zip(other.parameters(), moments, strict=True):
        del entries["master"]
        fresh.state[p] = entries
    train(optimizer, start=3)
    train(fresh, start=3)
    for p, q, new in zip(model.parameters(), other.parameters(), loaded, strict=True):
        assert new.float().mean() > 0.9
        assert raw(p[new]) == raw(q[new])
        assert raw(optimizer.state[p]["master"][new]) == raw(fresh.state[q]["master"][new])


@everywhere
def test_fp32_weights_edited_from_outside(place: Place) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = OffloadAdam(ours, lr=0.1, config=place.config())
    reference = torch.optim.Adam(theirs, lr=0.1)
    for step in range(3):
        train(optimizer, start=step, steps=1)
        train(reference, start=step, steps=1)
        with torch.no_grad():
            for p in (*ours, *theirs):
                p.mul_(0.5)
    assert_near(ours, theirs, 1e-5)


@everywhere
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_another_dtype(
    dtype: torch.dtype, grad_dtype: torch.dtype, place: Place
) -> None:
    (p,), (q,) = parameters((1500, 2), dtype=dtype), parameters((1500, 2))
    if not hasattr(p, "grad_dtype"):
        pytest.skip(f"torch {torch.__version__} has gradients of the parameter's dtype only")
    p.grad_dtype = grad_dtype
    with torch.no_grad():
        q.copy_(p)
    optimizer = OffloadAdamW([p], **OPTIONS, config=place.config())
    reference = torch.optim.AdamW([q], **OPTIONS)
    for step in range(3):
        set_grads([q], step)
        p.grad = q.grad.to(grad_dtype)
        q.grad = p.grad.float()
        optimizer.step()
        reference.step()
    result = optimizer.state[p].get("master", p)
    assert_near([result], [q], 1e-5)
