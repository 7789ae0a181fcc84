"""ONNX layers: products, convolutions, normalizations, pooling and resizing."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
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


MAX_POOLS = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
AVERAGE_POOLS = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


@rule("MaxPool")
def max_pool(node: Node) -> Function:
    """Return max pooling, where padding never wins."""
    node.refuse_unless(node.output_count == 1, "gives the indices of the maxima")
    rank, kernel, strides, pads = _window(node)
    dilations = spatial(node, "dilations", rank)
    pool: Function = MAX_POOLS[rank - 1]
    ceil = bool(node.get("ceil_mode", 0))
    if _as_torch_pads(pads, kernel):
        return lambda x: pool(x, kernel, strides, pads[:rank], dilations, ceil)
    return lambda x: pool(
        F.pad(x, flat_pads(pads), value=-math.inf), kernel, strides, 0, dilations, ceil
    )


@rule("AveragePool")
def average_pool(node: Node) -> Function:
    """Return average pooling, with or without padding in the average."""
    rank, kernel, strides, pads = _window(node)
    node.refuse_unless(set(spatial(node, "dilations", rank)) == {1}, "has dilations")
    pool: Function = AVERAGE_POOLS[rank - 1]
    ceil, counted = bool(node.get("ceil_mode", 0)), bool(node.get("count_include_pad", 0))
    if _as_torch_pads(pads, kernel):
        return lambda x: pool(x, kernel, strides, pads[:rank], ceil, counted)
    node.refuse_unless(not ceil, "rounds up the size of a result that is padded unevenly")
    around = flat_pads(pads)
    if counted:
        return lambda x: pool(F.pad(x, around), kernel, strides)

    def function(x: Tensor) -> Tensor:
        ones = F.pad(torch.ones_like(x), around)
        result: Tensor = pool(F.pad(x, around), kernel, strides) / pool(ones, kernel, strides)
        return result

    return function


@rule("GlobalAveragePool", "GlobalMaxPool")
def global_pool(node: Node) -> Function:
    """Return pooling over all spatial dimensions."""
    axes = tuple(range(2, node.rank()))
    if node.op == "GlobalMaxPool":
        return lambda x: torch.amax(x, axes, keepdim=True)
    return lambda x: torch.mean(x, axes, keepdim=True)


@rule("Resize", "Upsample")
def resize(node: Node) -> Function:
    """Return nearest, linear or cubic interpolation, in the modes that torch supports."""
    rank = node.rank() - 2
    at = 1 if node.op == "Upsample" or node.opset < 11 else 2
    scales = node.value(at) if node.has(at) else None
    sizes = node.ints(3) if node.has(3) else None
    if at == 2 and node.has(1):
        node.value(1)  # a region, used by tf_crop_and_resize only
    for name in ("antialias", "exclude_outside", "axes"):
        node.refuse_unless(not node.get(name), f"has {name}")
    policy = node.get("keep_aspect_ratio_policy", "stretch")
    node.refuse_unless(policy == "stretch", f"fits sizes by {policy}")
    old = list(node.shape(0))
    if sizes is None or not sizes:
        factors = scales.tolist() if scales is not None else node.get("scales", ())
        scaled = [size * factor for size, factor in zip(old, factors, strict=True)]
        sizes = [math.floor(size) for size in scaled]
        node.refuse_unless(sizes == scaled, f"scales {old} to sizes that are not whole")
    node.refuse_unless(sizes[:2] == old[:2] and rank >= 1, "changes more than spatial dimensions")
    mode, wanted = node.get("mode", "nearest"), sizes[2:]
    usual = "asymmetric" if at == 1 else "half_pixel"
    how = node.get("coordinate_transformation_mode", usual)
    exact = all(new % size == 0 for new, size in zip(wanted, old[2:], strict=True))
    if mode == "nearest":
        rounding = node.get("nearest_mode", "round_prefer_floor")
        if how == "asymmetric" and (rounding == "floor" or at == 1):
            return lambda x, *_: F.interpolate(x, wanted, mode="nearest")
        known = (
            how in ("half_pixel", "pytorch_half_pixel") and rounding.startswith("round") and exact
        )
        node.refuse_unless(known, f"rounds coordinates {how} by {rounding}")
        return lambda x, *_: F.interpolate(x, wanted, mode="nearest")
    node.refuse_unless(
        how in ("half_pixel", "pytorch_half_pixel", "align_corners"),
        f"interpolates between {how} coordinates",
    )
    node.refuse_unless(how != "pytorch_half_pixel" or 1 not in wanted, "gives a size of 1")
    cubic = mode == "cubic"
    node.refuse_unless(mode == "linear" or (cubic and rank == 2), f"is {mode} in {rank} dimensions")
    node.refuse_unless(
        not cubic or node.get("cubic_coeff_a", -0.75) == -0.75, "has another cubic_coeff_a"
    )
    names = {1: "linear", 2: "bicubic" if cubic else "bilinear", 3: "trilinear"}
    corners = how == "align_corners"

    def function(x: Tensor, *_: Any) -> Tensor:
        return F.interpolate(x, wanted, mode=names[rank], align_corners=corners)

    return function


def _window(node: Node) -> tuple[int, list[int], list[int], list[int]]:
    kernel = list(node.get("kernel_shape"))
    rank = len(kernel)
    node.refuse_unless(1 <= rank <= 3, f"has {rank} spatial dimensions")
    strides = spatial(node, "strides", rank)
    pads = padding(node, kernel, strides, spatial(node, "dilations", rank))
    return rank, kernel, strides, pads


def _as_torch_pads(pads: list[int], kernel: list[int]) -> bool:
    """Return whether both sides have the same padding, at most half of the kernel."""
    rank = len(kernel)
    half = all(2 * pad <= size for pad, size in zip(pads, kernel * 2, strict=True))
    return pads[:rank] == pads[rank:] and half
