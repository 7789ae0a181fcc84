"""What a model's code caches holds no tensors of a trace afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from graphs.extract import Workload, extract
from graphs.extract.extraction import EXTRACTORS
from tests.helpers.tiny_models import squared

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
KNOWN: dict[int, Tensor] = {}
LATEST: Tensor | None = None


@functools.lru_cache(maxsize=2)
def triangle(size: int) -> Tensor:
    return torch.ones(size, size).tril()


class Cache:
    def __init__(self) -> None:
        self.masks: list[dict[int, Tensor]] = [{}]


class Masked(nn.Module):
    of_class: ClassVar[dict[int, Tensor]] = {}

    def __init__(self, mask: Callable[[Masked, int], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.mask = mask
        self.cache = Cache()

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) @ self.mask(self, x.shape[-1])


def kept_in(cache: dict[int, Tensor], size: int) -> Tensor:
    if size not in cache:
        cache[size] = torch.ones(size, size).tril()
    return cache[size]


def as_global(_: Masked, size: int) -> Tensor:
    global LATEST  # noqa: PLW0603  # as models do
    if LATEST is None:
        LATEST = torch.ones(size, size).tril()
    return LATEST


@pytest.mark.parametrize("extractor", EXTRACTORS)
@pytest.mark.parametrize(
    "mask",
    [
        lambda _, size: triangle(size),
        lambda _, size: kept_in(KNOWN, size),
        as_global,
        lambda m, size: kept_in(m.of_class, size),
        lambda m, size: kept_in(m.cache.masks[0], size),
    ],
    ids=["function", "dict", "global", "class", "attribute"],
)
def test_caches_of_the_model_are_as_before(
    mask: Callable[[Masked, int], Tensor], extractor: str
) -> None:
    model = Masked(mask)
    extract(Workload.of(model, (X, X), squared), extractor)
    assert (KNOWN, LATEST, Masked.of_class, model.cache.masks) == ({}, None, {}, [{}])
    assert triangle.cache_info().currsize == 0
    assert type(model(X)) is Tensor
    kept = [*KNOWN.values(), *Masked.of_class.values(), triangle(8)]
    extract(Workload.of(model, (X, X), squared), extractor)
    assert [*KNOWN.values(), *Masked.of_class.values()] == kept[:-1]
    assert triangle(8) is kept[-1]
    forget()


def forget() -> None:
    global LATEST  # noqa: PLW0603  # as models do
    LATEST = None
    KNOWN.clear()
    Masked.of_class.clear()
    triangle.cache_clear()
