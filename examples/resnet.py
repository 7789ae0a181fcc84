"""ResNet-50, one training step: ``placer optimize examples/resnet.py:build``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from graphs.models import ResNet

BATCH = 2
PIXELS = 224  # per side


def build() -> tuple[ResNet, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """Return the model, (images, labels), and the loss."""
    torch.manual_seed(0)
    model = ResNet().train()
    images = torch.randn(BATCH, 3, PIXELS, PIXELS)
    return model, (images, torch.randint(1000, (BATCH,))), F.cross_entropy
