"""Split points of pipelines: torch cuts the model where they are, or they are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint
from torch.distributed.pipelining import pipeline as pipeline_of_torch
from torch.utils._pytree import tree_leaves

from graphs.extract import Workload, extract
from placer.exports.layer_counts import layer_counts
from placer.exports.pipelining import pipeline
from placer.exports.placed_modules import PlacedModules
from placer.exports.renaming import ExportError
from tests.helpers.placed_at_random import cut_placement
from tests.helpers.tiny_models import Plain

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning"  # torch copies what it deprecates
)
X = torch.linspace(-1, 1, 8).reshape(2, 4)


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def pairs() -> nn.Module:
    """Return a list of lists of two layers, which the model itself calls."""

    def forward(m: Any, x: Tensor) -> Tensor:
        for first, second in m.layers:
            x = x + second(first(x).relu())
        return x

    layers = nn.ModuleList(nn.ModuleList([linear(), linear()]) for _ in range(3))
    return Plain(forward, layers=layers)


def repeating() -> nn.Module:
    """Return a chain of three layers of which the first two are one module."""

    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = layer(x).relu()
        return x

    shared = linear()
    return Plain(forward, layers=nn.ModuleList([shared, shared, linear()]))


def named(name: str) -> nn.Module:
    """Return a chain of three layers, of which the second has this name in a ModuleDict."""

    def forward(m: Any, x: Tensor) -> Tensor:
        out: Tensor = m.last(m.parts[name](m.first(x)))
        return out

    parts = nn.ModuleDict({name: linear()})
    return Plain(forward, first=linear(), parts=parts, last=linear())


def rooted(again: bool = False) -> nn.Module:
    """Return layers inside a part and a model that have parameters of their own."""

    def inside(m: Any, x: Tensor) -> Tensor:
        x = m.first(x) + m.scale
        for layer in m.layers:
            x = x + layer(x).relu()
        return x + m.scale if again else x

    def forward(m: Any, x: Tensor) -> Tensor:
        out: Tensor = m.last(m.part(x + m.position))
        return out

    layers = nn.ModuleList(linear() for _ in range(3))
    part = Plain(inside, first=linear(), layers=layers)
    part.scale = nn.Parameter(torch.ones(4))
    model = Plain(forward, part=part, last=linear())
    model.position = nn.Parameter(torch.ones(4))
    return model


def split_points(model: nn.Module, *cuts: str) -> list[str]:
    """Return the split points of a placement that goes to the next GPU at each of these modules."""
    extraction = extract(Workload.of(model, X, training=False))
    names = tuple(f"cuda:{i}" for i in range(len(cuts) + 1))
    placement = cut_placement(extraction, names, cuts, of_calls=False)
    found = pipeline(PlacedModules.of(extraction, placement)).content
    assert found["stages"] == list(names)
    return list(found["split_points"])


def assert_cut(model: nn.Module, starts: list[str]) -> None:
    """Assert that torch makes as many stages as promised, which compute what the model does."""
    split_spec = dict.fromkeys(starts, SplitPoint.BEGINNING)
    pipe = pipeline_of_torch(copy.deepcopy(model), (X,), split_spec=split_spec)
    assert pipe.num_stages == len(starts) + 1
    torch.testing.assert_close(tree_leaves(pipe(X)), [model(X)])


@pytest.mark.parametrize(
    ("make", "cuts", "expected"),
    [
        (pairs, ("layers.1", "layers.2"), ["layers.1.0", "layers.2.0"]),
        (repeating, ("layers.2",), ["layers.2"]),
        (rooted, ("part.layers.1",), ["part.layers.1"]),
        (lambda: named("a-b 'c':7"), ("parts",), ["parts.a-b 'c':7"]),
        (lambda: named("\u00e9"), ("parts",), ["parts.\u00e9"]),
    ],
)
def test_torch_cuts_at_every_split_point(
    make: Callable[[], nn.Module], cuts: tuple[str, ...], expected: list[str]
) -> None:
    model = make()
    starts = split_points(model, *cuts)
    assert starts == expected
    assert_cut(model, starts)


@pytest.mark.parametrize("again", [False, True])
def test_parameters_around_the_layers_are_in_the_stages_that_read_them(again: bool) -> None:
    model = rooted(again)
    extraction = extract(Workload.of(model, (X, X), nn.functional.mse_loss))
    cuts = ("part.layers.1",)
    placement = cut_placement(extraction, ("cuda:0", "cuda:1"), cuts, of_calls=False)
    placed = PlacedModules.of(extraction, placement)
    remedy = "in training, add up the gradients of the copies of part.scale, one in each stage"
    assert pipeline(placed).remedy == (remedy if again else "")
    assert layer_counts(placed).content["counts"] == [1, 2]


def scaled(*layers: nn.Module) -> nn.Module:
    """Return a part with a parameter of its own before its layers."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = x * m.scale
        for layer in m.layers:
            x = layer(x)
        return x

    part = Plain(forward, layers=nn.ModuleList(layers))
    part.scale = nn.Parameter(torch.ones(4))
    return part


def weightless() -> nn.Module:
    """Return two layers, and between them a part whose layers have no weights."""
    return nn.Sequential(linear(), scaled(nn.ReLU(), nn.ReLU()), linear())


def blocks() -> nn.Module:
    """Return two parts with a parameter of their own."""
    return nn.Sequential(*(scaled(linear(), linear()) for _ in range(2)))


@pytest.mark.parametrize(("make", "cut"), [(weightless, "1"), (blocks, "1")])
def test_a_part_that_is_on_one_device_stays_whole(make: Callable[[], nn.Module], cut: str) -> None:
    model = make()
    assert split_points(model, cut) == [cut]
    assert_cut(model, [cut])


def test_a_model_whose_only_parameters_are_its_own_is_not_split() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        out: Tensor = m.act(x @ m.weight) @ m.weight
        return out

    model = Plain(forward, act=nn.ReLU())
    model.weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ExportError, match="there is nothing to split"):
        split_points(model, "act")


@pytest.mark.parametrize("name", ['a"b', "a\\", "a@b", "class", "e\u0301"])
def test_a_name_that_torch_cannot_write_into_code_is_refused(name: str) -> None:
    model = named(name)
    with pytest.raises((SyntaxError, AttributeError, ValueError)):
        assert_cut(model, [f"parts.{name}"])
    with pytest.raises(ExportError, match=r"^rename 'parts\."):
        split_points(model, "parts")
