"""Generated graphs have the properties that their parameters specify."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from graphs.graph_file import graph_from_dict, graph_to_dict
from graphs.synthetic import sketches
from graphs.synthetic.families import FAMILIES, FEWEST_OPS, MIN_OPS, draw
from graphs.synthetic.inception import inception
from graphs.synthetic.mirror import backward_id, with_backward
from graphs.synthetic.planted import planted
from graphs.synthetic.shapes import (
    Weights,
    cells,
    chain,
    fork_join,
    grid,
    layered,
    recurrence,
    sequence,
)
from graphs.synthetic.sketches import matrix_chain, sharded_feed_forward, sharded_layer

SHAPES: dict[str, Callable[[np.random.Generator, Weights], nx.DiGraph[str]]] = {
    "chain": lambda rng, weights: chain(rng, ops=30, weights=weights),
    "layered": lambda rng, weights: layered(rng, ops=50, width=7, weights=weights),
    "fork-join": lambda rng, weights: fork_join(rng, weights=weights),
    "grid": lambda rng, weights: grid(rng, weights=weights),
}
SEEDS = st.integers(0, 2**32)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("shape", SHAPES)
@given(
    seed=SEEDS,
    ratio=st.floats(0.05, 5),
    bandwidth=st.floats(1e8, 1e12),
    spread=st.floats(0, 1.5),
)
@settings(max_examples=15)
def test_shape_has_the_cost_and_ratio_asked_for(
    shape: str, seed: int, ratio: float, bandwidth: float, spread: float
) -> None:
    weights = Weights(mean_cost_s=2e-3, ratio=ratio, bandwidth_bytes_per_s=bandwidth, spread=spread)
    graph = SHAPES[shape](rng(seed), weights)
    costs_s = [node["cost_s"]["*"] for _, node in graph.nodes(data=True)]
    transfers_s = [edge["bytes"] / bandwidth for _, _, edge in graph.edges(data=True)]
    assert np.mean(costs_s) == pytest.approx(2e-3)
    assert np.mean(transfers_s) / np.mean(costs_s) == pytest.approx(ratio, rel=1e-2)


@pytest.mark.parametrize(
    ("graph", "ops", "edges", "longest_path"),
    [
        (chain(rng(), ops=9), 9, 8, 9),
        (chain(rng(), ops=1), 1, 0, 1),
        (fork_join(rng(), stages=2, width=5, depth=3), 2 * 17, 2 * 20 + 1, 2 * 5),
        (grid(rng(), rows=4, columns=6), 24, 4 * 5 + 3 * 6, 4 + 6 - 1),
    ],
)
def test_shape_has_the_ops_and_edges_of_its_drawing(
    graph: nx.DiGraph[str], ops: int, edges: int, longest_path: int
) -> None:
    assert len(graph) == ops
    assert graph.number_of_edges() == edges
    assert len(nx.dag_longest_path(graph, weight="")) == longest_path


@given(
    seed=SEEDS,
    ops=st.integers(1, 60),
    width=st.integers(1, 20),
    degree=st.floats(1, 4),
    skip=st.floats(0, 1),
)
@settings(max_examples=40)
def test_layered_ops_read_earlier_layers_only(
    seed: int, ops: int, width: int, degree: float, skip: float
) -> None:
    graph = layered(rng(seed), ops=ops, width=width, degree=degree, skip=skip)
    layer = {op_id: i // width for i, op_id in enumerate(graph)}
    assert len(graph) == ops
    for source, target in graph.edges:
        assert layer[source] < layer[target]
        assert skip > 0 or layer[source] == layer[target] - 1
    assert all(graph.in_degree(op_id) >= 1 for op_id in graph if layer[op_id] > 0)


@pytest.mark.slow_repeats
@pytest.mark.parametrize("family", [*FAMILIES, None])
@given(seed=SEEDS, max_ops=st.integers(FEWEST_OPS, 400))
@settings(max_examples=12)
def test_drawn_graph_is_a_valid_graph_within_its_limit(
    family: str | None, seed: int, max_ops: int
) -> None:
    graph = draw(rng(seed), family, max_ops=max_ops)
    arrays = GraphArrays.from_graph(graph)
    assert MIN_OPS <= len(arrays) <= max_ops
    assert arrays.edge_count > 0
    assert np.isfinite(arrays.costs_for("any kind")).all()
    assert graph_to_dict(graph_from_dict(graph_to_dict(graph))) == graph_to_dict(graph)


class Extremes(np.random.Generator):
    """Draws the smallest or the largest integer, by the bits of ``highest`` from the right."""

    def __init__(self, highest: int, *, share: float) -> None:
        super().__init__(np.random.PCG64(0))
        self.highest, self.share = highest, share

    def integers(self, low: int, high: int | None = None, size: Any = None) -> Any:  # type: ignore[override]  # fewer forms
        if size is not None:
            return super().integers(low, high, size)
        first, end = (0, low) if high is None else (low, high)
        assert first < end
        is_high, self.highest = self.highest % 2, self.highest // 2
        return end - 1 if is_high else first

    def random(self) -> float:  # type: ignore[override]  # as above
        return self.share


@pytest.mark.parametrize("share", [0.0, 0.99], ids=["with-backward", "forward"])
@pytest.mark.parametrize(
    "family", ["chain", "layered", "fork-join", "grid", "cells", "recurrence", "sequence"]
)
def test_smallest_and_largest_members_of_a_family_keep_to_its_limits(
    family: str, share: float
) -> None:
    for highest in range(2**4):
        graph = draw(Extremes(highest, share=share), family, max_ops=FEWEST_OPS)
        assert MIN_OPS <= len(graph) <= FEWEST_OPS, f"{highest:b}"


@pytest.mark.slow_repeats
@pytest.mark.parametrize("family", ["nmt", "moe", "transformer"])
def test_models_are_larger_than_usual_where_there_is_room(family: str) -> None:
    def largest(max_ops: int) -> int:
        return max(len(draw(np.random.default_rng(s), family, max_ops=max_ops)) for s in range(8))

    assert largest(2000) <= 1200
    assert 2000 < largest(5000) <= 5000


def test_draw_refuses_unknown_families_and_too_few_ops() -> None:
    with pytest.raises(ValueError, match="no family 'rnn'"):
        draw(rng(), "rnn")
    with pytest.raises(ValueError, match=f"max_ops is 9, below the {FEWEST_OPS}"):
        draw(rng(), max_ops=9)


@given(seed=SEEDS)
@settings(max_examples=20)
def test_backward_mirrors_forward(seed: int) -> None:
    forward = layered(rng(seed), ops=25, width=5)
    step = with_backward(forward)
    assert len(step) == 2 * len(forward)
    assert nx.is_directed_acyclic_graph(step)
    for op_id, node in forward.nodes(data=True):
        backward = step.nodes[backward_id(op_id)]
        assert step.nodes[op_id] == node
        assert backward["phase"] == "backward"
        assert backward["cost_s"]["*"] == pytest.approx(2 * node["cost_s"]["*"])
        assert step.edges[op_id, backward_id(op_id)]["bytes"] == node["saved_bytes"]
        assert backward["parameter_bytes"] == 0
    for source, target, edge in forward.edges(data=True):
        turned = step.edges[backward_id(target), backward_id(source)]
        assert turned["bytes"] == step.edges[source, target]["bytes"] == edge["bytes"]
    assert step.number_of_edges() == 2 * forward.number_of_edges() + len(forward)


def test_backward_of_a_weight_adds_gradients_and_its_readers_read_it_again() -> None:
    forward = new_graph("shared weight")
    add_op(forward, "m:weight", cost_s={"*": 0.0}, op="weight", output_bytes=40)
    for call in range(2):
        add_op(forward, f"m@{call}:linear", cost_s={"*": 1.0}, output_bytes=8, saved_bytes=8)
        add_edge(forward, "m:weight", f"m@{call}:linear")
    step = with_backward(forward)
    assert set(step.pred["m:backward/weight"]) == {"m@0:backward/linear", "m@1:backward/linear"}
    assert set(step.pred["m@1:backward/linear"]) == {"m:weight", "m@1:linear"}
    assert step.edges["m:weight", "m@1:backward/linear"]["bytes"] == 40


def test_backward_shares_a_device_with_forward_when_asked() -> None:
    step = with_backward(chain(rng(), ops=3), together=True)
    groups = GraphArrays.from_graph(step).group
    assert groups.tolist() == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("graph", "parameters"),
    [
        # Inception-V3 without its auxiliary classifier and the bias of its last layer.
        (inception(batch=1), 27_161_264 - 3_326_696 - 1000),
        (
            sketches.nmt(layers=2, steps=3, batch=2, hidden=16, vocabulary=50),
            2 * (50 * 16 + 2 * 8 * 16 * 16) + 3 * 16 * 16 + 16 * 50,
        ),
        (
            sketches.transformer(layers=3, micro_batches=2, tokens=4, hidden=8),
            3 * 12 * 8 * 8 + 2 * 8000 * 8,
        ),
        (
            sketches.moe(rng(), layers=2, experts=3, tokens=4, hidden=8),
            2 * (4 * 8 * 8 + 8 * 3 + 3 * 8 * 8 * 8) + 2 * 8000 * 8,
        ),
    ],
    ids=lambda value: value.graph["name"] if isinstance(value, nx.DiGraph) else "",
)
def test_sketch_has_the_parameters_of_its_model(graph: nx.DiGraph[str], parameters: int) -> None:
    assert int(GraphArrays.from_graph(graph).parameter_bytes.sum()) == 4 * parameters


@given(seed=SEEDS, devices=st.integers(1, 5), ops_per_device=st.integers(1, 12))
@settings(max_examples=40)
def test_planted_placement_leaves_no_device_idle(
    seed: int, devices: int, ops_per_device: int
) -> None:
    made = planted(rng(seed), devices=devices, ops_per_device=ops_per_device)
    arrays = GraphArrays.from_graph(made.graph)
    costs_ns = np.rint(arrays.cost_s["*"] * 1e9).astype(int).tolist()
    free_ns = [0] * devices
    end_ns: list[int] = []
    for op, device in enumerate(made.devices):
        inputs = arrays.predecessors[
            arrays.predecessor_start[op] : arrays.predecessor_start[op + 1]
        ].tolist()
        for source in inputs:
            far = made.devices[source] != device
            assert end_ns[source] + far * round(made.gap_s * 1e9) <= free_ns[device]
        free_ns[device] += costs_ns[op]
        end_ns.append(free_ns[device])
    assert free_ns == [round(made.step_s * 1e9)] * devices
    assert arrays.output_bytes.max() <= made.largest_bytes


@given(seed=SEEDS, premium=st.sampled_from([0.0, 0.7]), devices=st.integers(1, 4))
@settings(max_examples=20)
def test_at_the_prices_of_unequal_devices_no_device_of_a_planted_placement_is_idle(
    seed: int, premium: float, devices: int
) -> None:
    prices = rng(seed).uniform(1.0, 3.0, devices).tolist()
    made = planted(rng(seed), devices=devices, prices=prices, premium=premium, recent=3)
    arrays = GraphArrays.from_graph(made.graph)
    cost_s = np.stack([arrays.costs_for(f"device:{d}") for d in range(devices)], axis=1)
    ops, home = np.arange(len(arrays)), np.array(made.devices)
    load_s = np.bincount(home, cost_s[ops, home])
    assert load_s == pytest.approx([made.step_s] * devices)
    # No device is cheaper at these prices, so the loads of no placement are all shorter.
    priced = cost_s * prices
    assert (priced[ops, home] <= priced.min(axis=1) * (1 + 1e-9)).all()
    assert (np.diff(arrays.predecessor_start) <= 3).all()


def test_every_cell_is_wired_alike_and_only_its_costs_vary_a_little() -> None:
    graph = cells(rng(), repeats=5, nodes=6, weights=Weights(spread=1.0))
    assert len(graph) == 1 + 5 * 7

    def wiring(cell: int) -> list[list[str]]:
        prefix = f"cells.{cell}."
        own = [f"{prefix}{node}:op" for node in range(6)]
        inside = {op_id: op_id.removeprefix(prefix) for op_id in graph if op_id.startswith(prefix)}
        return [sorted(inside[source] for source in graph.pred[v] if source in inside) for v in own]

    assert all(wiring(cell) == wiring(0) for cell in range(5))
    costs = np.array(
        [[graph.nodes[f"cells.{c}.{n}:op"]["cost_s"]["*"] for n in range(6)] for c in range(5)]
    )
    assert np.log(costs).std(axis=0).max() < 0.3  # for one node across cells
    assert np.log(costs).mean(axis=0).std() > 0.3  # between nodes of a cell


def test_a_recurrence_reads_the_layer_below_the_step_before_and_weights_that_cost_nothing() -> None:
    graph = recurrence(rng(), layers=3, steps=4)
    assert len(graph) == 3 + 12
    assert sorted(graph.pred["layers.1@2:op"]) == [
        "layers.0@2:op",
        "layers.1:weight",
        "layers.1@1:op",
    ]
    assert graph.nodes["layers.1:weight"]["cost_s"]["*"] == 0.0
    assert len(graph.succ["layers.1:weight"]) == 4
    assert nx.dag_longest_path_length(graph, weight=None, default_weight=1) == 3 + 4 - 1


def test_a_second_stack_begins_where_the_first_ended_and_its_heads_read_all_of_it() -> None:
    graph = sequence(rng(), layers=2, steps=3, stacks=2, heads=2)
    assert len(graph) == 2 * 2 * (1 + 3) + 1 + 2 * (1 + 3) + 1
    reads = {op_id: sorted(graph.pred[op_id]) for op_id in graph}
    assert reads["joined:join"] == [f"stacks.0.1@{t}:op" for t in range(3)]
    assert reads["stacks.1.0@0:op"] == ["stacks.0.0@2:op", "stacks.1.0:weight"]
    assert reads["stacks.1.1@0:op"] == [
        "stacks.0.1@2:op",
        "stacks.1.0@0:op",
        "stacks.1.1:weight",
    ]
    for t in range(3):
        assert reads[f"heads.0@{t}:op"] == ["heads.0:weight", "joined:join", f"stacks.1.1@{t}:op"]
        assert reads[f"heads.1@{t}:op"] == [f"heads.0@{t}:op", "heads.1:weight"]
    assert reads["total:sum"] == [f"heads.1@{t}:op" for t in range(3)]


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_matrix_chain_has_all_tile_products(shards: int) -> None:
    graph = matrix_chain(shards=shards)
    kinds = Counter(node["op"] for _, node in graph.nodes(data=True))
    tiles = shards**2
    assert kinds == {
        "input": 5 * tiles,
        "product": 3 * tiles * shards,  # A B, D E, C (D E)
        "sum": 3 * tiles,
        "add": tiles,
    }
    product = graph.pred["cde.0.0.0:product"]
    assert sorted(product) == ["c.0.0:input", "de.0.0:sum"]


@pytest.mark.parametrize("program", [matrix_chain, sharded_feed_forward, sharded_layer])
def test_sharded_programs_are_graphs_of_which_every_tile_is_used(program: object) -> None:
    assert callable(program)
    graph = program(shards=2)
    assert len(GraphArrays.from_graph(graph)) == len(graph)
    results = {op_id.split(".")[0] for op_id in graph if not graph.succ[op_id]}
    assert len(results) == 1
