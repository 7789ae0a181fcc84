"""Pooling and resizing of spatial dimensions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from placer.sources.onnx_ops.layers import flat_pads, padding, spatial
from placer.sources.onnx_ops.rule import Function, Node, rule

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
