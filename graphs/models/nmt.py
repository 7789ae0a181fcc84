"""Neural machine translation: LSTM encoder and decoder, unrolled, with attention.

Attention is the "general" form of Luong et al. (arXiv 1508.04025, section 3.1), without input
feeding: one decoder step waits for the cells of the step before, but not for its attention, so
layers, steps, attention and projection overlap along a wavefront.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graphs.models.rnnlm import next_token_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class NmtConfig:
    """Sizes of the network; both languages share the size of their vocabulary."""

    vocabulary: int = 8000
    hidden: int = 512
    layers: int = 2


State = tuple[Tensor, Tensor]


class Recurrent(nn.Module):
    """An embedding and a stack of LSTM cells, advanced token by token."""

    def __init__(self, config: NmtConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(
            nn.LSTMCell(config.hidden, config.hidden) for _ in range(config.layers)
        )

    def forward(
        self, tokens: Tensor, states: list[State] | None = None
    ) -> tuple[list[Tensor], list[State]]:
        """Run over tokens (B, T), from zero states if there are none.

        Returns:
            The top layer's output (B, hidden) of each of the T steps, and each layer's last state.
        """
        embedded = self.embedding(tokens)
        if states is None:
            zeros = embedded.new_zeros(tokens.shape[0], embedded.shape[2])
            states = [(zeros, zeros)] * len(self.layers)
        states = list(states)
        outputs: list[Tensor] = []
        for step in embedded.unbind(1):
            x = step
            for number, cell in enumerate(self.layers):
                states[number] = cell(x, states[number])
                x = states[number][0]
            outputs.append(x)
        return outputs, states


class Attention(nn.Module):
    """Attention of a decoder output over the encoder's memory."""

    def __init__(self, config: NmtConfig) -> None:
        super().__init__()
        self.score = nn.Linear(config.hidden, config.hidden, bias=False)
        self.combine = nn.Linear(2 * config.hidden, config.hidden, bias=False)

    def forward(self, query: Tensor, memory: Tensor) -> Tensor:
        """Map a query (B, H) and a memory (B, S, H) to an attentional output (B, H)."""
        scores = torch.bmm(memory, self.score(query).unsqueeze(2))
        context = (torch.softmax(scores, 1) * memory).sum(1)
        return torch.tanh(self.combine(torch.cat([context, query], 1)))


class Nmt(nn.Module):
    """Encoder, decoder with attention, and projection to the target vocabulary."""

    def __init__(self, config: NmtConfig | None = None) -> None:
        super().__init__()
        config = config or NmtConfig()
        self.encoder = Recurrent(config)
        self.decoder = Recurrent(config)
        self.attention = Attention(config)
        self.projection = nn.Linear(config.hidden, config.vocabulary)

    def forward(self, source_tokens: Tensor, target_tokens: Tensor) -> Tensor:
        """Map tokens (B, S) and (B, T) to logits (B, T, vocabulary) of the next target token."""
        encoded, states = self.encoder(source_tokens)
        memory = torch.stack(encoded, 1)
        decoded, _ = self.decoder(target_tokens, states)
        logits = [self.projection(self.attention(output, memory)) for output in decoded]
        return torch.stack(logits, 1)


def build() -> tuple[Nmt, tuple[Tensor, Tensor, Tensor], Callable[..., Tensor]]:
    """Return the model, (source, target, next tokens), 32 sentences of ten tokens, and the loss."""
    torch.manual_seed(0)
    config = NmtConfig()
    model = Nmt(config).train()
    source = torch.randint(config.vocabulary, (32, 10))
    target = torch.randint(config.vocabulary, (32, 10 + 1))
    inputs = source, target[:, :-1].contiguous(), target[:, 1:].contiguous()
    return model, inputs, next_token_loss
