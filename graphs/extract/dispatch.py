"""The aten graph of an nn.Module, recorded from the ops that a real step dispatches.

The model's own Python code runs, on its own tensors (on fake ones if it is on the meta device), so
that everything it does is recorded. What it does because of tensor values holds for these inputs
only: the lines that read values are part of the trace.

Functionalization replaces in-place ops and writes through views: the graph is that of torch.export,
and the model's tensors are not changed. Under autocast every reader of a parameter casts it anew.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd.function import Function
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from graphs.extract.autocast import autocast
from graphs.extract.constants import (
    check_not_replaced,
    read_elsewhere,
    replaced,
    tensor_attributes,
)
from graphs.extract.convert import Traced
from graphs.extract.eager import try_fakes, without_meta
from graphs.extract.errors import (
    custom_backward_checked,
    running_line,
    unreturnable,
    wants_input_gradient,
    writes_gradient,
    writes_input,
)
from graphs.extract.export.flags import Results, asking_lines, check_like_eager
from graphs.extract.export.trace import Position
from graphs.extract.fx_nodes import constants_of, drop_unread, written_arguments
from graphs.extract.kernels.decomposed import trained_as_in_eager_mode
from graphs.extract.model_state import (
    GradientWatch,
    check_no_new_state,
    check_same_form,
    empty_buffers,
    substituted,
    tracing,
    with_distinct_inputs,
)
from graphs.extract.module_calls import ModuleCall, ModuleCalls, module_paths
from graphs.extract.program import Result, Role, Source
from graphs.extract.reads.checks import is_decided, running_check
from graphs.extract.reads.known_values import drawn_from
from graphs.extract.reads.value_reads import lines_that_read, readable, reads_values, steering
from graphs.inputs import PLAIN, flatten_objects
from graphs.workload import ExtractionError, LossModule, Workload


def record(step: Workload) -> Traced:
    """Record one step; the model is left as it was."""
    with tracing(step, "recorded"), without_meta(step) as traceable, trained_as_in_eager_mode():
        try_fakes(traceable)
        recording = _Recording(with_distinct_inputs(traceable))
        with custom_backward_checked(step), asking_lines() as lines:
            traced = recording.traced()
        check_like_eager(traceable, lines, recording.computed, "recorded")
        return traced


class _Recording:
    def __init__(self, step: Workload) -> None:
        self.step = step
        self.leaves, self.tree = tree_flatten((step.step_inputs, dict(step.keywords)))
        pairs = list(self._existing())
        self.sources = [source for source, _ in pairs]
        self.tensors = [tensor for _, tensor in pairs]
        self.empty = empty_buffers(module_paths(step))
        self.results: list[Result] = []
        self.outputs: Any = Position(0)
        self.returned: list[torch.Tensor] = []

    def traced(self) -> Traced:
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in self.tensors)
        random = contextlib.nullcontext() if is_fake else torch.random.fork_rng(devices=[])
        with random, readable(), enable_python_dispatcher(), FunctionalTensorMode():
            module = make_fx(self._run, _error_on_data_dependent_ops=False)(*self.tensors)
        graph = module.graph
        lines, unchecked = lines_that_read(graph, "reads_values"), lines_that_read(graph, "checks")
        steers = steering(module)
        drop_unread(graph)  # as values for Python
        placeholders = graph.find_nodes(op="placeholder")
        for node, tensor in zip(placeholders, self.tensors, strict=True):
            node.meta["val"] = tensor.detach()
        if not is_fake:
            _let_values_go(graph)
        (output,) = graph.find_nodes(op="output")
        return Traced(
            graph=graph,
            sources=dict(zip(placeholders, self.sources, strict=True)) | constants_of(module),
            results=list(zip(output.args[0], self.results, strict=True)),
            prefix="",
            training=self.step.training,
            outputs=self.outputs,
            depends_on_data=lines,
            unchecked=unchecked,
            steering=steers,
        )

    def computed(self) -> Results:
        """Return what the recorded step computed, once it is traced."""
        state = self.step.named_state()
        buffers = {k: t for k, t in state.items() if not isinstance(t, torch.nn.Parameter)}
        values: dict[str, dict[str, torch.Tensor]]
        values = {"output": {}, "gradient": {}, "state": buffers}
        for result, tensor in zip(self.results, self.returned, strict=True):
            values[result.role][result.name] = tensor.detach()
        outputs, gradients, buffers = values.values()
        return Results([*outputs.values()], gradients, buffers)

    def _existing(self) -> Iterator[tuple[Source, torch.Tensor]]:
        """Yield the tensors that exist before the step, each once."""
        parts = [self.step.model, self.step.loss]
        modules = [part for part in parts if isinstance(part, torch.nn.Module)]
        parameters = {id(tensor) for module in modules for tensor in module.parameters()}
        state = {id(tensor): name for name, tensor in reversed(self.step.named_state().items())}
        for name, tensor in self.step.named_state().items():
            if state[id(tensor)] == name:
                role: Role = "parameter" if id(tensor) in parameters else "buffer"
                yield Source(-1, role, name), tensor
        inputs = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        for position, tensor in enumerate(inputs):
            if self.step.training and tensor.requires_grad:
                raise wants_input_gradient(str(position))
            yield Source(-1, "input", str(position)), tensor
        if self.step.training:
            some = next(iter(self.step.named_state().values()))
            yield Source(-1, "tangent", ""), some.new_ones(()).detach()

    def _run(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Run the step under torch's tracing; store in ``results`` what each returned tensor is."""
        wrapped = [FunctionalTensor.to_functional(tensor) for tensor in tensors]
        by_id = {id(tensor): new for tensor, new in zip(self.tensors, wrapped, strict=True)}
        leaves = [by_id.get(id(leaf), leaf) for leaf in self.leaves]
        inputs, keywords = tree_unflatten(leaves, self.tree)
        mode = get_proxy_mode()
        assert mode is not None
        recorder = Recorder(self.step, mode.tracer.graph)
        attributes = tensor_attributes(module_paths(self.step))
        with (
            substituted(self.step, lambda t: by_id.get(id(t), t)),
            recorder.calls.followed(),
            recorder,
        ):
            if self.step.training:
                returned = self._train(recorder, inputs, keywords, wrapped)
            else:
                with autocast(self.step.dtype):
                    output = self.step.model(*inputs, **keywords)
                returned = self._outputs(output)
            check_not_replaced(replaced(attributes), lambda t: id(t) in recorder.read)
            returned += self._new_state(wrapped)
            changed = {result.name for result in self.results if result.role == "state"}
            for source, tensor in zip(self.sources, self.tensors, strict=True):
                trained = self.step.training and tensor.requires_grad
                if id(tensor) in recorder.read and (trained or source.name in changed):
                    raise ExtractionError(read_elsewhere(source.name))
        self.returned = [
            t.from_functional() if isinstance(t, FunctionalTensor) else t for t in returned
        ]
        return self.returned

    def _train(
        self, recorder: Recorder, inputs: Any, keywords: Any, wrapped: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        with autocast(self.step.dtype):
            loss = LossModule(self.step)(*inputs, **keywords)
        trained = {
            source.name: tensor
            for source, tensor in zip(self.sources, wrapped, strict=True)
            if source.role in ("parameter", "buffer") and tensor.requires_grad
        }
        names = [source.name for source in self.sources]
        watch = GradientWatch(
            [*zip(names, self.tensors, strict=True), *zip(names, wrapped, strict=True)]
        )
        recorder.go_back_from(loss, watch)
        self.results = [Result(-1, "output", "0")]
        returned = [loss]
        if loss.requires_grad:
            gradients = torch.autograd.grad(
                [loss], [*trained.values()], [wrapped[-1].to(loss.dtype)], allow_unused=True
            )
            for name, gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    self.results.append(Result(-1, "gradient", name))
                    returned.append(gradient)
            if written := watch.written():
                raise writes_gradient(type(self.step.model), written)
        return returned

    def _outputs(self, returned: Any) -> list[torch.Tensor]:
        flatten_objects(returned, "the output")  # what this cannot do is told below
        leaves, tree = tree_flatten(returned)
        tensors: list[torch.Tensor] = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[i] = Position(len(tensors))
                tensors.append(leaf)
            elif not isinstance(leaf, PLAIN):
                raise unreturnable(leaf)
        self.results = [Result(-1, "output", str(i)) for i in range(len(tensors))]
        self.outputs = tree_unflatten(leaves, tree)
        return tensors

    def _new_state(self, wrapped: Sequence[FunctionalTensor]) -> list[torch.Tensor]:
        """Return new values of parameters and buffers, whether written in place or assigned."""
        now = self.step.named_state()
        check_no_new_state(self.empty - empty_buffers(module_paths(self.step)))
        changed: list[torch.Tensor] = []
        for source, before in zip(self.sources, wrapped, strict=True):
            # missing in torch's stubs
            written = torch._functionalize_has_data_mutation(before.elem)  # type: ignore[attr-defined]
            if source.role == "input" and written:
                raise writes_input(f"tensor {source.name} of its inputs")
            if source.role not in ("parameter", "buffer"):
                continue
            new = now.get(source.name, before)
            check_same_form(source.name, before, new)
            if written or new is not before:
                self.results.append(Result(-1, "state", source.name))
                changed.append(new)
        return changed


def _let_values_go(graph: fx.Graph) -> None:
    """Replace the values of nodes by fake tensors of one mode, which take no memory."""

    def shape_of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )

    with FakeTensorMode(allow_non_fake_inputs=True):
        for node in graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = tree_map(shape_of, node.meta["val"])


class _Frames(ModuleCalls):
    """Records in which module call each autograd node was made, by sequence number."""

    def __init__(self, step: Workload) -> None:
        super().__init__(step)
        self.starts = [0]
        self.frames = [self.running]

    def entered(self, call: ModuleCall, inputs: Any) -> None:
        self._change()

    def left(self, call: ModuleCall, outputs: Any) -> None:
        self._change()

    def of(self, number: int) -> ModuleCall:
        return self.frames[bisect_right(self.starts, number) - 1]

    def _change(self) -> None:
        self.starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self.frames.append(self.running)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Annotates the nodes of the graph, as they appear, with what they belong to."""

    def __init__(self, step: Workload, graph: fx.Graph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = graph
        self.calls = _Frames(step)
        self.backward = False
        self.read: set[int] = set()  # ids of tensors that are not the step's own
        self.between = False  # autograd nodes, where the engine adds up gradients

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A written tensor that is not the step's would stay changed.
        if any(map(_is_plain, tree_leaves(list(written_arguments(func, args, kwargs))))):
            raise ExtractionError(
                f"the model writes into a tensor that is neither a parameter nor a buffer "
                f"({running_line()}); make it one with register_buffer"
            )
        self.read.update(id(t) for t in tree_leaves((args, kwargs)) if _is_plain(t))
        last = next(iter(reversed(self.graph.nodes)))
        result = func(*args, **kwargs)
        meta = self._meta(func)
        if reads_values(func, args) and not ((drawn := drawn_from(args[0])) and is_decided(drawn)):
            check = running_check()
            meta |= {"reads_values": running_line()} if check is None else {"checks": check.line}
        node = last.next
        while node is not self.graph._root:
            node.meta |= meta
            node = node.next
        return result

    def go_back_from(self, loss: torch.Tensor, watch: GradientWatch) -> None:
        """Treat everything dispatched from now on as the backward pass of ``loss``.

        Raise ExtractionError, meanwhile, if a function with its own backward writes a gradient.
        """
        self.backward = True

        def left(function: type[Function] | None, *_: Any) -> None:
            self.between = True
            if function is not None and (written := watch.written()):
                raise writes_gradient(function, written)

        queue, visited = [loss.grad_fn], set()
        while queue:
            node = queue.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            node.register_prehook(lambda _: setattr(self, "between", False))
            node.register_hook(partial(left, getattr(node, "_forward_cls", None)))
            queue += [below for below, _ in node.next_functions]

    def _meta(self, func: Any) -> dict[str, Any]:
        if not self.backward:
            number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
            meta = {"seq_nr": number, "nn_module_stack": _stack_of(self.calls.running)}
            if line := running_line():
                meta["stack_trace"] = line
            return meta
        meta = {"partitioner_tag": "is_backward"}
        differentiated = torch._C._current_autograd_node()
        if differentiated is not None:
            number = differentiated._sequence_nr()
            meta |= {"seq_nr": number, "fwd_nn_module_stack": _stack_of(self.calls.of(number))}
        if self.between and func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor):
            meta.pop("fwd_nn_module_stack", None)
            meta["is_gradient_acc"] = True
        return meta


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, FunctionalTensor)


def _stack_of(call: ModuleCall) -> dict[str, tuple[str, str]]:
    return {call.key: (call.path, call.kind)}
