"""ONNX operators element by element and along axes: casts, reductions, softmax and einsum."""

from __future__ import annotations

from functools import partial, reduce
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from placer.sources.onnx_ops.rule import RULES, Function, Node, rule
from placer.sources.onnx_ops.tensors import dtype_of

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
    "Mish": F.mish,
    "Mul": torch.mul,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Or": torch.logical_or,
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
    "Tan": torch.tan,
    "Tanh": torch.tanh,
    "Where": torch.where,
    "Xor": torch.logical_xor,
}


def _plain(function: Function) -> Function:
    return lambda node: function


RULES.update({op: _plain(function) for op, function in PLAIN.items()})


@rule("Cast")
def cast(node: Node) -> Function:
    """Return a cast to another type."""
    dtype = dtype_of(node.get("to"))
    return lambda x: x.to(dtype)


@rule("CastLike")
def cast_like(node: Node) -> Function:
    """Return a cast to the type of another tensor."""
    return lambda x, other: x.to(other.dtype)


@rule("Div")
def div(node: Node) -> Function:
    """Return a division, which rounds integers toward zero."""
    floating = node.dtypes[0] is not None and node.dtypes[0].is_floating_point
    return torch.div if floating else partial(torch.div, rounding_mode="trunc")


@rule("Mod")
def mod(node: Node) -> Function:
    """Return the remainder with the sign of the divisor, or of the dividend (fmod)."""
    return torch.fmod if node.get("fmod", 0) else torch.remainder


@rule("Pow")
def power(node: Node) -> Function:
    """Return a power with the type of the base."""
    exponent = node.known[1]
    if exponent is not None and exponent.numel() == 1:
        number = node.number(1, 1.0)
        return lambda x, _: torch.pow(x, number).to(x.dtype)
    return lambda x, y: torch.pow(x, y).to(x.dtype)


@rule("Max", "Min", "Sum", "Mean")
def of_many(node: Node) -> Function:
    """Return a reduction of any number of tensors."""
    two: Function = {"Max": torch.maximum, "Min": torch.minimum}.get(node.op, torch.add)
    scale = len(node.shapes) if node.op == "Mean" else 1

    def function(*tensors: Tensor) -> Tensor:
        joined: Tensor = reduce(two, tensors)
        return joined / scale if scale > 1 else joined

    return function


@rule("Clip")
def clip(node: Node) -> Function:
    """Return a clamp between two numbers, or tensors of one element."""
    if node.opset < 11:
        return partial(torch.clamp, min=node.get("min"), max=node.get("max"))

    if not node.has(1) and not node.has(2):
        return lambda x, *_: x
    bounds: list[Any] = [node.number(i, 0.0) if node.has(i) else None for i in (1, 2)]
    return lambda x, *_: torch.clamp(x, *bounds)


@rule("LeakyRelu", "Elu", "Celu", "ThresholdedRelu", "Shrink")
def with_alpha(node: Node) -> Function:
    """Return an activation with one parameter."""
    match node.op:
        case "LeakyRelu":
            return partial(F.leaky_relu, negative_slope=node.get("alpha", 0.01))
        case "Elu":
            return partial(F.elu, alpha=node.get("alpha", 1.0))
        case "Celu":
            return partial(F.celu, alpha=node.get("alpha", 1.0))
        case "ThresholdedRelu":
            return lambda x: F.threshold(x, node.get("alpha", 1.0), 0.0)
        case _:
            node.refuse_unless(node.get("bias", 0.0) == 0.0, "has a bias")
            return partial(F.hardshrink, lambd=node.get("lambd", 0.5))


@rule("Selu")
def selu(node: Node) -> Function:
    """Return torch's selu, whose parameters are ONNX's defaults."""
    alpha, gamma = node.get("alpha", 1.67326), node.get("gamma", 1.0507)
    usual = abs(alpha - 1.67326) < 1e-5 and abs(gamma - 1.0507) < 1e-4
    node.refuse_unless(usual, f"has alpha {alpha:g} and gamma {gamma:g}, not those of torch")
    return F.selu


@rule("HardSigmoid")
def hard_sigmoid(node: Node) -> Function:
    """Return a linear function clamped to 0 .. 1."""
    alpha, beta = node.get("alpha", 0.2), node.get("beta", 0.5)
    return lambda x: torch.clamp(x * alpha + beta, 0.0, 1.0)


@rule("IsInf")
def is_infinite(node: Node) -> Function:
    """Return a test for infinities of both signs, or of one."""
    above, below = node.get("detect_positive", 1), node.get("detect_negative", 1)
    if above and below:
        return torch.isinf
    return torch.isposinf if above else torch.isneginf


@rule("Gelu")
def gelu(node: Node) -> Function:
    """Return gelu, exact or approximated by tanh."""
    return partial(F.gelu, approximate=_text(node.get("approximate", "none")))


@rule("PRelu")
def prelu(node: Node) -> Function:
    """Return prelu with a slope that is broadcast like any other tensor."""
    return lambda x, slope: torch.where(x >= 0, x, x * slope)


@rule("Dropout")
def dropout(node: Node) -> Function:
    """Return the identity, which dropout is in inference."""
    node.refuse_unless(node.output_count == 1, "gives its mask, which is of use in training only")
    for position in (1, 2):
        node.value(position)
    return lambda x, *_: x


def _text(given: str | bytes) -> str:
    return given.decode() if isinstance(given, bytes) else given


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
