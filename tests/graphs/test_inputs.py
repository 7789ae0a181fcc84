"""Objects that hold tensors: taken apart without loss, or refused by name."""

from __future__ import annotations

import argparse
import weakref
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import InitVar, dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_unflatten

from graphs.inputs import flatten_objects, holds_tensors, leaves_with_paths, tensors_within
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
        ((X, Batch(ARRAY)), r"input \[1\].* an array of numpy"),  # type: ignore[arg-type]
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
