"""Values of traced tensors that no data decides: they are the same in every run.

    drop = torch.rand([])              mask = torch.ones(2, 7)
    if drop < 0.0: ...                 if mask.all(): ...

Such a value is computed from no input, parameter, buffer or random draw. A draw compared with a
number outside of its range counts as well.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from graphs.extract.fx_nodes import operator_name, written_arguments

MOST_NUMBERS: Final = 2**24
"""Largest number of elements of a tensor that is computed to know it."""
ONLY_SHAPES: Final = ("_like", "new_")
"""In names of operators that use only the shape of their input, not its values."""
SAME_NUMBERS: Final = frozenset(
    ("alias", "clone", "contiguous", "detach", "expand", "flatten", "lift_fresh")
) | {"permute", "reshape", "select", "slice", "squeeze", "t", "transpose", "unsqueeze", "view"}
"""Operators whose result consists of numbers of their first argument."""
COMPARISONS: Final = ("lt", "le", "gt", "ge", "eq", "ne")
CASTS: Final = ("_to_copy", "to")


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from ``low`` to ``high``; ``is_open`` if ``high`` is not among them."""

    low: float
    high: float
    is_open: bool = False

    def is_less(self, other: Range) -> bool | None:
        """Return whether any number here is less than any of another range, None if it depends."""
        if self.high < other.low or (self.high == other.low and self.is_open):
            return True
        return False if self.low >= other.high else None

    def compared(self, comparison: str, other: Range) -> bool | None:
        """Return what ``lt``, ``le``, ``gt``, ``ge``, ``eq`` or ``ne`` always gives, or None."""
        less, greater = self.is_less(other), other.is_less(self)
        if comparison in ("eq", "ne"):
            return comparison == "ne" if less or greater else None
        known = less if comparison in ("lt", "ge") else greater
        return known if known is None or comparison in ("lt", "gt") else not known


def known_value_of(tensor: object) -> Tensor | None:
    """Return the value of a tensor that torch is tracing, None if it depends on data."""
    node = _traced(tensor)
    return None if node is None else known_value(node)


def drawn_from(tensor: object) -> Range | None:
    """Return the numbers of which a traced tensor has some at random, None for any other."""
    node = _traced(tensor)
    return None if node is None else _drawn(node)


def _traced(tensor: object) -> fx.Node | None:
    mode = get_proxy_mode()
    if mode is None or not isinstance(tensor, Tensor):
        return None
    if isinstance(tensor, FunctionalTensor):
        tensor = torch._from_functional_tensor(tensor.elem)
    slot = get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def known_value(node: fx.Node) -> Tensor | None:
    """Return the value of a traced tensor, None if it depends on data or is too large."""
    needed: dict[fx.Node, Tensor | None] = {}
    queue = [node]
    while queue:
        current = queue.pop()
        if current in needed:
            continue
        needed[current] = decided = decided_value(current)
        if decided is None:
            if not _is_fixed(current):
                return None
            queue += [] if _ignores_values(current) else current.all_input_nodes
    if not _storages(needed).isdisjoint(_written(node.graph)):
        return None
    values: dict[fx.Node, Any] = {}
    with computing():
        for current in node.graph.nodes:
            if current in needed:
                decided = needed[current]
                values[current] = _computed(current, values) if decided is None else decided
    value = values[node]
    return value if isinstance(value, Tensor) else None


def decided_value(node: fx.Node) -> Tensor | None:
    """Return the value of a draw or a comparison that its range alone decides, or None."""
    example = node.meta.get("val")
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(example, Tensor):
        return None
    value: float | None = _compared(node)
    if value is None:
        drawn = _drawn(node)
        if drawn is None or drawn.low != drawn.high:
            return None
        value = drawn.low
    if example.numel() > MOST_NUMBERS:
        return None
    with computing():
        return torch.full(tuple(example.shape), value, dtype=example.dtype)


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Let torch compute as if it traced nothing."""
    with (
        _disable_current_modes(),
        torch._C._DisablePythonDispatcher(),
        torch._C._DisableAutocast(),
        torch._C.DisableTorchFunction(),
        torch.no_grad(),
    ):
        yield


def _compared(node: fx.Node) -> bool | None:
    """Return what a comparison of a draw gives for any number that may be drawn."""
    name = operator_name(node.target)
    if name not in COMPARISONS or len(node.args) != 2:
        return None
    if not any(isinstance(each, fx.Node) and _drawn(each) for each in node.args):
        return None
    one, other = map(_numbers, node.args)
    return None if one is None or other is None else one.compared(name, other)


def _numbers(argument: Any) -> Range | None:
    """Return the range of an argument of a comparison."""
    if isinstance(argument, bool | int | float):
        return Range(argument, argument)
    if not isinstance(argument, fx.Node):
        return None
    drawn = _drawn(argument)
    if drawn is not None:
        return drawn
    value = known_value(argument)
    if value is None or not value.numel() or value.is_complex():
        return None
    with computing():
        return Range(float(value.min()), float(value.max()))


def _drawn(node: fx.Node) -> Range | None:
    """Return the range of numbers that are drawn at random, None for any other."""
    is_cast = False
    while operator_name(node.target) in (*SAME_NUMBERS, *CASTS):
        is_cast |= operator_name(node.target) in CASTS
        viewed = node.args[0]
        if not isinstance(viewed, fx.Node) or "dtype" in str(node.target).split("."):
            return None
        node = viewed
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    found = _range_of_draw(node)
    if found is None or not _storages([node]).isdisjoint(_written(node.graph)):
        return None
    if not is_cast:
        return found
    is_share = found.low >= 0 and found.high <= 1  # in any dtype, but it may be rounded up
    return replace(found, is_open=False) if is_share else None


def _range_of_draw(node: fx.Node) -> Range | None:
    arguments: dict[str, Any] = {
        known.name: node.args[i] if i < len(node.args) else node.kwargs.get(known.name)
        for i, known in enumerate(node.target._schema.arguments)  # type: ignore[union-attr]
    }
    match operator_name(node.target):
        case "rand" | "rand_like":
            return Range(0.0, 1.0, is_open=True)
        case "randint" | "randint_like":
            low, high = arguments.get("low") or 0, arguments["high"]
            if isinstance(low, int) and isinstance(high, int):
                return Range(low, high - 1)
        case "uniform":
            low, high = arguments["from"], arguments["to"]
            if isinstance(low, int | float) and isinstance(high, int | float):
                return Range(low, high)
        case "bernoulli":
            likely = _numbers(arguments.get("p", node.args[0]))
            if likely is not None:
                return Range(math.floor(likely.low), math.ceil(likely.high))
    return None


def _is_fixed(node: fx.Node) -> bool:
    """Return whether a node computes the same from the same arguments, and little."""
    if node.target is operator.getitem:
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    sizes = [each.numel() for each in tree_leaves(node.meta.get("val")) if _is_tensor(each)]
    return not (
        "empty" in target._schema.name
        or target._schema.is_mutable
        or torch.Tag.nondeterministic_seeded in target.tags
        or max(sizes, default=0) > MOST_NUMBERS
    )


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _ignores_values(node: fx.Node) -> bool:
    return any(part in operator_name(node.target) for part in ONLY_SHAPES)


def _computed(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    def value(argument: fx.Node) -> Any:
        if argument in values:
            return values[argument]
        shown = argument.meta["val"]  # of which only the shape counts
        return torch.empty(tuple(shown.shape), dtype=shown.dtype)

    assert callable(node.target)
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value)
    return node.target(*args, **kwargs)


def _storages(nodes: Any) -> set[int]:
    leaves = (leaf for node in nodes for leaf in tree_leaves(node.meta.get("val")))
    return {leaf.untyped_storage()._cdata for leaf in leaves if _is_tensor(leaf)}


def _written(graph: fx.Graph) -> set[int]:
    """Return the storages that operators of a graph write."""
    return _storages(
        argument
        for node in graph.nodes
        for argument in tree_leaves(list(written_arguments(node.target, node.args, node.kwargs)))
        if isinstance(argument, fx.Node)
    )
