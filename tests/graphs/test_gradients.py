"""Ops that produce the gradients of a graph, and their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import networkx as nx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphs.extract import Workload, extract
from graphs.extract.placeable import gradient_makers
from graphs.extract.program import VIEW, StepProgram
from graphs.gradients import gradients_of
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from graphs.optimizer import Optimizer
from graphs.synthetic.mirror import with_backward
from tests.helpers.tiny_models import attention, conv_net, lstm, tied_weights


def named(graph: nx.DiGraph[str]) -> list[tuple[str, int, set[str]]]:
    arrays = GraphArrays.from_graph(graph)
    found = gradients_of(arrays)
    return [
        (arrays.ids[home], size, {arrays.ids[i] for i in makers})
        for home, size, makers in zip(
            found.home.tolist(), found.size_bytes.tolist(), found.makers, strict=True
        )
    ]


def two_layers() -> nx.DiGraph[str]:
    graph = new_graph("two layers")
    add_op(graph, "a", cost_s={"*": 1.0}, parameter_bytes=10)
    add_op(graph, "act", cost_s={"*": 1.0})
    add_op(graph, "b", cost_s={"*": 1.0}, parameter_bytes=20)
    add_edge(graph, "a", "act")
    add_edge(graph, "act", "b")
    return graph


def test_a_mirrored_op_makes_the_gradients_of_its_own_parameters_the_last_first() -> None:
    graph = with_backward(two_layers())
    assert named(graph) == [("b", 20, {"backward/b"}), ("a", 10, {"backward/a"})]


def test_gradients_of_backward_ops_are_made_by_them_in_their_order() -> None:
    graph = with_backward(two_layers())
    for name, size in (("b", 20), ("a", 10)):
        graph.nodes[f"backward/{name}"]["gradient_bytes"] = size
    expected = [("backward/b", 20, {"backward/b"}), ("backward/a", 10, {"backward/a"})]
    assert named(graph) == expected


def test_without_a_backward_pass_every_op_makes_its_own_in_order() -> None:
    assert named(two_layers()) == [("a", 10, {"a"}), ("b", 20, {"b"})]


def test_gradients_have_their_own_sizes_where_the_graph_gives_any() -> None:
    graph = two_layers()
    graph.nodes["b"]["gradient_bytes"] = 5  # the others are frozen
    assert named(graph) == [("b", 5, {"b"})]


def test_without_a_mirror_or_a_module_it_is_who_reads_the_output_or_the_last() -> None:
    graph = two_layers()
    add_op(graph, "b'", cost_s={"*": 1.0}, phase="backward")
    add_edge(graph, "b", "b'")
    add_op(graph, "a'", cost_s={"*": 1.0}, phase="backward")
    add_edge(graph, "b'", "a'")
    assert named(graph) == [("b", 20, {"b'"}), ("a", 10, {"a'"})]


@pytest.mark.parametrize("extractor", ["export", "dispatch", "modules"])
def test_of_a_model_all_trained_parameters_have_their_gradient_once(extractor: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    model[2].requires_grad_(False)
    step = Workload.of(model, (torch.randn(3, 4), torch.randn(3, 2)), F.mse_loss)
    arrays = GraphArrays.from_graph(extract(step, extractor).graph)
    found = gradients_of(arrays)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert found.size_bytes.sum() == sum(4 * p.numel() for p in trained)
    assert [arrays.modules[home] for home in found.home] == ["4", "0"]


@pytest.mark.slow_repeats
@pytest.mark.parametrize("make", [conv_net, attention, lstm, tied_weights])
@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_a_program_knows_the_ops_that_make_each_gradient(
    make: Callable[[], Workload], optimizer: str | None
) -> None:
    step = replace(make(), optimizer=Optimizer.of(optimizer))
    extraction = extract(step, "export")
    program, arrays = extraction.program, GraphArrays.from_graph(extraction.graph)
    known = gradient_makers(extraction)
    found = gradients_of(arrays, known)
    assert {arrays.ids[home] for home in found.home.tolist()} == set(known)
    makers = dict(zip(found.home.tolist(), found.makers, strict=True))
    producer = program.producers()
    for name, value in program.gradients.items():
        maker = program.calls[producer[program.values[value].root]].op
        assert maker in makers[first_reader(program, name)], name


def test_gradients_of_residual_connections_are_not_those_of_the_norm_behind_them() -> None:
    """The norm at the end of the stack gets its gradients first."""
    torch.manual_seed(0)
    step = Workload.of(Residual(), (torch.randn(3, 8), torch.randn(3, 8)), F.mse_loss)
    extraction = extract(step, "export")
    arrays = GraphArrays.from_graph(extraction.graph)
    for known in ({}, gradient_makers(extraction)):
        last = [max(makers) for makers in gradients_of(arrays, known).makers]
        assert len(last) == 7
        assert last == sorted(last)


class Residual(nn.Module):
    """Residual layers followed by a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return cast(Tensor, self.norm(x))


def first_reader(program: StepProgram, name: str) -> int:
    """Return the op that a parameter is resident with."""
    same = program.ties.get(name, name)
    own = {
        s.value
        for s in program.sources
        if s.role == "parameter" and program.ties.get(s.name, s.name) == same
    }
    return next(
        call.op
        for call in program.calls
        if call.op != VIEW and own & {program.values[value].root for value in call.reads}
    )
