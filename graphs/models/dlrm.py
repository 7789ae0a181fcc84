"""Deep learning recommendation model (Naumov et al., arXiv 1906.00091, section 2).

Nearly all of its bytes are in the embedding tables, nearly all of its FLOPs in the two networks:
the tables can be spread over devices, each of which sends only the rows that were looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CRITEO_KAGGLE_ROWS: Final = (
    *(1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194),
    *(27, 14_992, 5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
"""Distinct values of the 26 categories of the Criteo Kaggle data set (section 5 of the paper)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DlrmConfig:
    """Sizes of the model, by default those of the paper for the Criteo Kaggle data set.

    ``rows`` gives the rows of each table, ``bottom`` and ``top`` the outputs of the hidden layers:
    the bottom network ends in ``features``, the top network in one logit.
    """

    dense: int = 13
    rows: tuple[int, ...] = CRITEO_KAGGLE_ROWS
    features: int = 16
    bottom: tuple[int, ...] = (512, 256, 64)
    top: tuple[int, ...] = (512, 256)


class Interaction(nn.Module):
    """Dot products of all pairs of feature vectors."""

    def forward(self, vectors: Tensor) -> Tensor:
        """Map (B, V, F) to (B, V (V - 1) / 2), pair by pair."""
        count = vectors.shape[1]
        first, second = torch.tril_indices(count, count, -1, device=vectors.device)
        return torch.bmm(vectors, vectors.transpose(1, 2))[:, first, second]


class Dlrm(nn.Module):
    """Bottom network and embedding tables, their interaction, top network.

    At the published sizes: 540,201,232 parameters in the tables, 475,985 in the networks.
    """

    def __init__(self, config: DlrmConfig | None = None) -> None:
        super().__init__()
        config = config or DlrmConfig()
        vectors = len(config.rows) + 1
        joined = config.features + vectors * (vectors - 1) // 2
        self.bottom = _network(config.dense, *config.bottom, config.features)
        self.bottom.append(nn.ReLU())
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, config.features, mode="sum") for rows in config.rows
        )
        self.interaction = Interaction()
        self.top = _network(joined, *config.top, 1)

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:
        """Map numbers (B, dense) and table rows (B, tables, bag) to one logit per sample, (B,).

        The rows of a bag are added up.
        """
        numbers = self.bottom(dense)
        looked_up = [table(bag) for table, bag in zip(self.tables, indices.unbind(1), strict=True)]
        pairs = self.interaction(torch.stack([numbers, *looked_up], 1))
        logits: Tensor = self.top(torch.cat([numbers, pairs], 1)).squeeze(1)
        return logits


def _network(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.ReLU(), nn.Linear(inputs, outputs)]
    return nn.Sequential(*layers[1:])


def build() -> tuple[Dlrm, tuple[Tensor, Tensor, Tensor], Callable[..., Tensor]]:
    """Return the model, (numbers, four table rows each, clicks) of 512 samples, and the loss.

    Tables have at most 50,000 rows; the largest of the paper has ten million.
    """
    torch.manual_seed(0)
    config = DlrmConfig(rows=tuple(min(rows, 50_000) for rows in DlrmConfig().rows))
    model = Dlrm(config).train()
    dense = torch.randn(512, config.dense)
    indices = torch.stack([torch.randint(rows, (512, 4)) for rows in config.rows], 1)
    clicks = torch.randint(2, (512,)).float()
    return model, (dense, indices, clicks), F.binary_cross_entropy_with_logits
