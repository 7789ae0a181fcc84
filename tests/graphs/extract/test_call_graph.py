"""Graphs of exported calls: complete, exact, acyclic, with the right co-location groups."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

from graphs.extract import Extraction, Workload, extract
from graphs.extract.placeable import CallGraph, call_graph
from graphs.graph import GraphArrays, attributes_of
from tests.helpers import tiny_models, tiny_reference_models, tiny_transformers
from tests.helpers.in_turn import in_turn
from tests.helpers.tiny_models import Plain, squared

STEPS = tiny_models.STEPS | tiny_reference_models.STEPS | tiny_transformers.STEPS
QUICK = (
    *("conv_net", "tied_weights", "norm_twice", "views", "attention", "own_loss"),
    *("decaying_weight", "structured_output", "norm_twice_inference", "lstm_inference"),
    "stacked_moe",
)
SUMMED = ("flops", "parameter_bytes", "saved_bytes", "moved_bytes")
EVERY = pytest.mark.parametrize(
    "name",
    [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in STEPS if n not in QUICK)],
)


@functools.cache
def extracted(name: str) -> Extraction:
    torch.manual_seed(0)
    return extract(STEPS[name]())


@functools.cache
def calls_of(name: str) -> CallGraph:
    return call_graph(extracted(name))


def group_of(graph: nx.DiGraph[str], node: str) -> str | None:
    return attributes_of(graph, node)["colocate"]


@pytest.mark.slow_repeats
@EVERY
def test_nodes_are_calls_that_keep_sums_phases_and_groups(name: str) -> None:
    extraction, found = extracted(name), calls_of(name)
    ops, graph, ids = extraction.graph, found.graph, list(found.graph)
    assert len(GraphArrays.from_graph(graph)) <= len(ops)
    for size in SUMMED:
        expected = sum(data[size] for _, data in ops.nodes(data=True))
        assert sum(data[size] for _, data in graph.nodes(data=True)) == expected
    assert set(extraction.call_of) <= {call.key for call in extraction.forward.calls}
    assert set(found.node_of_call) == {call.key for call in extraction.forward.placed_calls}
    nodes_of: defaultdict[str, set[str]] = defaultdict(set)
    for op, key, number in zip(ops, extraction.call_of, found.node_of, strict=True):
        node, home = ids[number], ids[found.node_of_call[key]]
        assert attributes_of(graph, node)["phase"] == attributes_of(ops, op)["phase"]
        if node != home:  # backward is with its forward
            assert group_of(graph, home) == group_of(graph, node) is not None
        if (group := group_of(ops, op)) is not None:
            nodes_of[group].add(node)
    for nodes in nodes_of.values():
        groups = {group_of(graph, node) for node in nodes}
        assert len(groups) == 1
        assert len(nodes) == 1 or groups != {None}


@pytest.mark.slow_repeats
@pytest.mark.parametrize("name", in_turn(["conv_net", "norm_twice", "separate_moe"]))
def test_two_extractions_agree_in_every_node(name: str) -> None:
    torch.manual_seed(0)
    again = call_graph(extract(STEPS[name]()))
    first = calls_of(name)
    assert list(first.graph.nodes(data=True)) == list(again.graph.nodes(data=True))
    assert list(first.graph.edges(data=True)) == list(again.graph.edges(data=True))
    assert first.node_of_call == again.node_of_call


def test_a_call_is_named_by_its_module_and_the_number_of_its_call() -> None:
    found = calls_of("norm_twice")
    assert {"first:linear", "norm:batch_norm", "norm@1:batch_norm", "norm@1:add_"} <= set(
        found.graph
    )
    assert {"first:backward/linear", "norm@1:backward/batch_norm"} <= set(found.graph)
    assert attributes_of(found.graph, "first:linear")["parameter_bytes"] == 4 * (6 * 4 + 4)


def test_the_statistics_of_a_batch_norm_have_one_device() -> None:
    together = {frozenset(keys) for keys in extracted("norm_twice").forward.together()}
    assert frozenset({"norm:batch_norm", "norm@1:batch_norm"}) in together
    assert frozenset({"norm:add_", "norm@1:add_"}) in together
    assert extracted("norm_twice_inference").forward.together() == ()


def test_views_of_what_is_written_stay_with_it() -> None:
    def forward(m: nn.Module, x: Tensor) -> Any:
        shifted = x.new_zeros(x.shape)
        shifted[:, 1:] = x[:, :-1]
        shifted.t()[0].fill_(2.0)
        return m.get_submodule("linear")(shifted) * x.t().t()

    step = Workload.of(Plain(forward, linear=nn.Linear(4, 4)), (torch.randn(3, 4),) * 2, squared)
    extraction = extract(step)
    (keys,) = extraction.forward.together()
    kinds = {key.partition("#")[0] for key in keys}
    assert kinds == {":new_zeros", ":slice", ":copy_", ":t", ":select", ":fill_"}
    free = [call.op for call in extraction.forward.calls if call.is_free]
    assert free.count("t") == 2, "views of what nobody writes are made where they are read"
    found = call_graph(extraction)
    groups = {group_of(found.graph, list(found.graph)[found.node_of_call[key]]) for key in keys}
    assert len(groups) == 1


def test_a_gradient_that_is_added_to_two_others_is_an_output_once() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        a, b = m.p(x), m.q(x)
        out: Tensor = (a + b).tanh() + a.sin() + b.cos()
        return out

    model = Plain(forward, p=nn.Linear(4, 8), q=nn.Linear(4, 8))
    step = Workload.of(model, (torch.randn(3, 4), torch.randn(3, 8)), squared)
    graph = call_graph(extract(step)).graph
    [tanh] = [node for op, node in graph.nodes(data=True) if op.endswith("backward/tanh")]
    assert tanh["output_bytes"] == 3 * 8 * 4


def test_gradients_are_added_up_where_the_tensor_was_made() -> None:
    def forward(m: nn.Module, x: Tensor) -> Any:
        hidden = m.get_submodule("first")(x)
        return hidden.sin() + hidden.cos() + hidden.exp()

    inputs = (torch.randn(3, 4), torch.randn(3, 4))
    used = extract(Workload.of(Plain(forward, first=nn.Linear(4, 4)), inputs, squared))
    tied = extracted("tied_weights")
    for extraction, count, home in ((used, 2, "first:linear"), (tied, 1, "embedding:embedding")):
        adding = [i for i, op in enumerate(extraction.graph) if ".gradient" in op]
        assert len(adding) == count
        assert {extraction.call_of[i] for i in adding} == {home}


@pytest.mark.parametrize("name", in_turn(["tied_weights", "t5"]))
def test_tied_weights_are_one_source_whatever_they_are_called(name: str) -> None:
    extraction = extracted(name)
    named = [s.name for s in extraction.forward.sources if s.role == "parameter"]
    assert len(named) == len(list(extraction.step.model.parameters()))


def test_devices_and_order_reach_every_call() -> None:
    found = calls_of("conv_net")
    count = len(found.graph)
    devices = found.devices_of_calls([f"device {node}" for node in range(count)])
    assert devices["0:conv2d"] == f"device {list(found.graph).index('0:conv2d')}"
    order = found.launch_order(range(count))
    assert order == tuple(reversed(found.launch_order([-node for node in range(count)])))
    with pytest.raises(ValueError, match=f"3 devices are not for {count} nodes"):
        found.devices_of_calls("abc")
