"""Read nodes of a traced graph: their operator, module, exported call, and forward op.

Calls are tagged before they are lowered, and torch passes the tags on, also to backward ops.
Forward ops are identified by autograd's sequence numbers.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import fx

from graphs.extract.program import VIEW, Call, Source
from graphs.workload import ExtractionError

COPY: Final = "aten.clone.default"
TAG: Final = "placer_call"
"""Key of the exported call that a node stems from, in the part of its meta that torch passes on."""
IGNORED: Final = ("_assert_tensor_metadata", "_assert_async", "_assert_scalar")

ASSERTS: Final = ("_assert_async", "_assert_scalar")


def drop_checks(graph: fx.Graph, *, unread: bool) -> None:
    """Remove asserts of values from a graph, and what only they read.

    With ``unread``, as where the model checks values itself, all goes that nothing reads.
    """
    nodes = [node for node in graph.nodes if operator_name(node.target) in ASSERTS]
    nodes += [node for node in graph.nodes if unread and not _has_effect(node.target)]
    erased: set[fx.Node] = set()
    while nodes:
        node = nodes.pop()
        if node.op != "call_function" or node.users or node in erased:
            continue
        inputs = node.all_input_nodes
        if node.target is operator.getitem:  # members of a result go together
            members = list(inputs[0].users)
            if any(member.users for member in members):
                continue
            nodes += members
        graph.erase_node(node)
        erased.add(node)
        nodes += [each for each in inputs if not _has_effect(each.target)]


def _has_effect(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return isinstance(target, torch._ops.HigherOrderOperator)
    return target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags


def drop_unread(graph: fx.Graph) -> None:
    """Remove calls from a functional graph whose results nothing reads, as draws of chance."""
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


def operator_name(target: Any) -> str:
    """Return the name of an operator without its namespace and overload."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return str(getattr(target, "__name__", target))


def written_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments that the schema of an operator declares to be written."""
    if not isinstance(target, torch._ops.OpOverload):
        return
    for i, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[i] if i < len(args) else kwargs.get(argument.name)


def members_of(node: fx.Node) -> list[list[fx.Node]]:
    """Return, for every member of a tuple result, the getitem nodes that take it."""
    members: list[list[fx.Node]] = [[] for _ in node.meta.get("val") or ()]
    for user in node.users:
        if user.target is operator.getitem:
            members[cast(int, user.args[1])].append(user)
    return members


def owner(node: fx.Node, prefix: str) -> tuple[str, str] | None:
    """Return the path of a node's module, and the same with the number of its call.

    ``prefix`` is what paths have before the model's own. The result is None if torch gives no
    module.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    key, (path, _) = list(stack.items())[-1]
    module = "" if path == prefix else path.removeprefix(prefix + ".") if prefix else path
    _, at, number = key.partition("@")
    return module, f"{module}@{number}" if at else module


def numbered(keys: Iterable[str]) -> list[str]:
    """Return keys made distinct: the second of equal ones ends in #1, the third in #2."""
    counts: Counter[str] = Counter()
    distinct = []
    for key in keys:
        number = counts[key]
        counts[key] += 1
        distinct.append(f"{key}#{number}" if number else key)
    return distinct


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
    arguments = (
        getattr(module, str(argument.target), None)
        for argument in node.all_input_nodes
        if argument.op == "get_attr"
    )
    return [body for body in arguments if isinstance(body, fx.GraphModule)]


def accumulates(node: fx.Node) -> bool:
    """Return whether a node adds up gradients of one tensor: it differentiates no op."""
    return bool(node.meta.get("is_gradient_acc"))


def is_backward(node: fx.Node) -> bool:
    """Return whether a node of a joint graph belongs to the backward pass."""
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def forward_ops(calls: Sequence[Call], nodes: Sequence[fx.Node]) -> dict[int, int]:
    """Return {backward op: forward op that it differentiates}, without ops that add up gradients.

    ``nodes`` are those of the traced graph that the calls come from. The backward of an operator
    runs under the sequence number of that operator (``seq_nr``). Later forward calls that need no
    gradient carry the number too, so the first one counts.
    """
    pairs = list(zip(calls, nodes, strict=True))
    op_of = _forward_op_of_numbers([pair for pair in pairs if not is_backward(pair[1])])
    numbers = sorted(op_of)
    forward_of: dict[int, int] = {}
    for call, node in pairs:
        if call.op == VIEW or not is_backward(node) or accumulates(node):
            continue
        # An in-place operator has two numbers; its backward runs under the lower one, which no
        # forward call has.
        place = bisect_left(numbers, node.meta.get("seq_nr", -1))
        if place < len(numbers):
            forward_of[call.op] = op_of[numbers[place]]
    return forward_of


def _forward_op_of_numbers(forward: Sequence[tuple[Call, fx.Node]]) -> dict[int, int]:
    """Return {sequence number: op} of the calls of a forward pass.

    A view is no op: the first op that reads it stands for it, else the op whose output it shows. A
    copy has nothing to differentiate and counts only if no other op has its number.
    """
    reader: dict[int, int] = {}
    for call, _ in reversed(forward):
        op = call.op if call.op != VIEW else _first(reader, call.made)
        if op != VIEW:
            reader |= dict.fromkeys(call.reads, op)
    maker: dict[int, int] = {}
    copies: dict[int, int] = {}
    others: dict[int, int] = {}
    for call, node in forward:
        made_by = call.op if call.op != VIEW else _first(maker, call.reads)
        maker |= dict.fromkeys(call.made, made_by)
        op = call.op if call.op != VIEW else _first(reader, call.made, otherwise=made_by)
        if op != VIEW:
            ops = copies if call.target == COPY else others
            ops.setdefault(int(node.meta.get("seq_nr", -1)), op)
    return copies | others


def _first(op_of: Mapping[int, int], values: Iterable[int], otherwise: int = VIEW) -> int:
    return next((op_of[value] for value in values if value in op_of), otherwise)


def constants_of(module: fx.GraphModule) -> dict[fx.Node, Source]:
    """Return the tensors that a traced graph holds itself; nested graphs cannot be placed."""
    constants: dict[fx.Node, Source] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(str(node.target))(module)
        if not isinstance(value, torch.Tensor):
            raise ExtractionError(
                f"the step contains a nested graph ({node.target}); higher-order ops such as "
                "torch.cond cannot be placed yet"
            )
        constants[node] = Source(-1, "constant", str(node.target), value.detach())
    return constants


def constants_as_buffers(module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """Register the tensors that an exported module holds as attributes as buffers; return them.

    AOTAutograd takes tensors that are neither parameters nor buffers only where ``lift_fresh_copy``
    reads them, as of ``torch.tensor([1, 2])``.
    """
    constants: dict[str, torch.Tensor] = {}
    state = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    state |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    for node in module.graph.find_nodes(op="get_attr"):
        path = str(node.target)
        value = operator.attrgetter(path)(module)
        if path in state or path in constants or not isinstance(value, torch.Tensor):
            continue
        if not all(operator_name(user.target).startswith("lift_fresh") for user in node.users):
            inside, _, name = path.rpartition(".")
            holder = module.get_submodule(inside)
            delattr(holder, name)
            holder.register_buffer(name, value, persistent=False)
            constants[path] = value
    return constants
