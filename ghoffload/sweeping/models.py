"""Models to sweep: public shapes by name in plain PyTorch, or a user's own function.

Note [a user's own model]
    ``module:function`` names a function that is called without arguments and returns a
    ``torch.nn.Module``. While it is called, torch's default device is the sweep's (``meta`` on a
    simulated machine), and all parameters must end up there. ``module(tokens)``, with int64
    ``tokens`` ``[batch, sequence + 1]``, returns the loss: one number with a gradient. The tokens
    are below ``module.vocabulary``, or below 256 where it has none. ``module.layers``, where it has
    one, lists the modules that ``checkpoint="layers"`` recomputes.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ghoffload.sweeping.gpt import GPT, GPTShape
from ghoffload.sweeping.llama import Llama, LlamaShape

# Shapes of Brown et al. 2020 (arXiv:2005.14165), table 2.1; its 24 heads of 128 for 1.3 B do not
# make 2048, so it has 16.
# Llama and Qwen: config.json of the models named, on the Hugging Face Hub.
PRESETS: dict[str, GPTShape | LlamaShape] = {
    "gpt-125m": GPTShape(hidden=768, layers=12, heads=12),
    "gpt-350m": GPTShape(hidden=1024, layers=24, heads=16),
    "gpt-1.3b": GPTShape(hidden=2048, layers=24, heads=16),
    "gpt-2.7b": GPTShape(hidden=2560, layers=32, heads=32),
    # TinyLlama/TinyLlama-1.1B-Chat-v1.0
    "llama-1.1b": LlamaShape(
        hidden=2048, layers=22, feed_forward=5632, heads=32, kv_heads=4, vocabulary=32000
    ),
    # meta-llama/Llama-3.2-3B
    "llama-3b": LlamaShape(
        hidden=3072,
        layers=28,
        feed_forward=8192,
        heads=24,
        kv_heads=8,
        vocabulary=128256,
        tied=True,
    ),
    # meta-llama/Meta-Llama-3-8B
    "llama-8b": LlamaShape(
        hidden=4096, layers=32, feed_forward=14336, heads=32, kv_heads=8, vocabulary=128256
    ),
    # meta-llama/Meta-Llama-3-70B
    "llama-70b": LlamaShape(
        hidden=8192, layers=80, feed_forward=28672, heads=64, kv_heads=8, vocabulary=128256
    ),
    # Qwen/Qwen2.5-7B, -14B, -32B
    "qwen2.5-7b": LlamaShape(
        hidden=3584,
        layers=28,
        feed_forward=18944,
        heads=28,
        kv_heads=4,
        vocabulary=152064,
        biases=True,
    ),
    "qwen2.5-14b": LlamaShape(
        hidden=5120,
        layers=48,
        feed_forward=13824,
        heads=40,
        kv_heads=8,
        vocabulary=152064,
        biases=True,
    ),
    "qwen2.5-32b": LlamaShape(
        hidden=5120,
        layers=64,
        feed_forward=27648,
        heads=40,
        kv_heads=8,
        vocabulary=152064,
        biases=True,
    ),
    # Nobody's: for trying things out.
    "tiny": LlamaShape(
        hidden=256, layers=2, feed_forward=704, heads=4, kv_heads=2, vocabulary=1024
    ),
}
DTYPE = torch.bfloat16
"""Of the presets' weights."""

Model = str | Callable[[], nn.Module]


class ModelError(ValueError):
    """A user's own model is not what Note [a user's own model] says."""


def name_of(model: Model) -> str:
    """What the rows call a model."""
    if isinstance(model, str):
        return model
    return f"{model.__module__}:{model.__qualname__}"


def maker_of(model: Model, sequence: int) -> Callable[[], nn.Module]:
    """What makes the model, on torch's default device.

    Raises:
        ValueError: no preset of that name, or one with fewer positions than ``sequence``.
        ModelError: a function that cannot be found.
    """
    if callable(model):
        return model
    if not isinstance(model, str) or (model not in PRESETS and ":" not in model):
        expected = ", ".join(PRESETS)
        raise ValueError(f"model expects module:function or one of {expected}, got {model!r}")
    shape = PRESETS.get(model)
    if isinstance(shape, LlamaShape):
        return functools.partial(Llama, shape, dtype=DTYPE)
    if shape is not None:
        if sequence > shape.positions:
            raise ValueError(
                f"{model} expects sequences of {shape.positions} tokens or fewer, got {sequence}"
            )
        return functools.partial(GPT, shape, dtype=DTYPE)
    return _find(model)


def _find(model: str) -> Callable[[], nn.Module]:
    module, _, function = model.partition(":")
    if os.getcwd() not in sys.path:  # a command does not look where it is called, python -m does
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(f"model {model!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ModelError(f"model {model!r} expects a function, got {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def build(maker: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """A model in training mode, with everything on ``device``.

    Raises:
        ModelError: not a module, without parameters to train, or on another device.
    """
    with torch.device(device):
        module = maker()
    if not isinstance(module, nn.Module):
        raise ModelError(f"the model's function returns a torch.nn.Module, got {type(module)}")
    if not any(p.requires_grad for p in module.parameters()):
        raise ModelError("the model has no parameters to train")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type != device.type:
            raise ModelError(
                f"the model's function makes {name} on {tensor.device}, expected {device}: leave "
                "the device to torch's default"
            )
    return module.train()


def loss_of(module: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of a model.

    Raises:
        ModelError: it returns something else.
    """
    loss: Any = module(tokens)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ModelError(f"the model called with tokens returns a loss with a gradient, got {kind}")
    return loss


def make_tokens(module: nn.Module, tokens: tuple[int, int], device: torch.device) -> Tensor:
    """Tokens ``[batch, sequence + 1]`` for a model, always the same."""
    batch, sequence = tokens
    shape = (batch, sequence + 1)
    if device.type == "meta":
        return torch.zeros(shape, dtype=torch.long, device=device)
    below = int(getattr(module, "vocabulary", 256))
    generator = torch.Generator().manual_seed(0)
    return torch.randint(below, shape, generator=generator).to(device)


def checkpoint_layers(module: nn.Module) -> None:
    """Recompute each of ``module.layers`` in backward.

    Raises:
        ValueError: it has none.
    """
    layers = getattr(module, "layers", None)
    found = list(layers) if isinstance(layers, Iterable) else []
    if not found or not all(isinstance(layer, nn.Module) for layer in found):
        raise ValueError("checkpoint='layers' expects a model with modules in `layers`")
    for layer in found:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
