"""Two towers that meet in a dot product, as in retrieval: two devices could halve the step time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoTowersConfig:
    """Sizes of each tower."""

    features: int = 1024
    layers: int = 4


class TwoTowers(nn.Module):
    """Two stacks of linear layers with ReLU between them; they share no parameters."""

    def __init__(self, config: TwoTowersConfig | None = None) -> None:
        super().__init__()
        config = config or TwoTowersConfig()
        self.left = _tower(config)
        self.right = _tower(config)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Map features (B, F) and (B, F) to one logit per pair, (B,)."""
        scale: float = left.shape[1] ** -0.5
        logits: Tensor = (self.left(left) * self.right(right)).sum(1) * scale
        return logits


def _tower(config: TwoTowersConfig) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(config.features, config.features)]
    for _ in range(config.layers - 1):
        layers += [nn.ReLU(), nn.Linear(config.features, config.features)]
    return nn.Sequential(*layers)


def build() -> tuple[TwoTowers, tuple[Tensor, Tensor, Tensor], Callable[..., Tensor]]:
    """Return the model, (left, right, matches) of a batch of 256 pairs, and the loss."""
    torch.manual_seed(0)
    model = TwoTowers().train()
    left, right = torch.randn(256, 1024), torch.randn(256, 1024)
    matches = torch.randint(2, (256,)).float()
    return model, (left, right, matches), F.binary_cross_entropy_with_logits
