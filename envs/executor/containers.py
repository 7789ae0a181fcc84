"""Tensors within lists, dicts and whatever else torch knows as a tree."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

WRITABLE: Final = (list, dict, OrderedDict, defaultdict, deque)
"""Containers of which it matters which one it is: others see what is put into it."""


def replaced(
    tree: Any,
    tensor_for: Callable[[torch.Tensor], torch.Tensor],
    into: list[Any] | None = None,
) -> Any:
    """The tree with every tensor replaced; whatever holds none that differs is the same object.

    Without ``into`` the others are made anew. With it, those that can be written are written, and
    appended to it whether they had to be or not.
    """
    if isinstance(tree, torch.Tensor):
        return tensor_for(tree)
    inner, spec = tree_flatten(tree, is_leaf=lambda node: node is not tree)
    if inner and inner[0] is tree:
        return tree
    found = [replaced(one, tensor_for, into) for one in inner]
    writable = into is not None and type(tree) in WRITABLE
    if into is not None and writable:
        into.append(tree)
    if all(new is one for new, one in zip(found, inner, strict=True)):
        return tree
    if not writable:
        return tree_unflatten(found, spec)
    for place, new in zip(tree if isinstance(tree, dict) else range(len(tree)), found, strict=True):
        tree[place] = new
    return tree
