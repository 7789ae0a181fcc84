"""Bounds on the max-load, and the best contiguous parts, compared with brute force."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import every_placement, random_problem
from simulator_cases import one_kind

from benchmarks.instances import profile_names, profiled
from envs.cluster import Cluster, Device, Link
from envs.load_bound import Sweep, load_bound_ns, quick_load_bound_ns
from envs.max_load import max_load_ns
from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS
from envs.sweep_plan import narrow_order
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from placer.search.balancing import balance
from placer.search.budget import Budget
from placer.search.pipeline_parts import pipeline_parts


def drawn(seed: int, ops: int = 7) -> Problem:
    return random_problem(
        seed,
        ops=ops,
        devices=2 + seed % 2,
        groups=seed % 3 == 0,
        pins=seed % 4 == 1,
        unequal=seed % 5 == 1,
        memory_bytes=8_000_000 if seed % 7 == 2 else 10**12,
    )


def optimum_ns(problem: Problem) -> int:
    return int(max_load_ns(problem, every_placement(problem)).min())


def chain(seed: int, ops: int, devices: int) -> Problem:
    """Return unequal ops in a row, whose outputs take about as long to send as the ops take."""
    rng = np.random.default_rng(seed)
    graph = new_graph("chain")
    for i in range(ops):
        add_op(
            graph,
            f"op{i}",
            cost_s={"*": 1e-6 * float(rng.integers(1, 20))},
            output_bytes=int(rng.integers(0, 5000)),
        )
        if i:
            add_edge(graph, f"op{i - 1}", f"op{i}")
    return Problem.of(GraphArrays.from_graph(graph), one_kind(devices))


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6))
def test_no_placement_beats_the_bound_however_few_states_are_kept(seed: int) -> None:
    problem = drawn(seed)
    best_ns = optimum_ns(problem)
    if best_ns == INFEASIBLE_NS:
        return
    assert quick_load_bound_ns(problem) <= best_ns
    for states in (3, 20, 1000):
        assert load_bound_ns(problem, best_ns, states=states) <= best_ns
        for known_ns in (best_ns + best_ns // 50, 2 * best_ns):
            assert load_bound_ns(problem, known_ns, states=states) <= best_ns


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), groups=st.booleans(), pins=st.booleans(), unequal=st.booleans())
def test_with_room_for_all_states_the_bound_is_the_optimum(
    seed: int, groups: bool, pins: bool, unequal: bool
) -> None:
    problem = random_problem(seed, ops=7, devices=3, groups=groups, pins=pins, unequal=unequal)
    best_ns = optimum_ns(problem)
    if best_ns == INFEASIBLE_NS:
        return
    assert load_bound_ns(problem, best_ns) == best_ns
    assert Sweep(problem, 10_000).bound_ns(best_ns) == best_ns


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_of_a_chain_is_its_optimum_though_devices_may_be_visited_again(seed: int) -> None:
    problem = chain(seed, ops=9, devices=3)
    best_ns = optimum_ns(problem)
    assert load_bound_ns(problem, best_ns) == best_ns


def test_one_heavy_op_bounds_the_load_before_any_sweep() -> None:
    problem = profiled("alexnet")
    heaviest_ns = int(problem.cost_ns.max())
    assert heaviest_ns > problem.cost_ns[:, 0].sum() / 4
    assert quick_load_bound_ns(problem) == heaviest_ns


def test_hosts_pay_for_no_transfer_in_the_bound_either() -> None:
    drawn_problem = chain(1, ops=7, devices=3)
    devices = tuple(
        Device(name=name, kind="cpu" if d else "gpu", memory_bytes=10**9)
        for d, name in enumerate(drawn_problem.cluster.names)
    )
    cluster = Cluster(name="hosts", devices=devices, links=drawn_problem.cluster.links)
    problem = Problem.of(drawn_problem.graph, cluster)
    assert load_bound_ns(problem, optimum_ns(problem)) == optimum_ns(problem)


def test_links_of_unequal_speed_count_as_the_best_of_them() -> None:
    problem = chain(2, ops=7, devices=3)
    names = problem.cluster.names
    slow = Link(between=names[1:], latency_s=1e-3, bandwidth_bytes_per_s=1e6)
    cluster = Cluster(
        name="slow", devices=problem.cluster.devices, links=(slow, *problem.cluster.links)
    )
    slower = Problem.of(problem.graph, cluster)
    assert load_bound_ns(slower, optimum_ns(slower)) <= optimum_ns(slower)
    assert load_bound_ns(slower, 10**9) <= optimum_ns(problem)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_the_narrow_order_has_every_op_once_and_after_what_it_reads(seed: int) -> None:
    graph = random_problem(seed, ops=40).graph
    order = narrow_order(graph).tolist()
    position = {i: at for at, i in enumerate(order)}
    assert sorted(order) == list(range(len(graph)))
    for i, (first, end) in enumerate(pairwise(graph.successor_start.tolist())):
        assert all(position[i] < position[v] for v in graph.successors[first:end].tolist())


def best_parts_ns(problem: Problem, order: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> int:
    count = problem.op_count
    plans = []
    for borders in combinations_with_replacement(range(count + 1), problem.device_count - 1):
        plan = np.empty(count, np.int32)
        plan[order] = np.searchsorted(borders, np.arange(count), side="right")
        plans.append(plan)
    return int(max_load_ns(problem, np.array(plans)).min())


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), unequal=st.booleans(), pins=st.booleans(), tight=st.booleans())
def test_contiguous_parts_are_the_best_of_all_parts(
    seed: int, unequal: bool, pins: bool, tight: bool
) -> None:
    memory_bytes = 10_000_000 if tight else 10**12
    problem = random_problem(
        seed, ops=9, devices=3, unequal=unequal, pins=pins, memory_bytes=memory_bytes
    )
    for order in (problem.graph.topological, narrow_order(problem.graph)):
        best_ns = best_parts_ns(problem, order)
        if best_ns < INFEASIBLE_NS:
            assert max_load_ns(problem, pipeline_parts(problem, order)).tolist() == [best_ns]


def test_the_search_is_never_worse_than_contiguous_parts() -> None:
    problem = profiled("resnet101")
    parts = pipeline_parts(problem, narrow_order(problem.graph))
    found = balance(problem, Budget(evaluations=100), 0)
    assert max_load_ns(problem, found[0].devices)[0] <= max_load_ns(problem, parts)[0]


def test_profiles_are_read_as_their_files_say() -> None:
    assert len(profile_names()) == 13
    problem = profiled("vgg16")
    assert (problem.op_count, problem.device_count) == (41, 4)
    assert problem.cost_ns.sum(axis=0).tolist() == [690_507_000] * 4
    assert problem.graph.parameter_bytes.sum() == 553_430_176


@pytest.mark.parametrize("name", ["alexnet", "squeezenet1_0", "vgg16"])
def test_the_search_finds_what_is_proven_to_be_the_optimum(name: str) -> None:
    problem = profiled(name)
    found = balance(problem, Budget(evaluations=200_000), 0)
    best_ns = int(max_load_ns(problem, found[0].devices)[0])
    assert load_bound_ns(problem, best_ns) == best_ns
