"""Graphs made from arrays: equal to those made op by op, up to a million ops."""

from __future__ import annotations

import numpy as np
import pytest

from envs.problem import Problem
from envs.simulator import Simulator
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from graphs.synthetic.flat import flat_graph
from tests.helpers.simulator_cases import one_kind


def test_a_flat_graph_equals_one_that_was_made_op_by_op() -> None:
    rng = np.random.default_rng(0)
    edges = sorted({(a, b) for a, b in rng.integers(0, 30, (90, 2)).tolist() if a < b})
    source, target = np.array(edges).T
    sizes = rng.integers(0, 100, (2, 30))
    order = rng.permutation(len(edges))
    flat = flat_graph(
        "flat",
        cost_s=np.full(30, 1e-6),
        source=source[order],
        target=target[order],
        output_bytes=sizes[0],
        parameter_bytes=sizes[1],
    )
    graph = new_graph("flat")
    for i in range(30):
        size, own = sizes[:, i].tolist()
        cost = {"*": 1e-6}
        add_op(graph, str(i), op="op", cost_s=cost, output_bytes=size, parameter_bytes=own)
    for a, b in edges:
        add_edge(graph, str(a), str(b))
    plain = GraphArrays.from_graph(graph)
    for name in GraphArrays.__slots__:
        ours, theirs = getattr(flat, name), getattr(plain, name)
        if isinstance(ours, np.ndarray) and name != "topological":
            assert ours.dtype == theirs.dtype
            assert ours.tolist() == theirs.tolist()
    assert (flat.ids, flat.ops, flat.modules) == (plain.ids, plain.ops, plain.modules)


@pytest.mark.slow
def test_a_chain_of_a_million_ops_is_simulated() -> None:
    count = 10**6
    graph = flat_graph(
        "chain",
        cost_s=np.full(count, 1e-7),
        source=np.arange(count - 1),
        target=np.arange(1, count),
        output_bytes=np.ones(count, np.int64),
    )
    problem = Problem.of(graph, one_kind(2, bandwidth_bytes_per_s=1e9))
    devices = (np.arange(count) // 2 % 2).astype(np.int32)
    schedule = Simulator(problem).run(devices, np.zeros(count))
    transfers = count // 2 - 1
    assert schedule.step_ns == count * 100 + transfers * (1000 + 1)
    assert len(schedule.critical_chain()) == count
