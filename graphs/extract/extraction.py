"""Extraction: the one call that turns a step of a model into a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import networkx as nx

from graphs.extract.calls import calls_of
from graphs.extract.convert import convert
from graphs.extract.dag import build_graph
from graphs.extract.export import trace
from graphs.extract.forward import ForwardProgram, forward_program
from graphs.extract.program import StepProgram
from graphs.extract.step import ExtractionError, Step


@dataclass(frozen=True, slots=True)
class Extraction:
    """A step, its graph (costs not known yet) and its program; op ``i`` is the same in both.

    ``outputs`` is what the step returns, with a Position in place of every tensor. ``forward_of``
    gives for every backward op the forward op that it differentiates, None where there is none: for
    forward ops, and for those that add up gradients (their name ends in ".gradient"). ``forward``
    is the forward pass as it was exported, and ``call_of`` gives for every op the key of the call
    in it that the op stems from: what runs where the call does.
    """

    step: Step
    graph: nx.DiGraph[str]
    program: StepProgram
    outputs: Any
    forward_of: tuple[int | None, ...]
    forward: ForwardProgram
    call_of: tuple[str, ...]


def extract(step: Step) -> Extraction:
    """Extract the graph of one step.

    Raises:
        ExtractionError: the model cannot be exported, has no ops on these inputs, or holds
            something that cannot be placed.
    """
    name = type(step.model).__name__
    traced = trace(step)
    program, facts = convert(traced, ties_of(step))
    if program.op_count == 0:
        raise ExtractionError(
            f"{name} runs no ops on these inputs, so there is nothing to place; give the model "
            "that does the work"
        )
    graph = build_graph(program, facts, name)
    forward_of = tuple(op.forward_op for op in facts)
    forward = forward_program(
        traced.exported,
        step.named_state(),
        prefix=traced.prefix,
        mutated={result.name for result in program.results if result.role == "state"},
        counted={op.stems_from for op in facts if op.stems_from is not None},
    )
    call_of = calls_of(program, facts, forward)
    return Extraction(step, graph, program, traced.outputs, forward_of, forward, call_of)


def ties_of(step: Step) -> dict[str, str]:
    """{further name: first name} of parameters and buffers that are the same tensor."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, tensor in step.named_state().items():
        if (known := first.setdefault(id(tensor), name)) != name:
            ties[name] = known
    return ties
