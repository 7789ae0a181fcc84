"""Conversion of a traced aten graph to the program that runs it, and the facts of its ops.

An op of the DAG is every call that computes something, and every view of a part of what another op
computed. Other views belong to no op (see :mod:`graphs.extract.program`), members of tuples to the
call that returns the tuple. Backward convolutions are split into the part for the input and the
part for the weight: torch computes them separately anyway, and then they can run on two devices.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
from torch import fx

from graphs.extract.fx_nodes import (
    IGNORED,
    accumulates,
    forward_ops,
    is_backward,
    members_of,
    operator_name,
    owner,
    tagged_call,
)
from graphs.extract.kernels.recurrent import (
    BACKWARD,
    BIAS_GRADIENTS,
    WORKSPACE,
    saves_workspace,
    workspace_shape,
)
from graphs.extract.program import VIEW, Call, Ref, Result, Source, StepProgram, Value, values_in
from graphs.flops import call_flops
from graphs.graph import Phase
from graphs.synthetic.mirror import ACCUMULATES
from graphs.workload import ExtractionError, StepError

MAYBE_COPIES: Final = ("reshape", "contiguous", "to", "_reshape_alias")
ALSO_VIEWS: Final = ("_unsafe_view",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """An aten graph, and the meaning of its placeholders and outputs.

    ``sources`` and ``results`` are by fx node; their ``value`` is not set yet. ``prefix`` is what
    the traced module's paths have before the model's own. ``outputs`` is what the step returns,
    with a Position in place of every tensor. ``depends_on_data`` are the lines of the model that
    read tensor values on which the graph depends, ``unchecked`` those that only check or report
    values, which the graph leaves out. ``steering`` are tensors of the model, neither state nor
    inputs, whose values were read. ``exported`` is the forward pass before it was lowered, if
    it was exported; nodes of ``graph`` are tagged with the calls in it that they stem from.
    """

    graph: fx.Graph
    sources: dict[fx.Node, Source]
    results: list[tuple[fx.Node, Result]]
    prefix: str
    training: bool
    outputs: Any
    depends_on_data: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    steering: tuple[torch.Tensor, ...] = ()
    exported: fx.GraphModule | None = None


NORMALIZATIONS: Final = frozenset(
    {
        *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
        *("_native_batch_norm_legit_no_training", "_batch_norm_with_update"),
        *("_batch_norm_with_update_functional", "native_layer_norm", "native_group_norm"),
    }
)
"""Operators whose second and third output, mean and deviation, have the dtype of the parameters."""


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Facts about an op from the trace, besides its calls."""

    name: str
    module: str
    call_key: str  # module path with the number of its call
    phase: Phase
    flops: int
    forward_op: int | None  # of a backward op: the op that it differentiates
    stems_from: str | None  # key of the exported call, if torch passed it on


def convert(traced: Traced, ties: Mapping[str, str]) -> tuple[StepProgram, tuple[OpFacts, ...]]:
    """Return the program of a traced step, and the facts of its ops by index.

    If the trace holds something that cannot be placed, an ExtractionError says what and where in
    the model's code.
    """
    converter = _Converter(traced)
    program = converter.program(ties)
    forward_of = forward_ops(program.calls, converter.nodes)
    return program, tuple(
        replace(op, forward_op=forward_of.get(i)) for i, op in enumerate(converter.ops)
    )


class _Converter:
    """Collects values, calls and ops of a traced graph."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.values: list[Value] = []
        self.calls: list[Call] = []
        self.nodes: list[fx.Node] = []  # of the calls
        self.ops: list[OpFacts] = []
        self.sources: list[Source] = []
        self.from_source: set[int] = set()
        self.value_of: dict[fx.Node, int] = {}
        self.modules: dict[fx.Node, tuple[str, str]] = {}

    def program(self, ties: Mapping[str, str]) -> StepProgram:
        for node in self.traced.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._source(node)
            elif node.op == "call_function" and node.target is not operator.getitem:
                self._call(node)
        results = [
            replace(result, value=self.value_of[node]) for node, result in self.traced.results
        ]
        return StepProgram(
            values=tuple(self.values),
            calls=tuple(self.calls),
            sources=tuple(self.sources),
            results=tuple(results),
            op_count=len(self.ops),
            training=self.traced.training,
            ties=ties,
            gradients={r.name: r.value for r in results if r.role == "gradient"},
        )

    def _source(self, node: fx.Node) -> None:
        source = self.traced.sources.get(node)
        if source is None:
            if node.users:
                raise ExtractionError(f"the step reads {node.name!r}, which is not a tensor")
            return
        tensor = node.meta.get("val", source.tensor)
        self.sources.append(replace(source, value=self._value(node, tensor, None)))
        self.from_source.add(self.sources[-1].value)

    def _value(self, node: fx.Node, tensor: Any, root: int | None) -> int:
        if not isinstance(tensor, torch.Tensor):
            raise ExtractionError(_place(node, f"{node.target} gives a {type(tensor).__name__}"))
        if any(not isinstance(size, int) for size in (*tensor.shape, *tensor.stride())):
            raise ExtractionError(
                _place(node, f"{node.target} has a size that depends on data or is dynamic")
            )
        index = len(self.values)
        shape, stride = _real_shape(node, tuple(tensor.shape)), tuple(tensor.stride())
        dtype = _real_dtype(node, tensor.dtype)
        self.values.append(Value(shape, stride, dtype, index if root is None else root))
        self.value_of[node] = index
        return index

    def _call(self, node: fx.Node) -> None:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            raise ExtractionError(_place(node, f"{target} is no plain operator"))
        if operator_name(target) in IGNORED:
            return
        if operator_name(target) == "lstm":
            _check_states(node)
        if target is torch.ops.aten.convolution_backward.default and self._split(node):
            return
        is_whole_view = is_view(target) and not self._shows_a_part(node)
        op = VIEW if is_whole_view else self._op(node, operator_name(target), node.args)
        members = _members(node)
        if str(target) == BACKWARD and members is not None:
            self._add_layer_backward(node, op, members)
        else:
            self._add(node, op, node.args, members)

    def _add_layer_backward(self, node: fx.Node, op: int, members: list[fx.Node | None]) -> None:
        """Add the backward pass of a recurrent layer, which has one gradient for both biases."""
        kept, other = BIAS_GRADIENTS
        distinct = list(members)
        distinct[kept], distinct[other] = members[kept] or members[other], None
        self._add(node, op, node.args, distinct)
        if (first := members[kept]) is not None and (second := members[other]) is not None:
            self.value_of[second] = self.value_of[first]

    def _shows_a_part(self, node: fx.Node) -> bool:
        """Return whether a view omits some of a computed tensor (any as_strided: strides move)."""
        root = self.values[self.value_of[node.all_input_nodes[0]]].root
        if root in self.from_source:
            return False
        result = node.meta["val"]
        parts = [result] if isinstance(result, torch.Tensor) else result
        return "as_strided" in str(node.target) or any(
            part.numel() < self.values[root].numel for part in parts
        )

    def _split(self, node: fx.Node) -> bool:
        members = _members(node)
        assert isinstance(members, list)
        wanted = [member is not None for member in members]
        if not (wanted[0] and any(wanted[1:])):
            return False
        for part, keep in (("input", (0,)), ("weight", (1, 2))):
            mask = [wanted[i] and i in keep for i in range(3)]
            args = (*node.args[:-1], mask)
            op = self._op(node, f"convolution_backward.{part}", args)
            self._add(node, op, args, [m if i in keep else None for i, m in enumerate(members)])
        return True

    def _op(self, node: fx.Node, name: str, args: tuple[Any, ...]) -> int:
        module, call_key = self._module(node)
        phase: Phase = "backward" if is_backward(node) else "forward"
        name += ACCUMULATES if accumulates(node) else ""
        flops = call_flops(node.target, *_fake(args, node.kwargs), node.meta.get("val"))
        stems_from = None if accumulates(node) else tagged_call(node)
        self.ops.append(OpFacts(name, module, call_key, phase, flops, None, stems_from))
        return len(self.ops) - 1

    def _module(self, node: fx.Node) -> tuple[str, str]:
        """Return the path of the owning module, and the same with the number of its call.

        Gradient additions have none of their own: they belong to that of the op that feeds them.
        """
        module = owner(node, self.traced.prefix)
        if module is None:
            feeding = (self.modules[n] for n in node.all_input_nodes if n in self.modules)
            module = next(feeding, ("", ""))
        self.modules[node] = module
        return module

    def _add(
        self, node: fx.Node, op: int, args: tuple[Any, ...], members: list[fx.Node | None] | None
    ) -> None:
        arguments = self._plain(tuple(args))
        keywords = self._plain(dict(node.kwargs))
        reads = values_in((arguments, keywords))
        root = self.values[reads[0]].root if op == VIEW else None
        result = node.meta["val"]
        if members is None:
            outputs: list[int | None] = [self._value(node, result, root)]
        else:
            outputs = [
                None if member is None else self._value(member, result[i], root)
                for i, member in enumerate(members)
            ]
        self.calls.append(
            Call(
                op=op,
                target=str(node.target),
                args=arguments,
                kwargs=keywords,
                outputs=tuple(outputs),
                tuple_result=members is not None,
                reads=reads,
                shows_part=op != VIEW and is_view(cast("torch._ops.OpOverload", node.target)),
            )
        )
        self.nodes.append(node)
        module = self._module(node)
        self.modules |= {member: module for member in members or () if member is not None}

    def _plain(self, argument: Any) -> Any:
        match argument:
            case fx.Node():
                return Ref(self.value_of[argument])
            case tuple():
                return tuple(self._plain(item) for item in argument)
            case list():
                return [self._plain(item) for item in argument]
            case dict():
                return {key: self._plain(item) for key, item in argument.items()}
            case _:
                return argument


def is_view(target: torch._ops.OpOverload) -> bool:
    """Return whether an operator always returns a view of its input, never a copy."""
    name = operator_name(target)
    return name in ALSO_VIEWS or (target.is_view and name not in MAYBE_COPIES)


def _members(node: fx.Node) -> list[fx.Node | None] | None:
    """Return the getitem node of each member of a tuple result, None for a single tensor."""
    result = node.meta.get("val")
    if isinstance(result, torch.Tensor):
        return None
    if not isinstance(result, tuple | list):
        raise ExtractionError(_place(node, f"{node.target} gives a {type(result).__name__}"))
    return [users[-1] if users else None for users in members_of(node)]


def _fake(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    fakes = fx.node.map_arg((args, dict(kwargs)), lambda n: n.meta.get("val"))
    return cast("tuple[Any, Any]", fakes)


def _place(node: fx.Node, what: str) -> str:
    """Return the fault with the last line of the user's code that led to it."""
    lines = [line.strip() for line in str(node.meta.get("stack_trace", "")).splitlines()]
    places = [line for line in lines if line.startswith('File "')]
    return f"{what} and cannot be placed" + (f" ({places[-1]})" if places else "")


def _check_states(lstm: fx.Node) -> None:
    """Raise a StepError if last states of an LSTM are used that torch traces in a wrong shape.

    In torch 2.11 they have four dimensions instead of three, also where ops are recorded.
    """
    for member in (_members(lstm) or [])[1:]:
        if member is not None and member.meta["val"].dim() != 3:
            raise StepError(
                f"torch {torch.__version__} traces the last states of an LSTM, which the model "
                "uses, in a wrong shape: install torch 2.13"
            )


def _real_shape(node: fx.Node, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a result: torch's fake kernel says that a workspace is empty."""
    if node.target is operator.getitem and node.args[1] == WORKSPACE:
        layer = node.args[0]
        assert isinstance(layer, fx.Node)
        if saves_workspace(str(layer.target), layer.args):
            return workspace_shape(layer)
    return shape


def _real_dtype(node: fx.Node, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a result: torch's fake kernels are wrong in mixed precision.

    They give statistics of normalizations the dtype of the input, the kernels that of parameters.
    """
    if node.target is not operator.getitem or node.args[1] not in (1, 2):
        return dtype
    norm = node.args[0]
    assert isinstance(norm, fx.Node)
    if operator_name(norm.target) not in NORMALIZATIONS:
        return dtype
    parameters = [own.meta["val"] for own in norm.args[1:5] if isinstance(own, fx.Node)]
    return torch.float32 if any(p.dtype == torch.float32 for p in parameters) else dtype
