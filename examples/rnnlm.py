"""Recurrent language model, one training step: ``placer optimize examples/rnnlm.py:build``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from graphs.models import Rnnlm, RnnlmConfig

BATCH = 20
TOKENS = 10  # the paper unrolls 35


def build() -> tuple[Rnnlm, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """Return the model, (tokens, next tokens), and the loss."""
    torch.manual_seed(0)
    # Without dropout, so that placed and unplaced runs give the same numbers.
    config = RnnlmConfig(dropout=0.0)
    model = Rnnlm(config).train()
    text = torch.randint(config.vocabulary, (BATCH, TOKENS + 1))
    return model, (text[:, :-1].contiguous(), text[:, 1:].contiguous()), loss


def loss(logits: Tensor, next_tokens: Tensor) -> Tensor:
    """Return the cross-entropy of all next tokens."""
    return F.cross_entropy(logits.flatten(0, 1), next_tokens.flatten())
