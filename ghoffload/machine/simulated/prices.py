"""What torch's own operations cost on a simulated machine.

Note [price]
    A kernel takes the longer of its FLOPs over the machine's rate of matrix products and its bytes
    (inputs and outputs, once each) over the rate of HBM, and not less than an empty one. FLOPs are
    from torch.utils.flop_counter; those of attention, where keys may have fewer heads, are counted
    here, half of them where it is causal. Views are free. The host takes the same time for each
    operation that starts a kernel.

Note [meta]
    Tensors are on ``meta``: they have shapes and no numbers. Whoever asks for a number, as
    ``.item()`` does, gets ``ANSWER``, after all that is queued. Attention without a mask goes to
    the flash kernel, and with one to the memory-efficient one, as on a GPU; on ``meta`` torch would
    write out the whole matrix. So is RMS norm one kernel, which on ``meta`` torch takes apart. They
    are exchanged in ``torch.nn.functional``, as modes are off in what a checkpoint recomputes; who
    imported a function itself has torch's. A result whose shape depends on numbers is torch's
    error.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ghoffload.machine.simulated.live import Live
from ghoffload.machine.simulated.profile import Profile

ANSWER = 1
"""What a number on ``meta`` is taken to be."""

aten = torch.ops.aten
_FLASH = aten._scaled_dot_product_flash_attention
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward
_CAUSAL = {_FLASH: 4, _FLASH_BACKWARD: 11}  # where is_causal stands
_FREE = {
    *(aten.detach, aten.alias, aten._unsafe_view, aten._reshape_alias),
    *(aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty),
}


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
    """Floating-point operations of a call: Note [price]."""
    packet = func.overloadpacket
    at = _CAUSAL.get(packet)
    if at is not None:
        causal = bool(kwargs.get("is_causal") or (len(args) > at and args[at]))
        # Products of query and key, and with value; backward computes the first again.
        first, products = (0, 2) if packet is _FLASH else (1, 5)
        query, key = args[first], args[first + 1]
        length: int = math.prod(query.shape) * key.shape[-2]
        return length * 2.0 * products * (0.5 if causal else 1.0)
    formula = flop_registry.get(packet)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=out))


def bytes_of(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Bytes of a call's tensors, each once."""
    tensors = {
        id(leaf): leaf
        for leaf in itertools.chain(tree_leaves(args), tree_leaves(kwargs), tree_leaves(out))
        if isinstance(leaf, Tensor)
    }
    return sum(min(t.numel() * t.element_size(), _storage(t)) for t in tensors.values())


def _storage(tensor: Tensor) -> int:
    """An expanded tensor has fewer bytes than elements."""
    return int(tensor.untyped_storage().nbytes())


class Priced(TorchDispatchMode):
    """Shows a machine the operations of this thread on meta tensors.

    Args:
        profile: what they cost.
        live: counts their results.
        kernel: told of each kernel: its name, seconds and bytes.
        answered: the host asked for a number.
    """

    def __init__(
        self,
        profile: Profile,
        live: Live,
        kernel: Callable[[str, float, int], None],
        answered: Callable[[], None],
    ) -> None:
        super().__init__()
        self._flops, self._hbm = profile["bf16"], profile["hbm"]
        self._least = profile["launch_device"]
        self._live, self._kernel, self._answered = live, kernel, answered

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if func.overloadpacket is aten._local_scalar_dense:
            if not args[0].is_meta:
                return func(*args, **kwargs)
            self._answered()
            kind = args[0].dtype
            return float(ANSWER) if kind.is_floating_point else kind is torch.bool or ANSWER
        out = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_meta]
        for tensor in made:
            self._live.see(tensor)
        if (made or _on_meta(args)) and not func.is_view and func.overloadpacket not in _FREE:
            nbytes = bytes_of(args, kwargs, out)
            seconds = max(flops_of(func, args, kwargs, out) / self._flops, nbytes / self._hbm)
            self._kernel(func.overloadpacket.__name__, max(seconds, self._least), nbytes)
        return out


def _on_meta(args: Sequence[Any]) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(args))


@contextlib.contextmanager
def fused() -> Iterator[None]:
    """Within it, calls on meta tensors go to the kernels that a GPU has for them: Note [meta]."""
    before = {name: getattr(F, name) for name in _INSTEAD}
    for name, instead in _INSTEAD.items():
        setattr(F, name, _on_meta_only(before[name], instead))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(F, name, function)


def _on_meta_only(function: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (instead if _on_meta(args) else function)(*args, **kwargs)

    return call


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is None:
        out: Tensor = _FLASH(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    mask = attn_mask
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype)
    mask = mask.expand(*query.shape[:-1], key.shape[-2])
    found: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, True, dropout_p, is_causal, scale=scale
    )[0]
    return found


def _rms_norm(
    input: Tensor,  # noqa: A002 - torch's name
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    if weight is None:
        weight = input.new_empty(tuple(normalized_shape))
    out: Tensor = _norm(input, weight)[0]
    return out


@torch.library.custom_op("ghoffload::simulated_rms_norm", mutates_args=())
def _norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("it is for meta tensors")


@_norm.register_fake
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.shape[: x.dim() - weight.dim()]
    return torch.empty_like(x), x.new_empty((*rows, 1), dtype=torch.float32)


@torch.library.custom_op("ghoffload::simulated_rms_norm_backward", mutates_args=())
def _norm_backward(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("it is for meta tensors")


@_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _saved(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    x, weight = inputs
    ctx.save_for_backward(x, output[1], weight)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    x, scale, weight = ctx.saved_tensors
    found: tuple[Tensor, Tensor] = _norm_backward(grad, x, scale, weight)
    return found


_norm.register_autograd(_backward, setup_context=_saved)

_INSTEAD: Mapping[str, Callable[..., Tensor]] = {
    "scaled_dot_product_attention": _attention,
    "rms_norm": _rms_norm,
}
