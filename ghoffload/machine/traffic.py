"""What a machine was asked to move and to launch, counted when it is queued."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass
class Traffic:
    """Counts since the machine was made, or since ``reset``.

    Attributes:
        h2d_bytes: bytes of copies queued on the h2d stream.
        d2h_bytes: bytes of copies queued on the d2h streams.
        copies: copies queued on any stream.
        launches: kernels queued on any stream.
    """

    h2d_bytes: int = 0
    d2h_bytes: int = 0
    copies: int = 0
    launches: int = 0

    def reset(self) -> None:
        """Count from zero again."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, 0)
