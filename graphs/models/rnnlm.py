"""Recurrent language model (Zaremba et al., arXiv 1409.2329), its LSTM cells unrolled.

Dropout is on the connections between layers and never on those between steps (section 3.1).
Unrolled, layers and steps overlap along a wavefront: cell (t, l) waits for (t-1, l) and (t, l-1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class RnnlmConfig:
    """Sizes of the network; by default the medium one of the paper, on the Penn Treebank."""

    vocabulary: int = 10_000
    hidden: int = 650
    layers: int = 2
    dropout: float = 0.5


class Rnnlm(nn.Module):
    """Embedding, a stack of LSTM cells advanced token by token, projection to the vocabulary."""

    def __init__(self, config: RnnlmConfig | None = None) -> None:
        super().__init__()
        config = config or RnnlmConfig()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(
            nn.LSTMCell(config.hidden, config.hidden) for _ in range(config.layers)
        )
        self.dropout = nn.Dropout(config.dropout)
        self.projection = nn.Linear(config.hidden, config.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, T) to logits (B, T, vocabulary) of the next token, from zero states."""
        embedded = self.embedding(tokens)
        zeros = embedded.new_zeros(embedded.shape[0], embedded.shape[2])
        states = [(zeros, zeros)] * len(self.layers)
        logits: list[Tensor] = []
        for step in embedded.unbind(1):
            x = step
            for number, cell in enumerate(self.layers):
                states[number] = cell(self.dropout(x), states[number])
                x = states[number][0]
            logits.append(self.projection(self.dropout(x)))
        return torch.stack(logits, 1)


def build() -> tuple[Rnnlm, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """Return the model without dropout, (tokens, next tokens), and the loss.

    Ten steps are unrolled; the paper unrolls 35.
    """
    torch.manual_seed(0)
    config = RnnlmConfig(dropout=0.0)
    model = Rnnlm(config).train()
    text = torch.randint(config.vocabulary, (20, 10 + 1))
    return model, (text[:, :-1].contiguous(), text[:, 1:].contiguous()), next_token_loss


def next_token_loss(logits: Tensor, next_tokens: Tensor) -> Tensor:
    """Return the cross-entropy of all next tokens, from logits (B, T, V) and tokens (B, T)."""
    return F.cross_entropy(logits.flatten(0, 1), next_tokens.flatten())
