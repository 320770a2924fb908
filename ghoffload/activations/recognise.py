"""Which saved tensors are left alone, and why.

Note [parameters]
    Moving a parameter frees nothing, and autograd saves them in many forms: as they are, as views
    (a Linear saves ``weight.t()``), as casts (autocast), by whatever Python object. They are known
    by being a leaf, by the base of a view, by walking from the tensor's node through views,
    transposes and casts to the leaf they began with, or by their storage. A frozen weight that
    autocast casts has neither base nor node: with ``model=`` it is known by dtype and shape, and an
    activation that is taken for one merely stays.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ghoffload.machine.protocol import Machine

# Nodes whose output has the numbers of their input: views, transposes and casts.
_SAME = frozenset(
    f"{name}Backward"
    for name in (
        *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "Movedim"),
        *("Slice", "Select", "Narrow", "Split", "SplitWithSizes", "Unbind", "Chunk", "Diagonal"),
        *("Expand", "Unsqueeze", "Squeeze", "AsStrided", "Unfold", "ToCopy", "ViewAsReal"),
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
        self._storages: dict[int, tuple[StorageWeakRef, str]] = {}
        self._frozen: frozenset[tuple[int, ...]] = frozenset()
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
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return "layout"
        if tensor.is_conj() or tensor.is_neg():
            return "layout"
        if tensor.untyped_storage().data_ptr() == 0:
            return "layout"
        why = self._known(tensor)
        if why is not None:
            return why
        return "small" if tensor.numel() * tensor.element_size() < self._min_bytes else None

    def _known(self, tensor: Tensor) -> str | None:
        base = tensor._base if tensor._is_view() else None
        for one in (tensor, base):
            if one is None:
                continue
            if isinstance(one, nn.Parameter) or (one.is_leaf and one.requires_grad):
                self._remember(one, "parameter")
                return "parameter"
        found = self._storages.get(tensor.untyped_storage()._cdata)
        if found is not None and not found[0].expired():
            return found[1]
        node = tensor.grad_fn
        for _ in range(_FAR):
            if node is None:
                break
            if (variable := getattr(node, "variable", None)) is not None:
                return "parameter" if variable.is_leaf else None
            if node.name().rstrip("0123456789") not in _SAME:
                return None
            node = node.next_functions[0][0]
        return self._cast_of_frozen(tensor, base)

    def _cast_of_frozen(self, tensor: Tensor, base: Tensor | None) -> str | None:
        """A leaf without grad, of autocast's dtype, of a frozen parameter's shape."""
        if self._model is None or tensor.requires_grad or tensor.grad_fn is not None:
            return None
        kind = self._device.type
        if not torch.is_autocast_enabled(kind) or tensor.dtype != torch.get_autocast_dtype(kind):
            return None
        whole = tensor if base is None else base
        return "parameter" if tuple(whole.shape) in self._frozen else None

    def _read(self, model: nn.Module) -> None:
        frozen = set()
        for parameter in model.parameters():
            self._remember(parameter, "parameter")
            if not parameter.requires_grad:
                frozen.add(tuple(parameter.shape))
        for buffer in model.buffers():
            self._remember(buffer, "buffer")
        self._frozen = frozenset(frozen)

    def _remember(self, tensor: Tensor, what: str) -> None:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a subclass that wraps others
            return
        if storage._cdata in self._storages and not self._storages[storage._cdata][0].expired():
            return
        if len(self._storages) > _KNOWN:
            self._storages = {k: v for k, v in self._storages.items() if not v[0].expired()}
        self._storages[storage._cdata] = (StorageWeakRef(storage), what)
