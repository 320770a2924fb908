"""The optimizers that the benchmark compares, each behind the same few methods."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

HYPERPARAMETERS: dict[str, Any] = {
    "lr": 1e-4,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
}


class Optimizer:
    """One optimizer on one model; the base is no optimizer at all.

    Attributes:
        label: its name in tables.
        state: what it keeps for a parameter (p, m, v), and where.
        rounds: what of that is rounded to less than fp32 from step to step. With nothing rounded it
            is exact: AdamW on fp32 masters with fp32 moments.
        package: the distribution whose version belongs to its figures.
        module: what has to be installed for it beside torch.
    """

    label = "forward + backward alone"
    state = ""
    rounds = "nothing"
    package = "torch"
    module: ClassVar[str | None] = None

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @staticmethod
    def load() -> None:
        """Import what it needs, so that imports can be told from its own memory."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        """Update; may return with work in flight. ``torch.cuda.synchronize()`` ends it."""

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def version(self) -> str:
        try:
            return f"{self.package} {importlib.metadata.version(self.package)}"
        except importlib.metadata.PackageNotFoundError:
            return f"{self.package}, version unknown"


class Offload(Optimizer):
    """ghoffload. All that the benchmark knows of its interface is here.

    bf16 weights are the upper half of their masters by default, and the lower half is on the host:
    nothing of a master is lost. (Its weight is rounded up at a tie, torch's to even.)

    Args:
        config: options of ``OffloadConfig``; ``None`` takes its defaults, the environment's
            ``GHOFFLOAD_...`` and, before both, ``options``.

    Attributes:
        options: what a row of this class is about.
    """

    label = "ghoffload OffloadAdamW"
    state = "lower half of p, fp32 m, v on the host"
    package = "ghoffload"
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, model: nn.Module, config: dict[str, Any] | None = None) -> None:
        super().__init__(model)
        import ghoffload

        if config is None:
            chosen = dataclasses.replace(ghoffload.OffloadConfig.of(None), **self.options)
        else:
            chosen = ghoffload.OffloadConfig(**config)
        self.optimizer = ghoffload.OffloadAdamW(
            model.parameters(), **HYPERPARAMETERS, config=chosen
        )

    @staticmethod
    def load() -> None:
        try:
            import ghoffload
        except ModuleNotFoundError as error:
            if error.name != "ghoffload":
                raise
            sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone
            import ghoffload  # noqa: F401

    def step(self) -> None:
        self.optimizer.step()

    def version(self) -> str:
        import ghoffload

        return f"ghoffload {ghoffload.__version__}"

    def report(self) -> str:
        return str(self.optimizer.report())

    @staticmethod
    def ledger() -> dict[str, int]:
        """Bytes that ghoffload says it holds, by memory kind."""
        from ghoffload.memory import ledger

        held: dict[str, int] = {}
        for row in ledger.rows():
            held[row.kind] = held.get(row.kind, 0) + row.nbytes
        return held


class OffloadFp32(Offload):
    """The same with masters of their own, which is what others keep: 12 bytes instead of 10."""

    label = "ghoffload, fp32 master"
    state = "fp32 p, m, v on the host"
    options: ClassVar[dict[str, Any]] = {"master": "fp32", "moments": "fp32"}


class OffloadInt8(Offload):
    """Masters whole, moments in non-linear 8-bit codes with a scale for each 128: 4.1 bytes."""

    label = "ghoffload, int8 moments"
    state = "lower half of p, int8 m, v on the host"
    rounds = "m, v to int8"
    options: ClassVar[dict[str, Any]] = {"master": "split", "moments": "int8"}


class OffloadInHbm(Offload):
    """Nothing is offloaded: the kernel and the formats alone, beside torch's fused AdamW."""

    label = "ghoffload, in HBM"
    state = "lower half of p, fp32 m, v in HBM"
    options: ClassVar[dict[str, Any]] = {
        "master": "split",
        "moments": "fp32",
        "memory_kind": "device",
        "transfer": "auto",
    }


class TorchInHbm(Optimizer):
    """torch's fused AdamW on fp32 masters, everything in HBM: what offloading is measured by."""

    label = "torch AdamW (fused)"
    state = "fp32 p, m, v in HBM"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.weights = list(model.parameters())
        self.masters = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, **HYPERPARAMETERS, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        torch._foreach_copy_(self.weights, self.masters)


class TorchAO(Optimizer):
    """torchao's CPUOffloadOptimizer around torch's fused AdamW, its default."""

    label = "torchao CPUOffloadOptimizer"
    state = "bf16 p, m, v on the host (no fp32 master)"
    rounds = "p, m, v to bf16"
    package = module = "torchao"
    offload_gradients = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        from torchao.optim import CPUOffloadOptimizer

        self.optimizer = CPUOffloadOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            offload_gradients=self.offload_gradients,
            fused=True,
            **HYPERPARAMETERS,
        )

    @staticmethod
    def load() -> None:
        import torchao.optim  # noqa: F401

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class TorchAOGradients(TorchAO):
    """The same, which frees each gradient in HBM once it is on the host."""

    label = "torchao, offload_gradients"
    offload_gradients = True


class DeepSpeed(Optimizer):
    """DeepSpeed ZeRO-2 with the optimizer on the CPU (DeepSpeedCPUAdam), alone in its world.

    The settings are those of its ZeRO-Offload tutorial, with two that favour it: buckets just above
    the largest tensor, so that gradients leave during backward, and no search for overflow.
    """

    label = "DeepSpeed ZeRO-2 offload"
    state = "fp32 p, m, v and gradients on the host"
    package = module = "deepspeed"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        import deepspeed

        _alone_in_the_world()
        largest = max(parameter.numel() for parameter in model.parameters())
        adam = {name: value for name, value in HYPERPARAMETERS.items() if name != "betas"}
        config = {
            "train_micro_batch_size_per_gpu": 1,  # used for its own throughput figures alone
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": True, "check_grad_overflow": False},
            "optimizer": {
                "type": "AdamW",
                "params": {**adam, "betas": list(HYPERPARAMETERS["betas"])},
            },
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "contiguous_gradients": True,
                "overlap_comm": True,
                "reduce_bucket_size": max(largest, 100_000_000),
            },
            "steps_per_print": 1_000_000_000,
        }
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )

    @staticmethod
    def load() -> None:
        # The CPU Adam is compiled at first use by ninja, which may lie beside this interpreter.
        beside = str(Path(sys.executable).parent)
        os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", ""), beside))
        # In a folder of the benchmark's own: a lock left there by a run that was stopped while it
        # compiled would be waited for without end, and may be removed.
        versions = f"torch-{torch.__version__}-python-{sys.version_info[0]}.{sys.version_info[1]}"
        build = Path(tempfile.gettempdir()) / "benchmark_adamw" / versions
        build.mkdir(parents=True, exist_ok=True)
        for lock in build.glob("*/lock"):
            lock.unlink()
        os.environ["TORCH_EXTENSIONS_DIR"] = str(build)
        import deepspeed  # noqa: F401

    def forward(self, tokens: Tensor) -> Tensor:
        return self.engine(tokens)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self) -> None:
        self.engine.zero_grad()


class BitsAndBytes(Optimizer):
    """bitsandbytes' paged AdamW: managed memory, which stays in HBM for as long as there is room.

    It updates the bf16 weights themselves; there is no master.
    """

    label = "bitsandbytes paged AdamW"
    state = "bf16 p, fp32 m, v in managed memory (no fp32 master)"
    rounds = "p to bf16"
    package = module = "bitsandbytes"
    bits = 32

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        import bitsandbytes

        self.optimizer = bitsandbytes.optim.AdamW(
            model.parameters(), optim_bits=self.bits, is_paged=True, **HYPERPARAMETERS
        )

    @staticmethod
    def load() -> None:
        import bitsandbytes  # noqa: F401

    def step(self) -> None:
        self.optimizer.step()


class BitsAndBytes8(BitsAndBytes):
    """The same with moments in its dynamic 8-bit code."""

    label = "bitsandbytes paged AdamW 8-bit"
    state = "bf16 p, int8 m, v in managed memory (no fp32 master)"
    rounds = "p to bf16, m, v to int8"
    bits = 8


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "ours": Offload,
    "ours-fp32": OffloadFp32,
    "ours-int8": OffloadInt8,
    "ours-hbm": OffloadInHbm,
    "torch": TorchInHbm,
    "torchao": TorchAO,
    "torchao-gradients": TorchAOGradients,
    "deepspeed": DeepSpeed,
    "bitsandbytes": BitsAndBytes,
    "bitsandbytes-8bit": BitsAndBytes8,
}
SELECTIONS: dict[str, list[str]] = {
    "formats": ["ours", "ours-fp32", "ours-int8", "ours-hbm", "torch"],
    "peers": [name for name, kind in OPTIMIZERS.items() if kind.module is not None],
}
"""Names for several of them."""


def missing(name: str) -> str | None:
    """The module that is not installed here and that an optimizer needs."""
    module = OPTIMIZERS[name].module
    return module if module is not None and importlib.util.find_spec(module) is None else None


def _alone_in_the_world() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in world.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
