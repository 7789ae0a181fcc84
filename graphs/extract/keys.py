"""Stable names: keys of ops and calls, from the module they belong to and the operator they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx


def owner(node: fx.Node, prefix: str) -> tuple[str, str] | None:
    """Path of the module that a node belongs to, and the same with the number of its call.

    ``prefix`` is what paths start with, over the model's own. None where torch does not tell.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    key, (path, _) = list(stack.items())[-1]
    module = _stripped(path, prefix)
    _, at, number = key.partition("@")
    return module, f"{module}@{number}" if at else module


def operator_name(target: Any) -> str:
    """The name of an operator without its namespace and overload."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return str(getattr(target, "__name__", target))


def numbered(keys: Iterable[str]) -> list[str]:
    """Keys made distinct: the second of equal ones ends in #1, the third in #2."""
    seen: Counter[str] = Counter()
    distinct = []
    for key in keys:
        number = seen[key]
        seen[key] += 1
        distinct.append(f"{key}#{number}" if number else key)
    return distinct


def _stripped(path: str, prefix: str) -> str:
    """A module path without the wrapper's own part."""
    return "" if path == prefix else path.removeprefix(prefix + ".") if prefix else path
