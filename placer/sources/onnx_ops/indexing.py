"""Indexing operators: gather, scatter, slice and their like."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from placer.sources.onnx_ops.dtypes import dtype_of
from placer.sources.onnx_ops.rule import Function, Node, rule


@rule("Slice")
def slice_(node: Node) -> Function:
    """Return a slice along some axes; the step may be negative."""
    starts = node.attribute_or_input("starts", 1) or []
    ends = node.attribute_or_input("ends", 2) or []
    axes = node.attribute_or_input("axes", 3)
    steps = node.ints(4)
    sizes = node.shape(0)
    taken: list[tuple[int, range]] = []
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = (i if axes is None else axes[i]) % len(sizes)
        # Python slices have the same rules for indices out of range.
        step = 1 if steps is None else steps[i]
        beyond = step < 0 and end < -sizes[axis]
        stop = None if beyond else end
        taken.append((axis, range(*slice(start, stop, step).indices(sizes[axis]))))

    def function(x: Tensor, *_: Any) -> Tensor:
        for axis, part in taken:
            if part.step > 0:
                index = [slice(None)] * axis + [slice(part.start, part.stop, part.step)]
                x = x[tuple(index)]
            elif len(part):
                low = slice(part[-1], part[0] + 1, -part.step)
                x = x[tuple([slice(None)] * axis + [low])].flip(axis)
            else:
                x = x.narrow(axis, 0, 0)
        return x

    return function


@rule("Gather")
def gather(node: Node) -> Function:
    """Return a selection of entries along an axis by indices, which may be negative."""
    axis = node.get("axis", 0) % node.rank()
    size, known = node.shape(0)[axis], node.known[1]
    if known is not None and known.dim() == 0:
        at = (node.ints(1) or [0])[0]
        return lambda x, _: x.select(axis, at)
    before = (slice(None),) * axis

    def function(x: Tensor, index: Tensor) -> Tensor:
        chosen = index.long()
        if axis == 0 and x.dim() == 2 and x.is_floating_point():
            # Exporters write embeddings as Gather: restore the embedding.
            return torch.nn.functional.embedding(torch.where(chosen < 0, chosen + size, chosen), x)
        return x[(*before, chosen)]

    return function


@rule("GatherElements")
def gather_elements(node: Node) -> Function:
    """Return a selection of one entry along an axis for each element."""
    axis = node.get("axis", 0)

    def function(x: Tensor, index: Tensor) -> Tensor:
        return torch.gather(x, axis, torch.where(index < 0, index + x.shape[axis], index).long())

    return function


@rule("GatherND")
def gather_nd(node: Node) -> Function:
    """Return a selection by the indices in the last dimension."""
    node.refuse_unless(node.get("batch_dims", 0) == 0, "has batch dimensions")
    return lambda x, index: x[tuple(index.long().unbind(-1))]


@rule("ScatterElements", "Scatter")
def scatter_elements(node: Node) -> Function:
    """Return a copy in which one entry along an axis is updated for each element."""
    axis, kind = node.get("axis", 0), node.get("reduction", "none")
    names = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}

    def function(x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
        chosen = torch.where(index < 0, index + x.shape[axis], index).long()
        if kind == "none":
            return torch.scatter(x, axis, chosen, updates)
        return torch.scatter_reduce(x, axis, chosen, updates, names[kind])

    return function


@rule("ScatterND")
def scatter_nd(node: Node) -> Function:
    """Return a copy updated at the indices in the last dimension."""
    kind = node.get("reduction", "none")
    node.refuse_unless(kind in ("none", "add"), f"combines by {kind}")

    def function(x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
        places = tuple(index.long().unbind(-1))
        return torch.index_put(x, places, updates, accumulate=kind == "add")

    return function


@rule("OneHot")
def one_hot(node: Node) -> Function:
    """Return one value at the index, another elsewhere."""
    depth = (node.ints(1) or [0])[0]
    axis = node.get("axis", -1)

    def function(index: Tensor, _: Any, values: Tensor) -> Tensor:
        wrapped = torch.where(index < 0, index + depth, index).long().unsqueeze(axis)
        places = [1] * wrapped.dim()
        places[axis] = depth
        hit = wrapped == torch.arange(depth, device=index.device).reshape(places)
        return torch.where(hit, values[1], values[0])

    return function


@rule("Trilu")
def trilu(node: Node) -> Function:
    """Return the upper or the lower triangle."""
    diagonal = int(node.number(1, 0))
    triangle: Function = torch.triu if node.get("upper", 1) else torch.tril
    return lambda x, *_: triangle(x, diagonal)


@rule("TopK")
def top_k(node: Node) -> Function:
    """Return the largest or smallest entries along an axis, and their indices."""
    count = (node.ints(1) or [node.get("k", 1)])[0]
    axis, largest = node.get("axis", -1), bool(node.get("largest", 1))

    def function(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
        # ONNX requires the first of equal entries; topk returns any.
        found = torch.sort(x, stable=True, dim=axis, descending=largest)
        return tuple(part.narrow(axis, 0, count) for part in found)

    return function


@rule("NonZero")
def non_zero(node: Node) -> Function:
    """Return the indices of nonzero entries of a known tensor."""
    value = node.value(0)
    assert value is not None
    places = torch.stack(torch.nonzero(value, as_tuple=True))
    return lambda *_: places.clone()


@rule("EyeLike")
def eye_like(node: Node) -> Function:
    """Return a matrix with ones on a diagonal."""
    rows, columns = node.shape(0)
    shift = node.get("k", 0)
    given = node.get("dtype")
    dtype = node.dtypes[0] if given is None else dtype_of(given)
    return lambda _: torch.ones(rows, columns, dtype=dtype).triu(shift).tril(shift)
