"""How a parameter's elements lie in memory, and when a gradient can be read beside them as is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


def _significant(size: tuple[int, ...], stride: tuple[int, ...]) -> list[tuple[int, int]]:
    """(stride, size) of the dimensions that matter, the innermost first."""
    return sorted((st, n) for n, st in zip(size, stride, strict=True) if n != 1)


def _row_major(size: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for n in reversed(size[1:]):
        strides.append(strides[-1] * max(n, 1))
    return tuple(reversed(strides))[: len(size)] if size else ()


@dataclass(frozen=True, slots=True)
class Layout:
    """The order of a parameter's elements in its state arrays.

    A parameter that fills its memory (contiguous, transposed, channels-last) keeps the order of
    its memory; any other is packed in row-major order.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        expected = 1
        for step, count in _significant(size, stride):
            if step != expected:
                return cls(size, _row_major(size))
            expected *= count
        return cls(size, stride)

    @property
    def row_major(self) -> bool:
        """Whether the last dimension is the innermost, and so on."""
        return _significant(self.size, self.stride) == _significant(
            self.size, _row_major(self.size)
        )

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor``'s memory, from its first element on, is its values in this order."""
        if tuple(tensor.shape) != self.size or tensor.is_neg() or tensor._is_zerotensor():
            return False  # a negative view's memory has the other sign, a zero tensor has none
        if tensor.stride() == self.stride or tensor.numel() == 0:
            return True
        return all(
            mine == theirs
            for n, mine, theirs in zip(self.size, self.stride, tensor.stride(), strict=True)
            if n != 1
        )

    def view(self, flat: Tensor) -> Tensor:
        """The parameter-shaped view of a 1-D tensor in this order."""
        return flat.as_strided(self.size, self.stride)
