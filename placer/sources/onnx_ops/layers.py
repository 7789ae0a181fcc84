"""ONNX layers: products, convolutions, normalizations, pooling, resizing and recurrent layers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from placer.sources.onnx_ops.node import Function, Node, Rule


def _gemm(node: Node) -> Function:
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


def _conv(node: Node) -> Function:
    rank = node.rank() - 2
    kernel = node.get("kernel_shape") or node.shape(1)[2:]
    strides, dilations = _spatial(node, "strides", rank), _spatial(node, "dilations", rank)
    pads = _padding(node, kernel, strides, dilations)
    convolve = _by_rank(node, rank, (F.conv1d, F.conv2d, F.conv3d))
    even = pads[:rank] == pads[rank:]
    groups = node.get("group", 1)

    def function(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x, around = (x, pads[:rank]) if even else (F.pad(x, _flat_pads(pads)), [0] * rank)
        result: Tensor = convolve(x, weight, bias, strides, around, dilations, groups)
        return result

    return function


def _conv_transpose(node: Node) -> Function:
    rank = node.rank() - 2
    automatic = node.get("auto_pad", "NOTSET") == "NOTSET" and node.get("output_shape") is None
    node.refuse_unless(automatic, "leaves its padding to be found from the size of the output")
    strides, dilations = _spatial(node, "strides", rank), _spatial(node, "dilations", rank)
    pads = list(node.get("pads") or [0] * 2 * rank)
    more = list(node.get("output_padding") or [0] * rank)
    node.refuse_unless(pads[:rank] == pads[rank:], "pads its two sides differently")
    convolve = _by_rank(node, rank, (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d))
    groups = node.get("group", 1)
    return lambda x, weight, bias=None: convolve(
        x, weight, bias, strides, pads[:rank], more, groups, dilations
    )


def _batch_norm(node: Node) -> Function:
    """Return batch normalization with known means and variances."""
    node.refuse_unless(not node.get("training_mode", 0), "is in training mode")
    node.refuse_unless(node.get("spatial", 1) == 1, "normalizes each element by itself")
    node.refuse_unless(node.output_count == 1, "gives statistics, which is training")
    epsilon = node.get("epsilon", 1e-5)
    return lambda x, scale, bias, mean, var: F.batch_norm(
        x, mean, var, scale, bias, False, 0.0, epsilon
    )


def _layer_norm(node: Node) -> Function:
    """Return a normalization over all dimensions from an axis on."""
    axis = node.get("axis", -1) % node.rank()
    normalize = partial(F.layer_norm, normalized_shape=list(node.shape(0)[axis:]))
    axes, epsilon = tuple(range(axis, node.rank())), node.get("epsilon", 1e-5)

    def function(x: Tensor, scale: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        results = [normalize(x, weight=scale, bias=bias, eps=epsilon)]
        if node.output_count > 1:
            results.append(x.mean(axes, keepdim=True))
        if node.output_count > 2:
            results.append((x.var(axes, correction=0, keepdim=True) + epsilon).rsqrt())
        return tuple(results)

    return function


def _rms_norm(node: Node) -> Function:
    """Return a normalization over all dimensions from an axis on, without the mean."""
    axis = node.get("axis", -1) % node.rank()
    sizes, epsilon = list(node.shape(0)[axis:]), node.get("epsilon", 1e-5)
    return lambda x, scale: F.rms_norm(x, sizes, scale, epsilon)


def _group_norm(node: Node) -> Function:
    """Return group normalization; parameters are per group before opset 21, then per channel."""
    groups, epsilon = node.get("num_groups"), node.get("epsilon", 1e-5)
    repeats = node.shape(0)[1] // groups if node.opset < 21 else 1

    def function(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        weight, shift = (
            (one.repeat_interleave(repeats) if repeats > 1 else one) for one in (scale, bias)
        )
        return F.group_norm(x, groups, weight, shift, epsilon)

    return function


def _spatial(node: Node, name: str, rank: int) -> list[int]:
    """Return an attribute with a number for each spatial dimension, 1 by default."""
    return list(node.get(name) or [1] * rank)


def _padding(node: Node, kernel: Any, strides: list[int], dilations: list[int]) -> list[int]:
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


def _flat_pads(pads: list[int]) -> list[int]:
    """Convert ONNX's padding order to torch's: last dimension first, its two ends together."""
    rank = len(pads) // 2
    return [pads[axis + side * rank] for axis in reversed(range(rank)) for side in (0, 1)]


def _by_rank(node: Node, rank: int, functions: tuple[Function, ...]) -> Function:
    node.refuse_unless(1 <= rank <= len(functions), f"has {rank} spatial dimensions")
    return functions[rank - 1]


MAX_POOLS = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
AVERAGE_POOLS = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


def _max_pool(node: Node) -> Function:
    """Return max pooling, where padding never wins."""
    node.refuse_unless(node.output_count == 1, "gives the indices of the maxima")
    rank, kernel, strides, pads = _window(node)
    dilations = _spatial(node, "dilations", rank)
    pool: Function = MAX_POOLS[rank - 1]
    ceil = bool(node.get("ceil_mode", 0))
    if _as_torch_pads(pads, kernel):
        return lambda x: pool(x, kernel, strides, pads[:rank], dilations, ceil)
    return lambda x: pool(
        F.pad(x, _flat_pads(pads), value=-math.inf), kernel, strides, 0, dilations, ceil
    )


def _average_pool(node: Node) -> Function:
    """Return average pooling, with or without padding in the average."""
    rank, kernel, strides, pads = _window(node)
    node.refuse_unless(set(_spatial(node, "dilations", rank)) == {1}, "has dilations")
    pool: Function = AVERAGE_POOLS[rank - 1]
    ceil, counted = bool(node.get("ceil_mode", 0)), bool(node.get("count_include_pad", 0))
    if _as_torch_pads(pads, kernel):
        return lambda x: pool(x, kernel, strides, pads[:rank], ceil, counted)
    node.refuse_unless(not ceil, "rounds up the size of a result that is padded unevenly")
    around = _flat_pads(pads)
    if counted:
        return lambda x: pool(F.pad(x, around), kernel, strides)

    def function(x: Tensor) -> Tensor:
        ones = F.pad(torch.ones_like(x), around)
        result: Tensor = pool(F.pad(x, around), kernel, strides) / pool(ones, kernel, strides)
        return result

    return function


def _global_pool(node: Node) -> Function:
    axes = tuple(range(2, node.rank()))
    if node.op == "GlobalMaxPool":
        return lambda x: torch.amax(x, axes, keepdim=True)
    return lambda x: torch.mean(x, axes, keepdim=True)


def _resize(node: Node) -> Function:
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
    is_centred = how in ("half_pixel", "pytorch_half_pixel")
    if mode == "nearest":
        rounding = node.get("nearest_mode", "round_prefer_floor")
        exact = all(new % size == 0 for new, size in zip(wanted, old[2:], strict=True))
        known = is_centred and rounding.startswith("round") and exact
        known |= how == "asymmetric" and (rounding == "floor" or at == 1)
        node.refuse_unless(known, f"rounds coordinates {how} by {rounding}")
        return lambda x, *_: F.interpolate(x, wanted, mode="nearest")
    corners = how == "align_corners"
    node.refuse_unless(is_centred or corners, f"interpolates between {how} coordinates")
    node.refuse_unless(how != "pytorch_half_pixel" or 1 not in wanted, "gives a size of 1")
    cubic = mode == "cubic"
    node.refuse_unless(mode == "linear" or (cubic and rank == 2), f"is {mode} in {rank} dimensions")
    node.refuse_unless(
        not cubic or node.get("cubic_coeff_a", -0.75) == -0.75, "has another cubic_coeff_a"
    )
    name = {1: "linear", 2: "bicubic" if cubic else "bilinear", 3: "trilinear"}[rank]
    return lambda x, *_: F.interpolate(x, wanted, mode=name, align_corners=corners)


def _window(node: Node) -> tuple[int, list[int], list[int], list[int]]:
    kernel = list(node.get("kernel_shape"))
    rank = len(kernel)
    node.refuse_unless(1 <= rank <= 3, f"has {rank} spatial dimensions")
    strides = _spatial(node, "strides", rank)
    pads = _padding(node, kernel, strides, _spatial(node, "dilations", rank))
    return rank, kernel, strides, pads


def _as_torch_pads(pads: list[int], kernel: list[int]) -> bool:
    """Return whether both sides have the same padding, at most half of the kernel."""
    rank = len(kernel)
    half = all(2 * pad <= size for pad, size in zip(pads, kernel * 2, strict=True))
    return pads[:rank] == pads[rank:] and half


GATES: Final = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
"""Positions in ONNX's weights (iofc, zrh) of the gates in torch's order (ifgo, rzn)."""
ACTIVATIONS: Final = {
    "LSTM": ("Sigmoid", "Tanh", "Tanh"),
    "GRU": ("Sigmoid", "Tanh"),
    "RNN": ("Tanh",),
}
LAYERS: Final[dict[str, type[nn.LSTM | nn.GRU | nn.RNN]]] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN": nn.RNN,
}


class Recurrent(nn.Module):
    """A recurrent layer of torch with the inputs and outputs of ONNX.

    Inputs: x (T, B, I); initial_h and initial_c (D, B, H), D directions. Outputs: y (T, D, B, H),
    the last h and, of an LSTM, the last c (D, B, H).
    """

    def __init__(self, layer: nn.RNNBase, *, backward: bool) -> None:
        super().__init__()
        self.layer = layer
        self.backward = backward

    def forward(self, x: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
        """Run all time steps."""
        initial = [*others[4:6], None, None][:2]
        directions = 2 if self.layer.bidirectional else 1
        size = (directions, x.shape[1], self.layer.hidden_size)
        h, c = (x.new_zeros(size) if state is None else state for state in initial)
        x = x.flip(0) if self.backward else x
        if isinstance(self.layer, nn.LSTM):
            y, last = self.layer(x, (h, c))
        else:
            y, one = self.layer(x, h)
            last = (one,)
        y = y.flip(0) if self.backward else y
        parts: Tensor = y.reshape(*y.shape[:2], directions, size[2]).transpose(1, 2)
        return (parts, *last)


def _recurrent(node: Node) -> Function:
    """Return a layer of torch with the same weights."""
    direction = node.get("direction", "forward")
    directions = 2 if direction == "bidirectional" else 1
    usual = ACTIVATIONS[node.op] * directions
    activations = tuple(node.get("activations") or usual)
    node.refuse_unless(activations == usual, f"has the activations {', '.join(activations)}")
    node.refuse_unless(node.get("clip") is None, "clips its gates")
    node.refuse_unless(node.get("layout", 0) == 0, "has the batch as its first dimension")
    node.refuse_unless(not node.get("input_forget", 0), "couples its gates")
    node.refuse_unless(not node.has(7), "has peepholes")
    after = node.op != "GRU" or bool(node.get("linear_before_reset", 0))
    node.refuse_unless(after, "resets before its linear layer, which no GRU of torch does")
    steps = node.ints(4) if node.has(4) else None
    node.refuse_unless(
        steps is None or set(steps) == {node.shape(0)[0]}, "has sequences of different lengths"
    )
    inputs, hidden, biases = node.value(1), node.value(2), node.value(3)
    assert inputs is not None
    assert hidden is not None
    layer = LAYERS[node.op](
        inputs.shape[2],
        hidden.shape[2],
        bias=biases is not None,
        bidirectional=directions == 2,
    )
    weights: list[Any] = []
    for d in range(directions):
        weights += [_reordered(node.op, inputs[d]), _reordered(node.op, hidden[d])]
        if biases is not None:
            weights += [_reordered(node.op, half) for half in biases[d].chunk(2)]
    with torch.no_grad():
        for parameter, weight in zip(layer.parameters(), weights, strict=True):
            parameter.data = weight.contiguous()
    layer.requires_grad_(False)
    return Recurrent(layer, backward=direction == "reverse")


def _reordered(op: str, weights: Tensor) -> Tensor:
    gates = weights.chunk(len(GATES[op]))
    return torch.cat([gates[i] for i in GATES[op]])


RULES: Final[dict[str, Rule]] = {
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "GRU": _recurrent,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_pool,
    "GlobalMaxPool": _global_pool,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": lambda node: (
        lambda x, scale, bias: F.instance_norm(
            x, weight=scale, bias=bias, eps=node.get("epsilon", 1e-5)
        )
    ),
    "LRN": lambda node: partial(
        F.local_response_norm,
        size=node.get("size"),
        alpha=node.get("alpha", 1e-4),
        beta=node.get("beta", 0.75),
        k=node.get("bias", 1.0),
    ),
    "LSTM": _recurrent,
    "LayerNormalization": _layer_norm,
    "LpNormalization": lambda node: partial(
        F.normalize, p=float(node.get("p", 2)), dim=node.get("axis", -1)
    ),
    "MaxPool": _max_pool,
    "RMSNormalization": _rms_norm,
    "RNN": _recurrent,
    "Resize": _resize,
    "Upsample": _resize,
}
