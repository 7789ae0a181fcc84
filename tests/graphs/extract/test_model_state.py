"""Extraction leaves no tensors of a trace in what a model's code caches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

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

    @staticmethod
    @functools.lru_cache
    def triangle(size: int) -> Tensor:
        return torch.ones(size, size).tril()

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) @ self.mask(self, x.shape[-1])


def kept_in(cache: dict[int, Tensor], size: int) -> Tensor:
    if size not in cache:
        cache[size] = torch.ones(size, size).tril()
    return cache[size]


def assigned(m: Masked, size: int) -> Tensor:
    if not hasattr(m, "assigned"):
        type(m).assigned = torch.ones(size, size).tril()  # type: ignore[attr-defined]  # new
    return m.assigned  # type: ignore[return-value]  # a Tensor


def as_global(_: Masked, size: int) -> Tensor:
    global LATEST  # noqa: PLW0603  # as models do
    if LATEST is None:
        LATEST = torch.ones(size, size).tril()
    return LATEST


def values_of(kept: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(kept) if isinstance(leaf, Tensor)]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    globals()["LATEST"] = None
    KNOWN.clear()
    Masked.of_class.clear()
    if hasattr(Masked, "assigned"):
        del Masked.assigned
    triangle.cache_clear()
    Masked.triangle.cache_clear()


@pytest.mark.parametrize("extractor", EXTRACTORS)
@pytest.mark.parametrize(
    "mask",
    [
        lambda _, size: triangle(size),
        lambda _, size: kept_in(KNOWN, size),
        as_global,
        lambda m, size: m.triangle(size),
        lambda m, size: kept_in(m.of_class, size),
        assigned,
        lambda m, size: kept_in(m.cache.masks[0], size),
    ],
    ids=["function", "dict", "global", "static method", "of class", "class", "attribute"],
)
def test_what_a_model_caches_holds_no_tensors_of_a_trace(
    mask: Callable[[Masked, int], Tensor], extractor: str
) -> None:
    model = Masked(mask)
    extract(Workload.of(model, (X, X), squared), extractor)
    assert type(model(X)) is Tensor
    caches = (KNOWN, Masked.of_class, model.cache.masks[0])
    kept = [dict(cache) for cache in caches], triangle(8), LATEST
    assert {type(mask) for mask in values_of(kept)} <= {Tensor}
    extract(Workload.of(model, (X, X), squared), extractor)
    assert [*map(id, values_of(([dict(each) for each in caches], triangle(8), LATEST)))] == [
        *map(id, values_of(kept))
    ]
    assert type(model(X)) is Tensor


class Lazy(dict[str, Tensor]):
    """Has entries that are made when they are read, as those of transformers are."""

    def values(self) -> Any:
        raise AssertionError("it was read")

    get = items = __iter__ = values  # type: ignore[assignment]  # never called


LAZY = Lazy(first=X)


def test_entries_of_special_dicts_are_not_read() -> None:
    model = Masked(as_global)
    vars(model.cache)["lazy"] = Lazy(first=X)
    assert extract(Workload.of(model, (X, X), squared), "export").extractor == "export"
