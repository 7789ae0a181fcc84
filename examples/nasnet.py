"""NASNet-A (4 @ 1056), one training step: ``placer optimize examples/nasnet.py:build``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from graphs.models import NasNet, NasNetConfig

BATCH = 2
PIXELS = 224  # per side


def build() -> tuple[NasNet, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """Return the model, (images, labels), and the loss."""
    torch.manual_seed(0)
    # Without dropout, so that placed and unplaced runs give the same numbers.
    model = NasNet(NasNetConfig(dropout=0.0)).train()
    images = torch.randn(BATCH, 3, PIXELS, PIXELS)
    return model, (images, torch.randint(1000, (BATCH,))), F.cross_entropy
