"""Origin of ops: the exported call that they stem from, and the forward op they differentiate.

Calls are tagged before they are lowered, and torch passes the tags on, also to backward ops.
Forward ops are found by autograd's sequence numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from torch import fx

from graphs.extract.calls import numbered, operator_name, owner
from graphs.extract.program import VIEW, Call

COPY: Final = "aten.clone.default"
TAG: Final = "placer_call"
"""Key of the exported call that a node stems from, in the part of its meta that torch passes on."""


def tag_calls(module: fx.GraphModule, prefix: str) -> None:
    """Tag every call of an exported forward pass with its key ``module[@call]:op[#occurrence]``.

    ``prefix`` is what module paths have before the model's own.
    """
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    names = [
        f"{(owner(node, prefix) or ('', ''))[1]}:{operator_name(node.target)}" for node in calls
    ]
    for node, key in zip(calls, numbered(names), strict=True):
        _tag(module, node, key)


def _tag(module: fx.GraphModule, node: fx.Node, key: str) -> None:
    node.meta["custom"] = {**node.meta.get("custom", {}), TAG: key}
    for body in bodies(module, node):
        for inner in body.graph.nodes:
            _tag(body, inner, key)


def tagged_call(node: fx.Node) -> str | None:
    """Return the key of the exported call that a node stems from, None if torch lost it."""
    key: str | None = node.meta.get("custom", {}).get(TAG)
    return key


def bodies(module: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """Return the nested graphs that a call of a higher-order operator takes."""
    found = (
        getattr(module, str(argument.target), None)
        for argument in node.all_input_nodes
        if argument.op == "get_attr"
    )
    return [body for body in found if isinstance(body, fx.GraphModule)]


def accumulates(node: fx.Node) -> bool:
    """Return whether a node adds up gradients of one tensor: it differentiates no op."""
    return bool(node.meta.get("is_gradient_acc"))


def is_backward(node: fx.Node) -> bool:
    """Return whether a node of a joint graph belongs to the backward pass."""
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def forward_ops(calls: Sequence[Call], nodes: Sequence[fx.Node]) -> dict[int, int]:
    """Return {backward op: forward op that it differentiates}, without ops that add up gradients.

    The backward of an operator runs under the sequence number of that operator (``seq_nr``). Later
    forward calls that need no gradient carry the number too, so the first one counts.

    Args:
        calls: all calls of the step, in order.
        nodes: the node of the traced graph that each call comes from.
    """
    numbered = _numbered(
        [(call, node) for call, node in zip(calls, nodes, strict=True) if not is_backward(node)]
    )
    numbers = sorted(numbered)
    found: dict[int, int] = {}
    for call, node in zip(calls, nodes, strict=True):
        if call.op == VIEW or not is_backward(node) or accumulates(node):
            continue
        # An in-place operator has two numbers; its backward runs under the lower one, which no
        # forward call has.
        place = bisect_left(numbers, node.meta.get("seq_nr", -1))
        if place < len(numbers):
            found[call.op] = numbered[numbers[place]]
    return found


def _numbered(forward: Sequence[tuple[Call, fx.Node]]) -> dict[int, int]:
    """Return {sequence number: op} of the calls of a forward pass.

    A view is no op: the first op that reads it stands for it, else the op whose output it shows. A
    copy has nothing to differentiate and counts only if no other op has its number.
    """
    reader: dict[int, int] = {}
    for call, _ in reversed(forward):
        op = call.op if call.op != VIEW else _first(reader, _made(call))
        if op != VIEW:
            reader |= dict.fromkeys(call.reads, op)
    maker: dict[int, int] = {}
    copies: dict[int, int] = {}
    others: dict[int, int] = {}
    for call, node in forward:
        made_by = call.op if call.op != VIEW else _first(maker, call.reads)
        maker |= dict.fromkeys(_made(call), made_by)
        op = call.op if call.op != VIEW else _first(reader, _made(call), otherwise=made_by)
        if op != VIEW:
            found = copies if call.target == COPY else others
            found.setdefault(int(node.meta.get("seq_nr", -1)), op)
    return copies | others


def _made(call: Call) -> list[int]:
    return [value for value in call.outputs if value is not None]


def _first(op_of: Mapping[int, int], values: Iterable[int], otherwise: int = VIEW) -> int:
    return next((op_of[value] for value in values if value in op_of), otherwise)
