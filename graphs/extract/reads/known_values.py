"""Values of traced tensors that no data decides: they are the same in every run.

    drop = torch.rand([])              mask = torch.ones(2, 7)
    if drop < 0.0: ...                 if mask.all(): ...

Such a value is computed from no input, parameter, buffer or random draw. A draw from 0 to 1 that is
compared with a number outside of that counts as well. Only torch's own operators are known, and
only numbers that rounding to any type of float leaves on the same side.
"""

from __future__ import annotations

import contextlib
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
OF_TORCH: Final = ("aten", "prims")
WRITING: Final = ("batch_norm", "instance_norm")
"""In names of operators that write their statistics, which their schemas do not say."""
BELOW: Final = -0.01
ABOVE: Final = 1.1
"""Numbers that are clearly not between 0 and 1 in any type."""
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
            queue += deciding_inputs(current)
    if not _storages(needed).isdisjoint(_written(node.graph)):
        return None
    values: dict[fx.Node, Any] = {}
    try:
        with computing():
            for current in node.graph.nodes:
                if current in needed:
                    decided = needed[current]
                    values[current] = _computed(current, values) if decided is None else decided
    except Exception:  # noqa: BLE001  # whatever torch raises: the value is not known, then
        return None
    value = values[node]
    return value if isinstance(value, Tensor) and value.layout is torch.strided else None


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
    """Return what a comparison of a draw with a number gives for any number that may be drawn."""
    name = operator_name(node.target)
    if not _is_of_torch(node.target) or name not in COMPARISONS or len(node.args) != 2:
        return None
    drawn, number = node.args[0], number_range(node.args[1])
    if not isinstance(drawn, fx.Node) or number is None:  # 0 < drawn is traced as drawn > 0
        return None
    example, found = drawn.meta.get("val"), _drawn(drawn)
    if found is None or not isinstance(example, Tensor) or not example.dtype.is_floating_point:
        return None
    return found.compared(name, number)


def number_range(number: object) -> Range | None:
    """Return the range of one number, None if rounding might bring it between 0 and 1."""
    if type(number) not in (bool, int, float):
        return None
    value = float(number)  # type: ignore[arg-type]  # checked above
    return Range(value, value) if value in (0.0, 1.0) or value < BELOW or value > ABOVE else None


def _drawn(node: fx.Node) -> Range | None:
    """Return the range of numbers that are drawn at random, None for any other."""
    is_cast = False
    while _is_of_torch(node.target) and operator_name(node.target) in (*SAME_NUMBERS, *CASTS):
        is_cast |= operator_name(node.target) in CASTS
        viewed = node.args[0]
        if not isinstance(viewed, fx.Node) or "dtype" in str(node.target).split("."):
            return None
        node = viewed
    if not _is_of_torch(node.target):
        return None
    found = _range_of_draw(node)
    if found is None or not _storages([node]).isdisjoint(_written(node.graph)):
        return None
    return replace(found, is_open=False) if is_cast else found  # it may be rounded up


def _range_of_draw(node: fx.Node) -> Range | None:
    """Return the range of a draw: from 0 to 1, or always the same of the two."""
    arguments: dict[str, Any] = {
        known.name: node.args[i]
        if i < len(node.args)
        else node.kwargs.get(known.name, known.default_value)
        for i, known in enumerate(node.target._schema.arguments)  # type: ignore[union-attr]
    }
    match operator_name(node.target):
        case "rand" | "rand_like":
            return Range(0.0, 1.0, is_open=True)
        case "uniform" if (arguments["from"], arguments["to"]) == (0, 1):
            return Range(0.0, 1.0)
        case "bernoulli":
            likely = arguments.get("p", node.args[0])
            value = known_value(likely) if isinstance(likely, fx.Node) else likely
            with computing():
                return next((Range(p, p) for p in (0.0, 1.0) if _is_all(value, p)), None)
    return None


def _is_all(value: object, number: float) -> bool:
    if isinstance(value, Tensor):
        return value.layout is torch.strided and bool((value == number).all())
    return isinstance(value, int | float) and value == number


def _is_of_torch(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace in OF_TORCH


def _is_fixed(node: fx.Node) -> bool:
    """Return whether a node computes the same from the same arguments, and little."""
    if node.target is operator.getitem:
        return True
    target = node.target
    if not _is_of_torch(target):
        return False
    assert isinstance(target, torch._ops.OpOverload)
    sizes = [each.numel() for each in tree_leaves(node.meta.get("val")) if _is_tensor(each)]
    return not (
        "empty" in target._schema.name
        or target._schema.is_mutable
        or torch.Tag.nondeterministic_seeded in target.tags
        or max(sizes, default=0) > MOST_NUMBERS
    )


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def deciding_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a node whose values count; ``zeros_like`` takes only a shape."""
    name = operator_name(node.target)
    if _is_of_torch(node.target) and (name.endswith("_like") or name.startswith("new_")):
        rest = (node.args[1:], node.kwargs)
        return [leaf for leaf in tree_leaves(rest) if isinstance(leaf, fx.Node)]
    return node.all_input_nodes


def _computed(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Compute a node.

    Raises:
        ValueError: something has another form than in the trace, as under autocast.
    """

    def value(argument: fx.Node) -> Any:
        if argument in values:
            return values[argument]
        shown = argument.meta["val"]  # of which only the shape counts
        return torch.empty(tuple(shown.shape), dtype=shown.dtype)

    assert callable(node.target)
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value)
    result = node.target(*args, **kwargs)
    for found, shown in zip(tree_leaves(result), tree_leaves(node.meta.get("val")), strict=True):
        if _form(found) != _form(shown):
            raise ValueError(f"{node} is traced in another form than it is computed")
    return result


def _form(value: object) -> object:
    if not isinstance(value, Tensor):
        return "number"
    return tuple(map(int, value.shape)), value.dtype


def _storages(nodes: Any) -> set[int]:
    leaves = (leaf for node in nodes for leaf in tree_leaves(node.meta.get("val")))
    return {leaf.untyped_storage()._cdata for leaf in leaves if _is_tensor(leaf)}


def _written(graph: fx.Graph) -> set[int]:
    """Return the storages that operators of a graph write."""
    return _storages(
        argument
        for node in graph.nodes
        for argument in tree_leaves(_may_write(node))
        if isinstance(argument, fx.Node)
    )


def _may_write(node: fx.Node) -> list[Any]:
    if any(part in operator_name(node.target) for part in WRITING):
        return [node.all_input_nodes]
    return list(written_arguments(node.target, node.args, node.kwargs))
