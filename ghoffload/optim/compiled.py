"""Steps inside ``torch.compile``: they run outside the graph.

Note [why not an operator]
    A step that were one registered operator would name all weights as mutated, and a graph that is
    functionalised clones what is mutated: every weight once more in HBM. Its host work (which
    bucket next, what is pending) must happen at every call, and torch's own ``backward()`` breaks
    the graph anyway. So a step is a clean break with a reason, and gives the bits of an eager one.
"""

from __future__ import annotations

from typing import Any

import torch

METHODS = ("step", "clip_grad_norm_")
REASON = (
    "the step moves state on streams of its own and runs outside compiled graphs; compile without "
    "fullgraph=True, or call step() outside the compiled function"
)


def leave_graphs(cls: Any) -> None:
    """Have the methods of an optimizer class run outside compiled graphs.

    Not when the class is made: torch's compiler takes 0.8 s to import. torch does so itself when
    an optimizer is built.
    """
    for name in METHODS:
        method = vars(cls)[name]
        if not getattr(method, "_torchdynamo_disable", False):
            setattr(cls, name, torch.compiler.disable(method, reason=REASON))
