"""Graphs of a repeated motif, and sharded matrix programs."""

from __future__ import annotations

from collections import Counter

import networkx as nx
import numpy as np
import pytest

from graphs.graph import GraphArrays
from graphs.synthetic.shapes import Weights, cells, recurrence, sequence
from graphs.synthetic.sketches import matrix_chain, sharded_feed_forward, sharded_layer


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


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
