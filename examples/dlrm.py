"""Recommendation model, one training step: ``placer optimize examples/dlrm.py:build``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from graphs.models import Dlrm, DlrmConfig

BATCH = 512
BAG = 4  # table rows per sample
MOST_ROWS = 50_000  # per table; the largest of the paper has ten million


def build() -> tuple[Dlrm, tuple[Tensor, Tensor, Tensor], Callable[..., Tensor]]:
    """Return the model, (numbers, table rows, clicks), and the loss."""
    torch.manual_seed(0)
    config = DlrmConfig(rows=tuple(min(rows, MOST_ROWS) for rows in DlrmConfig().rows))
    model = Dlrm(config).train()
    dense = torch.randn(BATCH, config.dense)
    indices = torch.stack([torch.randint(rows, (BATCH, BAG)) for rows in config.rows], 1)
    clicks = torch.randint(2, (BATCH,)).float()
    return model, (dense, indices, clicks), F.binary_cross_entropy_with_logits
