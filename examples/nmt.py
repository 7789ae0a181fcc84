"""Translation with attention, one training step: ``placer optimize examples/nmt.py:build``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from graphs.models import Nmt, NmtConfig

BATCH = 32
TOKENS = 10  # of each sentence, in both languages


def build() -> tuple[Nmt, tuple[Tensor, Tensor, Tensor], Callable[..., Tensor]]:
    """Return the model, (source, target, next tokens), and the loss."""
    torch.manual_seed(0)
    config = NmtConfig()
    model = Nmt(config).train()
    source = torch.randint(config.vocabulary, (BATCH, TOKENS))
    target = torch.randint(config.vocabulary, (BATCH, TOKENS + 1))
    return model, (source, target[:, :-1].contiguous(), target[:, 1:].contiguous()), loss


def loss(logits: Tensor, next_tokens: Tensor) -> Tensor:
    """Return the cross-entropy of all next tokens."""
    return F.cross_entropy(logits.flatten(0, 1), next_tokens.flatten())
