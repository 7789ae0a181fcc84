"""Which forward op a backward op differentiates: by the numbers that autograd gives its nodes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from torch import fx

from graphs.extract.program import VIEW, Call

COPY: Final = "aten.clone.default"


def accumulates(node: fx.Node) -> bool:
    """Whether a node adds up gradients of one tensor: it differentiates no op."""
    return bool(node.meta.get("is_gradient_acc"))


def is_backward(node: fx.Node) -> bool:
    """Whether a node of a joint graph belongs to the backward pass."""
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def forward_ops(calls: Sequence[Call], nodes: Sequence[fx.Node]) -> dict[int, int]:
    """{backward op: forward op that it differentiates}, without ops that add up gradients.

    The backward of an operator runs under the sequence number of that operator (``seq_nr``). Later
    forward calls that need no gradient carry the number too, so the first one counts.

    Args:
        calls: All calls of the step, in order.
        nodes: The node of the traced graph that each call comes from.
    """
    numbered = _numbered(
        [(call, node) for call, node in zip(calls, nodes, strict=True) if not is_backward(node)]
    )
    numbers = sorted(numbered)
    found: dict[int, int] = {}
    for call, node in zip(calls, nodes, strict=True):
        if call.op == VIEW or not is_backward(node) or accumulates(node):
            continue
        # An operator in place has two numbers; its backward runs under the lower one, which no
        # forward call has.
        place = bisect_left(numbers, node.meta.get("seq_nr", -1))
        if place < len(numbers):
            found[call.op] = numbered[numbers[place]]
    return found


def _numbered(forward: Sequence[tuple[Call, fx.Node]]) -> dict[int, int]:
    """{sequence number: op} of the calls of a forward pass.

    A view is no op of its own: the first op that reads it stands for it, else the op whose output
    it shows. A copy has nothing to differentiate and counts only where it is alone.
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
