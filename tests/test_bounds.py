"""Lower bounds hold for every step, and are as good as they claim on small problems."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_cases import one_kind, problem_of, random_case

from envs.bounds import lower_bound_ns
from envs.cluster import Cluster, Device
from envs.problem import Problem
from envs.simulator import Simulator
from graphs.graph import GraphArrays, add_edge, add_op, new_graph

torch.set_num_threads(1)


def bound_of(graph: nx.DiGraph[str], cluster: Cluster) -> int:
    return lower_bound_ns(Problem.of(GraphArrays.from_graph(graph), cluster))


def independent(count: int, cost_s: dict[str, float]) -> nx.DiGraph[str]:
    graph = new_graph("independent")
    for i in range(count):
        add_op(graph, str(i), cost_s=cost_s)
    return graph


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**7))
def test_no_step_is_below_the_bound(seed: int) -> None:
    problem, _, priority = problem_of(random_case(seed))
    rng = np.random.default_rng(seed)
    shape = (20, problem.op_count)
    devices = rng.integers(0, problem.device_count, shape).astype(np.int32)
    steps = Simulator(problem, memory=False).step_ns(devices, np.tile(priority, (20, 1)))
    assert steps.min() >= lower_bound_ns(problem)


def test_a_chain_is_bounded_by_its_length() -> None:
    graph = independent(5, {"*": 2e-6})
    for i in range(4):
        add_edge(graph, str(i), str(i + 1))
    assert bound_of(graph, one_kind(3)) == 10_000


def test_independent_ops_are_bounded_by_their_share_of_the_work() -> None:
    assert bound_of(independent(12, {"*": 1e-6}), one_kind(4)) == 3000


@pytest.mark.parametrize("slow_s", [3e-6, 100e-6])
def test_slow_devices_do_not_count_as_fast_ones(slow_s: float) -> None:
    graph = independent(400, {"gpu": 1e-6, "cpu": slow_s})
    devices = [Device(name=kind, kind=kind, memory_bytes=1) for kind in ("gpu", "cpu")]
    best_s = 400 / (1 / 1e-6 + 1 / slow_s)  # both busy all the time
    bound_s = bound_of(graph, Cluster(name="mixed", devices=tuple(devices))) / 1e9
    assert 0.97 * best_s < bound_s <= best_s


def test_work_before_and_after_a_bottleneck_adds_up() -> None:
    graph = independent(8, {"*": 1e-6})
    add_op(graph, "neck", cost_s={"*": 1e-6})
    for i in range(4):
        add_edge(graph, str(i), "neck")
        add_edge(graph, "neck", str(4 + i))
    # Four ops on two devices, the neck, four ops: 2 + 1 + 2, though work / 2 is only 4.5.
    assert bound_of(graph, one_kind(2)) == 5000


def test_one_device_is_bounded_by_all_work() -> None:
    problem, _, _ = problem_of(random_case(3, bad_places=False))
    first = Cluster(name="one", devices=problem.cluster.devices[:1])
    alone = Problem.of(problem.graph, first)
    assert lower_bound_ns(alone) == alone.cost_ns.sum()
