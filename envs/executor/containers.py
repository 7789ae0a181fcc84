"""Replacement of tensors in lists, dicts and other torch pytrees."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

WRITABLE: Final = (list, dict, OrderedDict, defaultdict, deque)
"""Mutable containers whose identity matters: others see what is put into them."""


def replaced(
    tree: Any,
    tensor_for: Callable[[torch.Tensor], torch.Tensor],
    into: list[Any] | None = None,
) -> Any:
    """Return the tree with every tensor replaced; parts without changes are the same objects.

    Without ``into``, changed containers are created anew. With it, mutable ones are changed in
    place, and appended to it whether changed or not.
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
