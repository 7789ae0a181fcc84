"""The forward pass of a step's model alone, without its loss: what device maps are checked with.

The model's own code runs device maps, so that a forward pass serves even if it computes something
else than the model does in eager mode, or if it holds for the example inputs only.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import fx

from graphs.extract.convert import Traced
from graphs.extract.dispatch import record
from graphs.extract.export.forward import ForwardProgram, ForwardReader, forward_program
from graphs.extract.export.trace import trace_forward
from graphs.extract.fx_nodes import is_backward, owner, tag_calls
from graphs.extract.model_state import on_host
from graphs.extract.module_calls import OUTSIDE
from graphs.workload import WRAPPED, ExtractionError, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPass:
    """A forward pass of a model, None if it can be neither exported nor recorded.

    Lines that ``depends_on_data`` names read values of tensors: other inputs may lead to other ops.
    """

    program: ForwardProgram | None
    depends_on_data: tuple[str, ...] = ()


def model_pass(step: Workload) -> ModelPass:
    """Return the exported forward pass of a step's model, else that of a recorded step."""
    for attempt in (_exported, _recorded):
        with contextlib.suppress(ExtractionError):
            return attempt(step)
    return ModelPass(program=None)


def forward_alone(step: Workload) -> ForwardProgram:
    """Return the exported forward pass of a step's model, without its loss.

    A step that had to be recorded because of its loss has one; otherwise an ExtractionError says
    what in the model prevents it.
    """
    with on_host(step) as here:
        return forward_program(
            trace_forward(here), here.named_state(), prefix=WRAPPED, mutated=(), counted=()
        )


def _exported(step: Workload) -> ModelPass:
    return ModelPass(program=forward_alone(step))


def _recorded(step: Workload) -> ModelPass:
    with on_host(step) as here:
        traced = record(here)
        module = traced.graph.owning_module
        if module is None:
            raise ExtractionError("the recorded graph belongs to no module")
        tag_calls(module, traced.prefix)
        reader = _RecordingReader(module, traced, here)
        for node in traced.graph.nodes:
            reader.read(node)
        program = reader.program(mutated=(), counted=())
    return ModelPass(program=program, depends_on_data=traced.depends_on_data)


class _RecordingReader(ForwardReader):
    """Collects what the model does in a recorded step: no loss, no backward pass."""

    def __init__(self, module: fx.GraphModule, traced: Traced, step: Workload) -> None:
        super().__init__(module, step.named_state(), traced.prefix)
        self.traced = traced
        self.paths = {path for path, _ in step.model.named_modules(remove_duplicate=False)}

    def read(self, node: fx.Node) -> None:
        """Take a node of the recorded graph."""
        source = self.traced.sources.get(node)
        if source is not None:
            example = node.meta.get("val", source.tensor)
            assert isinstance(example, torch.Tensor)
            self.add_source(node, source.role, source.name, example)
        elif node.op == "call_function" and self._is_of_model(node):
            super().read(node)

    def _is_of_model(self, node: fx.Node) -> bool:
        stack = node.meta.get("nn_module_stack")
        if is_backward(node) or not stack:
            return False
        _, kind = list(stack.values())[-1]
        path, _ = owner(node, self.traced.prefix) or ("", "")
        return kind != OUTSIDE and path in self.paths
