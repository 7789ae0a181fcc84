"""Models of torch's own modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from benchmarks.coverage.case import BATCH, CLASSES, Case, Cases, classes, classifier, numbers

WORDS: Final = 50
TIME: Final = 7


class Calls(nn.Module):
    """Modules, and a function that calls them with the inputs."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


class Keywords(nn.Module):
    """Takes keywords, and further ones that it leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.mix = nn.Linear(16 + 4, CLASSES)

    def forward(self, tokens: Tensor, dense: Tensor, **others: Any) -> dict[str, Tensor]:
        mixed = torch.cat([self.words(tokens).mean(1), dense], 1)
        return {"mixed": mixed, "logits": self.mix(mixed)}


@dataclass
class Sample:
    """An input object, as loaders of data return it."""

    x: Tensor
    weight: Tensor


class TakesObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)

    def forward(self, sample: Sample) -> Tensor:
        scaled: Tensor = self.layer(sample.x) * sample.weight
        return scaled


class Scaled(torch.autograd.Function):
    """A function with a backward pass of its own."""

    @staticmethod
    def forward(context: Any, x: Any) -> Any:
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        (x,) = context.saved_tensors
        return gradient * 2 * x


class Fourier(nn.Module):
    """A convolution in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 9, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        back: Tensor = torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=16)
        return back


def _tokens(training: bool) -> tuple[Tensor]:
    return (torch.randint(WORDS, (BATCH, TIME)),)


def _language(kind: Callable[..., nn.Module], **options: Any) -> Callable[[], nn.Module]:
    width = 16 * (2 if options.get("bidirectional") else 1)
    return lambda: Calls(
        lambda own, tokens: own.head(own.layers(own.words(tokens))[0]),
        words=nn.Embedding(WORDS, 16),
        layers=kind(16, 16, batch_first=True, **options),
        head=nn.Linear(width, WORDS),
    )


def _packed(own: Any, x: Tensor, lengths: Tensor) -> Any:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return own.head(pad_packed_sequence(own.layers(packed)[0], batch_first=True)[0])


def _cells(own: Any, x: Tensor) -> Any:
    state = None
    for step in x.unbind(1):
        state = own.cell(step, state)
    assert state is not None
    return own.head(state[0])


def _attended(own: Any, x: Tensor) -> Any:
    return own.attention(x, x, x)


def _two_sequences(training: bool) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, TIME, 16), torch.randn(BATCH, TIME, 16)


def _sampled(own: Any, x: Tensor) -> Any:
    theta = own.where(x.flatten(1)).view(-1, 2, 3)
    return F.grid_sample(
        x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False
    )


def _scaled(own: Any, x: Tensor) -> Any:
    apply: Any = Scaled.apply
    return apply(own.body(x))


def _branch(own: Any, x: Tensor) -> Any:
    return own.left(x) if x.sum() > 0 else own.right(x)


def _mlp() -> nn.Module:
    norm, drop = nn.BatchNorm1d(16), nn.Dropout(0.1)
    return nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), drop, nn.Linear(16, CLASSES))


def _autoencoder() -> nn.Module:
    down = [nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 16, 3, 2, 1)]
    up = [nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.InstanceNorm2d(8, affine=True), nn.GELU()]
    return nn.Sequential(*down, *up, nn.ConvTranspose2d(8, 3, 4, 2, 1))


def _ctc(output: Tensor, labels: Tensor) -> Tensor:
    lengths = torch.full((BATCH,), TIME), torch.full((BATCH,), 2)
    return F.ctc_loss(output.log_softmax(-1).transpose(0, 1), labels, *lengths)


VECTOR: Final = numbers((BATCH, 8))
SEQUENCE: Final = numbers((BATCH, TIME, 16))
SQUARE: Final = numbers((BATCH, 3, 16, 16))

CASES: Final[Cases] = {
    "mlp with batch norm": Case(_mlp, VECTOR, F.cross_entropy, classes),
    "lstm": Case(_language(nn.LSTM, num_layers=2), _tokens),
    "bidirectional lstm": Case(_language(nn.LSTM, bidirectional=True), _tokens),
    "gru": Case(_language(nn.GRU), _tokens),
    "rnn": Case(_language(nn.RNN), _tokens),
    "lstm with projection": Case(
        lambda: Calls(lambda own, x: own.layers(x), layers=nn.LSTM(16, 16, proj_size=8)), SEQUENCE
    ),
    "lstm cells": Case(
        lambda: Calls(_cells, cell=nn.LSTMCell(16, 16), head=nn.Linear(16, 3)), SEQUENCE
    ),
    "packed gru": Case(
        lambda: Calls(_packed, layers=nn.GRU(16, 16, batch_first=True), head=nn.Linear(16, 3)),
        lambda training: (torch.randn(BATCH, TIME, 16), torch.randint(1, TIME + 1, (BATCH,))),
    ),
    "transformer": Case(lambda: nn.Transformer(16, 2, 1, 1, 32, batch_first=True), _two_sequences),
    "transformer encoder": Case(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
        SEQUENCE,
    ),
    "attention with weights": Case(
        lambda: Calls(_attended, attention=nn.MultiheadAttention(16, 2, batch_first=True)),
        SEQUENCE,
    ),
    "convolutional autoencoder": Case(_autoencoder, SQUARE),
    "convolutions in 3d": Case(
        lambda: nn.Sequential(
            nn.Conv3d(1, 4, 3), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(4, 4, 1)
        ),
        numbers((BATCH, 1, 8, 8, 8)),
    ),
    "pixel shuffle": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.PixelShuffle(2), nn.PReLU()),
        SQUARE,
    ),
    "spatial transformer": Case(lambda: Calls(_sampled, where=nn.Linear(3 * 16 * 16, 6)), SQUARE),
    "spectral norm": classifier(
        lambda: nn.Sequential(
            parametrizations.spectral_norm(nn.Conv2d(3, 8, 3)),
            nn.LeakyReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            parametrizations.spectral_norm(nn.Linear(8, CLASSES)),
        ),
        16,
    ),
    "weight norm": Case(
        lambda: nn.Sequential(
            parametrizations.weight_norm(nn.Conv1d(4, 8, 3)), nn.Tanh(), nn.Conv1d(8, 4, 3)
        ),
        numbers((BATCH, 4, 16)),
    ),
    "bag of words": Case(
        lambda: nn.Sequential(nn.EmbeddingBag(WORDS, 16), nn.Linear(16, CLASSES)),
        _tokens,
        F.cross_entropy,
        classes,
    ),
    "ctc": Case(_language(nn.GRU), _tokens, _ctc, lambda: torch.randint(1, WORDS, (BATCH, 2))),
    "checkpointing": Case(
        lambda: Calls(
            lambda own, x: own.head(checkpoint(own.body, x, use_reentrant=False)),
            body=nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)),
            head=nn.Linear(8, 3),
        ),
        VECTOR,
    ),
    "function with a backward": Case(lambda: Calls(_scaled, body=nn.Linear(8, 8)), VECTOR),
    "fourier": Case(Fourier, numbers((BATCH, 4, 16))),
    "dict of inputs": Case(
        Keywords,
        lambda training: {
            "tokens": torch.randint(WORDS, (BATCH, TIME)),
            "dense": torch.randn(BATCH, 4),
        },
    ),
    "object of inputs": Case(
        TakesObject, lambda training: (Sample(torch.randn(BATCH, 8), torch.rand(BATCH, 1)),)
    ),
    "branch on data": Case(
        lambda: Calls(_branch, left=nn.Linear(8, 3), right=nn.Linear(8, 3)), VECTOR
    ),
}
