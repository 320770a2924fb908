"""Gradient clipping whose factor stays on the device and is applied by the step itself.

Note [whose factor it is]
    ``clip_grad_norm_`` reads the gradients once and rewrites none of them. The factor belongs to
    the gradients as they were then. Whether a gradient is still the same is seen by the tensor's
    identity and its version counter:

        a step whose gradients are all as they were clipped    applies the factor
        another one, where no step has applied it yet          RuntimeError: clip again
        another one, after a step that has                     forgets the factor

    So stepping twice with the same gradients applies the factor twice, as if they had been
    rewritten. A later clip replaces an earlier one; ``zero_grad()`` of the optimizer forgets it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ghoffload.kernels import pool
from ghoffload.kernels.norm import norm, partials_needed
from ghoffload.machine.protocol import Machine
from ghoffload.optim.layout import Layout


@dataclass(slots=True)
class _Clip:
    """One clip: the factor, the scale the gradients had, and which gradients they were."""

    factor: Tensor
    grad_scale: Tensor | None
    grads: dict[int, tuple[weakref.ref[Tensor], int]]  # by id, with the version
    applied: bool = False

    def holds(self, grad: Tensor) -> bool:
        """Whether a gradient is one that was clipped, and as it was."""
        found = self.grads.get(id(grad))
        return found is not None and found[0]() is grad and found[1] == grad._version


class Clipping:
    """The clip factor of one optimizer, from ``clip_grad_norm_`` to the steps that apply it."""

    def __init__(self, title: str, device: torch.device, machine: Machine | None) -> None:
        self._title, self._device, self._machine = title, device, machine
        self._clip: _Clip | None = None

    def forget(self) -> None:
        """Drop the factor: the gradients it belongs to are gone."""
        self._clip = None

    @torch.no_grad()
    def clip(
        self,
        grads: Sequence[Tensor],
        max_norm: float,
        norm_type: float,
        *,
        error_if_nonfinite: bool,
        grad_scale: Tensor | None,
        threads: int,
    ) -> tuple[Tensor, Tensor]:
        """Queue the norm of ``grads`` and keep the factor; returns the norm and the found_inf flag.

        Raises:
            RuntimeError: ``error_if_nonfinite`` and the norm is infinite or NaN.
        """
        total, found_inf, factor = (
            torch.empty((), dtype=torch.float32, device=self._device) for _ in range(3)
        )
        dense = [_dense(grad) for grad in grads]
        partials = torch.empty(partials_needed(dense), dtype=torch.float64, device=self._device)
        launches = norm(
            dense,
            partials=partials,
            total_norm=total,
            found_inf=found_inf,
            clip=factor,
            max_norm=float(max_norm),
            grad_scale=grad_scale,
            norm_type=float(norm_type),
        )
        if self._machine is None:
            with pool.threads(threads):
                for launch in launches:
                    launch.run_on_host()
        else:
            # On the stream that this memory was allocated on, so it may be dropped right away.
            stream = self._machine.current_stream()
            for launch in launches:
                self._machine.launch(launch, stream=stream)
        if error_if_nonfinite and not math.isfinite(total.item()):
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is {total.item()}, so they "
                "cannot be clipped; error_if_nonfinite=False lets it pass"
            )
        identities = {id(grad): (weakref.ref(grad), grad._version) for grad in grads}
        self._clip = _Clip(factor, grad_scale, identities) if grads else None
        return total, found_inf

    def of_step(
        self, grads: Sequence[Tensor], grad_scale: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The clip factor for a step with these gradients, and the scale they have.

        Raises:
            RuntimeError: the gradients are not as they were when they were clipped.
        """
        clip = self._clip
        if clip is None:
            return None, grad_scale
        if not all(clip.holds(grad) for grad in grads):
            if not clip.applied:
                raise RuntimeError(
                    f"{self._title} expects gradients as they were in clip_grad_norm_(), and some "
                    "were changed, replaced or added since; call it after the last change, or "
                    "zero_grad() of the optimizer to forget it"
                )
            self.forget()
            return None, grad_scale
        if grad_scale is not None and clip.grad_scale is None:
            raise RuntimeError(
                f"{self._title} expects to know the scale of the gradients it clips: call "
                "clip_grad_norm_(max_norm, scaler=scaler), or scaler.unscale_(optimizer) before it"
            )
        if self._machine is not None:  # the user may have changed streams since
            for tensor in (clip.factor, clip.grad_scale):
                if tensor is not None and tensor.device == self._device:
                    self._machine.record_stream(tensor, self._machine.current_stream())
        clip.applied = True
        return clip.factor, clip.grad_scale


def scale_of(optimizer: Any, scaler: torch.amp.GradScaler | None) -> Tensor | None:
    """The scale of an optimizer's gradients now, copied; ``None`` where they have none.

    It is the product of the optimizer's own ``grad_scale``, where a user has set one, and of the
    scaler's, where it has not unscaled them: what the scaler would give to the step.

    Raises:
        RuntimeError: ``scaler`` has not scaled anything yet, or was stepped already.
    """
    own: Tensor | None = getattr(optimizer, "grad_scale", None)
    if scaler is None or not scaler.is_enabled():
        return None if own is None else own.clone()
    stage = _state(scaler, optimizer)["stage"]
    if stage is OptState.STEPPED:
        raise RuntimeError("clip_grad_norm_() expects to be called before scaler.step(), not after")
    if stage is OptState.UNSCALED:
        return None if own is None else own.clone()
    scale: Tensor | None = scaler._get_scale_async()
    if scale is None:
        raise RuntimeError("clip_grad_norm_() expects scaler.scale(loss) before it")
    # A copy: update() changes the scaler's own in place.
    return scale.clone() if own is None else scale * own


def tell(optimizer: Any, scaler: torch.amp.GradScaler | None, found_inf: Tensor) -> None:
    """Give ``scaler`` what ``unscale_`` would have found, so that it need not read the gradients.

    The step unscales: to the scaler they count as unscaled from here on. What an ``unscale_`` of
    its own has found stays.
    """
    if scaler is None or not scaler.is_enabled():
        return
    state = _state(scaler, optimizer)
    if state["stage"] is not OptState.READY:
        return
    state["found_inf_per_device"] = {found_inf.device: found_inf}
    state["stage"] = OptState.UNSCALED


def _state(scaler: torch.amp.GradScaler, optimizer: Any) -> dict[str, Any]:
    state: dict[str, Any] = scaler._per_optimizer_states[id(optimizer)]
    return state


def _dense(grad: Tensor) -> Tensor:
    """A gradient whose memory, from its first element on, is its elements in some order."""
    if grad.is_contiguous() and not grad._is_zerotensor():
        return grad  # a negative view, too: no norm looks at signs
    layout = Layout.of(grad)
    return grad if layout.holds(grad) else layout.view(grad.new_empty(grad.numel())).copy_(grad)
