"""Conversion of the graph of an ONNX file to a torch module whose submodules are its nodes."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from placer.sources.names import TargetError
from placer.sources.onnx_ops import RULES, Node, UnsupportedError
from placer.sources.onnx_ops.node import attributes_of, tensor_of

OWN_DOMAINS: Final = ("", "ai.onnx")
ONLY_SHAPES: Final = ("Shape", "Size")
"""Operators that depend only on the shape of their input."""
QUOTING: Final = "\"'\\"
SCOPES: Final = "pkg.torch.onnx.name_scopes"


@dataclass(frozen=True, slots=True)
class Call:
    """A node to run: the path of its submodule, and the names of its inputs and outputs."""

    path: str
    reads: tuple[str | None, ...]
    gives: tuple[str, ...]


class OnnxModel(nn.Module):
    """An ONNX file as a module: takes the file's inputs, returns its output or a tuple of them.

    Submodules have the paths of nodes in the file, "/layer1/layer1.0/conv1/Conv" is
    ``layer1.0.conv1.Conv``; parameters have their names in the file.
    """

    def __init__(self, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.calls: list[Call] = []
        self.state: dict[str, str] = {}  # {value of the file: path of the parameter or buffer}

    def forward(self, *inputs: Tensor) -> Any:
        """Run the nodes in the order of the file."""
        values: dict[str, Any] = dict(zip(self.inputs, inputs, strict=True))
        for call in self.calls:
            arguments = [None if name is None else self._value(name, values) for name in call.reads]
            made = self.get_submodule(call.path)(*arguments)
            values |= zip(call.gives, _results(made), strict=False)
        outputs = tuple(self._value(name, values) for name in self.outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def _value(self, name: str, values: Mapping[str, Any]) -> Any:
        if name in values:
            return values[name]
        return reduce(getattr, self.state[name].split("."), self)


class _Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any, op: str) -> None:
        super().__init__()
        self.function = function
        self.op = op

    def forward(self, *inputs: Tensor | None) -> Any:
        return self.function(*inputs)

    def extra_repr(self) -> str:
        return self.op


def build(graph: Any, opset: int, inputs: Mapping[str, Tensor]) -> OnnxModel:
    """Return the module of a graph (onnx.GraphProto), for inputs of these sizes.

    Everything that does not depend on the data is computed here, once, so that all sizes are known.
    A node without counterpart in torch, or that does not run on such inputs, is a TargetError.
    """
    builder = _Builder(graph, opset, inputs)
    builder.add(graph.node)
    return builder.finished()


class _Builder:
    """Walks a graph once: folds known values, and adds a submodule for every other node."""

    def __init__(self, graph: Any, opset: int, inputs: Mapping[str, Tensor]) -> None:
        self.opset = opset
        self.model = OnnxModel(list(inputs), [output.name for output in graph.output])
        self.known = {one.name: tensor_of(one) for one in graph.initializer}
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.fakes = {name: self.mode.from_tensor(value) for name, value in inputs.items()}
        self.path_of: dict[int, str] = {}  # of registered tensors, by id

    def add(self, nodes: Iterable[Any]) -> None:
        """Add nodes in topological order."""
        for node in nodes:
            where = f"node {node.name or next(iter(node.output), '')!r} ({node.op_type})"
            try:
                self._add(node)
            except TargetError:
                raise
            except UnsupportedError as error:
                raise TargetError(f"{where} {error}") from error
            except Exception as error:
                reason = " ".join(str(error).split())[:300] or type(error).__name__
                raise TargetError(f"{where} does not run on these inputs: {reason}") from error

    def finished(self) -> OnnxModel:
        """Return the module, after registering outputs that are known values."""
        for name in self.model.outputs:
            if name in self.known:
                self._register(name)
            elif name not in self.fakes:
                raise TargetError(f"no node gives the output {name!r}")
        return self.model.eval()

    def _add(self, proto: Any) -> None:
        attributes = attributes_of(proto)
        reads = [name or None for name in proto.input]
        gives = list(proto.output)
        while gives and not gives[-1]:
            gives.pop()
        if proto.op_type == "Constant":
            self.known[gives[0]] = _constant(attributes)
            return
        for name in reads:
            if name is not None and name not in self.known and name not in self.fakes:
                raise UnsupportedError(f"reads {name!r}, which no node before it gives")
        if proto.op_type == "If":
            self._branch(attributes, reads[0], gives)
            return
        rule = RULES.get(proto.op_type) if proto.domain in OWN_DOMAINS else None
        if rule is None:
            domain = f" of the domain {proto.domain}" if proto.domain not in OWN_DOMAINS else ""
            raise UnsupportedError(f"is an operator{domain} that placer does not know")
        examples = [None if n is None else self.known.get(n, self.fakes.get(n)) for n in reads]
        node = Node(
            op=proto.op_type,
            opset=self.opset,
            attributes=attributes,
            shapes=tuple(None if one is None else one.shape for one in examples),
            dtypes=tuple(None if one is None else one.dtype for one in examples),
            known=tuple(None if n is None else self.known.get(n) for n in reads),
            output_count=len(gives),
        )
        function = rule(node)
        left = [None if i in node.read else name for i, name in enumerate(reads)]
        if proto.op_type in ONLY_SHAPES or all(n is None or n in self.known for n in left):
            with torch.no_grad():
                made = function(*(None if n is None else self.known.get(n) for n in left))
            self.known |= zip(gives, _results(made), strict=False)
            return
        with self.mode, torch.no_grad():
            made = function(*(None if n is None else self._fake(n) for n in left))
        self.fakes |= zip(gives, _results(made), strict=False)
        for name in left:
            if name is not None and name in self.known:
                self._register(name)
        owner, free, path = _place(self.model, _node_path(proto))
        owner.add_module(
            free,
            function if isinstance(function, nn.Module) else _Function(function, proto.op_type),
        )
        self.model.calls.append(Call(path, tuple(left), tuple(gives)))

    def _branch(
        self, attributes: Mapping[str, Any], condition: str | None, gives: Sequence[str]
    ) -> None:
        """Replace an If whose condition is known by its branch."""
        known = self.known.get(condition or "")
        if known is None:
            raise UnsupportedError("depends on the data: no fixed graph can hold both branches")
        branch = attributes["then_branch" if known.item() else "else_branch"]
        self.known |= {one.name: tensor_of(one) for one in branch.initializer}
        self.add(branch.node)
        for name, inner in zip(gives, branch.output, strict=True):
            if inner.name in self.known:
                self.known[name] = self.known[inner.name]
            else:
                self.fakes[name] = self.fakes[inner.name]
                owner, free, path = _place(self.model, [*_parts(name), "If"])
                owner.add_module(free, nn.Identity())
                self.model.calls.append(Call(path, (inner.name,), (name,)))

    def _fake(self, name: str) -> Tensor:
        if name not in self.fakes:
            self.fakes[name] = self.mode.from_tensor(self.known[name])
        return self.fakes[name]

    def _register(self, name: str) -> None:
        """Add a parameter for a known tensor, or a buffer if it is small or not floating point."""
        if name in self.model.state:
            return
        tensor = self.known[name]
        if id(tensor) not in self.path_of:
            owner, free, path = _place(self.model, _parts(name))
            if tensor.is_floating_point() and tensor.numel() > 1:
                owner.register_parameter(free, nn.Parameter(tensor, requires_grad=False))
            else:
                owner.register_buffer(free, tensor)
            self.path_of[id(tensor)] = path
        self.model.state[name] = self.path_of[id(tensor)]


def _constant(attributes: Mapping[str, Any]) -> Tensor:
    match attributes:
        case {"value": Tensor() as tensor}:
            return tensor
        case {"value_float": number} | {"value_floats": number}:
            return torch.tensor(number, dtype=torch.float32)
        case {"value_int": number} | {"value_ints": number}:
            return torch.tensor(number, dtype=torch.int64)
        case _:
            raise UnsupportedError(
                f"holds {', '.join(attributes) or 'nothing'}, which is no tensor"
            )


def _results(made: Any) -> Sequence[Any]:
    return made if isinstance(made, tuple | list) else (made,)


def _node_path(proto: Any) -> list[str]:
    """Return the path of a node's module, as written by its exporter.

    Torch's newer exporter adds the paths of all modules around a node. The older one names the node
    by them, where a scope such as layer1/layer1.0 repeats its parent.
    """
    noted = {one.key: one.value for one in proto.metadata_props}
    if SCOPES in noted:
        around = str(ast.literal_eval(noted[SCOPES])[-2])
        return _parts(f"{around}.{proto.name or proto.op_type}")
    path: list[str] = []
    before = ""
    for scope in proto.name.split("/"):
        path += _parts(scope.removeprefix(f"{before}."))
        before = scope
    return path or [proto.op_type]


def _parts(path: str) -> list[str]:
    """Split a path, replacing characters that torch cannot write into quoted code."""
    plain = "".join(c if c.isprintable() and c not in QUOTING else "_" for c in path)
    return [part for part in plain.split(".") if part]


def _place(root: nn.Module, path: Sequence[str]) -> tuple[nn.Module, str, str]:
    """Return the module that owns the last part of a path, a free name there, and the full path."""
    owner, taken = root, []
    for part in path[:-1]:
        if part not in owner._modules:
            part = _free(owner, part)  # noqa: PLW2901
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
        taken.append(part)
    last = _free(owner, path[-1])
    return owner, last, ".".join([*taken, last])


def _free(owner: nn.Module, name: str) -> str:
    number = 0
    free = name
    while hasattr(owner, free):
        number += 1
        free = f"{name}_{number}"
    return free
