"""Invalid input is refused with the numbers; it causes no crash and no hang."""

from __future__ import annotations

import math
from typing import Any

import networkx as nx
import numpy as np
import pytest

from envs.hardware.cluster import LONGEST_S, MOST_DEVICES, RANGES, Cluster, Device, Link
from envs.problem import HORIZON_NS, Problem
from envs.simulator import INFEASIBLE_NS, Simulator
from envs.simulator.bounds import bounds_of, lower_bound_ns
from envs.simulator.max_load import max_load_ns
from envs.simulator.micro_batches import Pipeline
from graphs.graph import LARGEST_BYTES, GraphArrays, add_edge, add_op, new_graph
from placer.search.annealing.step_time import StepTimeAnnealing
from placer.search.evaluator import Evaluator
from placer.search.heuristics import heuristics
from placer.search.list_scheduler.decoder import HEFT, decode
from tests.helpers.simulator_cases import fork, one_kind, run


def problem_of(graph: nx.DiGraph[str]) -> Problem:
    return Problem.of(GraphArrays.from_graph(graph), one_kind(2))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("cost_s", {"*": math.nan}, r"op '0': cost_s\['\*'\] is nan"),
        ("cost_s", {"*": 1e300}, "op '0' costs 1e\\+300 s on d0"),
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
    with pytest.raises(ValueError, match=r"6.92e\+18 bytes in all"):
        problem_of(graph)


def test_micro_batches_whose_bytes_do_not_add_up_are_refused() -> None:
    graph = fork(2)
    graph.nodes["s"]["output_bytes"] = 1 << 60
    problem = problem_of(graph)
    with pytest.raises(ValueError, match="bytes in all"):
        Pipeline.of(problem, 4)


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


def with_link(**link: Any) -> Problem:
    """Return a fork on two devices with one edge of the largest size and the others of 0 bytes."""
    devices = one_kind(2).devices
    graph = fork(3, moved=0)
    graph.edges["s", "0"]["bytes"] = LARGEST_BYTES
    plain: dict[str, Any] = {"latency_s": 0.0, "bandwidth_bytes_per_s": 1.0}
    joined = Link(between=("d0", "d1"), **plain | link)
    return Problem.of(
        GraphArrays.from_graph(graph), Cluster(name="c", devices=devices, links=(joined,))
    )


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("key", ["latency_s", "bandwidth_bytes_per_s"])
def test_links_at_the_ends_of_their_ranges_are_searched_and_simulated(key: str, end: int) -> None:
    problem = with_link(**{key: RANGES[key][end]})
    evaluator = Evaluator(problem)
    for plan in heuristics(evaluator):
        assert set(plan.devices.tolist()) <= {0, 1}
    run = StepTimeAnnealing(evaluator, heuristics(evaluator)[0], seed=0)
    run.run(50, first=0, total=50)
    assert run.best().step_ns <= heuristics(evaluator)[0].step_ns == 4000
    assert 0 <= problem.transfer_ns(LARGEST_BYTES, 0, 1) <= HORIZON_NS
    assert max_load_ns(problem, np.zeros((1, 4), np.int32)).tolist() == [4000]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_decoders_choose_devices_even_where_times_are_no_numbers(value: float) -> None:
    scheduling = Evaluator(with_link()).scheduling
    scheduling.latency[:] = value
    devices, _ = decode(scheduling, HEFT)
    assert set(devices.tolist()) <= {0, 1}


@pytest.mark.parametrize("key", RANGES)
def test_numbers_of_devices_and_links_beyond_their_ranges_are_refused(key: str) -> None:
    low, high = RANGES[key]
    device: dict[str, Any] = {"name": "d", "kind": "k", "memory_bytes": 1}
    link: dict[str, Any] = {"between": ("d", "e"), "latency_s": 0.0, "bandwidth_bytes_per_s": 1.0}
    for value in (np.nextafter(low, -math.inf), -math.inf, math.nan, 2 * high):
        if not (low <= value <= high) and not (key == "peak_flop_per_s" and math.isnan(value)):
            with pytest.raises(ValueError, match=f"{key} is .*{low:g} .. "):
                Link(**link | {key: value}) if key in link else Device(**device | {key: value})


def test_clusters_of_too_many_devices_are_refused() -> None:
    devices = tuple(Device(name=f"d{i}", kind="k", memory_bytes=1) for i in range(MOST_DEVICES + 1))
    with pytest.raises(ValueError, match=r"1025 devices.* 1024"):
        Cluster(name="c", devices=devices)
    assert len(Cluster(name="c", devices=devices[1:])) == MOST_DEVICES


def test_bounds_hold_for_the_dearest_op_on_most_devices() -> None:
    graph = new_graph("dear")
    add_op(graph, "dear", cost_s={"*": 0.99 * LONGEST_S})
    devices = tuple(Device(name=f"d{i}", kind="k", memory_bytes=1) for i in range(MOST_DEVICES))
    problem = Problem.of(GraphArrays.from_graph(graph), Cluster(name="c", devices=devices))
    bounds = bounds_of(problem)
    assert 0 < bounds.work_ns <= bounds.path_ns == problem.cost_ns[0, 0]
