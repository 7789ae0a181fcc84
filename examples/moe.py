"""Mixture of experts, one training step: ``placer optimize examples/moe.py:build``.

Each expert is a separate module, so that they can be placed one by one; ``build_stacked`` keeps the
experts of a layer in one weight instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from graphs.models import Moe, MoeConfig

BATCH = 2
TOKENS = 64
CONFIG = MoeConfig(
    vocabulary=4000, hidden=256, intermediate=512, layers=4, heads=8, key_value_heads=2
)


def build(config: MoeConfig = CONFIG) -> tuple[Moe, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """Return the model, (tokens, next tokens), and the loss."""
    torch.manual_seed(0)
    model = Moe(config).train()
    text = torch.randint(config.vocabulary, (BATCH, TOKENS + 1))
    return model, (text[:, :-1].contiguous(), text[:, 1:].contiguous()), loss


def build_stacked() -> tuple[Moe, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """Return the same model with the experts of a layer in one weight, and its inputs and loss."""
    return build(replace(CONFIG, stacked=True))


def loss(logits: Tensor, next_tokens: Tensor) -> Tensor:
    """Return the cross-entropy of all next tokens."""
    return F.cross_entropy(logits.flatten(0, 1), next_tokens.flatten())
