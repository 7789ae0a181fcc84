"""Graphs made from arrays: equal to those made op by op, up to a million ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envs.problem import Problem
from envs.simulator import Simulator
from graphs.flat import flat_graph
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from tests.helpers.simulator_cases import one_kind

CHAIN: dict[str, Any] = {
    "cost_s": np.full(3, 1e-6),
    "source": np.array([0, 1]),
    "target": np.array([1, 2]),
    "output_bytes": np.array([10, 20, 30]),
}


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cost_s": np.zeros(0)}, "has no ops"),
        ({"cost_s": np.array([1e-6, np.nan, 0.0])}, "a cost is not a time >= 0"),
        ({"cost_s": np.zeros(2)}, "2 costs, 3 outputs"),
        ({"target": np.array([1, 3])}, "edge 1 -> 3 does not lead from one of 3 ops"),
        ({"source": np.array([0, 7])}, "edge 7 -> 2"),
        ({"source": np.array([2, 1])}, "edge 2 -> 1"),
        ({"source": np.array([0, 0]), "target": np.array([1, 1])}, "an edge twice"),
        ({"output_bytes": np.array([1, -1, 1])}, "a size is not within"),
    ],
)
def test_arrays_that_are_no_graph_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flat_graph("bad", **{**CHAIN, **changes})


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
