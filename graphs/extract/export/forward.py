"""The exported forward pass as a list of calls that torch runs on any device and differentiates.

A step program (:mod:`graphs.extract.program`) is lowered: its operators are those of the device it
was traced on. The calls here are those of the model, such as ``aten.linear``, with in-place writes
and views as the model has them. Each has a device, except free calls: their output is a view or
costs nothing, and is made wherever it is read.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from graphs.extract.calls import operator_name, owner
from graphs.extract.convert import IGNORED
from graphs.extract.lineage import bodies, tagged_call
from graphs.extract.program import Ref, Role, Source
from graphs.workload import WRAPPED, unwrapped


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardCall:
    """One call of the exported forward pass.

    ``key`` is as stable as the ids of ops: ``module[@call]:op[#occurrence]``. Arguments hold a Ref
    for every tensor, and the nested graphs of a higher-order operator as they are. ``outputs``
    gives the value of the tensor that it returns (``tuple_result`` False) or of the members of the
    tuple, None for a member nobody reads. ``touches`` are the shared storages that it must access
    in program order, ``writes`` those of them that it writes.
    """

    key: str
    op: str
    module: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[int | None, ...]
    tuple_result: bool
    reads: tuple[int, ...]
    touches: frozenset[int]
    writes: frozenset[int]
    is_random: bool
    is_free: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardProgram:
    """All calls of a forward pass in an order that can be run, with its inputs and outputs.

    Sources are parameters, buffers, constants, and inputs (named by their position among all leaves
    of the inputs). ``storage_of`` gives for every value the first one that shares its memory.
    ``results`` are the leaves of the output: a Ref for a tensor, anything else as it is.
    """

    calls: tuple[ForwardCall, ...]
    sources: tuple[Source, ...]
    storage_of: tuple[int, ...]
    results: tuple[Any, ...]

    @property
    def placed_calls(self) -> tuple[ForwardCall, ...]:
        """Calls that have a device, in order."""
        return tuple(call for call in self.calls if not call.is_free)

    def together(self) -> tuple[tuple[str, ...], ...]:
        """Return keys of calls that must share a device: they make, view or write one storage.

        A view on another device would be a copy, and writes to it would be lost.
        """
        members: defaultdict[int, dict[str, None]] = defaultdict(dict)
        for call in self.calls:
            made = {self.storage_of[value] for value in call.outputs if value is not None}
            for storage in sorted(call.writes | (call.touches & made)):
                members[storage][call.key] = None
        return tuple(tuple(keys) for keys in members.values() if len(keys) > 1)

    def first_readers(self) -> dict[int, str]:
        """Return {value of a state: key of the placed call that reads it first}, if there is one.

        A free call stands for the first that reads its output. A call that writes a state shares a
        device with all its readers, see :meth:`together`.
        """
        reader: dict[int, str] = {}
        for call in reversed(self.calls):
            made = (value for value in call.outputs if value is not None)
            key = call.key
            if call.is_free:
                key = next((reader[value] for value in made if value in reader), "")
            if key:
                reader |= dict.fromkeys(call.reads, key)
        states = (s.value for s in self.sources if s.role in ("parameter", "buffer"))
        return {value: reader[value] for value in states if value in reader}

    def makers(self) -> dict[int, int]:
        """Return {value: index of the call that makes it}, without sources."""
        return {
            value: index
            for index, call in enumerate(self.calls)
            for value in call.outputs
            if value is not None
        }


def forward_program(
    exported: fx.GraphModule,
    state: Mapping[str, torch.Tensor],
    *,
    prefix: str,
    mutated: Collection[str],
    counted: Collection[str],
) -> ForwardProgram:
    """Build the program of an exported forward pass whose calls are tagged.

    Args:
        exported: the graph, with fake tensors that share storage as the real ones will.
        state: parameters and buffers of the step by name.
        prefix: what module paths have before the model's own.
        mutated: names of the state that the step changes. Its readers count as writers: the schema
            of batch_norm, for one, hides that it writes.
        counted: keys of the calls that ops of the graph stem from; they are not free.
    """
    reader = _Reader(exported, state, prefix)
    for node in exported.graph.nodes:
        reader.read(node)
    return reader.program(mutated, counted)


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """A call whose written storages are not known yet."""

    node: fx.Node
    key: str
    module: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[int | None, ...]
    reads: tuple[int, ...]


class _Reader:
    """Collects values, sources and calls of an exported graph."""

    def __init__(
        self, exported: fx.GraphModule, state: Mapping[str, torch.Tensor], prefix: str
    ) -> None:
        self.exported = exported
        self.state = state
        self.prefix = prefix
        self.storage_of: list[int] = []
        self.first: dict[int, int] = {}  # by the identity of a fake storage
        self.values: dict[fx.Node, int] = {}
        self.bodies: dict[fx.Node, fx.GraphModule] = {}
        self.values_of_state: dict[int, int] = {}  # by the identity of the tensor, for ties
        self.sources: list[Source] = []
        self.found: list[_Found] = []
        self.results: tuple[Any, ...] = ()
        self.inputs = 0

    def read(self, node: fx.Node) -> None:
        match node.op:
            case "placeholder":
                if isinstance(example := node.meta.get("val"), torch.Tensor):
                    self._source(node, "input", str(self.inputs), example)
                self.inputs += 1
            case "get_attr":
                self._attribute(node)
            case "call_function" if node.target is not operator.getitem:
                if operator_name(node.target) not in IGNORED:
                    self._call(node)
            case "call_function":
                assert node in self.values or not node.users, f"{node} is no member of a tuple"
            case "output":
                self.results = tuple(tree_leaves(self._plain(node.args[0]), is_leaf=_is_ref))

    def program(self, mutated: Collection[str], counted: Collection[str]) -> ForwardProgram:
        written = [self._written(call) for call in self.found]
        read_state = (self.values_of_state.get(id(self.state[name])) for name in mutated)
        changing = {self.storage_of[value] for value in read_state if value is not None}
        shared = changing.union(*written)
        calls = []
        for call, own in zip(self.found, written, strict=True):
            read = {self.storage_of[value] for value in call.reads}
            made = {self.storage_of[value] for value in call.outputs if value is not None}
            touches = frozenset(shared & (read | made))
            is_random = _is_random(self.exported, call.node)
            calls.append(
                ForwardCall(
                    key=call.key,
                    op=operator_name(call.node.target),
                    module=call.module,
                    target=cast("Callable[..., Any]", call.node.target),
                    args=call.args,
                    kwargs=call.kwargs,
                    outputs=call.outputs,
                    tuple_result=not isinstance(call.node.meta.get("val"), torch.Tensor),
                    reads=call.reads,
                    touches=touches,
                    writes=frozenset(own | (changing & read)),
                    is_random=is_random,
                    is_free=not (touches or is_random or call.key in counted),
                )
            )
        return ForwardProgram(
            calls=tuple(calls),
            sources=tuple(self.sources),
            storage_of=tuple(self.storage_of),
            results=self.results,
        )

    def _source(self, node: fx.Node, role: Role, name: str, held: torch.Tensor) -> None:
        value = self._value(node, node.meta.get("val", held))
        constant = held.detach() if role == "constant" else None
        self.sources.append(Source(value, role, name, constant))

    def _attribute(self, node: fx.Node) -> None:
        held: Any = self.exported
        for part in str(node.target).split("."):
            held = getattr(held, part)
        if isinstance(held, fx.GraphModule):
            self.bodies[node] = held
            return
        name = unwrapped(str(node.target)) if self.prefix == WRAPPED else str(node.target)
        if name in self.state and id(self.state[name]) in self.values_of_state:
            self.values[node] = self.values_of_state[id(self.state[name])]
        elif name in self.state:
            is_parameter = isinstance(self.state[name], torch.nn.Parameter)
            self._source(node, "parameter" if is_parameter else "buffer", name, held)
            self.values_of_state[id(self.state[name])] = self.values[node]
        else:
            self._source(node, "constant", str(node.target), held)

    def _value(self, node: fx.Node, tensor: torch.Tensor) -> int:
        index = len(self.storage_of)
        self.storage_of.append(self.first.setdefault(_storage(tensor), index))
        self.values[node] = index
        return index

    def _call(self, node: fx.Node) -> None:
        module, _ = owner(node, self.prefix) or ("", "")
        args, kwargs = self._plain(tuple(node.args)), self._plain(dict(node.kwargs))
        refs = [leaf for leaf in tree_leaves((args, kwargs), is_leaf=_is_ref) if _is_ref(leaf)]
        result = node.meta.get("val")
        if isinstance(result, torch.Tensor):
            outputs: list[int | None] = [self._value(node, result)]
        else:
            outputs = [None] * len(result or ())
            for user in node.users:
                if user.target is operator.getitem:
                    position = cast(int, user.args[1])
                    if outputs[position] is None:
                        outputs[position] = self._value(user, cast(Any, result)[position])
                    else:
                        self.values[user] = cast(int, outputs[position])
        self.found.append(
            _Found(
                node=node,
                key=tagged_call(node) or "",
                module=module,
                args=args,
                kwargs=kwargs,
                outputs=tuple(outputs),
                reads=tuple(dict.fromkeys(ref.value for ref in refs)),
            )
        )

    def _plain(self, argument: Any) -> Any:
        def plain(leaf: Any) -> Any:
            if not isinstance(leaf, fx.Node):
                return leaf
            return self.bodies[leaf] if leaf in self.bodies else Ref(self.values[leaf])

        return tree_map(plain, argument)

    def _written(self, call: _Found) -> set[int]:
        """Return the storages that a call is declared to write."""
        target = call.node.target
        if isinstance(target, torch._ops.OpOverload):
            written = [
                call.args[i] if i < len(call.args) else call.kwargs.get(argument.name)
                for i, argument in enumerate(target._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
        else:
            written = [
                operand
                for body in bodies(self.exported, call.node)
                for operand, is_written in zip(
                    _operands(call.args), _written_inputs(body), strict=True
                )
                if is_written
            ]
        refs = tree_leaves(written, is_leaf=_is_ref)
        return {self.storage_of[ref.value] for ref in refs if _is_ref(ref)}


def _operands(args: tuple[Any, ...]) -> tuple[Any, ...]:
    first = next(i for i, argument in enumerate(args) if isinstance(argument, fx.GraphModule))
    return args[first + 1 :]


def _written_inputs(body: fx.GraphModule) -> list[bool]:
    """Return, for every input of a nested graph, whether a call in it writes the storage."""
    written: set[int] = set()
    for node in body.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        for i, argument in enumerate(node.target._schema.arguments):
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                nodes = [leaf for leaf in tree_leaves(given) if isinstance(leaf, fx.Node)]
                written |= {_storage(leaf.meta["val"]) for leaf in nodes}
    inputs = [node.meta.get("val") for node in body.graph.nodes if node.op == "placeholder"]
    return [isinstance(val, torch.Tensor) and _storage(val) in written for val in inputs]


def _storage(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's memory, shared by its views, also of a fake tensor."""
    return int(tensor.untyped_storage()._cdata)


def _is_random(module: fx.GraphModule, node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    return any(
        _is_random(body, inner)
        for body in bodies(module, node)
        for inner in body.graph.nodes
        if inner.op == "call_function"
    )


def _is_ref(leaf: Any) -> bool:
    return isinstance(leaf, Ref)
