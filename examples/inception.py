"""Inception-V3, one training step: ``placer optimize examples/inception.py:build``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from graphs.models import InceptionConfig, InceptionV3

AUXILIARY_WEIGHT = 0.4  # of the auxiliary classifier's loss, as in common training recipes


def build() -> tuple[InceptionV3, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """Return the model, (images, labels) of a batch of two, and the loss."""
    torch.manual_seed(0)
    # Without dropout, so that placed and unplaced runs give the same numbers.
    model = InceptionV3(InceptionConfig(dropout=0.0)).train()
    images = torch.randn(2, 3, 299, 299)
    labels = torch.randint(1000, (2,))
    return model, (images, labels), loss


def loss(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Return the weighted sum of the cross-entropies of both classifiers."""
    logits, auxiliary = output
    return F.cross_entropy(logits, labels) + AUXILIARY_WEIGHT * F.cross_entropy(auxiliary, labels)
