"""TensorManager: tensors in a memory kind of one's choice, with budgets, figures and advice."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ghoffload.config import parse_bytes
from ghoffload.machine.managed import ADVICE
from ghoffload.machine.protocol import Machine, Stream
from ghoffload.memory import numa as nodes
from ghoffload.memory.ledger import ledger
from ghoffload.memory.manager_checks import (
    forget,
    location_of,
    machine_or_default,
    own_stream,
    require_kind,
)
from ghoffload.memory.manager_pool import Block, Pool, tensor_over
from ghoffload.memory.manager_registry import KINDS, Registry
from ghoffload.memory.shares import fair_share


class TensorManager(Registry):
    """Makes tensors in a memory kind of one's choice and takes their memory back.

    Memory is asked of the system in segments and given out by best fit, without size classes. It
    comes back when a tensor's storage dies, is reused once all work queued on the device has
    finished (the host waits for it, at the earliest when nothing else fits), and is kept until
    ``trim``, ``close`` or the budget gives it back. Device tensors are torch's own: one that is
    used on another stream than it was made on needs ``record_stream``, as ever.

    Args:
        machine: the machine, or ``"cuda"``, ``"virtual"``, ``"cpu"``; by default that of
            ``use_machine``, else of the current GPU, else none: then ``"system"`` is what there is.
        budgets: most bytes by kind, as ints or text such as ``"2 GiB"``. Those of host memory are
            promises while the manager lives: other processes, and the rest of this one, leave them
            alone. Managed memory never says by itself that it has run out, so it has a budget
            always: by default this process's fair share of the host bytes available at the first
            use (all of them, or one part in ``LOCAL_WORLD_SIZE``), and never more than are
            available at the moment.
        debug: whether ``check`` looks at what it is given.
        owner: who holds the memory, for the ledger and messages.

    Raises:
        ValueError: an unknown kind, or a bad budget.
        MachineUnavailableError: the machine that was asked for cannot be used.
        torch.OutOfMemoryError: a budget of host memory does not fit below a cgroup's limit, beside
            what was promised to others; it says to whom.
    """

    def __init__(
        self,
        machine: Machine | str | None = None,
        *,
        budgets: Mapping[str, int | str] | None = None,
        debug: bool = False,
        owner: str = "TensorManager",
    ) -> None:
        budgets = dict(budgets or {})
        for kind in budgets:
            require_kind(kind, KINDS)
        limits = {kind: parse_bytes(value, f"budgets[{kind!r}]") for kind, value in budgets.items()}
        super().__init__(machine_or_default(machine), limits, debug=debug, owner=owner)

    def empty(
        self,
        shape: int | Sequence[int],
        dtype: torch.dtype,
        kind: str = "device",
        numa: int | None = None,
    ) -> Tensor:
        """An uninitialised contiguous tensor.

        Args:
            shape: of the tensor.
            dtype: of the tensor.
            kind: ``"device"`` gives a device tensor, the others a CPU tensor: over ``"pinned"``
                memory, which kernels read in place; over ``"managed"`` memory, which stays on the
                host, is read there by kernels, and moves by ``prefetch``; or over ``"system"``
                memory, which kernels read where the machine lets them.
            numa: the NUMA node for host memory; ``None`` leaves it to the system.

        Raises:
            ValueError: an unknown kind or node, or a kind that this machine does not have.
            torch.OutOfMemoryError: its budget or the system has no room for it.
            RuntimeError: the memory cannot be bound to ``numa``; the manager is closed.

        Warns:
            RuntimeWarning: some of the memory is not on ``numa``.
        """
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(size < 0 for size in shape):
            raise ValueError(f"shape expects sizes of 0 or more, got {shape}")
        require_kind(kind, KINDS)
        self._require_served(kind)
        if numa is not None:
            _require_node(kind, numa)
        nbytes = math.prod(shape) * dtype.itemsize
        with self._entered():
            if kind == "device":
                return self._device_tensor(shape, dtype, nbytes)
            if nbytes == 0:
                return torch.empty(shape, dtype=dtype, device="cpu")
            block = self._pool(kind).allocate(nbytes, numa)
            try:
                tensor = tensor_over(block, dtype, self._graveyard)
            except BaseException:  # a dtype that torch cannot lay over memory
                self._count_out(block)
                raise
            self._blocks[block.address] = block
            return tensor.view(shape)

    def move(self, tensor: Tensor, kind: str, numa: int | None = None) -> Tensor:
        """A contiguous copy of any tensor in another kind; the tensor itself if it is there.

        For setting up, not for training loops: the host waits until the copy is done. From and to
        managed memory a copy engine is slow (7 GB/s on an H200): use ``prefetch`` and a kernel.

        Raises:
            ValueError, torch.OutOfMemoryError, RuntimeError: as ``empty``.
        """
        require_kind(kind, KINDS)
        with self._entered():
            block = self._block(tensor)
        node = block.segment.node if block is not None and block.segment is not None else None
        if block is not None and block.kind == kind and numa in (None, node):
            return tensor
        machine = self.machine
        if machine is not None:
            machine.synchronize_all()  # what is queued may still write the source
        source = tensor.detach().contiguous()
        result = self.empty(tuple(source.shape), source.dtype, kind, numa)
        if machine is None or (kind != "device" and self._on_host(source)):
            return result.copy_(source)
        machine.copy(result, source, stream=machine.current_stream())
        machine.synchronize_all()
        return result

    def advise(self, tensor: Tensor, advice: str, location: str | torch.device = "host") -> None:
        """Advise the driver on managed memory (or system memory that the device reaches).

        Args:
            tensor: contiguous, from this manager.
            advice: ``"preferred_location"``, ``"accessed_by"``, ``"read_mostly"``, or one of them
                with ``"unset_"`` before it. A tensor starts with preferred location host, accessed
                by the device, and its memory returns to that.
            location: ``"device"``, ``"host"`` or ``"host:N"`` for NUMA node N; or a torch device.

        Raises:
            ValueError: unknown advice or location, or another memory kind.
        """
        if advice not in ADVICE:
            raise ValueError(f"advice expects one of {', '.join(ADVICE)}, got {advice!r}")
        to_device, node = location_of(location, self.machine)
        with self._entered():
            block = self._migrating(tensor, "advise")
            driver = self._driver()
            if driver is not None:
                block.advised = True
                driver.advise(
                    tensor.data_ptr(), tensor.nbytes, advice, to_device=to_device, node=node
                )

    def prefetch(
        self,
        tensors: Tensor | Iterable[Tensor],
        location: str | torch.device,
        *,
        stream: Stream | torch.cuda.Stream,
    ) -> None:
        """Queue the migration of managed memory; several tensors in one call where CUDA has it.

        Args:
            tensors: one or several, contiguous, from this manager.
            location: as for ``advise``.
            stream: what it runs on.

        Raises:
            ValueError: an unknown location, or another memory kind.
        """
        to_device, node = location_of(location, self.machine)
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        queue = own_stream(stream, self.machine)
        with self._entered():
            for tensor in tensors:
                self._migrating(tensor, "prefetch")
            driver = self._driver()
            if driver is not None and tensors:
                driver.prefetch_batch(
                    [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors],
                    to_device=to_device,
                    stream=queue.handle,  # type: ignore[attr-defined]
                    node=node,
                )

    def discard(
        self, tensors: Tensor | Iterable[Tensor], *, stream: Stream | torch.cuda.Stream
    ) -> None:
        """Queue that managed tensors' contents are no longer needed: then nothing moves them.

        Reading one before it is written again gives anything.

        Raises:
            ValueError: a view of part of a tensor, or another memory kind.
            RuntimeError: the driver or its bindings are older than CUDA 13.0.
        """
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        queue = own_stream(stream, self.machine)
        with self._entered():
            for tensor in tensors:
                block = self._migrating(tensor, "discard", kinds=("managed",))
                if tensor.nbytes != block.nbytes:
                    raise ValueError(
                        f"discard expects whole tensors, got a view of {tensor.nbytes:,} of "
                        f"{block.nbytes:,} bytes"
                    )
            if tensors:
                assert self.machine is not None, "managed tensors have one"
                forget(self.machine, self._driver(), tensors, queue)

    # -- inner workings

    def _device_tensor(self, shape: Sequence[int], dtype: torch.dtype, nbytes: int) -> Tensor:
        assert self.machine is not None, "refused before"
        budget, held = self._budgets.get("device"), self._device.in_use
        if budget is not None and held + nbytes > budget:
            raise torch.OutOfMemoryError(
                f"{self.owner}: {nbytes:,} bytes of device memory do not fit. Budget: {budget:,} "
                f"bytes; in use: {held:,}"
            )
        tensor = self.machine.empty(shape, dtype)
        if nbytes:
            storage = tensor.untyped_storage()
            block = Block("device", storage.data_ptr(), nbytes)
            self._blocks[block.address] = block
            self._device.add(nbytes)
            ledger.add("device", self.owner, nbytes)
            death = weakref.finalize(storage, self._graveyard.bury, block)
            death.atexit = False
        return tensor

    def _pool(self, kind: str) -> Pool:
        pool = self._pools.get(kind)
        if pool is None:
            budget = self._budgets.get(kind)
            follows = kind == "managed" and budget is None
            if follows:
                budget = fair_share()
            pool = Pool(
                kind, self.machine, self.owner, budget, follows, promise=self._promises.get(kind)
            )
            self._pools[kind] = pool
        return pool

    def _require_served(self, kind: str) -> None:
        if self.machine is None:
            if kind != "system":
                raise ValueError(
                    f"kind {kind!r} needs a GPU or the virtual machine; without, there is 'system'"
                )
        elif kind == "managed" and self.machine.kind == "cuda":
            driver = self._driver()
            assert driver is not None, "it is a CUDA machine"
            if not driver.attribute("CONCURRENT_MANAGED_ACCESS"):
                raise ValueError(
                    f"kind 'managed' needs ConcurrentManagedAccess, which {self.machine.device} "
                    "does not have"
                )

    def _on_host(self, tensor: Tensor) -> bool:
        """Whether it is in host memory; on the virtual machine, other CPU tensors are in "HBM"."""
        with self._entered():
            block = self._block(tensor)
        if block is None:
            return tensor.is_cpu and self.machine is not None and self.machine.kind == "cuda"
        return block.kind != "device"

    def _migrating(
        self, tensor: Tensor, what: str, kinds: Sequence[str] = ("managed", "system")
    ) -> Block:
        block = self._require_block(tensor)
        driver = self._driver()
        reached = driver is not None and driver.attribute("PAGEABLE_MEMORY_ACCESS")
        allowed = kinds if reached else ("managed",)
        if block.kind not in allowed:
            raise ValueError(f"{what} expects {' or '.join(allowed)} memory, got {block.kind}")
        if not tensor.is_contiguous() or not tensor.numel():
            raise ValueError(f"{what} expects a contiguous tensor, not empty, got {tensor.shape}")
        return block


def _require_node(kind: str, node: int) -> None:
    if kind == "device":
        raise ValueError(f"numa expects host memory, got numa={node} for kind 'device'")
    there = nodes.memory_nodes()
    if node not in there:
        raise ValueError(
            f"numa expects a node with memory ({', '.join(map(str, there))}), got {node}"
        )
