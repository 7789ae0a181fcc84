"""Reductions along axes, softmax and einsum."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from placer.sources.onnx_ops.rule import RULES, Function, Node, rule


def _product(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


REDUCTIONS: Final[dict[str, Function]] = {
    "ReduceL1": lambda x, axes, keep: x.abs().sum(axes, keepdim=keep),
    "ReduceL2": lambda x, axes, keep: x.square().sum(axes, keepdim=keep).sqrt(),
    "ReduceLogSum": lambda x, axes, keep: x.sum(axes, keepdim=keep).log(),
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep),
    "ReduceMax": lambda x, axes, keep: torch.amax(x, axes, keepdim=keep),
    "ReduceMean": lambda x, axes, keep: torch.mean(x, axes, keepdim=keep),
    "ReduceMin": lambda x, axes, keep: torch.amin(x, axes, keepdim=keep),
    "ReduceProd": _product,
    "ReduceSum": lambda x, axes, keep: torch.sum(x, axes, keepdim=keep, dtype=x.dtype),
    "ReduceSumSquare": lambda x, axes, keep: x.square().sum(axes, keepdim=keep),
}


def _reduction(node: Node) -> Function:
    axes, keep = node.attribute_or_input("axes", 1), bool(node.get("keepdims", 1))
    if not axes and node.get("noop_with_empty_axes", 0):
        return lambda x, *_: x
    chosen = tuple(axes) if axes else tuple(range(node.rank()))
    function = REDUCTIONS[node.op]
    return lambda x, *_: function(x, chosen, keep)


RULES.update(dict.fromkeys(REDUCTIONS, _reduction))


@rule("ArgMax", "ArgMin")
def arg_extreme(node: Node) -> Function:
    """Return the index of the largest or smallest entry, the first of equal ones."""
    node.refuse_unless(not node.get("select_last_index", 0), "asks for the last of equal entries")
    axis, keep = node.get("axis", 0), bool(node.get("keepdims", 1))
    extreme: Function = torch.argmax if node.op == "ArgMax" else torch.argmin
    return lambda x: extreme(x, axis, keepdim=keep)


@rule("CumSum")
def cumulative_sum(node: Node) -> Function:
    """Return a cumulative sum, optionally exclusive or reversed."""
    axis = (node.ints(1) or [0])[0]
    backward, exclusive = node.get("reverse", 0), node.get("exclusive", 0)

    def function(x: Tensor, _: Any) -> Tensor:
        x = x.flip(axis) if backward else x
        found = torch.cumsum(x, axis, dtype=x.dtype)
        found = found - x if exclusive else found
        return found.flip(axis) if backward else found

    return function


@rule("Softmax", "LogSoftmax")
def softmax(node: Node) -> Function:
    """Return softmax along one axis; before opset 13 over all dimensions from it on."""
    function: Function = torch.softmax if node.op == "Softmax" else torch.log_softmax
    if node.opset >= 13:
        axis = node.get("axis", -1)
        return lambda x: function(x, axis)
    first = node.get("axis", 1) % node.rank()
    if first == node.rank() - 1:
        return lambda x: function(x, first)
    return lambda x: function(x.flatten(first), first).reshape(x.shape)


@rule("Einsum")
def einsum(node: Node) -> Function:
    """Return sums of products by a formula."""
    equation = node.get("equation")

    def function(*tensors: Any) -> Tensor:
        return torch.einsum(equation, *tensors)

    return function
