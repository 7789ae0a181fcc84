"""Objects that hold tensors: taken apart without loss, or refused by name."""

from __future__ import annotations

import argparse
import re
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import InitVar, dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_unflatten

from graphs.inputs import (
    flatten_objects,
    holds_tensors,
    leaves_with_paths,
    snapshot,
    tensors_within,
)
from graphs.workload import StepError, Workload

X, Y = torch.arange(6.0).reshape(2, 3), torch.tensor([1, 0])


@dataclass
class Batch:
    x: Tensor
    y: Tensor | None = None
    scale: float = 2.0


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    inner: Any = None


@dataclass
class Derived:
    """Computes a field, and could not be made from its fields."""

    x: Tensor
    factor: InitVar[float]
    doubled: Tensor = field(init=False)

    def __post_init__(self, factor: float) -> None:
        self.doubled = self.x * factor


class Holder:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class Bare:
    """Holds no tensors."""


class Named(Holder):
    """Has a method named like one of a mapping that does not give its tensors back."""

    def __copy__(self) -> Named:
        return Named(**vars(self))

    def to_dict(self) -> dict[str, Any]:
        return {"x": self.x.clone()}  # type: ignore[attr-defined]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Named:
        return cls(**values)


class Storage(dict[str, Any]):
    """Knows its owner, as in torch_geometric."""

    def __init__(self, owner: Any) -> None:
        self.owner = weakref.ref(owner)


class Graph:
    """Has the shape of torch_geometric's Data: attributes are items of a storage."""

    def __init__(self, **values: Any) -> None:
        self.__dict__["store"] = Storage(self)
        self.store.update(values)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["store"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.store[name] = value

    def __copy__(self) -> Graph:
        return Graph(**self.store)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.store)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Graph:
        return cls(**values)


class Encoding(UserDict[str, Any]):
    def __init__(self, data: dict[str, Any], name: str) -> None:
        super().__init__(data)
        self.name = name


class Output(OrderedDict[str, Any]):
    """Has the shape of transformers' ModelOutput: items are attributes, too."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AssertionError("no code of the class runs")


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        (Batch(X, Y), [".x", ".y", ".scale"]),
        (Batch(X), [".x", ".y", ".scale"]),
        (Frozen(X, Batch(Y)), [".x", ".inner.x", ".inner.y", ".inner.scale"]),
        (Derived(X, 2.0), [".x", ".doubled"]),
        (Holder(x=X, parts=[Y, 3]), [".x", ".parts[0]", ".parts[1]"]),
        (argparse.Namespace(x=X), [".x"]),
        (Encoding({"x": X}, "first"), [".data['x']", ".name"]),
        (Output(x=X), ["['x']", ".x"]),
        (Graph(x=X, edges=Y, kind="mesh"), ["['x']", "['edges']", "['kind']"]),
        ({"a": [Batch(X)]}, ["['a'][0].x", "['a'][0].y", "['a'][0].scale"]),
    ],
)
def test_objects_are_taken_apart_and_made_again(value: Any, paths: list[str]) -> None:
    assert flatten_objects(value, "") == ""
    found = leaves_with_paths(value)
    assert sorted("".join(map(str, path)) for path, _ in found) == sorted(paths)
    leaves, tree = tree_flatten(value)
    assert {id(t) for t in leaves if isinstance(t, Tensor)} == {
        id(t) for t in tensors_within(value)
    }
    other = [leaf + 1 if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    again = tree_unflatten(other, tree)
    assert type(again) is type(value)
    assert all(one is two for one, two in zip(other, tree_leaves(again), strict=True))
    assert all(one is two for one, two in zip(leaves, tree_leaves(value), strict=True))


def test_what_is_made_again_has_the_attributes_and_methods_of_its_class() -> None:
    graph = Graph(x=X)
    assert flatten_objects(graph, "") == ""
    again: Any = tree_unflatten([Y], tree_flatten(graph)[1])
    assert again.x is Y
    assert again.store.owner() is again
    output = Output(x=X)
    assert flatten_objects(output, "") == ""
    made: Any = tree_unflatten([Y, Y], tree_flatten(output)[1])
    assert made["x"] is made.x is Y
    assert [*made] == ["x"]


def cyclic() -> Holder:
    value = Holder(x=X)
    vars(value)["self"] = value
    return value


def reading(x: Tensor) -> Any:
    return lambda: x


class Missing(defaultdict[str, Any]):
    pass


class Pair(tuple[Any, ...]):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [
        SimpleNamespace(x=X),
        Named(x=X),
        cyclic(),
        Missing(None, x=X),
        Pair((X, Y)),
        nn.Linear(2, 2),
        reading(X),
        {X},
        Holder(x=X).__init__,  # type: ignore[misc]
    ],
)
def test_other_objects_with_tensors_are_refused_by_their_class(value: Any) -> None:
    for inputs, path in (((X, [value]), r"\[1\]\[0\]"), ({"x": X, "it": value}, r"\['it'\]")):
        with pytest.raises(StepError, match=f"input {path}.*whose tensors torch cannot find"):
            Workload.of(nn.Identity(), inputs, training=False)


@pytest.mark.parametrize("value", [3, "x", None, len, X.shape, SimpleNamespace(a=1), Bare()])
def test_objects_without_tensors_are_left_alone(value: Any) -> None:
    assert not holds_tensors(value)
    assert flatten_objects((X, value), "") == ""
    assert tree_leaves((value,))[0] is value or isinstance(value, torch.Size)


def test_classes_that_are_registered_stay_as_they_are() -> None:
    class Pairing(Holder):
        pass

    register_pytree_node(
        Pairing, lambda v: ([v.x], v.n), lambda xs, n: Pairing(x=next(iter(xs)), n=n)
    )
    value = [Pairing(x=X, n=2)]
    assert flatten_objects(value, "") == ""
    assert [leaf for _, leaf in leaves_with_paths(value)] == [X]  # no names of parts


def test_the_example_does_not_follow_changes_of_the_callers_object() -> None:
    batch = Batch(X)
    step = Workload.of(nn.Identity(), ([batch],), training=False)
    batch.x = Y
    assert step.inputs[0][0].x is X


ARRAY = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((X, ARRAY), r"input \[1\] is an array of numpy.*torch\.from_numpy"),
        ({"x": X, "mask": ARRAY}, r"input \['mask'\] is an array"),
        ((X, {"masks": [ARRAY]}), r"input \[1\]\['masks'\]\[0\] is an array"),
        ((X, Batch(ARRAY)), r"input \[1\].* an array of numpy"),  # type: ignore[arg-type]  # meant
        ((X, SimpleNamespace(inner=Holder(x=ARRAY))), r"\(SimpleNamespace\) holds an array"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_arrays_of_numpy_are_refused(inputs: Any, message: str, training: bool) -> None:
    with pytest.raises(StepError, match=message):
        Workload.of(nn.Identity(), inputs, training=training)


def test_numbers_of_numpy_are_numbers() -> None:
    step = Workload.of(nn.Identity(), (X, np.float32(2), np.int64(3)), training=False)
    assert step.inputs[1:] == (2.0, 3)


@dataclass
class Config:
    scale: float = 2.0
    layers: list[int] = field(default_factory=lambda: [1, 2])


class Slotted:
    __slots__ = ("a",)
    a: Any


def slotted(a: Any) -> Slotted:
    value = Slotted()
    value.a = a
    return value


def counted(first: int) -> Any:
    count = first

    def step() -> int:
        nonlocal count
        count += 1
        return count

    return step


def changed(value: Any, change: Any) -> tuple[Any, Any, Any]:
    before, again = snapshot(value), snapshot(value)
    change(value)
    return before, again, snapshot(value)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (Config(), lambda v: setattr(v, "scale", 3.0)),
        (Config(), lambda v: v.layers.append(3)),
        (SimpleNamespace(inner=Config()), lambda v: setattr(v.inner, "scale", 3.0)),
        (slotted([1]), lambda v: v.a.append(2)),
        (deque([1]), lambda v: v.append(2)),
        ({1: {2}}, lambda v: v[1].add(3)),
        (OrderedDict(a=1), lambda v: v.move_to_end("a") or v.update(b=2)),
        (UserDict(a=1), lambda v: v.update(a=2)),
        (bytearray(b"a"), lambda v: v.append(1)),
        (counted(0), lambda v: v()),
        (Config([1]).layers.__len__, lambda v: v.__self__.append(3)),  # type: ignore[arg-type]
        (partial(len, [1]), lambda v: v.args[0].append(2)),
        (iter([1, 2]), next),
        (nn.ReLU(), lambda v: v.eval()),
        (torch.Generator(), lambda v: torch.rand(1, generator=v)),
    ],
)
def test_a_snapshot_shows_changes_of_objects(value: Any, change: Any) -> None:
    before, again, after = changed(value, change)
    assert before == again
    assert before != after


@pytest.mark.parametrize(
    "value",
    [
        *(3, [float("nan")], "x", None, len, X.shape, Bare(), object(), nn.Module, torch),
        *(torch.float32, torch.strided, re.compile("a"), np.float32(2), Path("a"), range(3)),
        *({3, 1, 2}, cyclic),
    ],
)
def test_a_snapshot_is_the_same_again(value: Any) -> None:
    assert snapshot(value) == snapshot(value)


def test_a_snapshot_of_a_cycle_ends() -> None:
    config = Config()
    config.layers.append(config)  # type: ignore[arg-type]
    before, again, after = changed(config, lambda v: setattr(v, "scale", 3.0))
    assert before == again != after


def test_what_cannot_be_compared_has_no_snapshot() -> None:
    for value in ((n for n in range(3)), Lock(), SimpleNamespace(lock=[Lock()])):
        with pytest.raises(TypeError, match="cannot pickle"):
            snapshot(value)
