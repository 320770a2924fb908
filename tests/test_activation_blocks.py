"""Keeping, offloading or recomputing blocks: what is chosen, and that the bits stay."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from activation_programs import Block, machine_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ghoffload
from ghoffload.activations import hooks
from ghoffload.activations.blocks import Stage
from ghoffload.activations.choose import (
    ROUNDING,
    BlockCost,
    Choice,
    Costs,
    Mode,
    Peaks,
    choose,
)
from ghoffload.activations.mover import mover_of
from ghoffload.check.programs import same_bits

GB = 10**9
# 22 blocks of 1.1 B parameters, 4 x 2048 tokens, on an H200: facts as measured there.
LLAMA = Costs(
    blocks=[BlockCost(nbytes=620 * 10**6, input_bytes=34 * 10**6, seconds=2e-3)] * 22,
    forward=0.045,
    backward=0.085 + 22 * 2e-3,
    peaks=Peaks(forward=5_600 * 10**6, loss=5_800 * 10**6, blocks=6 * GB),
    d2h=55e9,
    h2d=55e9,
    code_ratio=0.0,
    under_way=512 << 20,
)
ALL = 6 * GB + 22 * 586 * 10**6


def counts(choice: Choice) -> dict[Mode, int]:
    return {mode: choice.modes.count(mode) for mode in Mode if mode in choice.modes}


def test_with_room_for_everything_everything_is_kept() -> None:
    for budget in (None, ALL):
        choice = choose(LLAMA, budget)
        assert counts(choice) == {Mode.KEEP: 22}
        assert choice.seconds == pytest.approx(0.13)
        assert choice.moved == 0


def test_at_the_peak_of_checkpointing_blocks_are_recomputed() -> None:
    choice = choose(LLAMA, LLAMA.peaks.blocks)
    assert choice.fits
    assert choice.seconds <= 0.13 + 22 * 2e-3 + 1e-9
    assert counts(choice)[Mode.RECOMPUTE] >= 16


def test_a_fast_link_offloads_and_a_slow_one_recomputes() -> None:
    fast = dataclasses.replace(LLAMA, d2h=400e9, h2d=400e9)
    assert counts(choose(fast, 7 * GB))[Mode.OFFLOAD] >= 18  # two percent are as good as equal
    slow = dataclasses.replace(LLAMA, d2h=1e9, h2d=1e9)
    assert counts(choose(slow, slow.peaks.blocks)) == {Mode.RECOMPUTE: 22}


def test_fp8_is_chosen_where_it_may_be_and_hides_more() -> None:
    coded = dataclasses.replace(LLAMA, code_ratio=0.515)
    plain, with_it = (
        choose(LLAMA, LLAMA.peaks.blocks + GB),
        choose(coded, LLAMA.peaks.blocks + GB),
    )
    assert Mode.FP8 not in plain.modes
    assert Mode.FP8 in with_it.modes
    assert with_it.seconds < plain.seconds


def test_offloaded_blocks_are_spread_and_the_last_are_kept() -> None:
    choice = choose(LLAMA, LLAMA.peaks.blocks + 4 * GB)
    others = [mode for mode in choice.modes if mode is not Mode.OFFLOAD]
    assert others == sorted(others, key=[Mode.RECOMPUTE, Mode.KEEP].index)
    assert choice.modes[-1] is Mode.KEEP
    moved = [index for index, mode in enumerate(choice.modes) if mode is Mode.OFFLOAD]
    gaps = [b - a for a, b in itertools.pairwise(moved)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_where_nothing_fits_it_is_what_needs_least() -> None:
    choice = choose(LLAMA, GB)
    assert not choice.fits
    assert choice.peak == min(
        choose(LLAMA, budget).peak for budget in range(GB, 8 * GB, 100 * 10**6)
    )


costs = st.builds(
    Costs,
    blocks=st.lists(
        st.builds(
            BlockCost,
            nbytes=st.integers(10**6, 10**9),
            input_bytes=st.integers(1000, 10**6),
            seconds=st.floats(1e-5, 1e-2),
        ),
        min_size=1,
        max_size=8,
    ),
    forward=st.floats(1e-2, 1),
    backward=st.floats(1e-2, 1),
    peaks=st.builds(Peaks, *[st.integers(10**9, 2 * 10**9)] * 3),
    d2h=st.floats(1e9, 5e11),
    h2d=st.floats(1e9, 5e11),
    code_ratio=st.sampled_from([0.0, 0.515]),
    under_way=st.integers(0, 10**8),
).map(lambda c: dataclasses.replace(c, forward=c.forward + sum(b.seconds for b in c.blocks)))


@given(costs, st.integers(10**9, 12 * 10**9))
def test_it_is_never_slower_than_plain_ways_that_fit(costs: Costs, budget: int) -> None:
    choice = choose(costs, budget)
    again = sum(block.seconds for block in costs.blocks)
    compute = costs.forward + costs.own_backward
    if max(costs.peaks) <= budget:  # plain checkpointing fits
        assert choice.fits
        assert choice.seconds <= 1.02 * (compute + again) + 1e-12
    kept = max(costs.peaks) + sum(block.nbytes - block.input_bytes for block in costs.blocks)
    if kept <= budget:
        assert choice.seconds <= 1.02 * compute + 1e-12
    assert choice.seconds >= compute - 1e-12
    plain = set(choice.modes) == {Mode.RECOMPUTE} and not choice.move_inputs
    assert choice.fits == (choice.peak <= budget + (ROUNDING * choice.peak if plain else 0))


def run(context: Any, steps: int = 5, batch: Any = lambda step: 2) -> list[Tensor]:
    torch.manual_seed(6)
    blocks = nn.ModuleList(Block(32) for _ in range(6))
    head = nn.Linear(32, 50)
    found = []
    for step in range(steps):
        x = torch.randn(batch(step), 16, 32, requires_grad=True)
        with context(blocks):
            h = x
            for block in blocks:
                h = nn.functional.dropout(block(h), 0.1)
            loss = head(h).logsumexp(-1).mean()
        loss.backward()
        found += [x.grad, *(p.grad for p in blocks.parameters())]
        found = [t.clone() for t in found if t is not None]
        blocks.zero_grad()
        head.zero_grad()
    return found


def options(blocks: nn.ModuleList, **more: Any) -> Any:
    small = {"min_offload_bytes": 256, "window_bytes": 1 << 14, "ahead_bytes": 1 << 14}
    return ghoffload.offload_activations(blocks=blocks, **(small | more))


@pytest.mark.parametrize("budget", [None, 1 << 19, 1 << 20, 1 << 30])
@pytest.mark.parametrize("order", ["latest", "adversarial"])
def test_the_bits_are_those_without(budget: int | None, order: str) -> None:
    expected = run(lambda blocks: contextlib.nullcontext())
    with machine_of(order=order, seed=budget or 0, check=True):
        assert same_bits(run(lambda blocks: options(blocks, budget_bytes=budget)), expected)


def peaks(context: Any) -> list[int]:
    """Of six steps of eight blocks; the parameters are on the machine before."""
    with machine_of(hbm_bytes=1 << 30) as machine:
        torch.manual_seed(6)
        blocks = nn.ModuleList(Block(32) for _ in range(8))
        head = nn.Linear(32, 50)
        found = []
        for _ in range(6):
            x = torch.randn(4, 32, 32, requires_grad=True)
            machine.reset_peak()
            with context(blocks):
                h = x
                for block in blocks:
                    h = block(h)
                loss = head(h).logsumexp(-1).mean()
            loss.backward()
            found.append(machine.memory_peak())
            blocks.zero_grad()
            head.zero_grad()
            del x, h, loss
        return found


@contextlib.contextmanager
def recomputed(blocks: nn.ModuleList) -> Iterator[None]:
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    yield
    for block in blocks:
        del block.forward


@pytest.mark.parametrize("quarter", range(5))
def test_the_peak_is_within_the_budget_and_uses_it(quarter: int) -> None:
    least = peaks(recomputed)[-1]
    most = peaks(lambda blocks: contextlib.nullcontext())[-1]
    budget = least + (most - least) * quarter // 4
    found = peaks(lambda blocks: options(blocks, budget_bytes=budget))
    assert max(found[2:]) <= budget + 64
    assert max(found[2:]) > budget - (most - least) // 4


def test_it_learns_in_two_passes_and_says_what_it_chose() -> None:
    with machine_of(hbm_bytes=1 << 30) as machine:
        seen: list[Any] = []
        moved = [0]

        def context(blocks: nn.ModuleList) -> Any:
            seen.append(options(blocks, budget_bytes=1 << 29))
            moved.append(machine.traffic.d2h_bytes)
            return seen[-1]

        run(context, steps=4)
        (learning,) = mover_of(machine).blocks.values()
        assert learning.stage is Stage.CHOSEN
        assert learning.choice is not None
        assert set(learning.choice.modes) == {Mode.KEEP}
        assert moved[1] == 0 < moved[2]  # the first offloads everything
        assert moved[2:] == [moved[2]] * 3  # then nothing moves any more
        assert machine.traffic.d2h_bytes == moved[2]
        assert "keep 6 blocks" in seen[-1].report()
        assert "ms" in seen[-1].report()


def test_a_larger_batch_begins_anew_and_a_smaller_one_does_not() -> None:
    with machine_of(hbm_bytes=1 << 30) as machine:
        stages = []

        def context(blocks: nn.ModuleList) -> Any:
            stages.append([learning.stage for learning in mover_of(machine).blocks.values()])
            return options(blocks, budget_bytes=1 << 29)

        run(context, steps=10, batch=lambda step: (2, 2, 2, 2, 1, 4, 4, 4, 4, 4)[step])
        assert [stage[0] for stage in stages[1:]] == [
            *(Stage.TIMES, Stage.TIMES, Stage.CHOSEN, Stage.CHOSEN, Stage.CHOSEN),
            *(Stage.SAVED, Stage.TIMES, Stage.TIMES, Stage.CHOSEN),
        ]


def test_what_takes_long_the_first_time_is_not_what_counts() -> None:
    slow = dataclasses.replace(
        LLAMA,
        blocks=[dataclasses.replace(LLAMA.blocks[0], seconds=6.5), *LLAMA.blocks[1:]],
        forward=6.6,
        peaks=Peaks(6 * GB, GB, GB),
    )
    both = slow.least(LLAMA)
    assert both == dataclasses.replace(
        LLAMA, peaks=Peaks(6 * GB, LLAMA.peaks.loss, LLAMA.peaks.blocks)
    )
    assert LLAMA.least(slow) == dataclasses.replace(both, blocks=LLAMA.blocks)


def test_forwards_are_as_before_afterwards() -> None:
    with machine_of():
        blocks = nn.ModuleList(Block(32) for _ in range(2))
        own = blocks[1].forward
        blocks[1].forward = lambda x: own(x)  # someone else's
        theirs = blocks[1].forward
        with contextlib.suppress(ZeroDivisionError), options(blocks):
            assert "forward" in vars(blocks[0])
            blocks[1](blocks[0](torch.randn(1, 4, 32))).sum() / (1 // 0)
        assert "forward" not in vars(blocks[0])
        assert vars(blocks[1])["forward"] is theirs
        with options(blocks), torch.no_grad():
            blocks[1](blocks[0](torch.randn(1, 4, 32)))
        gc.collect()


def test_hooks_are_off_in_kept_blocks_and_on_again_behind_them() -> None:
    """What a kept block saves is autograd's own; what comes behind it is ours again."""
    seen: dict[str, list[tuple[Any, Any] | None]] = {"block": [], "behind": []}

    class Watched(Block):
        def forward(self, x: Tensor) -> Tensor:
            seen["block"].append(hooks._top_hooks())
            return super().forward(x)

    with machine_of(hbm_bytes=1 << 30):
        torch.manual_seed(6)
        blocks = nn.ModuleList(Watched(32) for _ in range(3))
        for _ in range(4):
            x = torch.randn(2, 16, 32, requires_grad=True)
            with options(blocks):
                for block in blocks:
                    x = block(x)
                seen["behind"].append(hooks._top_hooks())
            x.sum().backward()
            del x
    assert seen["block"][-3:] == [None] * 3
    assert None not in seen["block"][:3]
    assert None not in seen["behind"]


def test_hooks_of_others_in_kept_blocks_are_left_to_them() -> None:
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.detach()

    def other(blocks: nn.ModuleList, *, outside: bool) -> Any:
        theirs = torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed)
        stack = contextlib.ExitStack()
        for context in (theirs, options(blocks)) if outside else (options(blocks), theirs):
            stack.enter_context(context)
        return stack

    with machine_of(hbm_bytes=1 << 30):
        run(lambda blocks: other(blocks, outside=True), steps=6)
        assert not packed  # ours are the inner ones, and stay
        run(lambda blocks: other(blocks, outside=False), steps=6)
        assert packed


def test_backwards_of_kept_blocks_send_for_what_comes_later() -> None:
    """Offloaded blocks before kept ones come back while those run, and are not waited for."""
    under_way = []

    class Kept(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if y.grad_fn is not None:
                home = mover_of(machine)
                y.register_hook(lambda grad: under_way.append(home.coming_bytes))
            return y

    with machine_of(hbm_bytes=1 << 30) as machine:
        torch.manual_seed(6)
        blocks = nn.ModuleList(Kept(32) for _ in range(4))
        for _ in range(8):
            context = options(blocks, window_bytes=1 << 12, ahead_bytes=1 << 12)
            x = torch.randn(2, 16, 32, requires_grad=True)
            with context:
                h = x
                for block in blocks:
                    h = block(h)
            for learning in mover_of(machine).blocks.values():
                if learning.choice is not None:
                    modes = (Mode.OFFLOAD, Mode.OFFLOAD, Mode.KEEP, Mode.KEEP)
                    learning.choice = dataclasses.replace(
                        learning.choice, modes=modes, under_way=1 << 12
                    )
            under_way.clear()
            h.sum().backward()
            del x, h
    assert under_way[0] == 0  # nothing asked yet
    assert under_way[1] > 0  # the last block's backward did
