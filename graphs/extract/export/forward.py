"""The exported forward pass as a list of calls that torch runs on any device and differentiates.

A step program (:mod:`graphs.extract.program`) is lowered: its operators are those of the device it
was traced on. The calls here are those of the model, such as ``aten.linear``, with in-place writes
and views as the model has them. Each has a device, except free calls: their output is a view or
costs nothing, and is made wherever it is read.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from graphs.extract.export.functions import OwnFunction
from graphs.extract.fx_nodes import (
    IGNORED,
    bodies,
    members_of,
    operator_name,
    owner,
    tagged_call,
    written_arguments,
)
from graphs.extract.program import Ref, Role, Source, values_in
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

    @property
    def made(self) -> tuple[int, ...]:
        """Values of the results that something reads."""
        return tuple(value for value in self.outputs if value is not None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardProgram:
    """All calls of a forward pass in an order that can be run, with its inputs and outputs.

    Sources are parameters, buffers, constants, and inputs (named by their position among all leaves
    of the inputs). ``storage_of`` gives for every value the first one that shares its memory,
    ``shapes`` and ``dtypes`` are those of every value. ``results`` are the leaves of the output: a
    Ref for a tensor, anything else as it is.
    """

    calls: tuple[ForwardCall, ...]
    sources: tuple[Source, ...]
    storage_of: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
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
            made = {self.storage_of[value] for value in call.made}
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
            key = call.key
            if call.is_free:
                key = next((reader[value] for value in call.made if value in reader), "")
            if key:
                reader |= dict.fromkeys(call.reads, key)
        states = (s.value for s in self.sources if s.role in ("parameter", "buffer"))
        return {value: reader[value] for value in states if value in reader}

    def producers(self) -> dict[int, int]:
        """Return {value: index of the call that makes it}, without sources."""
        return {value: index for index, call in enumerate(self.calls) for value in call.made}


def forward_program(
    exported: fx.GraphModule,
    state: Mapping[str, torch.Tensor],
    *,
    prefix: str,
    mutated: Collection[str],
    counted: Collection[str],
) -> ForwardProgram:
    """Build the program of an exported forward pass whose calls are tagged.

    Fake tensors of ``exported`` share storage as the real ones will. ``state`` holds parameters and
    buffers of the step, ``prefix`` is what module paths have before the model's own. Readers of
    ``mutated`` state count as writers: the schema of batch_norm, for one, hides that it writes.
    Calls with the keys ``counted``, from which ops of the graph stem, are not free.
    """
    reader = ForwardReader(exported, state, prefix)
    for node in exported.graph.nodes:
        reader.read(node)
    return reader.program(mutated, counted)


class ForwardReader:
    """Collects values, sources and calls of an exported graph."""

    def __init__(
        self, exported: fx.GraphModule, state: Mapping[str, torch.Tensor], prefix: str
    ) -> None:
        self.exported = exported
        self.state = state
        self.prefix = prefix
        self.storage_of: list[int] = []
        self.shapes: list[tuple[int, ...]] = []
        self.dtypes: list[torch.dtype] = []
        self.first: dict[int, int] = {}  # by the identity of a fake storage
        self.values: dict[fx.Node, int] = {}
        self.bodies: dict[fx.Node, fx.GraphModule] = {}
        self.values_of_state: dict[int, int] = {}  # by the identity of the tensor, for ties
        self.sources: list[Source] = []
        self.calls: list[ForwardCall] = []
        self.results: tuple[Any, ...] = ()
        self.inputs = 0

    def read(self, node: fx.Node) -> None:
        """Read a node; nodes come in the order of the program."""
        match node.op:
            case "placeholder":
                if isinstance(example := node.meta.get("val"), torch.Tensor):
                    self.add_source(node, "input", str(self.inputs), example)
                self.inputs += 1
            case "get_attr":
                self._attribute(node)
            case "call_function" if node.target is not operator.getitem:
                if operator_name(node.target) not in IGNORED:
                    self.calls.append(self._call(node))
            case "call_function":
                assert node in self.values or not node.users, f"{node} is no member of a tuple"
            case "output":
                self.results = tuple(tree_leaves(self._plain(node.args[0])))

    def program(self, mutated: Collection[str], counted: Collection[str]) -> ForwardProgram:
        """Return the program; only now is it known which storages are written."""
        read_state = (self.values_of_state.get(id(self.state[name])) for name in mutated)
        changing = self._storages(value for value in read_state if value is not None)
        shared = changing.union(*(call.writes for call in self.calls))
        calls = []
        for call in self.calls:
            read = self._storages(call.reads)
            touches = shared & (read | self._storages(call.made))
            calls.append(
                replace(
                    call,
                    touches=touches,
                    writes=call.writes | (changing & read),
                    is_free=not (touches or call.is_random or call.key in counted),
                )
            )
        return ForwardProgram(
            calls=tuple(calls),
            sources=tuple(self.sources),
            storage_of=tuple(self.storage_of),
            shapes=tuple(self.shapes),
            dtypes=tuple(self.dtypes),
            results=self.results,
        )

    def add_source(self, node: fx.Node, role: Role, name: str, tensor: torch.Tensor) -> None:
        """Take a node as a tensor that exists before the step."""
        value = self._value(node, node.meta.get("val", tensor))
        constant = tensor.detach() if role == "constant" else None
        self.sources.append(Source(value, role, name, constant))

    def _attribute(self, node: fx.Node) -> None:
        path = str(node.target)
        attribute = operator.attrgetter(path)(self.exported)
        if isinstance(attribute, fx.GraphModule):
            self.bodies[node] = attribute
            return
        name = unwrapped(path) if self.prefix == WRAPPED else path
        if name not in self.state:
            self.add_source(node, "constant", path, attribute)
        elif id(self.state[name]) in self.values_of_state:
            self.values[node] = self.values_of_state[id(self.state[name])]
        else:
            is_parameter = isinstance(self.state[name], torch.nn.Parameter)
            self.add_source(node, "parameter" if is_parameter else "buffer", name, attribute)
            self.values_of_state[id(self.state[name])] = self.values[node]

    def _value(self, node: fx.Node, tensor: torch.Tensor) -> int:
        index = len(self.storage_of)
        self.storage_of.append(self.first.setdefault(_storage(tensor), index))
        self.shapes.append(tuple(tensor.shape))
        self.dtypes.append(tensor.dtype)
        self.values[node] = index
        return index

    def _storages(self, values: Iterable[int]) -> frozenset[int]:
        return frozenset(self.storage_of[value] for value in values)

    def _call(self, node: fx.Node) -> ForwardCall:
        """Return a call with the storages that it is declared to write."""
        module, _ = owner(node, self.prefix) or ("", "")
        args, kwargs = self._plain(tuple(node.args)), self._plain(dict(node.kwargs))
        result: Any = node.meta.get("val")
        is_tensor = isinstance(result, torch.Tensor)
        outputs: list[int | None] = [self._value(node, result)] if is_tensor else []
        for position, users in enumerate(() if is_tensor else members_of(node)):
            outputs.append(self._value(users[0], result[position]) if users else None)
            if users:
                self.values |= dict.fromkeys(users, self.values[users[0]])
        written = list(written_arguments(node.target, args, kwargs))
        if not isinstance(node.target, torch._ops.OpOverload):
            for body in bodies(self.exported, node):
                inputs = zip(_operands(args), _written_inputs(body), strict=True)
                written += [operand for operand, is_written in inputs if is_written]
        return ForwardCall(
            key=tagged_call(node) or "",
            op=operator_name(node.target),
            module=module,
            target=cast("Callable[..., Any]", node.target),
            args=args,
            kwargs=kwargs,
            outputs=tuple(outputs),
            tuple_result=not is_tensor,
            reads=values_in((args, kwargs)),
            touches=frozenset(),
            writes=self._storages(values_in(written)),
            is_random=_is_random(self.exported, node),
            is_free=False,
        )

    def _plain(self, argument: Any) -> Any:
        def plain(leaf: Any) -> Any:
            if not isinstance(leaf, fx.Node):
                return leaf
            return self.bodies[leaf] if leaf in self.bodies else Ref(self.values[leaf])

        return tree_map(plain, argument)


def _operands(args: tuple[Any, ...]) -> tuple[Any, ...]:
    first = next(i for i, argument in enumerate(args) if isinstance(argument, fx.GraphModule))
    return args[first + 1 :]


def _written_inputs(body: fx.GraphModule) -> list[bool]:
    """Return, for every input of a nested graph, whether a call in it writes the storage."""
    written = {
        _storage(leaf.meta["val"])
        for node in body.graph.nodes
        if node.op == "call_function"
        for leaf in tree_leaves(list(written_arguments(node.target, node.args, node.kwargs)))
        if isinstance(leaf, fx.Node)
    }
    inputs = [node.meta.get("val") for node in body.graph.nodes if node.op == "placeholder"]
    return [isinstance(val, torch.Tensor) and _storage(val) in written for val in inputs]


def _storage(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's memory, shared by its views, also of a fake tensor."""
    return int(tensor.untyped_storage()._cdata)


def _is_random(module: fx.GraphModule, node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    if isinstance(node.target, OwnFunction):
        return node.target.is_random
    return any(
        _is_random(body, inner)
        for body in bodies(module, node)
        for inner in body.graph.nodes
        if inner.op == "call_function"
    )
