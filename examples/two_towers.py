"""Two towers, one training step: ``placer optimize examples/two_towers.py:build``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from graphs.models import TwoTowers


def build() -> tuple[TwoTowers, tuple[Tensor, Tensor, Tensor], Callable[..., Tensor]]:
    """Return the model, (left, right, matches) of a batch of 256 pairs, and the loss."""
    torch.manual_seed(0)
    model = TwoTowers().train()
    left, right = torch.randn(256, 1024), torch.randn(256, 1024)
    matches = torch.randint(2, (256,)).float()
    return model, (left, right, matches), loss


def loss(logits: Tensor, matches: Tensor) -> Tensor:
    """Return the binary cross-entropy of whether each pair matches."""
    return F.binary_cross_entropy_with_logits(logits, matches)
