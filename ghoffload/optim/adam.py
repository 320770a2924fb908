"""``OffloadAdam`` and ``OffloadAdamW``: torch's optimizers with their state on the host."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ghoffload.config import OffloadConfig
from ghoffload.errors import InterruptedStepError
from ghoffload.kernels.adam import Hyper
from ghoffload.machine import machine_for
from ghoffload.machine.protocol import Machine
from ghoffload.optim import checkpoint
from ghoffload.optim.checks import (
    check_gradient,
    check_options,
    check_parameters,
    check_sharing,
    check_unchanged,
)
from ghoffload.optim.clipping import Clipping, scale_of, tell
from ghoffload.optim.compiled import leave_graphs
from ghoffload.optim.engine import Engine, GroupStep
from ghoffload.optim.report import MemoryReport, memory_report
from ghoffload.optim.state import OffloadState
from ghoffload.optim.wrapping import WRAPPABLE, check_wrappable, retire

# Defaults are objects of their own, so that an argument given beside a wrapped optimizer shows.
_LR, _BETAS, _EPS = float("1e-3"), (0.9, 0.999), float("1e-8")
_NO_DECAY, _DECAY = float("0"), float("1e-2")
_names = itertools.count()


class OffloadAdam(Optimizer):
    r"""Adam whose state lives in host memory; ``torch.optim.Adam``'s arguments and meaning.

    Args:
        params: parameters, named parameters or parameter groups; or a ``torch.optim.Adam`` or
            ``torch.optim.AdamW``, whose groups, hyperparameters, hooks and state are taken over
            (the wrapped optimizer can then no longer step by itself, but LR schedulers made on it
            keep working). fp32, bf16 and fp16 parameters on one device.
        lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay: as in torch. ``lr``
            and ``betas`` may be tensors. None of them is accepted beside a wrapped optimizer.
        foreach, fused, capturable: accepted for compatibility; there is one implementation.
        differentiable: must be ``False``.
        config: an ``OffloadConfig``, a mapping of its fields, or the path of a TOML file.
        machine: the machine to run on (``"cuda"``, ``"virtual"``, ``"cpu"`` or a ``Machine``);
            default: ``use_machine``, the environment, then where the parameters are.

    bf16 and fp16 parameters are updated through an fp32 ``master`` unless ``config.master`` is
    ``"none"``. An outside edit of a weight wins over its master at the next step; with a split
    master the old rest stays, at most half a unit of the weight's last place.

    Raises:
        ValueError, TypeError: an argument that cannot be used, before anything is changed.
        torch.OutOfMemoryError: the host or HBM has no room for state or staging buffers.
    """

    _step_supports_amp_scaling = True
    _forces_decoupled = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = _LR,
        betas: tuple[float | Tensor, float | Tensor] = _BETAS,
        eps: float = _EPS,
        weight_decay: float = _NO_DECAY,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        config: OffloadConfig | Mapping[str, Any] | str | None = None,
        machine: Machine | str | None = None,
    ) -> None:
        leave_graphs(OffloadAdam)
        self._config = OffloadConfig.of(config)
        self._machine_choice = machine
        self._engine: Engine | None = None
        if isinstance(params, Optimizer):
            given = {
                "lr": lr is not _LR,
                "betas": betas is not _BETAS,
                "eps": eps is not _EPS,
                "weight_decay": weight_decay is not self._default_decay,
                "amsgrad": amsgrad,
                "foreach": foreach is not None,
                "maximize": maximize,
                "capturable": capturable,
                "differentiable": differentiable,
                "fused": fused is not None,
                "decoupled_weight_decay": decoupled_weight_decay and not self._forces_decoupled,
            }
            self._take_over(params, [name for name, is_given in given.items() if is_given])
            return
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        check_options(self._title, defaults)
        defaults["betas"] = _scalars(betas)
        super().__init__(params, defaults)
        self._open()

    @property
    def _title(self) -> str:
        return type(self).__name__

    @property
    def _default_decay(self) -> float:
        return _DECAY if self._forces_decoupled else _NO_DECAY

    def _take_over(self, inner: Optimizer, given: list[str]) -> None:
        """Become ``inner``: the same groups list, defaults, hooks, and its state."""
        kinds = (torch.optim.AdamW,) if self._forces_decoupled else WRAPPABLE
        check_wrappable(self._title, inner, kinds, given)
        for group in inner.param_groups:
            check_options(self._title, group)
        self.defaults = inner.defaults
        self.defaults.setdefault("decoupled_weight_decay", type(inner) is torch.optim.AdamW)
        self.param_groups = inner.param_groups
        for group in self.param_groups:
            group.setdefault("decoupled_weight_decay", self.defaults["decoupled_weight_decay"])
        for name, value in vars(inner).items():
            if name.startswith("_optimizer_") and name.endswith("_hooks"):
                setattr(self, name, value)
        self._patch_step_function()
        self._open()
        try:
            members = {p for group in self.param_groups for p in group["params"]}
            self.state = {
                p: entries for p, entries in inner.state.items() if p in members and entries
            }
        except BaseException:
            self._close()
            raise
        self._inner = inner
        retire(inner, self._title)

    def _open(self) -> None:
        """Choose the machine, plan every trainable parameter, reserve memory."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        for group in self.param_groups:
            check_options(self._title, group)
            group["betas"] = _scalars(group["betas"])
        check_parameters(self._title, parameters)
        devices = sorted({str(parameter.device) for parameter in parameters})
        if len(devices) != 1:
            raise ValueError(
                f"{self._title} expects all parameters on one device, got "
                f"{', '.join(devices) or 'no parameter'}"
            )
        check_sharing(self._title, list(dict.fromkeys(parameters)))
        device = parameters[0].device
        machine = machine_for(device, self._machine_choice)
        owner = f"{self._title}-{next(_names)}"
        self._engine = Engine(machine, device, self._config, owner=owner)
        self._state = OffloadState(self._engine)
        self._clipping = Clipping(self._title, device, machine)
        self._close = weakref.finalize(self, self._engine.close)
        try:
            self._plan([p for p in parameters if p.requires_grad])
        except BaseException:
            self._close()
            raise

    @property
    def _open_engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def _plan(self, parameters: Iterable[Tensor]) -> None:
        """Reserve the state of those among ``parameters`` that have none yet."""
        engine = self._open_engine
        new = [p for p in dict.fromkeys(parameters) if engine.find(p) is None]
        if new:
            engine.add(new, {p: group for group in self.param_groups for p in group["params"]})
            # At exit the newest finalizer runs first: pending work must end before its arenas go.
            self._close.detach()
            self._close = weakref.finalize(self, engine.close)

    @property
    def state(self) -> Any:
        """Parameter -> entries, as in torch; reading waits for pending write-back."""
        if self._engine is None:  # torch.optim.Optimizer.__init__ is still filling the groups
            return self.__dict__.setdefault("_early_state", {})
        self._check_whole()
        return self._state

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        if self._engine is None:
            return
        self._check_whole()
        mine = {p for group in self.param_groups for p in group["params"]}
        self._plan([p for p in value if p in mine])
        self._state.replace(value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; reserves the memory of its state now."""
        if self._engine is None:
            super().add_param_group(param_group)
            return
        engine = self._open_engine
        count = len(self.param_groups)
        given = dict(param_group) if isinstance(param_group, dict) else {}
        try:
            super().add_param_group(param_group)
            group = self.param_groups[count]
            check_options(self._title, group)
            group["betas"] = _scalars(group["betas"])
            check_parameters(self._title, group["params"])
            everything = [p for g in self.param_groups for p in g["params"]]
            check_sharing(self._title, list(dict.fromkeys(everything)))
            for parameter in group["params"]:
                if parameter.device != engine.device:
                    raise ValueError(
                        f"{self._title} expects parameters on {engine.device}, got "
                        f"{parameter.device}"
                    )
            self._plan([p for p in group["params"] if p.requires_grad])
        except BaseException:
            del self.param_groups[count:]
            if isinstance(param_group, dict):  # torch has filled it with defaults
                param_group.clear()
                param_group.update(given)
            raise

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient; returns with the work in flight.

        Args:
            closure: reevaluates the model under ``torch.enable_grad()`` and returns the loss.

        Raises:
            RuntimeError: a gradient that cannot be used (sparse, complex, on another device).
                Nothing was changed.
            InterruptedStepError: an earlier step stopped part-way.
        """
        self._check_whole()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = []
        for number, group in enumerate(self.param_groups):
            grads = {p: p.grad for p in group["params"] if p.grad is not None}
            if grads:
                self._check_grads(grads)
                self._plan(grads)
                groups.append(GroupStep(self._hyper(number, group, grads), grads))
        if groups:
            clip, grad_scale = self._clipping.of_step(
                [grad for group in groups for grad in group.grads.values()],
                getattr(self, "grad_scale", None),
            )
            self._open_engine.step(
                groups,
                found_inf=getattr(self, "found_inf", None),
                grad_scale=grad_scale,
                clip=clip,
            )
        inner = getattr(self, "_inner", None)
        if inner is not None:
            inner._opt_called = True  # what LR schedulers made on the wrapped optimizer look for
        return loss

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Tensor:
        """Clip the norm of all gradients of this optimizer, as one vector, at the next step.

        ``torch.nn.utils.clip_grad_norm_`` in one read of the gradients: the norm and the factor
        stay on the device and the step multiplies the gradients as it reads them. ``p.grad`` itself
        is not rewritten. The factor is that of the gradients as they are now: changing them before
        the step is an error, a later call replaces it, ``zero_grad()`` forgets it. (torch's own
        function works, too, and then this one is not needed.)

        Args:
            max_norm: 0 or more.
            norm_type: 2 or infinity.
            error_if_nonfinite: raise where the norm is infinite or NaN; waits for the device.
            scaler: the ``GradScaler`` whose ``step`` follows. The norm is then that of the unscaled
                gradients, and neither ``unscale_`` nor the scaler reads them again. Leave it out
                only where there is none or after ``scaler.unscale_(optimizer)``.

        Returns:
            The norm before clipping: fp32, 0-dim, on the parameters' device.

        Raises:
            RuntimeError: a gradient that cannot be used; a norm that is not finite, if asked for.
        """
        self._check_whole()
        grads = {p: p.grad for g in self.param_groups for p in g["params"] if p.grad is not None}
        self._check_grads(grads)
        total, found_inf = self._clipping.clip(
            list(grads.values()),
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
            grad_scale=scale_of(self, scaler),
            threads=self._config.cpu_threads,
        )
        tell(self, scaler, found_inf)
        return total

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as in torch, and forget a clip of theirs."""
        self._clipping.forget()
        super().zero_grad(set_to_none)

    def _hyper(self, number: int, group: dict[str, Any], grads: Mapping[Tensor, Any]) -> Hyper:
        for parameter in grads:
            home = self._open_engine.find(parameter)
            if home is not None and home[0].format(home[1]).amsgrad != bool(group["amsgrad"]):
                raise ValueError(
                    f"amsgrad of group {number} was changed after its state was reserved; "
                    "build the optimizer with the value it should have"
                )
        return Hyper(
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            amsgrad=bool(group["amsgrad"]),
            maximize=bool(group["maximize"]),
            decoupled=self._forces_decoupled or bool(group["decoupled_weight_decay"]),
        )

    def _check_grads(self, grads: Mapping[Tensor, Tensor]) -> None:
        engine = self._open_engine
        for parameter, grad in grads.items():
            check_gradient(self._title, parameter, grad, engine.device)
            home = engine.find(parameter)
            if home is not None:
                section, index = home
                size, dtype = section.layouts[index].size, section.dtypes[index]
                check_unchanged(self._title, parameter, size, dtype)

    def _check_whole(self) -> None:
        where = None if self._engine is None else self._engine.interrupted
        if where is not None:
            raise InterruptedStepError(
                f"an earlier step stopped {where}: some parameters and their state were updated "
                "and others were not; load a checkpoint into a new optimizer"
            )

    def state_dict(self, *, native: bool = False) -> dict[str, Any]:
        """The optimizer's state on the CPU, safe for ``torch.load(weights_only=True)``.

        Args:
            native: add the config and a version, and leave coded state coded. Torch's form
                (default) also goes into ``torch.optim.AdamW`` and back, bit for bit for fp32
                parameters (for bf16 and fp16 ones torch rounds the moments when it loads them).

        The tensors are the live host memory, not a copy, but for what torch's form has decoded:
        save them before the next step.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        self._check_whole()
        engine = self._open_engine
        engine.drain()
        result = checkpoint.pack(engine, self.param_groups, native=native)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, result)
            if changed is not None:
                result = changed
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load either form, in place: nothing is cast down, nothing is copied to the GPU.

        A stored ``master`` counts where it rounds to the weight that is there; elsewhere the
        weight does.

        Raises:
            ValueError, TypeError: it does not fit this optimizer. Nothing was changed.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state dict expects a dict, got {type(state_dict).__name__}")
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            if changed is not None:
                state_dict = changed
        engine = self._open_engine
        entries, options = checkpoint.check(engine, self._title, self.param_groups, state_dict)
        self._plan(entries)
        if engine.interrupted is not None and engine.machine is not None:
            engine.machine.synchronize_all()  # what the interrupted step queued, nothing waits for
        engine.interrupted = "while a state dict was being loaded"
        self._state.replace(entries)
        for group, new in zip(self.param_groups, options, strict=True):
            group.update(new)
            if self._forces_decoupled:
                group["decoupled_weight_decay"] = True
        engine.interrupted = None
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def synchronize(self) -> None:
        """Block until the state of every step so far is in host memory."""
        self._open_engine.drain()

    def report(self) -> MemoryReport:
        """Where every byte of weights, gradients and state lives; ``print`` it."""
        return memory_report(self._open_engine, self.param_groups)

    @property
    def config(self) -> OffloadConfig:
        """The configuration in force."""
        return self._config

    def __getstate__(self) -> dict[str, Any]:
        self._check_whole()
        machine = self._machine_choice
        return {
            "defaults": self.defaults,
            "state": {p: dict(self.state[p]) for p in self.state},
            "param_groups": self.param_groups,
            "config": self._config,
            "machine": machine if isinstance(machine, str) else None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        leave_graphs(OffloadAdam)
        self._engine = None
        self._config = state["config"]
        self._machine_choice = state["machine"]
        super().__setstate__({"defaults": state["defaults"], "param_groups": state["param_groups"]})
        self._open()
        self.state = state["state"]


class OffloadAdamW(OffloadAdam):
    """AdamW whose state lives in host memory; ``torch.optim.AdamW``'s arguments and meaning.

    Takes parameters or a ``torch.optim.AdamW``; see ``OffloadAdam`` for everything else.
    """

    _forces_decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = _LR,
        betas: tuple[float | Tensor, float | Tensor] = _BETAS,
        eps: float = _EPS,
        weight_decay: float = _DECAY,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        config: OffloadConfig | Mapping[str, Any] | str | None = None,
        machine: Machine | str | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            config=config,
            machine=machine,
        )


def _scalars(betas: Iterable[Any]) -> tuple[Any, ...]:
    """One-element tensors as 0-dim, anything else as it is."""
    return tuple(beta.reshape(()) if isinstance(beta, Tensor) else beta for beta in betas)
