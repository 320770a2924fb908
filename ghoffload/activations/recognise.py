"""Which saved tensors are left alone, and why.

Note [parameters]
    Moving a parameter frees nothing, and autograd saves them in many forms: as they are, as views
    (a Linear saves ``weight.t()``), as casts (autocast), by whatever Python object. They are known
    by being a leaf, by the base of a view, by walking from the tensor's node through views,
    transposes and casts to the leaf they began with, or by their storage. A frozen weight that
    autocast casts has neither base nor node: with ``model=`` it is known by dtype and shape, and an
    activation that is taken for one merely stays.
    Where the model gets other storages (``to``, ``load_state_dict(assign=True)``) it is read again:
    noticed by the first and the last of its frozen parameters and of its buffers, as the others are
    known without it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ghoffload.machine.protocol import Machine

# Nodes whose output has the numbers of their input: views, transposes and casts.
_SAME = frozenset(
    f"{name}Backward"
    for name in (
        *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias"),
        *("Slice", "Select", "Split", "SplitWithSizes", "Unbind", "Diagonal", "AsStrided"),
        *("Expand", "Unsqueeze", "Squeeze", "Unfold", "ViewAsReal", "ViewAsComplex", "ToCopy"),
    )
)
_FAR = 8  # steps that are walked
_KNOWN = 1 << 14  # storages that are remembered before those that are gone are forgotten


class Recogniser:
    """Knows what may be moved.

    Args:
        machine: whose memory tensors must be in.
        model: whose parameters and buffers are known from the beginning.
        min_bytes: smaller tensors stay.
    """

    def __init__(self, machine: Machine, *, model: nn.Module | None, min_bytes: int) -> None:
        self._device, self._min_bytes, self._model = machine.device, min_bytes, model
        # While the reference is there, no other storage is at that address.
        self._storages: dict[int, tuple[StorageWeakRef, str]] = {}
        self._most = _KNOWN
        self._signs: list[tuple[dict[str, Any], str, int | None]] = []
        self._frozen: dict[tuple[int, ...], set[torch.dtype]] = {}  # dtypes by shape
        if model is not None:
            self._read(model)

    def kept(self, tensor: Tensor) -> str | None:
        """Why a saved tensor stays; ``None`` where it may be moved.

        Returns:
            ``"parameter"``, ``"buffer"``, ``"small"``, ``"subclass"``, ``"device"`` or
            ``"layout"``.
        """
        kind = type(tensor)
        if kind is not Tensor and kind is not nn.Parameter and kind is not nn.Buffer:
            return "subclass"
        if tensor.device != self._device:
            return "device"
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return "layout"
        if tensor.is_conj() or tensor.is_neg():
            return "layout"
        try:
            storage = tensor.untyped_storage()
            if storage.data_ptr() == 0 and not tensor.is_meta:
                return "layout"
        except (NotImplementedError, RuntimeError):  # a wrapper of vmap's or functionalize's, zeros
            return "layout"
        why = self._known(tensor, storage._cdata)
        if why is not None:
            return why
        # An expanded tensor has fewer bytes than elements.
        nbytes = min(tensor.numel() * tensor.element_size(), storage.nbytes())
        return "small" if nbytes < self._min_bytes else None

    def _known(self, tensor: Tensor, storage: int) -> str | None:
        if (found := self._storages.get(storage)) is not None:
            return found[1]
        base = tensor._base if tensor._is_view() else None
        for one in (tensor, base):
            if one is None:
                continue
            own = type(one) is not Tensor and isinstance(one, nn.Parameter)
            if own or (one.is_leaf and one.requires_grad):
                self._remember(one, "parameter")
                return "parameter"
        node = tensor.grad_fn
        if node is None and self._signs and self._changed():
            assert self._model is not None
            self._read(self._model)
            if (found := self._storages.get(storage)) is not None:
                return found[1]
        for _ in range(_FAR):
            if node is None:
                break
            same = _same(node.name())
            if same is None:
                variable = getattr(node, "variable", None)
                return "parameter" if variable is not None and variable.is_leaf else None
            if not same:
                return None
            node = node.next_functions[0][0]
        return self._cast_of_frozen(tensor, base)

    def _cast_of_frozen(self, tensor: Tensor, base: Tensor | None) -> str | None:
        """A leaf without grad, of autocast's dtype, of the shape of a frozen parameter in another.

        Whether autocast is on cannot be asked: it is off within the operation that it casts for.
        """
        if not self._frozen or tensor.requires_grad or tensor.grad_fn is not None:
            return None
        if tensor.dtype != torch.get_autocast_dtype(self._device.type):
            return None
        whole = tensor if base is None else base
        dtypes = self._frozen.get(tuple(whole.shape), set())
        return "parameter" if dtypes - {tensor.dtype} else None

    def _read(self, model: nn.Module) -> None:
        frozen: list[tuple[dict[str, Any], str]] = []
        buffers: list[tuple[dict[str, Any], str]] = []
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._remember(parameter, "parameter")
                    if not parameter.requires_grad:
                        frozen.append((module._parameters, name))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self._remember(buffer, "buffer")
                    buffers.append((module._buffers, name))
        self._frozen = {}
        for home, name in frozen:
            self._frozen.setdefault(tuple(home[name].shape), set()).add(home[name].dtype)
        signs = (*frozen[:1], *frozen[-1:], *buffers[:1], *buffers[-1:])
        self._signs = [(home, name, _storage_of(home[name])) for home, name in signs]

    def _changed(self) -> bool:
        return any(_storage_of(home.get(name)) != known for home, name, known in self._signs)

    def _remember(self, tensor: Tensor, what: str) -> None:
        at = _storage_of(tensor)
        if at is None or at in self._storages:
            return
        if len(self._storages) > self._most:
            self._storages = {k: v for k, v in self._storages.items() if not v[0].expired()}
            self._most = max(_KNOWN, 2 * len(self._storages))
        self._storages[at] = (StorageWeakRef(tensor.untyped_storage()), what)


@lru_cache(None)
def _same(name: str) -> bool | None:
    """Of a node: whether its output has its input's numbers; ``None``: it accumulates a leaf's."""
    if "AccumulateGrad" in name:
        return None
    return name.rstrip("0123456789") in _SAME


def _storage_of(tensor: Tensor | None) -> int | None:
    """What identifies a storage while it is remembered."""
    if tensor is None:
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a subclass that wraps others
        return None
