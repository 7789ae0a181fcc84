"""Stable keys of ops and calls, from the module they belong to and the operator they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import fx

from graphs.extract.step import LOSS

Op = TypeVar("Op")


def owner(node: fx.Node, prefix: str) -> tuple[str, str] | None:
    """Return the path of a node's module, and the same with the number of its call.

    ``prefix`` is what paths have before the model's own. The result is None if torch gives no
    module.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    key, (path, _) = list(stack.items())[-1]
    module = _stripped(path, prefix)
    _, at, number = key.partition("@")
    return module, f"{module}@{number}" if at else module


def operator_name(target: Any) -> str:
    """Return the name of an operator without its namespace and overload."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return str(getattr(target, "__name__", target))


def numbered(keys: Iterable[str]) -> list[str]:
    """Return keys made distinct: the second of equal ones ends in #1, the third in #2."""
    seen: Counter[str] = Counter()
    distinct = []
    for key in keys:
        number = seen[key]
        seen[key] += 1
        distinct.append(f"{key}#{number}" if number else key)
    return distinct


class Homes(Generic[Op]):
    """Ops at which parameters that no op reads are counted, for they take memory all the same."""

    def __init__(self, ops: Iterable[tuple[Op, str]]) -> None:
        """Take all ops, at least one, each with the path of its module."""
        self._first: dict[str, Op] = {}
        for op, module in ops:
            for path in and_outer(module):
                self._first.setdefault(path, op)

    def of(self, parameter: str) -> Op:
        """Return the first op in the parameter's own module, else in the nearest one around it."""
        module = parameter.replace(LOSS, "loss").rpartition(".")[0]
        return next(self._first[path] for path in and_outer(module) if path in self._first)


def and_outer(module: str) -> Iterator[str]:
    """Yield a module path and those of all modules around it, the whole model's last."""
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""


def _stripped(path: str, prefix: str) -> str:
    return "" if path == prefix else path.removeprefix(prefix + ".") if prefix else path
