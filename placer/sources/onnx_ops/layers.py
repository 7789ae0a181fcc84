"""Products, convolutions and normalizations."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from placer.sources.onnx_ops.rule import Function, Node, rule


@rule("Gemm")
def gemm(node: Node) -> Function:
    """Return F.linear if the node is a linear layer, else a scaled product."""
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    left, right = node.get("transA", 0), node.get("transB", 0)
    vector = not node.has(2) or node.rank(2) == 1
    if alpha == beta == 1.0 and not left and right and vector:
        return F.linear

    def function(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
        product = (a.t() if left else a) @ (b.t() if right else b)
        scaled = product if alpha == 1.0 else product * alpha
        return scaled if c is None else scaled + (c if beta == 1.0 else c * beta)

    return function


@rule("Conv")
def conv(node: Node) -> Function:
    """Return a convolution in one to three dimensions, with uneven padding done before."""
    rank = node.rank() - 2
    kernel = node.get("kernel_shape") or node.shape(1)[2:]
    strides, dilations = spatial(node, "strides", rank), spatial(node, "dilations", rank)
    pads = padding(node, kernel, strides, dilations)
    convolve = _by_rank(node, rank, (F.conv1d, F.conv2d, F.conv3d))
    even = pads[:rank] == pads[rank:]
    groups = node.get("group", 1)

    def function(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x, around = (x, pads[:rank]) if even else (F.pad(x, flat_pads(pads)), [0] * rank)
        result: Tensor = convolve(x, weight, bias, strides, around, dilations, groups)
        return result

    return function


@rule("ConvTranspose")
def conv_transpose(node: Node) -> Function:
    """Return a transposed convolution in one to three dimensions."""
    rank = node.rank() - 2
    automatic = node.get("auto_pad", "NOTSET") == "NOTSET" and node.get("output_shape") is None
    node.refuse_unless(automatic, "leaves its padding to be found from the size of the output")
    strides, dilations = spatial(node, "strides", rank), spatial(node, "dilations", rank)
    pads = list(node.get("pads") or [0] * 2 * rank)
    more = list(node.get("output_padding") or [0] * rank)
    node.refuse_unless(pads[:rank] == pads[rank:], "pads its two sides differently")
    convolve = _by_rank(node, rank, (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d))
    groups = node.get("group", 1)
    return lambda x, weight, bias=None: convolve(
        x, weight, bias, strides, pads[:rank], more, groups, dilations
    )


@rule("BatchNormalization")
def batch_norm(node: Node) -> Function:
    """Return batch normalization with known means and variances."""
    node.refuse_unless(not node.get("training_mode", 0), "is in training mode")
    node.refuse_unless(node.get("spatial", 1) == 1, "normalizes each element by itself")
    node.refuse_unless(node.output_count == 1, "gives statistics, which is training")
    epsilon = node.get("epsilon", 1e-5)
    return lambda x, scale, bias, mean, var: F.batch_norm(
        x, mean, var, scale, bias, False, 0.0, epsilon
    )


@rule("InstanceNormalization")
def instance_norm(node: Node) -> Function:
    """Return a normalization of each channel of each sample."""
    epsilon = node.get("epsilon", 1e-5)
    return lambda x, scale, bias: F.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


@rule("LayerNormalization")
def layer_norm(node: Node) -> Function:
    """Return a normalization over all dimensions from an axis on."""
    axis = node.get("axis", -1) % node.rank()
    normalize = partial(F.layer_norm, normalized_shape=list(node.shape(0)[axis:]))
    axes, epsilon = tuple(range(axis, node.rank())), node.get("epsilon", 1e-5)

    def function(x: Tensor, scale: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        found = [normalize(x, weight=scale, bias=bias, eps=epsilon)]
        if node.output_count > 1:
            found.append(x.mean(axes, keepdim=True))
        if node.output_count > 2:
            found.append((x.var(axes, correction=0, keepdim=True) + epsilon).rsqrt())
        return tuple(found)

    return function


@rule("RMSNormalization")
def rms_norm(node: Node) -> Function:
    """Return a normalization over all dimensions from an axis on, without the mean."""
    axis = node.get("axis", -1) % node.rank()
    sizes, epsilon = list(node.shape(0)[axis:]), node.get("epsilon", 1e-5)
    return lambda x, scale: F.rms_norm(x, sizes, scale, epsilon)


@rule("GroupNormalization")
def group_norm(node: Node) -> Function:
    """Return group normalization; parameters are per group before opset 21, then per channel."""
    groups, epsilon = node.get("num_groups"), node.get("epsilon", 1e-5)
    repeats = node.shape(0)[1] // groups if node.opset < 21 else 1

    def function(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        weight, shift = (
            (one.repeat_interleave(repeats) if repeats > 1 else one) for one in (scale, bias)
        )
        return F.group_norm(x, groups, weight, shift, epsilon)

    return function


@rule("LRN")
def local_response_norm(node: Node) -> Function:
    """Return a normalization over neighbouring channels."""
    return partial(
        F.local_response_norm,
        size=node.get("size"),
        alpha=node.get("alpha", 1e-4),
        beta=node.get("beta", 0.75),
        k=node.get("bias", 1.0),
    )


@rule("LpNormalization")
def lp_normalization(node: Node) -> Function:
    """Return a normalization to unit length along an axis."""
    return partial(F.normalize, p=float(node.get("p", 2)), dim=node.get("axis", -1))


def spatial(node: Node, name: str, rank: int) -> list[int]:
    """Return an attribute with a number for each spatial dimension, 1 by default."""
    return list(node.get(name) or [1] * rank)


def padding(node: Node, kernel: Any, strides: list[int], dilations: list[int]) -> list[int]:
    """Return the padding of all beginnings, then all ends, from auto_pad or pads."""
    rank, automatic = len(strides), node.get("auto_pad", "NOTSET")
    if automatic == "NOTSET":
        return list(node.get("pads") or [0] * 2 * rank)
    if automatic == "VALID":
        return [0] * 2 * rank
    begins, ends = [], []
    for size, k, stride, dilation in zip(
        node.shape(0)[2:], kernel, strides, dilations, strict=True
    ):
        total = max((math.ceil(size / stride) - 1) * stride + (k - 1) * dilation + 1 - size, 0)
        small, large = total // 2, total - total // 2
        begins.append(small if automatic == "SAME_UPPER" else large)
        ends.append(large if automatic == "SAME_UPPER" else small)
    return begins + ends


def flat_pads(pads: list[int]) -> list[int]:
    """Convert ONNX's padding order to torch's: last dimension first, its two ends together."""
    rank = len(pads) // 2
    return [pads[axis + side * rank] for axis in reversed(range(rank)) for side in (0, 1)]


def _by_rank(node: Node, rank: int, functions: tuple[Function, ...]) -> Function:
    node.refuse_unless(1 <= rank <= len(functions), f"has {rank} spatial dimensions")
    return functions[rank - 1]
