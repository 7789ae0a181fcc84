"""The project's own reference models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.coverage.case import BATCH, CLASSES, Case, Cases, classifier, word_loss
from graphs.models import (
    Dlrm,
    DlrmConfig,
    Moe,
    MoeConfig,
    NasNet,
    NasNetConfig,
    ResNet,
    ResNetConfig,
    Rnnlm,
    RnnlmConfig,
)
from graphs.models.nmt import Nmt, NmtConfig
from graphs.models.two_towers import TwoTowers, TwoTowersConfig

WORDS: Final = 11
MOE: Final[dict[str, Any]] = {
    "vocabulary": WORDS,
    "hidden": 8,
    "intermediate": 6,
    "layers": 2,
    "heads": 2,
    "key_value_heads": 1,
    "experts": 4,
}


def _text(*lengths: int) -> Callable[[bool], tuple[Tensor, ...]]:
    return lambda training: tuple(torch.randint(WORDS, (BATCH, length)) for length in lengths)


def _words(model: Callable[[], nn.Module], *lengths: int) -> Case:
    return Case(
        model, _text(*lengths), word_loss, lambda: torch.randint(WORDS, (BATCH, lengths[-1]))
    )


def _clicks() -> Tensor:
    return torch.randint(2, (BATCH,)).float()


CASES: Final[Cases] = {
    "resnet": classifier(
        lambda: ResNet(ResNetConfig(classes=CLASSES, blocks=(2, 1, 1, 1), width=4)), 48
    ),
    "nasnet": classifier(
        lambda: NasNet(NasNetConfig(classes=CLASSES, stem=4, filters=4, repeats=1)), 48
    ),
    "rnnlm": _words(lambda: Rnnlm(RnnlmConfig(vocabulary=WORDS, hidden=4)), 4),
    "nmt": _words(lambda: Nmt(NmtConfig(vocabulary=WORDS, hidden=8)), 5, 4),
    "moe": _words(lambda: Moe(MoeConfig(**MOE)), 4),
    "stacked moe": _words(lambda: Moe(MoeConfig(**MOE, stacked=True)), 4),
    "dlrm": Case(
        lambda: Dlrm(DlrmConfig(dense=3, rows=(5, 7, 4), features=4, bottom=(6,), top=(5,))),
        lambda training: (torch.randn(BATCH, 3), torch.randint(4, (BATCH, 3, 2))),
        F.binary_cross_entropy_with_logits,
        _clicks,
    ),
    "two towers": Case(
        lambda: TwoTowers(TwoTowersConfig(features=8, layers=2)),
        lambda training: (torch.randn(BATCH, 8), torch.randn(BATCH, 8)),
        F.binary_cross_entropy_with_logits,
        _clicks,
    ),
}
