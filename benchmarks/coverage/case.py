"""A small model of a package, with what it is given; and tensors to give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

BATCH = 2
CLASSES = 5


def mean_square(output: Any, target: Tensor) -> Tensor:
    """Return the mean squared distance of all real numbers in an output from one number."""
    tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    return torch.stack(
        [(each - target).square().mean() for each in tensors if each.is_floating_point()]
    ).mean()


def word_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the cross-entropy of all words, from logits (B, T, V) and tokens (B, T)."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def number() -> Tensor:
    return torch.randn(())


def classes(count: int = CLASSES) -> Tensor:
    return torch.randint(count, (BATCH,))


@dataclass(frozen=True, slots=True)
class Case:
    """A model and its inputs, made anew with each call: all random numbers are torch's.

    ``inputs`` is called with True for training; a model that computes its own loss has no ``loss``,
    and its labels are then among the inputs.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[bool], Any]
    loss: Callable[[Any, Any], Tensor] | None = mean_square
    target: Callable[[], Tensor] = number


Cases: TypeAlias = Mapping[str, Case]
"""The models of a package by name."""


def images(size: int, channels: int = 3) -> Callable[[bool], tuple[Tensor]]:
    return lambda training: (torch.randn(BATCH, channels, size, size),)


def classifier(make: Callable[[], nn.Module], size: int, channels: int = 3) -> Case:
    """Return the case of a model that classifies square images."""
    return Case(make, images(size, channels), F.cross_entropy, classes)


def numbers(*shapes: Sequence[int]) -> Callable[[bool], tuple[Tensor, ...]]:
    return lambda training: tuple(torch.randn(*shape) for shape in shapes)
