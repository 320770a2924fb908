"""What stands for a saved tensor while it is away, and what it was.

Note [the life of a spill]
    LEAVING: its bytes are still in HBM and a copy to the host is queued  ->  AWAY: the stream that
    owns the bytes has waited for the copy and they were let go  ->  COMING: HBM was taken again and
    a copy from the host is queued  ->  BACK: a consumer has waited for it; when all who share it
    were served the memory is theirs alone  ->  AWAY (for a second backward)  ->  DEAD: nobody can
    ask for it any more and the host memory was given back. A spill that is asked for while LEAVING
    is served from HBM and nothing comes back.

Note [versions]
    Autograd compares versions of saved tensors, and stops to where hooks are set. So a handle has a
    ``probe``: a tensor without memory that shares the version counter of the saved one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ghoffload.machine.protocol import Event, Stream

if TYPE_CHECKING:
    from ghoffload.activations.passes import Pass
    from ghoffload.activations.slabs import Block


class State(enum.Enum):
    """Where the bytes are: Note [the life of a spill]."""

    LEAVING = "leaving"
    AWAY = "away"
    COMING = "coming"
    BACK = "back"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [start, end) of a storage, or of a compact copy of a tensor (``compact``)."""

    start: int
    end: int
    compact: bool = False

    def covers(self, other: Extent) -> bool:
        return not self.compact and self.start <= other.start and other.end <= self.end


class Spill:
    """Some bytes of one storage, offloaded once for all tensors that look at them.

    Attributes:
        extent: which bytes of the storage.
        state: Note [the life of a spill].
        nbytes: in HBM.
        moved_bytes: that cross the link: fewer where they are coded.
        coded: dtype of the elements that were coded in fp8; ``None`` for bytes as they are.
        source: the bytes in HBM while LEAVING: uint8, 1-D; the codes where coded.
        back: the bytes in HBM while COMING or BACK; coded ones once they are decoded.
        storage: whether the storage is still alive; of a compact copy, the one it was made of.
        version: the saved tensor's when its bytes were queued to leave.
        block: host memory.
        left, arrived: when the copies are done.
        stream: the one that ``back`` was taken from.
        own_holders: tensors of ours that look at the storage while LEAVING; 0 of a copy of it.
        reloaded: whether a copy from ``block`` was ever queued.
        holders: handles that may still ask for it.
        unserved: those of them that have not asked since it left.
        home, index: the pass it belongs to and its number there.
    """

    __slots__ = (
        "__weakref__",
        "arrived",
        "back",
        "block",
        "coded",
        "extent",
        "holders",
        "home",
        "index",
        "left",
        "moved_bytes",
        "nbytes",
        "own_holders",
        "reloaded",
        "source",
        "state",
        "storage",
        "stream",
        "unserved",
        "version",
    )  # fmt: skip

    def __init__(
        self,
        extent: Extent,
        *,
        source: Tensor,
        nbytes: int,
        coded: torch.dtype | None,
        storage: StorageWeakRef,
        version: int | None,
        block: Block,
        left: Event,
        arrived: Event,
        own_holders: int,
        home: Pass,
        index: int,
    ) -> None:
        self.extent = extent
        self.state = State.LEAVING
        self.nbytes, self.moved_bytes = nbytes, source.numel()
        self.coded = coded
        self.source: Tensor | None = source
        self.back: Tensor | None = None
        self.storage = storage
        self.version = version
        self.block = block
        self.left, self.arrived = left, arrived
        self.own_holders = own_holders
        self.reloaded = False
        self.stream: Stream | None = None
        self.holders = 0
        self.unserved = 0
        self.home, self.index = home, index


class Handle:
    """What autograd keeps in a saved tensor's place.

    Args:
        tensor: the saved tensor.
        home: the pass it was saved in.
    """

    __slots__ = ("_name", "_probe", "_version", "home")

    def __init__(self, tensor: Tensor, home: Pass) -> None:
        self.home = home
        home.handles += 1
        self._version = version_of(tensor)
        self._name = tensor.grad_fn.name() if tensor.grad_fn is not None else "a leaf"
        self._probe: Tensor | None = None
        if self._version is not None:
            self._probe = tensor.detach()

    def check(self) -> None:
        """Raise as autograd would where the saved tensor was changed in place.

        Raises:
            RuntimeError: it was.
        """
        if self._probe is not None and self._probe._version != self._version:
            raise RuntimeError(
                "a tensor that backward needs was changed in place after it was saved: the output "
                f"of {self._name}, expected at version {self._version}, is at version "
                f"{self._probe._version}. Change a copy of it instead (x = x + 1, not x += 1)"
            )


class Kept(Handle):
    """A saved tensor that stays in HBM. Its probe is an alias of it, without its history.

    Args:
        index: its number in the pass, where it could have been moved.
    """

    __slots__ = ("_tensor", "index")

    def __init__(self, tensor: Tensor, home: Pass, index: int | None = None) -> None:
        super().__init__(tensor, home)
        self._tensor = tensor.detach() if self._probe is None else self._probe
        self.index = index

    @property
    def tensor(self) -> Tensor:
        return self._tensor

    def __del__(self) -> None:
        self.home.mover.forget(self.home)


class Moved(Handle):
    """A saved tensor whose bytes are in a spill."""

    __slots__ = ("_geometry", "served", "spill")

    def __init__(self, tensor: Tensor, home: Pass, spill: Spill) -> None:
        super().__init__(tensor, home)
        if self._probe is not None:
            self._probe.data = _nothing(tensor.dtype, tensor.device)
        start = tensor.storage_offset() * tensor.element_size() - spill.extent.start
        strides: tuple[int, ...] = tensor.stride()
        self._geometry = (tensor.dtype, tuple(tensor.shape), strides, start)
        self.spill = spill
        self.served = False
        spill.holders += 1
        spill.unserved += 1

    def of(self, memory: Tensor) -> Tensor:
        """The saved tensor, given the bytes of the spill's extent."""
        dtype, shape, strides, start = self._geometry
        if self.spill.extent.compact:
            dense = memory.view(dtype).view(shape)
            return torch.empty_strided(shape, strides, dtype=dtype, device=memory.device).copy_(
                dense
            )
        whole = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return whole.as_strided(shape, strides, start // dtype.itemsize)

    def of_original(self, storage: Any) -> Tensor:
        """The saved tensor, given the storage it was saved with."""
        dtype, shape, strides, start = self._geometry
        offset = (start + self.spill.extent.start) // dtype.itemsize
        return torch.empty(0, dtype=dtype, device=storage.device).set_(
            storage, offset, shape, strides
        )

    def __del__(self) -> None:
        self.home.mover.forget(self.home, self.spill, served=self.served)


@lru_cache(None)
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def version_of(tensor: Tensor) -> int | None:
    """The version of a tensor; inference tensors have none."""
    return None if tensor.is_inference() else tensor._version


def extent_of(tensor: Tensor) -> Extent:
    """The bytes to move for a tensor.

    All of its storage where it looks at half of it or more, so that views that are saved later
    (queries, keys and values of one product) find it there; else what lies between its first and
    its last byte; else, where most of that is not its own, a compact copy.
    """
    item, total = tensor.element_size(), tensor.untyped_storage().nbytes()
    total -= total % item
    start = int(tensor.storage_offset()) * item
    span = item + sum(
        (n - 1) * abs(s) * item for n, s in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if 2 * span >= total:
        return Extent(0, total)
    if span <= 2 * tensor.numel() * item:
        # As far behind a multiple of 256 as before: what kernels are fast on stays aligned.
        return Extent(start - start % 256, start + span)
    return Extent(start, start + tensor.numel() * item, compact=True)
