"""ONNX operators that change shapes, create tensors or select elements (gather, scatter, slice)."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from placer.sources.onnx_ops.node import Function, Node, Rule, dtype_of

LARGEST_COUNT: Final = 2**31


def _reshape(node: Node) -> Function:
    """Return a reshape: 0 keeps a size (unless allowzero), -1 is inferred."""
    wanted, old = node.ints(1) or list(node.get("shape", ())), node.shape(0)
    if not node.get("allowzero", 0):
        wanted = [old[i] if size == 0 else size for i, size in enumerate(wanted)]
    return lambda x, *_: x.reshape(wanted)


def _flatten(node: Node) -> Function:
    axis = node.get("axis", 1)
    axis += node.rank() if axis < 0 else 0
    rows = math.prod(node.shape(0)[:axis])
    return lambda x: x.reshape(rows, math.prod(x.shape[axis:]))


def _squeeze(node: Node) -> Function:
    axes = node.attribute_or_input("axes", 1)
    chosen = tuple(axes) if axes is not None else tuple(range(node.rank()))
    return lambda x, *_: torch.squeeze(x, chosen)


def _unsqueeze(node: Node) -> Function:
    axes = node.attribute_or_input("axes", 1) or []
    rank = node.rank() + len(axes)

    def function(x: Tensor, _: Any = None) -> Tensor:
        for axis in sorted(axis % rank for axis in axes):
            x = x.unsqueeze(axis)
        return x

    return function


def _split(node: Node) -> Function:
    """Return a split into parts of given sizes, by default equal ones with a smaller last one."""
    axis = node.get("axis", 0)
    sizes, count = node.attribute_or_input("split", 1), node.output_count
    if sizes is None:
        total = node.shape(0)[axis]
        part = -(-total // count)
        sizes = [max(0, min(part, total - i * part)) for i in range(count)]
    return lambda x, *_: torch.split(x, sizes, axis)


def _expand(node: Node) -> Function:
    """Return a bidirectional broadcast to a shape."""
    new, old = node.ints(1) or [], list(node.shape(0))
    rank = max(len(new), len(old))
    sizes = zip([1] * (rank - len(old)) + old, [1] * (rank - len(new)) + new, strict=True)
    wanted = [b if a == 1 else a for a, b in sizes]
    return lambda x, _: x.expand(wanted)


def _tile(node: Node) -> Function:
    repeats = node.ints(1) or []
    _check_size(node, node.shape(0).numel() * math.prod(repeats))
    return lambda x, _: x.repeat(*repeats)


def _pad(node: Node) -> Function:
    """Return padding by a number, the edge or reflection; negative padding crops."""
    rank = node.rank()
    pads = node.attribute_or_input("pads", 1) or []
    axes = node.ints(3) if node.has(3) else None
    sizes = [[0, 0] for _ in range(rank)]
    chosen = list(range(rank)) if axes is None else [axis % rank for axis in axes]
    for i, axis in enumerate(chosen):
        sizes[axis] = [pads[i], pads[i + len(chosen)]]
    mode = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}[
        node.get("mode", "constant")
    ]
    if mode == "constant":
        value = node.number(2, 0.0) if node.opset >= 11 else node.get("value", 0.0)
        flat = [size for axis in reversed(sizes) for size in axis]
        return lambda x, *_: F.pad(x, flat, value=value)
    whole = 0  # torch requires the unpadded dimensions in front
    while whole < rank - 1 and sizes[whole] == [0, 0]:
        whole += 1
    node.refuse_unless(rank - whole <= 3, f"pads {rank - whole} dimensions by {mode}")
    flat = [size for axis in reversed(sizes[whole:]) for size in axis]
    ahead = rank - whole

    def function(x: Tensor, *_: Any) -> Tensor:
        inner = x.reshape(1, -1, *x.shape[-ahead:])
        padded = F.pad(inner, flat, mode=mode)
        return padded.reshape(*x.shape[:whole], *padded.shape[2:])

    return function


def _constant_of_shape(node: Node) -> Function:
    sizes, value = node.ints(0) or [], node.get("value")
    _check_size(node, math.prod(sizes))
    fill = torch.zeros(1) if value is None else value
    return lambda _: torch.full(sizes, fill.item(), dtype=fill.dtype)


def _range(node: Node) -> Function:
    start, stop, step = (node.number(i, 0) for i in range(3))
    dtype = node.dtypes[0]
    _check_size(node, math.ceil((stop - start) / step) if step else 0)
    return lambda *_: torch.arange(start, stop, step, dtype=dtype)


def _depth_to_space(node: Node) -> Function:
    block = node.get("blocksize")
    if node.get("mode", "DCR") == "CRD":
        return lambda x: F.pixel_shuffle(x, block)

    def function(x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        parts = x.reshape(n, block, block, c // block**2, h, w).permute(0, 3, 4, 1, 5, 2)
        return parts.reshape(n, c // block**2, h * block, w * block)

    return function


def _space_to_depth(node: Node) -> Function:
    node.refuse_unless(node.get("mode", "DCR") == "DCR", f"is of mode {node.get('mode')}")
    block = node.get("blocksize")

    def function(x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        parts = x.reshape(n, c, h // block, block, w // block, block).permute(0, 3, 5, 1, 2, 4)
        return parts.reshape(n, c * block**2, h // block, w // block)

    return function


def _wrapped(index: Tensor, size: int) -> Tensor:
    """Return indices with the negative ones counted from the end."""
    return torch.where(index < 0, index + size, index)


def _check_size(node: Node, count: int) -> None:
    """Refuse tensors too large for memory, which a small file may request."""
    node.refuse_unless(count <= LARGEST_COUNT, f"makes a tensor of {count:.1e} elements")


def _slice(node: Node) -> Function:
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


def _gather(node: Node) -> Function:
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
            return F.embedding(_wrapped(chosen, size), x)
        return x[(*before, chosen)]

    return function


def _gather_nd(node: Node) -> Function:
    node.refuse_unless(node.get("batch_dims", 0) == 0, "has batch dimensions")
    return lambda x, index: x[tuple(index.long().unbind(-1))]


def _scatter_elements(node: Node) -> Function:
    axis, kind = node.get("axis", 0), node.get("reduction", "none")
    names = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}

    def function(x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
        chosen = _wrapped(index, x.shape[axis]).long()
        if kind == "none":
            return torch.scatter(x, axis, chosen, updates)
        return torch.scatter_reduce(x, axis, chosen, updates, names[kind])

    return function


def _scatter_nd(node: Node) -> Function:
    kind = node.get("reduction", "none")
    node.refuse_unless(kind in ("none", "add"), f"combines by {kind}")

    def function(x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
        places = tuple(index.long().unbind(-1))
        return torch.index_put(x, places, updates, accumulate=kind == "add")

    return function


def _one_hot(node: Node) -> Function:
    depth = (node.ints(1) or [0])[0]
    axis = node.get("axis", -1)

    def function(index: Tensor, _: Any, values: Tensor) -> Tensor:
        wrapped = _wrapped(index, depth).long().unsqueeze(axis)
        places = [1] * wrapped.dim()
        places[axis] = depth
        hit = wrapped == torch.arange(depth, device=index.device).reshape(places)
        return torch.where(hit, values[1], values[0])

    return function


def _top_k(node: Node) -> Function:
    """Return the largest or smallest entries along an axis, and their indices."""
    count = (node.ints(1) or [node.get("k", 1)])[0]
    axis, largest = node.get("axis", -1), bool(node.get("largest", 1))

    def function(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
        # ONNX requires the first of equal entries; topk returns any.
        ordered = torch.sort(x, stable=True, dim=axis, descending=largest)
        return tuple(part.narrow(axis, 0, count) for part in ordered)

    return function


def _non_zero(node: Node) -> Function:
    """Return the indices of nonzero entries of a known tensor."""
    value = node.value(0)
    assert value is not None
    places = torch.stack(torch.nonzero(value, as_tuple=True))
    return lambda *_: places.clone()


def _eye_like(node: Node) -> Function:
    rows, columns = node.shape(0)
    shift = node.get("k", 0)
    number = node.get("dtype")
    dtype = node.dtypes[0] if number is None else dtype_of(number)
    return lambda _: torch.ones(rows, columns, dtype=dtype).triu(shift).tril(shift)


def _transpose(node: Node) -> Function:
    order = node.get("perm") or tuple(reversed(range(node.rank())))
    return lambda x: x.permute(*order)


def _concat(node: Node) -> Function:
    axis = node.get("axis", 1)
    return lambda *tensors: torch.cat(tensors, axis)


def _constant(values: Any) -> Function:
    return lambda _: torch.tensor(values, dtype=torch.int64)


def _shape(node: Node) -> Function:
    return _constant(list(node.shape(0))[node.get("start", 0) : node.get("end")])


def _gather_elements(node: Node) -> Function:
    axis = node.get("axis", 0)
    return lambda x, index: torch.gather(x, axis, _wrapped(index, x.shape[axis]).long())


def _triangle(node: Node) -> Function:
    diagonal = int(node.number(1, 0))
    triangle: Function = torch.triu if node.get("upper", 1) else torch.tril
    return lambda x, *_: triangle(x, diagonal)


RULES: Final[dict[str, Rule]] = {
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "DepthToSpace": _depth_to_space,
    "Expand": _expand,
    "EyeLike": _eye_like,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "NonZero": _non_zero,
    "OneHot": _one_hot,
    "Pad": _pad,
    "Range": _range,
    "Reshape": _reshape,
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Shape": _shape,
    "Size": lambda node: _constant(node.shape(0).numel()),
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "TopK": _top_k,
    "Transpose": _transpose,
    "Trilu": _triangle,
    "Unsqueeze": _unsqueeze,
}
