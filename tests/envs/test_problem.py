"""A graph joined with a cluster: costs in ns and allowed devices; links are the simulator's."""

from __future__ import annotations

from typing import Any

import pytest

from envs.hardware.cluster import LONGEST_S, Cluster, Device
from envs.problem import Problem
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from tests.helpers.simulator_cases import fork, one_kind


def cluster_of(kinds: str = "gggg") -> Cluster:
    devices = tuple(
        Device(name=f"d{k}", kind=kind, memory_bytes=1000 + k, launch_s=k * 1e-6)
        for k, kind in enumerate(kinds)
    )
    return Cluster(name="test", devices=devices)


def problem_of(cluster: Cluster, **op: Any) -> Problem:
    graph = new_graph("two")
    add_op(graph, "a", **{"cost_s": {"*": 1e-6}, **op})
    add_op(graph, "b", cost_s={"*": 1.5e-9})
    add_edge(graph, "a", "b")
    return Problem.of(GraphArrays.from_graph(graph), cluster)


def test_costs_include_the_launch_and_are_rounded_half_to_even() -> None:
    problem = problem_of(cluster_of())
    assert problem.cost_ns[0].tolist() == [1000, 2000, 3000, 4000]
    assert problem.cost_ns[1, 0] == 2  # rounded from 1.5
    for array in (problem.cost_ns, problem.allowed, problem.queue, problem.memory_bytes):
        assert not array.flags.writeable


def test_the_cost_of_the_own_kind_comes_before_that_of_any_kind() -> None:
    problem = problem_of(cluster_of(kinds="gc"), cost_s={"g": 5e-6, "*": 7e-6})
    assert problem.cost_ns[0].tolist() == [5000, 8000]


def test_ops_are_kept_from_devices_without_a_cost_or_permission() -> None:
    assert problem_of(cluster_of(kinds="gc"), cost_s={"g": 1.0}).allowed[0].tolist() == [1, 0]
    named = problem_of(cluster_of(), devices=("d1", "d3"))
    assert named.allowed[0].tolist() == [False, True, False, True]
    assert named.allowed[1].all()
    assert named.cheapest_ns().tolist() == [2000, 2]


def test_an_op_may_take_longest_where_it_is_kept_from() -> None:
    kinds = {"g": 1e-6, "c": 1.01 * LONGEST_S}
    problem = problem_of(cluster_of(kinds="gc"), cost_s=kinds, devices=("d0",))
    assert problem.cost_ns[0].tolist() == [1000, 0]
    with pytest.raises(ValueError, match=r"costs 2\.02e\+09 s on d1; an op may take 63 years"):
        problem_of(cluster_of(kinds="gc"), cost_s=kinds)


def test_a_group_may_only_be_where_all_its_ops_may() -> None:
    graph = new_graph("group")
    add_op(graph, "a", cost_s={"*": 1e-6}, colocate="g", devices=("d0", "d1"))
    add_op(graph, "b", cost_s={"*": 1e-6}, colocate="g", devices=("d1", "d2"))
    problem = Problem.of(GraphArrays.from_graph(graph), cluster_of())
    assert problem.allowed.tolist() == [[False, True, False, False]] * 2


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ({"cost_s": {"tpu": 1.0}}, "known for kind tpu"),
        ({"devices": ("d9",)}, "only d9"),
    ],
)
def test_ops_that_cannot_be_placed_are_named(op: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        problem_of(cluster_of(), **op)


@pytest.mark.parametrize("key", ["output_bytes", "parameter_bytes", "workspace_bytes"])
def test_bytes_that_do_not_add_up_in_63_bits_are_refused(key: str) -> None:
    graph = fork(5)
    for node in graph.nodes.values():
        node[key] = 1 << 60
    with pytest.raises(ValueError, match=r"6.92e\+18 bytes in all"):
        Problem.of(GraphArrays.from_graph(graph), one_kind(2))
