"""Tiny versions of the published reference models, with a step each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphs.extract import Workload
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

TINY_MOE = MoeConfig(
    vocabulary=11,
    hidden=8,
    intermediate=6,
    layers=2,
    heads=2,
    key_value_heads=1,
    experts=4,
)
TINY_DLRM = DlrmConfig(dense=3, rows=(5, 7, 4), features=4, bottom=(6,), top=(5,))
TINY_NASNET = NasNetConfig(classes=5, stem=4, filters=4, repeats=1)


def words(logits: Tensor, next_tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), next_tokens.flatten())


def images_step(model: nn.Module) -> Workload:
    return Workload.of(model, (torch.randn(2, 3, 48, 48), torch.tensor([1, 3])), F.cross_entropy)


def resnet() -> Workload:
    return images_step(ResNet(ResNetConfig(classes=5, blocks=(2, 1, 1, 1), width=4)))


def rnnlm(dropout: float = 0.0) -> Workload:
    tokens = torch.randint(11, (2, 4))
    model = Rnnlm(RnnlmConfig(vocabulary=11, hidden=4, dropout=dropout))
    return Workload.of(model, (tokens[:, :-1], tokens[:, 1:]), words)


def moe_step(config: MoeConfig) -> Workload:
    tokens = torch.randint(config.vocabulary, (2, 4))
    return Workload.of(Moe(config), (tokens[:, :-1], tokens[:, 1:]), words)


def separate_moe() -> Workload:
    return moe_step(TINY_MOE)


def stacked_moe() -> Workload:
    return moe_step(replace(TINY_MOE, stacked=True))


def dlrm() -> Workload:
    inputs = (torch.randn(6, 3), torch.randint(4, (6, 3, 2)), torch.randint(2, (6,)).float())
    return Workload.of(Dlrm(TINY_DLRM), inputs, F.binary_cross_entropy_with_logits)


def nasnet(dropout: float = 0.0) -> Workload:
    return images_step(NasNet(replace(TINY_NASNET, dropout=dropout)))


STEPS: dict[str, Callable[[], Workload]] = {
    make.__name__: make for make in (resnet, rnnlm, separate_moe, stacked_moe, dlrm, nasnet)
}


def parameter_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
