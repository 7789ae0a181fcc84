"""The aten graph of an nn.Module, recorded from the ops that a real step dispatches.

The model's own Python code runs, on its own tensors (on fake ones if it is on the meta device), so
that everything it does is recorded. What it does because of tensor values holds for these inputs
only: the lines that read values are part of the trace.

Torch's functionalization replaces in-place ops and writes through views by ops that return new
tensors: the graph is the same as by torch.export, and the model's own tensors are not changed.
Under autocast, though, every reader of a parameter casts it anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from graphs.extract.autocast import autocast
from graphs.extract.buffers import PlainTensors, check_same_form
from graphs.extract.convert import Traced
from graphs.extract.dispatch.recorder import Recorder, lines_that_read, listable
from graphs.extract.export.trace import (
    Position,
    cell_by_cell,
    constants_of,
)
from graphs.extract.program import Result, Role, Source
from graphs.extract.refusals import (
    explained,
    own_backward_refused,
    quiet,
    wants_input_gradient,
    writes_input,
)
from graphs.extract.substitute import in_its_mode, substituted, with_distinct_inputs
from graphs.extract.trial import try_fakes, without_meta
from graphs.workload import ExtractionError, LossModule, Workload

PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def record(step: Workload) -> Traced:
    """Record one step; the model is left as it was.

    Raises:
        ExtractionError: the model does something that cannot be recorded.
    """
    try:
        with quiet(), in_its_mode(step), without_meta(step) as traceable, cell_by_cell(step):
            try_fakes(traceable)
            with own_backward_refused(step):
                return _Recording(with_distinct_inputs(traceable)).traced()
    except ExtractionError:
        raise
    except Exception as error:
        raise ExtractionError(explained(step, error, "recorded")) from error


@dataclass(frozen=True, slots=True)
class _Given:
    """A tensor that exists before the step."""

    source: Source
    tensor: torch.Tensor


class _Recording:
    def __init__(self, step: Workload) -> None:
        self.step = step
        self.leaves, self.tree = tree_flatten((step.step_inputs, dict(step.keywords)))
        self.given = list(self._given())
        self.results: list[Result] = []
        self.outputs: Any = Position(0)

    def traced(self) -> Traced:
        tensors = [given.tensor for given in self.given]
        random = contextlib.nullcontext() if _fake(tensors) else torch.random.fork_rng(devices=[])
        with random, listable(), enable_python_dispatcher(), FunctionalTensorMode():
            module = make_fx(self._run, _error_on_data_dependent_ops=False)(*tensors)
        graph = module.graph
        lines = lines_that_read(graph)
        _drop_unused(graph)
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        for node, given in zip(placeholders, self.given, strict=True):
            node.meta["val"] = given.tensor.detach()
        if not _fake(tensors):
            _let_values_go(graph)
        (output,) = graph.find_nodes(op="output")
        return Traced(
            graph=graph,
            sources={
                **{n: g.source for n, g in zip(placeholders, self.given, strict=True)},
                **constants_of(module),
            },
            results=list(zip(output.args[0], self.results, strict=True)),
            prefix="",
            training=self.step.training,
            outputs=self.outputs,
            depends_on_data=lines,
        )

    def _given(self) -> Iterator[_Given]:
        parameters = {id(own) for own in self._parameters()}
        known: set[int] = set()
        for name, tensor in self.step.named_state().items():
            if id(tensor) not in known:
                known.add(id(tensor))
                role: Role = "parameter" if id(tensor) in parameters else "buffer"
                yield _Given(Source(-1, role, name), tensor)
        inputs = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        for position, tensor in enumerate(inputs):
            if self.step.training and tensor.requires_grad:
                raise wants_input_gradient(str(position))
            yield _Given(Source(-1, "input", str(position)), tensor)
        if self.step.training:
            some = next(iter(self.step.named_state().values()))
            yield _Given(Source(-1, "tangent", ""), some.new_ones(()).detach())

    def _parameters(self) -> Iterable[torch.Tensor]:
        parts = [self.step.model, self.step.loss]
        return [own for p in parts if isinstance(p, torch.nn.Module) for own in p.parameters()]

    def _run(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Run the step under torch's tracing; store in ``results`` what each returned tensor is."""
        wrapped = [FunctionalTensor.to_functional(tensor) for tensor in tensors]
        by_id = {id(given.tensor): own for given, own in zip(self.given, wrapped, strict=True)}
        leaves = [by_id.get(id(leaf), leaf) for leaf in self.leaves]
        inputs, keywords = tree_unflatten(leaves, self.tree)
        mode = get_proxy_mode()
        assert mode is not None
        recorder = Recorder(self.step, mode.tracer.graph)
        kept = PlainTensors(self.step)
        with (
            substituted(self.step, lambda t: by_id.get(id(t), t)),
            recorder.calls.followed(),
            recorder,
        ):
            if self.step.training:
                found = self._train(recorder, inputs, keywords, wrapped)
            else:
                with autocast(self.step.dtype):
                    returned = self.step.model(*inputs, **keywords)
                found = self._outputs(returned)
            kept.check(recorder.read)
            found += self._new_state(wrapped)
        return [t.from_functional() if isinstance(t, FunctionalTensor) else t for t in found]

    def _train(
        self, recorder: Recorder, inputs: Any, keywords: Any, wrapped: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        with autocast(self.step.dtype):
            loss = LossModule(self.step)(*inputs, **keywords)
        trained = [
            (given.source.name, own)
            for given, own in zip(self.given, wrapped, strict=True)
            if given.source.role in ("parameter", "buffer") and own.requires_grad
        ]
        recorder.go_back_from(loss)
        tangent = wrapped[-1].to(loss.dtype)
        gradients: Sequence[torch.Tensor | None] = [None] * len(trained)
        if loss.requires_grad:
            gradients = torch.autograd.grad(
                [loss], [own for _, own in trained], [tangent], allow_unused=True
            )
        self.results = [Result(-1, "output", "0")]
        found = [loss]
        for (name, _), gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                self.results.append(Result(-1, "gradient", name))
                found.append(gradient)
        return found

    def _outputs(self, returned: Any) -> list[torch.Tensor]:
        leaves, tree = tree_flatten(returned)
        found: list[torch.Tensor] = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[i] = Position(len(found))
                found.append(leaf)
            elif not isinstance(leaf, PLAIN):
                raise ExtractionError(
                    f"the model returns a {type(leaf).__name__}, whose tensors torch cannot find; "
                    "return tensors in tuples, lists or dicts"
                )
        self.results = [Result(-1, "output", str(i)) for i in range(len(found))]
        self.outputs = tree_unflatten(leaves, tree)
        return found

    def _new_state(self, wrapped: Sequence[FunctionalTensor]) -> list[torch.Tensor]:
        """Return new values of parameters and buffers, whether written in place or assigned."""
        now = self.step.named_state()
        found: list[torch.Tensor] = []
        for given, own in zip(self.given, wrapped, strict=True):
            source = given.source
            # missing in torch's stubs
            written = torch._functionalize_has_data_mutation(own.elem)  # type: ignore[attr-defined]
            if source.role == "input" and written:
                raise writes_input(f"tensor {source.name} of its inputs")
            if source.role not in ("parameter", "buffer"):
                continue
            new = now.get(source.name, own)
            check_same_form(source.name, own, new)
            if written or new is not own:
                self.results.append(Result(-1, "state", source.name))
                found.append(new)
        return found


def _drop_unused(graph: fx.Graph) -> None:
    """Remove nodes that nothing reads, such as values read by Python."""
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


def _let_values_go(graph: fx.Graph) -> None:
    """Replace the values of nodes by fake tensors of one mode, which take no memory."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def shape_of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )

    with mode:
        for node in graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = tree_map(shape_of, node.meta["val"])


def _fake(tensors: Sequence[torch.Tensor]) -> bool:
    return any(isinstance(tensor, FakeTensor) for tensor in tensors)
