"""The aten graph of an nn.Module, traced by torch.export.

A training step becomes the joint forward and backward graph of AOTAutograd, an inference step the
functional core graph. Both are functional: mutated state is returned as a result.

Torch.export reserves some names of submodules (``meta``, ``graph``, ``code`` and others). Its
result is an ``fx.GraphModule`` with the submodules of the model as attributes, and one that is
named like an attribute of that class is lost: :func:`reserved_modules` finds them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, TypeVar

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.utils._pytree import tree_flatten, tree_unflatten

from graphs.extract.autocast import (
    autocast,
    cast_once,
    name_nodes,
    runs_under,
    share_casts,
    without_casts,
)
from graphs.extract.constants import check_not_replaced, is_part_of
from graphs.extract.convert import Traced
from graphs.extract.eager import check_runs, has_no_values, without_meta
from graphs.extract.errors import custom_backward_checked, writes_input
from graphs.extract.export.descriptions import input_of, is_output, output_of
from graphs.extract.export.flags import exported_like_eager
from graphs.extract.export.functions import KeptFunctions
from graphs.extract.export.parts import Parts
from graphs.extract.fx_nodes import (
    constants_as_buffers,
    constants_of,
    drop_checks,
    drop_unread,
    tag_calls,
)
from graphs.extract.kernels.decomposed import trained_as_in_eager_mode
from graphs.extract.model_state import (
    in_step_mode,
    tracing,
    with_distinct_inputs,
    written_when_assigned,
)
from graphs.extract.program import Result, Role, Source
from graphs.extract.reads.answers import CheckReads
from graphs.precision import FULL
from graphs.workload import (
    WRAPPED,
    ExtractionError,
    LossModule,
    ModelAlone,
    Workload,
    unwrapped,
)

T = TypeVar("T")
OF_PROGRAMS = frozenset(
    {"_guards_fn", "_in_spec", "_out_spec", "range_constraints", "shape_env", "validate_inputs"}
)
"""Attributes that exported programs add to those of GraphModule, as of torch 2.13."""


@functools.cache
def reserved_names() -> frozenset[str]:
    """Return the names that no submodule, parameter or buffer of an exported model can have."""
    attributes = dir(fx.GraphModule(nn.Module(), fx.Graph()))
    return frozenset(attributes) - frozenset(dir(nn.Module())) | OF_PROGRAMS


def reserved_at_the_top(model: nn.Module) -> list[str]:
    """Return the reserved names of the model's own submodules, parameters and buffers."""
    names = (*model._modules, *model._parameters, *model._buffers)
    return [name for name in names if name in reserved_names()]


def reserved_modules(model: nn.Module) -> list[str]:
    """Return the paths of modules, at any depth, that have a reserved name."""
    return [
        path for path, _ in model.named_modules() if path.rpartition(".")[2] in reserved_names()
    ]


@dataclass(frozen=True, slots=True)
class Position:
    """Placeholder for an output tensor: the result with this number as its name."""

    number: int
    device: ClassVar[torch.device] = torch.device("cpu")  # a PackedSequence asks its parts for it


def trace(step: Workload) -> Traced:
    """Trace one step by torch.export; the model is left as it was.

    Modules in eval mode within a model in train mode stay in eval mode; only a model that is not in
    the step's mode as a whole is switched meanwhile. A model on the meta device is traced on fake
    tensors, without memory for its parameters.
    """
    with tracing(step, "exported"), without_meta(step) as traceable:

        def export() -> Traced:
            traced, unchecked = _answered(with_distinct_inputs(traceable), _step)
            return replace(traced, unchecked=unchecked)

        return exported_like_eager(traceable, export)


def _step(step: Workload, checked: bool) -> Traced:
    if step.training:
        with trained_as_in_eager_mode():
            return _described(LossModule(step), step, checked)
    return (_inference if step.dtype == FULL else _mixed_inference)(step, checked)


def _answered(
    step: Workload, export: Callable[[Workload, bool], T], whole: Workload | None = None
) -> tuple[T, tuple[str, ...]]:
    """Export without the checks of values that the model makes; return their lines, too.

    They must hold on the example inputs: if there are any, the step runs once, by torch alone, or
    the ``whole`` one if what is exported is a part of it. ``export`` gets True if there are any.
    """
    reads = CheckReads()
    try:
        with in_step_mode(step), reads.watched():
            exported = export(step, False)
    except Exception:
        if not reads.lines or has_no_values(step):
            raise
    else:
        if not reads.lines:
            return exported, ()
    if not has_no_values(step):
        with reads.kept():
            check_runs(whole or step)  # raises if a check fails
    with in_step_mode(step), reads.answered():
        return export(step, True), tuple(reads.lines)


def _mixed_inference(step: Workload, checked: bool) -> Traced:
    """Trace inference under autocast, which must see what composite operators consist of."""
    traced = _described(ModelAlone(step), step, checked)
    state = step.named_state()
    trained = {
        node
        for node, source in traced.sources.items()
        if source.role == "parameter" and state[source.name].requires_grad
    }
    share_casts(traced.graph, trained)
    return traced


def _described(wrapper: nn.Module, step: Workload, checked: bool) -> Traced:
    """Trace a wrapper by AOTAutograd, whose descriptors identify inputs and outputs."""
    parts = Parts(step)
    kept = KeptFunctions(step)
    with custom_backward_checked(step, functions=kept.call, saving=True):
        program, module = _exported(wrapper, step, parts, checked, kept)
    constants = constants_as_buffers(module)
    joint = _aot_graph(module, step, parts)
    drop_unread(joint.graph)
    leaves = tree_flatten(parts.arguments)[0]
    sources: dict[fx.Node, Source] = {}
    for node in joint.graph.find_nodes(op="placeholder"):
        description = node.meta["desc"]
        position = getattr(description, "idx", None)
        if position is not None and not isinstance(leaves[position], torch.Tensor):
            continue  # a number, whose example value is part of the graph
        role, name = input_of(description, leaves, constants)
        if role == "constant":
            sources[node] = Source(-1, role, name, constants[name].detach())
        elif role == "tangent" and not is_output(description.output):
            # The new value of mutated state is an output too, but has no gradient.
            none = torch.zeros(node.meta["val"].shape, dtype=node.meta["val"].dtype)
            sources[node] = Source(-1, "constant", "", none)
        else:
            sources[node] = Source(-1, role, name)
    (end,) = joint.graph.find_nodes(op="output")
    results: list[tuple[fx.Node, Result]] = []
    returned: list[Any] = []
    for node, description in zip(end.args[0], end.meta["desc"], strict=True):
        if is_output(description):
            returned.append(Position(len(returned)) if isinstance(node, fx.Node) else node)
        if isinstance(node, fx.Node):
            results.append((node, Result(-1, *output_of(description, leaves, constants))))
    assert program.call_spec.out_spec is not None
    return Traced(
        graph=joint.graph,
        sources=sources | constants_of(joint),
        results=results,
        prefix=WRAPPED,
        training=step.training,
        outputs=parts.whole(tree_unflatten(returned, program.call_spec.out_spec)),
        exported=module,
    )


def _forward(step: Workload, checked: bool) -> fx.GraphModule:
    return _exported(ModelAlone(step), step, Parts(step), checked, KeptFunctions(step))[1]


def trace_forward(step: Workload) -> fx.GraphModule:
    """Export the forward pass of a step's model alone, in the mode of the step."""
    with tracing(step, "exported"), without_meta(step.without_loss) as traceable:
        alone = with_distinct_inputs(traceable)
        return _answered(alone, _forward, step)[0]


def _exported(
    wrapper: nn.Module, step: Workload, parts: Parts, checked: bool, kept: KeptFunctions
) -> tuple[torch.export.ExportedProgram, fx.GraphModule]:
    """Export a wrapper of a step's model; return the program, and its module with tagged calls."""
    with (
        autocast(step.dtype),
        parts.taken_apart(wrapper),
        written_when_assigned(wrapper, unwrapped) as gone,
    ):
        program = torch.export.export(wrapper, *parts.arguments, strict=False)
    check_not_replaced(gone, constants_in(program))
    drop_checks(program.graph_module.graph, unread=checked)
    module = program.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    kept.restore(module)
    tag_calls(module, WRAPPED)
    return program, module


def constants_in(program: torch.export.ExportedProgram) -> Callable[[torch.Tensor], bool]:
    """Return a function that tells whether a tensor is a constant of an exported program."""
    held = [value for value in program.constants.values() if isinstance(value, torch.Tensor)]
    return functools.partial(is_part_of, held)


def _aot_graph(module: fx.GraphModule, step: Workload, parts: Parts) -> fx.GraphModule:
    """Return the aten graph of an exported module in the step dtype, with backward in training."""

    def traced() -> fx.GraphModule:
        with contextlib.ExitStack() as stack:
            return aot_export_joint_with_descriptors(
                stack, module, *parts.arguments, _record_nn_module_stack=True
            ).graph_module

    if step.dtype == FULL:
        return traced()
    name_nodes(module)
    with runs_under(module, step.dtype):
        joint = traced()
    if step.training and (added := cast_once(module, joint.graph)):
        with runs_under(module, step.dtype):
            joint = traced()
        without_casts(module, added)
    return joint


EXPORT_INPUTS: Final[dict[InputKind, Role]] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}


def _inference(step: Workload, checked: bool) -> Traced:
    """Trace inference to the core graph, whose signature identifies inputs and outputs."""
    # In a wrapper submodules can have any names, and buffers can be assigned in any order.
    is_wrapped = bool(reserved_at_the_top(step.model) or step.model._buffers)
    prefix = WRAPPED if is_wrapped else ""
    model = ModelAlone(step) if prefix else step.model
    named: Callable[[str], str] = unwrapped if prefix else str
    parts = Parts(step)
    with parts.taken_apart(model), written_when_assigned(model, named) as gone:
        program = torch.export.export(model, *parts.arguments, strict=False)
    check_not_replaced(gone, constants_in(program))
    drop_checks(program.graph_module.graph, unread=checked)
    tag_calls(program.graph_module, prefix)
    exported = program.module(check_guards=False)
    assert isinstance(exported, fx.GraphModule)
    program = program.run_decompositions({})
    nodes = {node.name: node for node in program.graph_module.graph.nodes}
    sources = constants_of(program.graph_module)
    tensors = 0
    for spec in program.graph_signature.input_specs:
        if not hasattr(spec.arg, "name"):
            continue
        if spec.kind not in EXPORT_INPUTS:
            raise ExtractionError(f"the exported model takes an input of kind {spec.kind.name}")
        node = nodes[spec.arg.name]
        match role := EXPORT_INPUTS[spec.kind]:
            case "input" if isinstance(spec.arg, TensorArgument):
                sources[node] = Source(-1, role, str(tensors))
                tensors += 1
            case "parameter" | "buffer":
                sources[node] = Source(-1, role, named(spec.target or ""))
            case "constant":
                constant = program.constants[spec.target or ""]
                assert isinstance(constant, torch.Tensor)
                sources[node] = Source(-1, role, spec.target or "", constant.detach())
    results: list[tuple[fx.Node, Result]] = []
    returned: list[Any] = []
    for out in program.graph_signature.output_specs:
        name = getattr(out.arg, "name", None)
        match out.kind:
            case OutputKind.BUFFER_MUTATION | OutputKind.PARAMETER_MUTATION:
                results.append((nodes[name or ""], Result(-1, "state", named(out.target or ""))))
            case OutputKind.USER_OUTPUT if name in nodes:
                results.append((nodes[name], Result(-1, "output", str(len(returned)))))
                returned.append(Position(len(returned)))
            case OutputKind.USER_OUTPUT:
                returned.append(getattr(out.arg, "value", None))
            case OutputKind.USER_INPUT_MUTATION:
                raise writes_input(f"its input {out.target}")
            case other:
                raise ExtractionError(f"the exported model gives an output of kind {other.name}")
    assert program.call_spec.out_spec is not None
    return Traced(
        graph=program.graph_module.graph,
        sources=sources,
        results=results,
        prefix=prefix,
        training=False,
        outputs=parts.whole(tree_unflatten(returned, program.call_spec.out_spec)),
        exported=exported,
    )
