"""ONNX operators element by element and along axes: casts, reductions, softmax and einsum."""

from __future__ import annotations

from functools import partial, reduce
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from placer.sources.onnx_ops.node import Function, Node, Rule, dtype_of

PLAIN: Final[dict[str, Function]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Add": torch.add,
    "And": torch.logical_and,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "CastLike": lambda x, other: x.to(other.dtype),
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Equal": torch.eq,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "HardSwish": F.hardswish,
    "Identity": lambda x: x,
    "IsNaN": torch.isnan,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Log": torch.log,
    "MatMul": torch.matmul,
    "Max": lambda *tensors: reduce(torch.maximum, tensors),
    "Mean": lambda x, *others: reduce(torch.add, others, x) / (len(others) + 1) if others else x,
    "Min": lambda *tensors: reduce(torch.minimum, tensors),
    "Mish": F.mish,
    "Mul": torch.mul,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Or": torch.logical_or,
    "PRelu": lambda x, slope: torch.where(x >= 0, x, x * slope),
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Sqrt": torch.sqrt,
    "Sub": torch.sub,
    "Sum": lambda *tensors: reduce(torch.add, tensors),
    "Tan": torch.tan,
    "Tanh": torch.tanh,
    "Where": torch.where,
    "Xor": torch.logical_xor,
}


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


def _cast(node: Node) -> Function:
    dtype = dtype_of(node.get("to"))
    return lambda x: x.to(dtype)


def _divide(node: Node) -> Function:
    """Return a division, which rounds integers toward zero."""
    is_float = node.dtypes[0] is not None and node.dtypes[0].is_floating_point
    return torch.div if is_float else partial(torch.div, rounding_mode="trunc")


def _power(node: Node) -> Function:
    """Return a power with the type of the base."""
    exponent = node.known[1]
    if exponent is not None and exponent.numel() == 1:
        number = node.number(1, 1.0)
        return lambda x, _: torch.pow(x, number).to(x.dtype)
    return lambda x, y: torch.pow(x, y).to(x.dtype)


def _clip(node: Node) -> Function:
    """Return a clamp between two numbers: attributes before opset 11, then inputs."""
    if node.opset < 11:
        return partial(torch.clamp, min=node.get("min"), max=node.get("max"))
    if not node.has(1) and not node.has(2):
        return lambda x, *_: x
    bounds: list[Any] = [node.number(i, 0.0) if node.has(i) else None for i in (1, 2)]
    return lambda x, *_: torch.clamp(x, *bounds)


def _shrink(node: Node) -> Function:
    node.refuse_unless(node.get("bias", 0.0) == 0.0, "has a bias")
    return partial(F.hardshrink, lambd=node.get("lambd", 0.5))


def _selu(node: Node) -> Function:
    """Return torch's selu, whose parameters are ONNX's defaults."""
    alpha, gamma = node.get("alpha", 1.67326), node.get("gamma", 1.0507)
    usual = abs(alpha - 1.67326) < 1e-5 and abs(gamma - 1.0507) < 1e-4
    node.refuse_unless(usual, f"has alpha {alpha:g} and gamma {gamma:g}, not those of torch")
    return F.selu


def _hard_sigmoid(node: Node) -> Function:
    alpha, beta = node.get("alpha", 0.2), node.get("beta", 0.5)
    return lambda x: torch.clamp(x * alpha + beta, 0.0, 1.0)


def _is_infinite(node: Node) -> Function:
    above, below = node.get("detect_positive", 1), node.get("detect_negative", 1)
    if above and below:
        return torch.isinf
    return torch.isposinf if above else torch.isneginf


def _dropout(node: Node) -> Function:
    """Return the identity, which dropout is in inference."""
    node.refuse_unless(node.output_count == 1, "gives its mask, which is of use in training only")
    for position in (1, 2):
        node.value(position)
    return lambda x, *_: x


def _arg_extreme(node: Node) -> Function:
    """Return the index of the largest or smallest entry, the first of equal ones."""
    node.refuse_unless(not node.get("select_last_index", 0), "asks for the last of equal entries")
    axis, keep = node.get("axis", 0), bool(node.get("keepdims", 1))
    extreme: Function = torch.argmax if node.op == "ArgMax" else torch.argmin
    return lambda x: extreme(x, axis, keepdim=keep)


def _cumulative_sum(node: Node) -> Function:
    axis = (node.ints(1) or [0])[0]
    backward, exclusive = node.get("reverse", 0), node.get("exclusive", 0)

    def function(x: Tensor, _: Any) -> Tensor:
        x = x.flip(axis) if backward else x
        sums = torch.cumsum(x, axis, dtype=x.dtype)
        sums = sums - x if exclusive else sums
        return sums.flip(axis) if backward else sums

    return function


def _softmax(node: Node) -> Function:
    """Return softmax along one axis; before opset 13 over all dimensions from it on."""
    function: Function = torch.softmax if node.op == "Softmax" else torch.log_softmax
    if node.opset >= 13:
        axis = node.get("axis", -1)
        return lambda x: function(x, axis)
    first = node.get("axis", 1) % node.rank()
    if first == node.rank() - 1:
        return lambda x: function(x, first)
    return lambda x: function(x.flatten(first), first).reshape(x.shape)


def _plain(node: Node) -> Function:
    return PLAIN[node.op]


RULES: Final[dict[str, Rule]] = {
    **dict.fromkeys(PLAIN, _plain),
    **dict.fromkeys(REDUCTIONS, _reduction),
    "ArgMax": _arg_extreme,
    "ArgMin": _arg_extreme,
    "Cast": _cast,
    "Celu": lambda node: partial(F.celu, alpha=node.get("alpha", 1.0)),
    "Clip": _clip,
    "CumSum": _cumulative_sum,
    "Div": _divide,
    "Dropout": _dropout,
    "Einsum": lambda node: partial(torch.einsum, node.get("equation")),
    "Elu": lambda node: partial(F.elu, alpha=node.get("alpha", 1.0)),
    "Gelu": lambda node: partial(F.gelu, approximate=node.get("approximate", "none")),
    "HardSigmoid": _hard_sigmoid,
    "IsInf": _is_infinite,
    "LeakyRelu": lambda node: partial(F.leaky_relu, negative_slope=node.get("alpha", 0.01)),
    "LogSoftmax": _softmax,
    "Mod": lambda node: torch.fmod if node.get("fmod", 0) else torch.remainder,
    "Pow": _power,
    "Selu": _selu,
    "Shrink": _shrink,
    "Softmax": _softmax,
    "ThresholdedRelu": lambda node: partial(
        F.threshold, threshold=node.get("alpha", 1.0), value=0.0
    ),
}
