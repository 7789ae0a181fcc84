"""Operators that change shapes, or create tensors of a shape."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from placer.sources.onnx_ops.rule import Function, Node, rule

LARGEST_COUNT: Final = 2**31


@rule("Reshape")
def reshape(node: Node) -> Function:
    """Return a reshape: 0 keeps a size (unless allowzero), -1 is inferred."""
    wanted, old = node.ints(1) or list(node.get("shape", ())), node.shape(0)
    if not node.get("allowzero", 0):
        wanted = [old[i] if size == 0 else size for i, size in enumerate(wanted)]
    return lambda x, *_: x.reshape(wanted)


@rule("Flatten")
def flatten(node: Node) -> Function:
    """Return a reshape to two dimensions."""
    axis = node.get("axis", 1)
    axis += node.rank() if axis < 0 else 0
    rows = math.prod(node.shape(0)[:axis])
    return lambda x: x.reshape(rows, math.prod(x.shape[axis:]))


@rule("Transpose")
def transpose(node: Node) -> Function:
    """Return a permutation of the dimensions, by default reversed."""
    order = node.get("perm") or tuple(reversed(range(node.rank())))
    return lambda x: x.permute(*order)


@rule("Squeeze")
def squeeze(node: Node) -> Function:
    """Return a removal of dimensions of size 1."""
    axes = node.attribute_or_input("axes", 1)
    chosen = tuple(axes) if axes is not None else tuple(range(node.rank()))
    return lambda x, *_: torch.squeeze(x, chosen)


@rule("Unsqueeze")
def unsqueeze(node: Node) -> Function:
    """Return an insertion of dimensions of size 1."""
    axes = node.attribute_or_input("axes", 1) or []
    rank = node.rank() + len(axes)

    def function(x: Tensor, _: Any = None) -> Tensor:
        for axis in sorted(axis % rank for axis in axes):
            x = x.unsqueeze(axis)
        return x

    return function


@rule("Concat")
def concat(node: Node) -> Function:
    """Return a concatenation along an axis."""
    axis = node.get("axis", 1)
    return lambda *tensors: torch.cat(tensors, axis)


@rule("Split")
def split(node: Node) -> Function:
    """Return a split into parts of given sizes, by default equal ones with a smaller last one."""
    axis = node.get("axis", 0)
    sizes, count, total = node.attribute_or_input("split", 1), node.output_count, 0
    if sizes is None:
        total = node.shape(0)[axis]
        part = -(-total // count)
        sizes = [max(0, min(part, total - i * part)) for i in range(count)]
    return lambda x, *_: torch.split(x, sizes, axis)


@rule("Expand")
def expand(node: Node) -> Function:
    """Return a bidirectional broadcast to a shape."""
    given, own = node.ints(1) or [], list(node.shape(0))
    rank = max(len(given), len(own))
    pairs = zip([1] * (rank - len(own)) + own, [1] * (rank - len(given)) + given, strict=True)
    wanted = [new if size == 1 else size for size, new in pairs]
    return lambda x, _: x.expand(wanted)


@rule("Tile")
def tile(node: Node) -> Function:
    """Return a repetition along each axis."""
    repeats = node.ints(1) or []
    _check_size(node, node.shape(0).numel() * math.prod(repeats))
    return lambda x, _: x.repeat(*repeats)


@rule("Pad")
def pad(node: Node) -> Function:
    """Return padding by a number, the edge or reflection; negative padding crops."""
    rank = node.rank()
    given = node.attribute_or_input("pads", 1) or []
    axes = node.ints(3) if node.has(3) else None
    sizes = [[0, 0] for _ in range(rank)]
    chosen = list(range(rank)) if axes is None else [axis % rank for axis in axes]
    for i, axis in enumerate(chosen):
        sizes[axis] = [given[i], given[i + len(chosen)]]
    mode = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}[
        node.get("mode", "constant")
    ]
    if mode == "constant":
        value = node.number(2, 0.0) if node.opset >= 11 else node.get("value", 0.0)
        flat = [size for axis in reversed(sizes) for size in axis]
        return lambda x, *_: F.pad(x, flat, value=value)
    whole = 0  # torch requires the unpadded dimensions in front
    while whole < rank - 1 and sizes[whole] == [0, 0] and rank - whole > 1:
        whole += 1
    node.refuse_unless(rank - whole <= 3, f"pads {rank - whole} dimensions by {mode}")
    flat = [size for axis in reversed(sizes[whole:]) for size in axis]
    ahead = rank - whole

    def function(x: Tensor, *_: Any) -> Tensor:
        inner = x.reshape(1, -1, *x.shape[-ahead:])
        padded = F.pad(inner, flat, mode=mode)
        return padded.reshape(*x.shape[:whole], *padded.shape[2:])

    return function


@rule("Shape")
def shape(node: Node) -> Function:
    """Return the shape as a tensor, or a part of it."""
    sizes = list(node.shape(0))[node.get("start", 0) : node.get("end")]
    return lambda _: torch.tensor(sizes, dtype=torch.int64)


@rule("Size")
def size(node: Node) -> Function:
    """Return the number of elements."""
    count = node.shape(0).numel()
    return lambda _: torch.tensor(count, dtype=torch.int64)


@rule("ConstantOfShape")
def constant_of_shape(node: Node) -> Function:
    """Return a tensor filled with one value."""
    sizes, value = node.ints(0) or [], node.get("value")
    _check_size(node, math.prod(sizes))
    fill = torch.zeros(1) if value is None else value
    return lambda _: torch.full(sizes, fill.item(), dtype=fill.dtype)


@rule("Range")
def arange(node: Node) -> Function:
    """Return equally spaced numbers."""
    start, stop, step = (node.number(i, 0) for i in range(3))
    dtype = node.dtypes[0]
    _check_size(node, math.ceil((stop - start) / step) if step else 0)
    return lambda *_: torch.arange(start, stop, step, dtype=dtype)


@rule("DepthToSpace")
def depth_to_space(node: Node) -> Function:
    """Return a rearrangement of channels into pixels."""
    block = node.get("blocksize")
    if node.get("mode", "DCR") == "CRD":
        return lambda x: F.pixel_shuffle(x, block)

    def function(x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        parts = x.reshape(n, block, block, c // block**2, h, w).permute(0, 3, 4, 1, 5, 2)
        return parts.reshape(n, c // block**2, h * block, w * block)

    return function


@rule("SpaceToDepth")
def space_to_depth(node: Node) -> Function:
    """Return a rearrangement of pixels into channels."""
    node.refuse_unless(node.get("mode", "DCR") == "DCR", f"is of mode {node.get('mode')}")
    block = node.get("blocksize")

    def function(x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        parts = x.reshape(n, c, h // block, block, w // block, block).permute(0, 3, 5, 1, 2, 4)
        return parts.reshape(n, c * block**2, h // block, w // block)

    return function


def _check_size(node: Node, count: int) -> None:
    """Refuse tensors too large for memory, which a small file may request."""
    node.refuse_unless(count <= LARGEST_COUNT, f"makes a tensor of {count:.1e} elements")
