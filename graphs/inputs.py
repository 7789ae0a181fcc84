"""Objects that hold tensors among the inputs of a step.

Torch finds tensors in pytrees: tuples, lists, dicts and registered classes. Of any other object a
trace would keep the tensors as constants, so that a placed step would go on computing the first
batch. Objects that are nothing but their attributes or items are registered as pytrees, whose
leaves these are; of others the step is refused, and so are arrays of numpy. Objects without tensors
are constants of a placed step: :func:`snapshot` shows whether they have changed.
"""

from __future__ import annotations

import copyreg
import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils._pytree import (
    GetAttrKey,
    KeyEntry,
    MappingKey,
    SequenceKey,
    TreeSpec,
    keystr,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_is_leaf,
)

Found = TypeVar("Found")
PYTHON_CLASS: Final = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: only such classes have slots that are attributes of their objects."""
STATE_METHODS: Final = ("__copy__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")

PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of values that never change, and that a placed step can return."""
CONTAINERS: Final = (tuple, list, dict, OrderedDict, defaultdict, deque)
"""Registered classes whose further data are the names of their parts."""
FIXED: Final = (type, ModuleType, Enum, np.generic, torch.layout, torch.memory_format)
"""Further ones that never change."""


def array_refusal(tree: Any, name: str) -> str:
    """Return why the arrays of numpy in a tree cannot be inputs, "" if it holds none."""
    for path, leaf in leaves_with_paths(tree):
        if type(leaf) in PLAIN or isinstance(leaf, torch.Tensor):
            continue
        if any(True for _ in _instances_within(leaf, np.ndarray)):
            holds = "is" if isinstance(leaf, np.ndarray) else f"({type(leaf).__name__}) holds"
            return (
                f"{name}{keystr(path)} {holds} an array of numpy, which would stay as it is in "
                "every placed step; give a tensor: torch.from_numpy(x)"
            )
    return ""


def flatten_objects(tree: Any, name: str) -> str:
    """Register the classes of objects in a tree that hold tensors, or return why it cannot be done.

    ``name`` is what the tree is, for the message; the result is "" if torch finds all tensors.
    """
    return _flatten(tree, name, (), ())


def leaves_with_paths(tree: Any) -> list[tuple[tuple[KeyEntry, ...], Any]]:
    """Return the leaves of a tree with their paths; without names of parts, these are numbers."""
    try:
        return tree_flatten_with_path(tree)[0]
    except ValueError:  # some classes are registered without names of their parts
        return [((SequenceKey(i),), leaf) for i, leaf in enumerate(tree_flatten(tree)[0])]


def holds_tensors(value: Any) -> bool:
    """Return whether an object is a tensor, or holds one at any depth."""
    return next(tensors_within(value), None) is not None


def tensors_within(value: Any, skipped: type | tuple[type, ...] = ()) -> Iterator[torch.Tensor]:
    """Yield every tensor that an object holds at any depth, except in objects of some classes."""
    return _instances_within(value, torch.Tensor, skipped)


def _instances_within(
    value: Any, kind: type[Found], skipped: type | tuple[type, ...] = ()
) -> Iterator[Found]:
    queue, known = [value], {id(value): value}
    while queue:
        one = queue.pop()
        if isinstance(one, kind):
            yield one
        elif not isinstance(one, skipped):
            new = {id(part): part for part in _inside(one) if id(part) not in known}
            known |= new  # keeps them alive, as ids may be reused
            queue += new.values()


class _Kind(NamedTuple):
    """How the objects of a class are taken apart, and made again from {key of a part: part}."""

    parts: Callable[[Any], dict[KeyEntry, Any]]
    made: Callable[[type, dict[KeyEntry, Any]], Any]


_KINDS: Final[dict[type, _Kind]] = {}
"""The classes that are registered here."""


def _flatten(value: Any, name: str, path: tuple[KeyEntry, ...], outer: tuple[int, ...]) -> str:
    if isinstance(value, torch.Tensor) or not holds_tensors(value):
        return ""
    cls = type(value)
    is_registered = not tree_is_leaf(value) and cls not in _KINDS
    kind = None if is_registered else _kind_of(value)
    if id(value) in outer or (kind is None and not is_registered):
        return (
            f"{name}{keystr(path)} is a {cls.__name__}, whose tensors torch cannot find, so that "
            "the placed step would go on computing with those of the example; give the tensors "
            f"themselves, in tuples, lists, dicts or dataclasses, and make the {cls.__name__} in "
            "the model's forward, or register the class by torch.utils._pytree.register_pytree_node"
        )
    if kind is None:
        parts = _level(value)
    else:
        _register(cls, kind)
        parts = kind.parts(value)
    refusals = (
        _flatten(part, name, (*path, key), (*outer, id(value))) for key, part in parts.items()
    )
    return next((refusal for refusal in refusals if refusal), "")


def _level(value: Any) -> dict[KeyEntry, Any]:
    """Return the parts of a registered object."""
    parts = tree_flatten(value, is_leaf=lambda part: part is not value)[0]
    if isinstance(value, dict):
        return dict(zip(map(MappingKey, value), parts, strict=True))
    return dict(zip(map(SequenceKey, range(len(parts))), parts, strict=True))


def _inside(value: Any) -> Iterator[Any]:
    """Yield what an object holds itself."""
    match value:
        case type() | ModuleType() | str() | bytes() | int() | float() | None:
            return
        case dict():
            yield from dict.values(value)
        case list() | tuple() | set() | frozenset():
            yield from value
        case MethodType():
            yield value.__self__
        case FunctionType():
            for cell in value.__closure__ or ():
                with suppress(ValueError):  # it is empty
                    yield cell.cell_contents
        case _ if not tree_is_leaf(value) and type(value) not in _KINDS:
            yield from tree_flatten(value, is_leaf=lambda part: part is not value)[0]
    yield from _attributes(value).values()


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes that an object itself has, in slots and in its dict."""
    found: dict[str, Any] = {}
    for cls in type(value).__mro__:
        for name, member in vars(cls).items() if cls.__flags__ & PYTHON_CLASS else ():
            if isinstance(member, MemberDescriptorType):
                with suppress(AttributeError):
                    found[name] = member.__get__(value)
    with suppress(AttributeError):
        found |= object.__getattribute__(value, "__dict__")
    return found


# --- objects without tensors


def snapshot(value: Any) -> Any:
    """Return what an object without tensors holds, in tuples: equal ones hold the same.

    The state of an object is what pickle would store of it, at any depth. Functions, classes and
    modules are themselves, with what functions have in their closures.

    Raises:
        TypeError: it holds what cannot be stored, such as a generator or a lock.
    """
    return _held(value, {})


def contexts(values: Mapping[Any, Any]) -> dict[Any, list[Any]]:
    """Return what registered classes in values keep beside their parts, {key of a value: list}.

    These are constants of a placed step. Tuples, lists, dicts and classes that are registered here
    keep nothing but the names of their parts.
    """
    found: dict[Any, list[Any]] = {}
    for key, value in values.items():
        if type(value) in PLAIN or isinstance(value, torch.Tensor):
            continue
        queue = [tree_flatten(value)[1]]
        while queue:
            spec = queue.pop()
            queue += spec.children()
            if not (spec.is_leaf() or spec.type in _KINDS or spec.type in CONTAINERS):
                found.setdefault(key, []).append((spec.type, _comparable(spec.context)))
    return found


def keeps_no_more(form: TreeSpec) -> bool:
    """Return whether :func:`contexts` finds nothing in values of this form."""
    queue = [form]
    while queue:
        spec = queue.pop()
        if not (spec.is_leaf() or spec.type in _KINDS or spec.type in CONTAINERS):
            return False
        queue += spec.children()
    return True


def _comparable(context: Any) -> Any:
    try:
        return snapshot(context)
    except Exception:  # noqa: BLE001  # what a class does when it is stored
        return context


def _held(value: Any, known: dict[int, tuple[int, Any]]) -> Any:
    if type(value) in PLAIN or isinstance(value, FIXED):
        return value
    if id(value) in known:
        return known[id(value)][0]
    known[id(value)] = len(known), value  # keeps it alive, as ids may be reused
    parts: Iterable[Any]
    match value:
        case torch.Tensor():  # in what is stored of an object
            parts = value.flatten().tolist()
        case set() | frozenset():
            parts = sorted((_held(part, known) for part in value), key=repr)
        case FunctionType():
            return value, tuple(_held(part, known) for part in (*_inside(value), value.__dict__))
        case _ if type(value) in (tuple, list, torch.Size):
            parts = [_held(part, known) for part in value]
        case _ if type(value) is dict:
            parts = [(_held(key, known), _held(part, known)) for key, part in value.items()]
        case _:
            reduce = copyreg.dispatch_table.get(type(value))
            stored: Any = value.__reduce_ex__(2) if reduce is None else reduce(value)
            if isinstance(stored, str):  # the name of a single object
                return value
            function, arguments, *rest = stored
            contents = [list(part) if isinstance(part, Iterator) else part for part in rest]
            parts = [function, *(_held(part, known) for part in (arguments, *contents))]
    return type(value), tuple(parts)


# --- kinds of objects


def _kind_of(value: Any) -> _Kind | None:
    """Return how an object can be taken apart and made again without loss, if it can."""
    cls: Any = type(value)
    if isinstance(value, torch.nn.Module):
        return None
    of_attributes = all(getattr(cls, name, None) is None for name in STATE_METHODS)
    of_attributes &= cls.__getstate__ is object.__getstate__
    of_attributes &= cls.__reduce_ex__ is object.__reduce_ex__
    reduces = (object.__reduce__, OrderedDict.__reduce__)
    of_attributes = (of_attributes and cls.__reduce__ in reduces) or dataclasses.is_dataclass(cls)
    if cls.__new__ is object.__new__ and (of_attributes or isinstance(value, UserDict)):
        return _Kind(_named_attributes, _with_attributes)
    if isinstance(value, dict) and cls.__new__ in (dict.__new__, OrderedDict.__new__):
        return _Kind(_items, _with_items) if of_attributes else None
    return _by_dict(value)


def _named_attributes(value: Any) -> dict[KeyEntry, Any]:
    return {GetAttrKey(name): part for name, part in _attributes(value).items()}


def _with_attributes(cls: type, parts: dict[KeyEntry, Any]) -> Any:
    value: Any = object.__new__(cls)
    _set_attributes(value, parts)
    return value


def _items(value: Any) -> dict[KeyEntry, Any]:
    items: dict[KeyEntry, Any] = {MappingKey(key): dict.__getitem__(value, key) for key in value}
    return items | _named_attributes(value)


def _with_items(cls: type, parts: dict[KeyEntry, Any]) -> Any:
    base = OrderedDict if issubclass(cls, OrderedDict) else dict
    value: Any = base.__new__(cls)
    for key, part in parts.items():
        if isinstance(key, MappingKey):
            base.__setitem__(value, key.key, part)
    _set_attributes(value, parts)
    return value


def _set_attributes(value: Any, parts: dict[KeyEntry, Any]) -> None:
    for key, part in parts.items():
        if isinstance(key, GetAttrKey):
            object.__setattr__(value, key.name, part)


def _by_dict(value: Any) -> _Kind | None:
    """Return how an object is taken apart by its to_dict and from_dict, if no tensor is lost.

    Graphs of torch_geometric have these methods.
    """
    cls = type(value)
    kind = _Kind(_dict_of, _from_dict)
    try:
        parts = kind.parts(value)
        again = kind.made(cls, parts)
    except Exception:  # noqa: BLE001  # methods of these names may do anything
        return None
    first, of_parts, second = (
        {id(t) for t in tensors_within(one)} for one in (value, parts, again)
    )
    return kind if type(again) is cls and first == of_parts == second else None


def _dict_of(value: Any) -> dict[KeyEntry, Any]:
    return {MappingKey(key): part for key, part in value.to_dict().items()}


def _from_dict(cls: Any, parts: dict[KeyEntry, Any]) -> Any:
    return cls.from_dict({key.key: part for key, part in parts.items()})  # type: ignore[attr-defined]


def _register(cls: type, kind: _Kind) -> None:
    if cls in _KINDS:
        return

    def flatten_with_keys(value: Any) -> tuple[list[tuple[KeyEntry, Any]], Any]:
        parts = kind.parts(value)
        return list(parts.items()), tuple(parts)

    def flatten(value: Any) -> tuple[list[Any], Any]:
        parts = kind.parts(value)
        return list(parts.values()), tuple(parts)

    def unflatten(parts: Any, keys: Any) -> Any:
        return kind.made(cls, dict(zip(keys, parts, strict=True)))

    register_pytree_node(cls, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)
    _KINDS[cls] = kind
