"""What cannot be simulated is refused with the numbers, and never crashes or hangs."""

from __future__ import annotations

import math
from collections.abc import Callable

import networkx as nx
import numpy as np
import pytest
from simulator_cases import fork, one_kind, run

from envs.bounds import lower_bound_ns
from envs.cluster import Cluster
from envs.max_load import max_load_ns
from envs.micro_batches import Pipeline
from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS, Simulator
from graphs.graph import GraphArrays, add_edge, add_op, new_graph


def problem_of(graph: nx.DiGraph[str]) -> Problem:
    return Problem.of(GraphArrays.from_graph(graph), one_kind(2))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("cost_s", {"*": math.nan}, r"op '0': cost_s\['\*'\] is nan"),
        ("cost_s", {"*": -1e-6}, r"cost_s\['\*'\] is -1e-06"),
        ("cost_s", {"*": math.inf}, r"cost_s\['\*'\] is inf"),
        ("cost_s", {"*": 1e300}, "op '0' costs 1e\\+300 s on d0; steps must stay below 500 s"),
        ("cost_s", {}, "op '0' can run on no device"),
        ("output_bytes", -1, "op '0': output_bytes is -1"),
        ("parameter_bytes", 1 << 61, "op '0': parameter_bytes is 2305843009213693952"),
    ],
)
def test_ops_whose_numbers_mean_nothing_are_refused(key: str, value: object, message: str) -> None:
    graph = fork(2)
    graph.nodes["0"][key] = value
    with pytest.raises(ValueError, match=message):
        problem_of(graph)


def test_edges_of_negative_size_are_refused() -> None:
    graph = fork(1)
    graph.edges["s", "0"]["bytes"] = -8
    with pytest.raises(ValueError, match="edge 's' -> '0': bytes is -8"):
        problem_of(graph)


@pytest.mark.parametrize("key", ["output_bytes", "parameter_bytes", "workspace_bytes"])
def test_bytes_that_do_not_add_up_in_63_bits_are_refused(key: str) -> None:
    graph = fork(5)
    for node in graph.nodes.values():
        node[key] = 1 << 60
    with pytest.raises(ValueError, match=r"'fork' holds 6.92e\+18 bytes in all; a problem may"):
        problem_of(graph)


def test_micro_batches_whose_bytes_do_not_add_up_are_refused() -> None:
    graph = fork(2)
    graph.nodes["s"]["output_bytes"] = 1 << 60
    problem = problem_of(graph)
    with pytest.raises(ValueError, match=r"bytes in all; a problem may have 2\*\*62"):
        Pipeline.of(problem, 4)


def test_no_devices_and_no_ops_are_refused() -> None:
    with pytest.raises(ValueError, match="has no devices"):
        Cluster(name="none", devices=())
    with pytest.raises(ValueError, match="has no ops"):
        problem_of(new_graph("empty"))


def test_costs_that_add_up_beyond_the_horizon_are_refused() -> None:
    graph = new_graph("long")
    for i in range(3):
        add_op(graph, str(i), cost_s={"*": 400.0})
        if i:
            add_edge(graph, str(i - 1), str(i))
    with pytest.raises(ValueError, match="'long' takes more than 550 s"):
        run(graph, one_kind(1), [0, 0, 0])
    simulator = Simulator(problem_of(graph))
    with pytest.raises(ValueError, match="'long' takes more than 550 s"):
        simulator.step_ns(np.zeros((2, 3), np.int32), np.zeros((2, 3)))


def test_devices_without_a_link_between_an_edge_are_infeasible_everywhere() -> None:
    apart = Cluster(name="apart", devices=one_kind(2).devices)
    problem = Problem.of(GraphArrays.from_graph(fork(1)), apart)
    devices, priority = np.array([[0, 1], [0, 0]], np.int32), np.zeros((2, 2))
    assert Simulator(problem).step_ns(devices, priority).tolist() == [INFEASIBLE_NS, 2000]
    assert max_load_ns(problem, devices).tolist() == [INFEASIBLE_NS, 2000]
    assert lower_bound_ns(problem) == 2000
    copies = Pipeline.of(problem, 2)
    steps = Simulator(copies.problem).step_ns(copies.devices(devices), copies.priority(priority))
    assert steps.tolist() == [INFEASIBLE_NS, 4000]


def test_tensors_of_no_bytes_take_the_latency_alone() -> None:
    assert run(fork(2, moved=0), one_kind(2), [0, 1, 1]).start_ns.tolist() == [0, 2000, 3000]


@pytest.mark.parametrize("evaluate", [Simulator.step_ns, Simulator.run])
@pytest.mark.parametrize(
    ("devices", "message"),
    [([0], r"must be \(B, 2\)"), ([0, 9], "device 9 does not exist"), ([], r"must be \(B, 2\)")],
)
def test_placements_of_a_wrong_length_or_device_are_refused(
    evaluate: Callable[..., object], devices: list[int], message: str
) -> None:
    simulator = Simulator(problem_of(fork(1)))
    with pytest.raises(ValueError, match=message):
        evaluate(simulator, np.array(devices, np.int32), np.zeros(len(devices)))
