"""The models a sweep knows: sizes as published; and what a user's own has to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ghoffload.sweeping.gpt import GPT, GPTShape
from ghoffload.sweeping.llama import Llama, LlamaShape
from ghoffload.sweeping.models import (
    PRESETS,
    ModelError,
    build,
    checkpoint_layers,
    loss_of,
    make_tokens,
    maker_of,
    name_of,
)

META, CPU = torch.device("meta"), torch.device("cpu")


class Own(nn.Module):
    """A user's model, as the contract has it."""

    def __init__(self, says: str = "loss") -> None:
        super().__init__()
        self.says = says
        self.table = nn.Embedding(256, 64)
        self.layers = nn.ModuleList([nn.Linear(64, 64)])

    def forward(self, tokens: Tensor) -> Any:
        loss = self.layers[0](self.table(tokens)).square().mean()
        return {"loss": loss, "dict": {}, "vector": loss.expand(2), "number": loss.detach()}[
            self.says
        ]


def elsewhere() -> nn.Module:
    return nn.Linear(2, 2, device="cpu")


def frozen() -> nn.Module:
    return Own().requires_grad_(False)


def nothing() -> None:
    return None


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-1.1b", 1_100_048_384),
        ("llama-3b", 3_212_749_824),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        # GPT-2 has 1,024 positions and 124,439,808 parameters; these are 2,048.
        ("gpt-125m", 124_439_808 + 1024 * 768),
    ],
)
def test_presets_have_as_many_parameters_as_is_published(name: str, count: int) -> None:
    module = build(maker_of(name, 64), META)
    assert sum(p.numel() for p in module.parameters()) == count
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(("name", "billions"), [("350m", 0.35), ("1.3b", 1.3), ("2.7b", 2.7)])
def test_gpt_presets_are_about_as_large_as_they_are_called(name: str, billions: float) -> None:
    module = build(maker_of(f"gpt-{name}", 64), META)
    assert sum(p.numel() for p in module.parameters()) / 1e9 == pytest.approx(billions, rel=0.03)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GPT(GPTShape(hidden=32, layers=2, heads=4, vocabulary=97, positions=16)),
        lambda: Llama(
            LlamaShape(
                hidden=32, layers=2, feed_forward=48, heads=4, kv_heads=2, vocabulary=97, tied=True
            )
        ),
        lambda: Llama(
            LlamaShape(
                hidden=32,
                layers=2,
                feed_forward=48,
                heads=4,
                kv_heads=4,
                vocabulary=97,
                biases=True,
            )
        ),
    ],
)
def test_models_learn_what_follows_and_recomputing_changes_no_bit(
    make: Callable[[], nn.Module],
) -> None:
    module = build(make, CPU)
    tokens = make_tokens(module, (2, 16), CPU)
    assert tokens.shape == (2, 17)
    assert int(tokens.max()) < 97

    def gradients() -> list[Tensor]:
        module.zero_grad()
        loss_of(module, tokens).backward()
        return [p.grad.clone() for p in module.parameters() if p.grad is not None]

    plain = gradients()
    assert len(plain) == len(list(module.parameters()))
    calls: list[int] = []
    module.layers[0].out.register_forward_hook(lambda *_: calls.append(1))
    checkpoint_layers(module)
    for a, b in zip(plain, gradients(), strict=True):
        assert torch.equal(a, b)
    assert len(calls) == 2, "forward, and once more in backward"
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    first = float(loss_of(module, tokens).detach())
    for _ in range(20):
        loss_of(module, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(loss_of(module, tokens).detach()) < first - 1


def test_a_position_sees_nothing_that_follows() -> None:
    module = build(lambda: Llama(PRESETS["tiny"]), CPU)  # type: ignore[arg-type]
    found: list[Tensor] = []
    module.norm.register_forward_hook(lambda *args: found.append(args[2]))
    tokens = make_tokens(module, (1, 8), CPU)
    loss_of(module, tokens)
    tokens[0, 6] += 1
    loss_of(module, tokens)
    same = (found[0] == found[1]).all(-1)[0].tolist()
    assert same == [True] * 6 + [False] * 2


def test_a_users_model_by_name_and_as_a_function() -> None:
    name = f"{__name__}:Own"
    for given in (name, Own):
        assert name_of(given) == name
        module = build(maker_of(given, 64), META)
        loss_of(module, make_tokens(module, (1, 8), META)).backward()
        assert module.table.weight.grad is not None


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("llama-9b", "model expects module:function or one of gpt-125m, .* got 'llama-9b'"),
        ("no.such:thing", "model 'no.such:thing' cannot be imported: No module named 'no'"),
        ("torch:thing", "model 'torch:thing' cannot be imported: .*has no attribute 'thing'"),
        ("torch:__version__", "model 'torch:__version__' expects a function, got"),
        (7, "model expects module:function"),
    ],
)
def test_what_is_no_model(model: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        maker_of(model, 64)


def test_a_gpt_has_positions() -> None:
    maker_of("gpt-125m", 2048)
    with pytest.raises(ValueError, match="gpt-125m expects sequences of 2048 tokens or fewer"):
        maker_of("gpt-125m", 2049)


@pytest.mark.parametrize(
    ("maker", "sentence"),
    [
        (nothing, "returns a torch.nn.Module, got <class 'NoneType'>"),
        (elsewhere, "makes weight on cpu, expected meta: leave the device"),
        (frozen, "no parameters to train"),
    ],
)
def test_a_function_that_makes_no_model(maker: Any, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build(maker, META)


@pytest.mark.parametrize(
    ("says", "got"), [("dict", "dict"), ("vector", r"shape \(2,\)"), ("number", r"shape \(\)")]
)
def test_a_model_that_returns_no_loss(says: str, got: str) -> None:
    module = build(lambda: Own(says), CPU)
    with pytest.raises(ModelError, match=f"returns a loss with a gradient, got {got}"):
        loss_of(module, make_tokens(module, (1, 8), CPU))


def test_layers_are_needed_for_checkpointing() -> None:
    with pytest.raises(ValueError, match="expects a model with modules in `layers`"):
        checkpoint_layers(nn.Linear(2, 2))
