"""The loss that the models here end with."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross entropy, in fp32.

    Args:
        logits: ``[batch, sequence, vocabulary]``.
        tokens: ``[batch, sequence + 1]``: each is predicted from those before it.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
