"""Costs under load: what ops cost more while other devices of their machine compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.hardware.cluster import Cluster, Device
from envs.hardware.host import Host
from envs.problem import Problem
from envs.simulator import Schedule, Simulator, arrays_of
from envs.simulator.schedule import busy_ns
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from tests.helpers.simulator_cases import problem_of, random_case


def cores(*names: str, **options: Any) -> Cluster:
    devices = (Device(name=name, kind="core", memory_bytes=10**9, **options) for name in names)
    return Cluster(name="cores", devices=tuple(devices))


def alone_and_loaded(*ops: tuple[float, float]) -> nx.DiGraph[str]:
    """Return ops 0, 1, ... without edges, given by (microseconds alone, microseconds loaded)."""
    graph = new_graph("load")
    for k, (alone_us, loaded_us) in enumerate(ops):
        add_op(
            graph,
            str(k),
            cost_s={"core": alone_us / 1e6},
            loaded_cost_s={"core": loaded_us / 1e6},
        )
    return graph


def scheduled(graph: nx.DiGraph[str], cluster: Cluster, *devices: int) -> Schedule:
    problem = Problem.of(GraphArrays.from_graph(graph), cluster)
    count = len(devices)
    return Simulator(problem).run(np.array(devices, np.int32), -np.arange(float(count)))


def durations_us(schedule: Schedule) -> list[float]:
    took_us: list[float] = ((schedule.end_ns - schedule.start_ns) / 1000).tolist()
    return took_us


def test_an_op_costs_more_if_the_other_core_computes_when_it_starts() -> None:
    graph = alone_and_loaded((10, 14), (3, 5), (4, 6), (7, 9))
    # Ops 0 and 1 start together; 2 starts beside 0; 3 starts at 11, beside 0, which ends at 14.
    schedule = scheduled(graph, cores("core:0", "core:1"), 0, 1, 1, 1)
    assert durations_us(schedule) == [14, 5, 6, 9]
    assert schedule.step_ns == 20_000
    # With the short ops first on both: the last op of core:0 starts when core:1 is done.
    schedule = scheduled(graph, cores("core:0", "core:1"), 1, 0, 0, 0)
    assert durations_us(schedule) == [14, 5, 6, 9]
    schedule = scheduled(
        alone_and_loaded((2, 3), (5, 8), (1, 2)), cores("core:0", "core:1"), 0, 0, 1
    )
    assert durations_us(schedule) == [3, 5, 2]  # core:1 is done at 2, before op 1 starts at 3


def test_some_of_the_others_cost_their_share_rounded_half_up() -> None:
    graph = new_graph("load")
    for name in "ab":
        add_op(graph, name, cost_s={"core": 1e-6}, loaded_cost_s={"core": 1.005e-6})
    cluster = cores("core:0", "core:1", "core:2")
    assert durations_us(scheduled(graph, cluster, 0, 2)) == [1.003, 1.003]  # 2.5 ns of 5


def test_launches_are_not_loaded() -> None:
    graph = alone_and_loaded((10, 14), (10, 14))
    cluster = cores("core:0", "core:1", launch_s=1e-6)
    assert durations_us(scheduled(graph, cluster, 0, 1)) == [15, 15]


@pytest.mark.parametrize(
    "cluster",
    [
        cores("core:0"),
        cores("n0:core:0", "n1:core:0"),
        replace(cores("gpu:0", "gpu:1"), hosts=(Host(devices=("gpu:0", "gpu:1")),)),
    ],
)
def test_without_another_core_of_the_machine_there_is_no_load(cluster: Cluster) -> None:
    graph = alone_and_loaded((10, 14), (10, 14))
    assert Problem.of(GraphArrays.from_graph(graph), cluster).load is None
    devices = (0, len(cluster) - 1)
    assert durations_us(scheduled(graph, cluster, *devices)) == [10, 10]


def test_machines_do_not_load_each_other() -> None:
    graph = alone_and_loaded((10, 14), (10, 14))
    names = [f"n{n}:core:{k}" for n in range(2) for k in range(2)]
    assert durations_us(scheduled(graph, cores(*names), 0, 2)) == [10, 10]
    assert durations_us(scheduled(graph, cores(*names), 2, 3)) == [14, 14]


def test_kinds_without_loaded_costs_take_no_part() -> None:
    graph = alone_and_loaded((10, 14), (10, 14))
    for node in graph.nodes.values():
        node["cost_s"]["core*2"] = 8e-6
    pair = Device(name="core:1-2", kind="core*2", memory_bytes=10**9)
    cluster = Cluster(name="mixed", devices=(*cores("core:0", "core:3").devices, pair))
    assert durations_us(scheduled(graph, cluster, 0, 2)) == [10, 8]
    assert durations_us(scheduled(graph, cluster, 0, 1)) == [14, 14]


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), turn=st.integers(1, 8))
def test_the_order_of_devices_does_not_matter(seed: int, turn: int) -> None:
    graph, cluster, devices, priority = random_case(seed, bad_places=False)
    for link in cluster.links:  # of transfers requested at once, the lower destination goes first
        if link.sharing != "none":
            cluster = replace(cluster, links=())
    count = len(cluster)
    rolled = replace(
        cluster, devices=cluster.devices[-turn % count :] + cluster.devices[: -turn % count]
    )
    moved = [(d + turn) % count for d in devices]
    one, other = (
        Simulator(problem, memory=False).run(where, levels)
        for problem, where, levels in (
            problem_of((graph, cluster, devices, priority)),
            problem_of((graph, rolled, moved, priority)),
        )
    )
    assert one.step_ns == other.step_ns
    assert one.end_ns.tolist() == other.end_ns.tolist()


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_every_op_takes_between_its_cost_alone_and_its_loaded_cost(seed: int) -> None:
    problem, devices, priority = problem_of(random_case(seed, bad_places=False))
    schedule = Simulator(problem, memory=False).run(devices, priority)
    if not schedule.feasible:
        return
    ops = np.arange(problem.op_count)
    extra_ns = 0 if problem.load is None else problem.load.extra_ns[ops, devices]
    took_ns = schedule.end_ns - schedule.start_ns
    alone_ns = problem.cost_ns[ops, devices]
    assert (alone_ns <= took_ns).all()
    assert (took_ns <= alone_ns + extra_ns).all()
    if len(set(devices.tolist())) == 1:
        assert (took_ns == alone_ns).all()
    worked_ns = np.bincount(devices, took_ns, minlength=problem.device_count)
    assert busy_ns(problem, schedule)[: problem.device_count].tolist() == worked_ns.tolist()


def test_devices_of_one_kind_share_a_column_of_costs() -> None:
    graph = alone_and_loaded((10, 14), (10, 10))
    arrays = arrays_of(Problem.of(GraphArrays.from_graph(graph), cores("core:0", "core:1")))
    assert arrays.cost_ns.tolist() == [[10_000], [10_000]]
    assert arrays.extra_ns.tolist() == [[4_000], [0]]


def test_ops_that_read_each_other_are_never_charged_for_each_other() -> None:
    graph = alone_and_loaded((10, 14), (10, 14))
    add_edge(graph, "0", "1")
    assert durations_us(scheduled(graph, cores("core:0", "core:1"), 0, 0)) == [10, 10]
