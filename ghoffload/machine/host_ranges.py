"""HostRanges: the host memory a machine was told of, and what may be handed to it.

Note [pointers]
    Where the GPU and the host see each other's memory, a wrong pointer is no fault but a slow or
    stale read. So a kernel gets a host tensor only where the machine was told of its memory, and
    of a kind that the device reaches. In debug mode (``GHOFFLOAD_DEBUG=1``, or ``machine.debug``)
    every pointer of every copy is looked up, too: the memory must still be registered, copies by
    engine must find it pinned (from managed memory they are slow, from pageable memory they block
    the host), and memory bound to a NUMA node must be on the one nearest to the device. All this
    is answered by this registry: asking the driver costs microseconds a pointer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

HostKind = Literal["pinned", "managed", "system"]

DEBUG_VARIABLE = "GHOFFLOAD_DEBUG"


def debug_wanted() -> bool:
    """Whether the environment asks for debug mode."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


@dataclass(frozen=True, slots=True)
class HostRange:
    """One piece of host memory.

    Attributes:
        address: of its first byte.
        nbytes: its size.
        kind: its memory kind.
        node: the NUMA node it is bound to; ``None`` for none.
    """

    address: int
    nbytes: int
    kind: HostKind
    node: int | None = None


class HostRanges:
    """What a machine was told of, by address. Safe to read while another thread adds.

    Attributes:
        state: another object after each change.
    """

    def __init__(self) -> None:
        self._ranges: dict[int, HostRange] = {}
        self.state = object()

    def __contains__(self, address: int) -> bool:
        return address in self._ranges

    def __iter__(self) -> Iterator[HostRange]:
        return iter(list(self._ranges.values()))

    def add(self, found: HostRange) -> None:
        """Enter a range that no other begins at."""
        self._ranges[found.address] = found
        self.state = object()

    def remove(self, address: int) -> HostRange | None:
        """Forget the range that begins at ``address``."""
        found = self._ranges.pop(address, None)
        self.state = object()
        return found

    def of(self, tensor: Tensor) -> HostRange | None:
        """The range that holds a tensor's whole storage."""
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        end = start + storage.nbytes()
        for found in self:
            if found.address <= start and end <= found.address + found.nbytes:
                return found
        return None

    def check_kernel(
        self, tensor: Tensor, reached: frozenset[str], near: int | None, who: str, *, debug: bool
    ) -> None:
        """Refuse a host tensor that a kernel must not get: Note [pointers].

        Args:
            tensor: in host memory.
            reached: kinds that kernels of the device reach.
            near: the NUMA node nearest to the device.
            who: the kernel, for the message.
            debug: whether to look at the node.

        Raises:
            ValueError: it is of no memory the machine knows, or of a kind it does not reach.
        """
        found = self.of(tensor)
        if found is None or found.kind not in reached:
            kinds = ", ".join(kind for kind in ("pinned", "managed", "system") if kind in reached)
            was = "other host memory" if found is None else f"{found.kind} memory"
            raise ValueError(
                f"{who} expects tensors in HBM or in its own host memory ({kinds}), got {was} of "
                f"shape {tuple(tensor.shape)} and {tensor.dtype}"
            )
        if debug:
            _check_node(found, near, who)

    def check_copy(self, tensor: Tensor, near: int | None, who: str) -> None:
        """In debug mode, refuse the host side of a copy by engine: Note [pointers].

        Raises:
            ValueError: it is not in pinned memory that the machine knows, or far from the device.
        """
        found = self.of(tensor)
        if found is None or found.kind != "pinned":
            was = "memory that is not registered (any more)" if found is None else found.kind
            raise ValueError(
                f"{who} expects pinned memory of this machine on the host, got {was}, shape "
                f"{tuple(tensor.shape)} and {tensor.dtype}"
            )
        _check_node(found, near, who)


def _check_node(found: HostRange, near: int | None, who: str) -> None:
    if found.node is not None and near is not None and found.node != near:
        raise ValueError(
            f"{who} expects memory on NUMA node {near}, the nearest to the device, got memory "
            f"bound to node {found.node}"
        )
