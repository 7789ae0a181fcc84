"""nn.Module -> traced aten graph, by torch.export.

A training step becomes the joint forward and backward graph of AOTAutograd, an inference step the
functional core graph. Both are functional: what the model mutates comes out as a result.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from graphs.extract.fake import without_meta
from graphs.extract.lineage import tag_calls
from graphs.extract.program import Result, Source
from graphs.extract.step import WRAPPED, ExtractionError, LossModule, Step, unwrapped

OWN: Final = str(Path(__file__).parent)
DATA_DEPENDENT: Final = {
    "GuardOnDataDependentSymNode": "its control flow depends on the values in a tensor",
    "DataDependentOutputException": "its control flow depends on the values in a tensor",
    "DynamicOutputShapeException": "the size of what {} returns depends on the values in a tensor",
}
"""Torch's exceptions for what no fixed graph can hold, and what they mean; {} is their message."""


@dataclass(frozen=True, slots=True)
class Position:
    """Stands for an output tensor: the result with this number as its name."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """An aten graph, and what its placeholders and outputs are.

    ``sources`` and ``results`` are by fx node; their ``value`` is not set yet. ``prefix`` is what
    the traced module's paths start with, over the model's own. ``outputs`` is what the step
    returns, with the position (a Position) in place of every tensor. ``exported`` is the forward
    pass before it was lowered; nodes of ``graph`` say which of its calls they stem from.
    """

    graph: fx.Graph
    sources: dict[fx.Node, Source]
    results: list[tuple[fx.Node, Result]]
    prefix: str
    training: bool
    outputs: Any
    exported: fx.GraphModule


def trace(step: Step) -> Traced:
    """Trace one step; the model is left as it was.

    It is traced as it stands: modules in eval mode within a model in train mode stay so. Only a
    model that is not in the step's mode as a whole is switched for the while. One on the meta
    device is traced on fake tensors, without memory for its parameters.

    Raises:
        ExtractionError: torch cannot export it; the message carries torch's own reason.
    """
    modes = {module: module.training for module in step.model.modules()}
    if step.model.training is not step.training:
        step.model.train(step.training)
    try:
        with _quiet(), torch.set_grad_enabled(step.training), without_meta(step) as traceable:
            distinct = _with_distinct_inputs(traceable)
            return _joint(distinct) if step.training else _inference(distinct)
    except ExtractionError:
        raise
    except Exception as error:
        raise ExtractionError(_explain(step, error)) from error
    finally:
        for module, mode in modes.items():
            module.training = mode


def _with_distinct_inputs(step: Step) -> Step:
    """The step on copies: a tensor that is given twice would be traced as one input for good."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return replace(
        step,
        inputs=tree_map(copied, step.inputs),
        keywords=tree_map(copied, dict(step.keywords)),
    )


def _joint(step: Step) -> Traced:
    if not any(tensor.requires_grad for tensor in step.named_state().values()):
        raise ExtractionError(
            f"{type(step.model).__name__} has no parameter that requires a gradient, so there is "
            "nothing to train; place inference"
        )
    wrapper = LossModule(step)
    program = torch.export.export(wrapper, step.inputs, dict(step.keywords), strict=False)
    module = program.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    tag_calls(module, WRAPPED)
    with contextlib.ExitStack() as stack:
        if any(isinstance(part, nn.LSTM) for part in step.model.modules()):
            # Of an LSTM on plain inputs torch would trace the inference kernel of oneDNN, which
            # keeps nothing for backward; without oneDNN the layer is traced cell by cell.
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        joint = aot_export_joint_with_descriptors(
            stack, module, step.inputs, dict(step.keywords), _record_nn_module_stack=True
        ).graph_module
    graph = joint.graph
    leaves = tree_flatten((step.inputs, dict(step.keywords)))[0]
    sources: dict[fx.Node, Source] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and _is_tensor(node.meta["desc"], leaves):
            sources[node] = _joint_source(node.meta["desc"], leaves)
            if sources[node].role == "tangent" and not _is_loss(node.meta["desc"].output):
                # The new value of mutated state is an output too, but no loss: no gradient.
                none = torch.zeros(node.meta["val"].shape, dtype=node.meta["val"].dtype)
                sources[node] = Source(-1, "constant", "", none)
    sources |= _constants(joint)
    output = next(node for node in graph.nodes if node.op == "output")
    descriptions = output.meta["desc"]
    results: list[tuple[fx.Node, Result]] = []
    for node, description in zip(output.args[0], descriptions, strict=True):
        if isinstance(node, fx.Node):
            results.append((node, _joint_result(description, leaves)))
    return Traced(
        graph=graph,
        sources=sources,
        results=results,
        prefix=WRAPPED,
        training=True,
        outputs=Position(0),
        exported=module,
    )


def _is_loss(output: Any) -> bool:
    return type(output).__name__ == "PlainAOTOutput"


def _is_tensor(description: Any, leaves: list[Any]) -> bool:
    """False for inputs such as numbers, whose example values are part of the graph."""
    position = getattr(description, "idx", None)
    return position is None or isinstance(leaves[position], torch.Tensor)


def _joint_source(description: Any, leaves: list[Any]) -> Source:
    match type(description).__name__:
        case "ParamAOTInput":
            return Source(-1, "parameter", unwrapped(description.target))
        case "BufferAOTInput":
            return Source(-1, "buffer", unwrapped(description.target))
        case "PlainAOTInput":
            before = leaves[: description.idx]
            return Source(-1, "input", str(sum(isinstance(x, torch.Tensor) for x in before)))
        case "TangentAOTInput":
            return Source(-1, "tangent", "")
        case kind:
            raise ExtractionError(
                f"the traced step takes an input of kind {kind}, which no step has"
            )


def _joint_result(description: Any, leaves: list[Any]) -> Result:
    match type(description).__name__:
        case "PlainAOTOutput":
            return Result(-1, "output", str(description.idx))
        case "GradAOTOutput":
            source = _joint_source(description.grad_of, leaves)
            if source.role == "input":
                raise ExtractionError(
                    f"tensor {source.name} of the inputs requires a gradient, but a placed step "
                    "hands back gradients of parameters only; detach it first"
                )
            return Result(-1, "gradient", source.name)
        case "InputMutationAOTOutput":
            source = _joint_source(description.mutated_input, leaves)
            if source.role == "input":
                raise _writes_input(f"tensor {source.name} of its inputs")
            return Result(-1, "state", source.name)
        case kind:
            raise ExtractionError(f"the traced step gives an output of kind {kind}")


def _inference(step: Step) -> Traced:
    program = torch.export.export(step.model, step.model_inputs, dict(step.keywords), strict=False)
    tag_calls(program.graph_module, "")
    exported = program.module(check_guards=False)
    assert isinstance(exported, fx.GraphModule)
    program = program.run_decompositions({})
    graph = program.graph_module.graph
    nodes = {node.name: node for node in graph.nodes}
    sources = _constants(program.graph_module)
    tensors = 0
    for spec in program.graph_signature.input_specs:
        node = nodes[spec.arg.name] if hasattr(spec.arg, "name") else None
        if node is None:
            continue
        target = spec.target or ""
        match spec.kind:
            case InputKind.PARAMETER:
                sources[node] = Source(-1, "parameter", target)
            case InputKind.BUFFER:
                sources[node] = Source(-1, "buffer", target)
            case InputKind.CONSTANT_TENSOR:
                constant = program.constants[target]
                assert isinstance(constant, torch.Tensor)
                sources[node] = Source(-1, "constant", target, constant.detach())
            case InputKind.USER_INPUT if isinstance(spec.arg, TensorArgument):
                sources[node] = Source(-1, "input", str(tensors))
                tensors += 1
            case InputKind.USER_INPUT:
                pass
            case kind:
                raise ExtractionError(f"the exported model takes an input of kind {kind.name}")
    results: list[tuple[fx.Node, Result]] = []
    leaves: list[Any] = []
    for out in program.graph_signature.output_specs:
        name = getattr(out.arg, "name", None)
        match out.kind:
            case OutputKind.BUFFER_MUTATION | OutputKind.PARAMETER_MUTATION:
                results.append((nodes[name or ""], Result(-1, "state", out.target or "")))
            case OutputKind.USER_OUTPUT if name in nodes:
                results.append((nodes[name], Result(-1, "output", str(len(leaves)))))
                leaves.append(Position(len(leaves)))
            case OutputKind.USER_OUTPUT:
                leaves.append(getattr(out.arg, "value", None))
            case OutputKind.USER_INPUT_MUTATION:
                raise _writes_input(f"its input {out.target}")
            case other:
                raise ExtractionError(f"the exported model gives an output of kind {other.name}")
    tree = program.call_spec.out_spec
    assert tree is not None
    return Traced(
        graph=graph,
        sources=sources,
        results=results,
        prefix="",
        training=False,
        outputs=tree_unflatten(leaves, tree),
        exported=exported,
    )


def _constants(module: nn.Module) -> dict[fx.Node, Source]:
    assert isinstance(module, fx.GraphModule)
    found: dict[fx.Node, Source] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value: object = module
            for part in str(node.target).split("."):
                value = getattr(value, part)
            if not isinstance(value, torch.Tensor):
                raise ExtractionError(
                    f"the step contains a nested graph ({node.target}); higher-order ops such as "
                    "torch.cond cannot be placed yet"
                )
            found[node] = Source(-1, "constant", str(node.target), value.detach())
    return found


def _writes_input(which: str) -> ExtractionError:
    return ExtractionError(f"the model writes into {which} in place; clone it first")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from talking while it traces.

    It prints whole graphs and tracebacks to stderr when an export fails, though the reason is in
    the exception, and warns of what it does itself.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _explain(step: Step, error: Exception) -> str:
    """What torch says in its first line, the line of the model, and what can be done about it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = (lines[0] if lines else type(error).__name__)[:300].rstrip(".")
    advice = "The model must run on the example inputs as they are given"
    if type(error).__name__ in DATA_DEPENDENT:
        reason = DATA_DEPENDENT[type(error).__name__].format(reason)
        advice = (
            "Neither control flow nor the sizes of tensors may depend on values in tensors: "
            "compute both branches and choose with torch.where, or mask instead of selecting"
        )
    places = [line for line in lines if line.startswith('File "')]
    place = next((p for p in reversed(places) if "torch/" not in p and OWN not in p), "")
    kind = "training step" if step.training else "inference"
    text = f"{type(step.model).__name__} cannot be exported for {kind}: {reason}"
    if place:
        text += f" ({place})"
    return f"{text}. {advice}."
