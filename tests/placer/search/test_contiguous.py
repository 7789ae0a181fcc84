from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS
from envs.simulator.max_load import max_load_ns
from graphs.graph import GraphArrays, Phase, add_edge, add_op, new_graph
from placer.search.annealing.max_load import minimize_max_load
from placer.search.candidate import Candidate
from placer.search.contiguous.orders import (
    breadth_first_order,
    depth_first_order,
    folded_order,
    linear_orders,
    narrow_order,
)
from placer.search.contiguous.parts import best_parts, device_orders, pipeline_parts
from placer.search.registry import placer_named
from placer.search.request import Budget, SearchRequest
from tests.helpers.random_problems import keeps_groups, random_problem
from tests.helpers.simulator_cases import one_kind


def split(problem: Problem) -> Candidate:
    """Return the layer split."""
    [found] = placer_named("layer-split").place(SearchRequest(problem, Budget(evaluations=1)))
    return found


def chain(seed: int, *, ops: int, devices: int, memory_bytes: int, host: bool = False) -> Problem:
    """Return a random chain on unequal devices with equal links; the last may be a host."""
    rng = np.random.default_rng(seed)
    graph = new_graph("chain")
    kinds = [f"kind{d}" for d in range(devices - host)] + ["cpu"] * host
    for i in range(ops):
        add_op(
            graph,
            str(i),
            cost_s={kind: float(rng.uniform(1e-4, 1e-3)) for kind in kinds},
            output_bytes=int(rng.integers(0, 10**6)),
            parameter_bytes=int(rng.integers(0, 10**5)),
        )
        if i:
            add_edge(graph, str(i - 1), str(i))
    equal = one_kind(devices, latency_s=1e-5)
    unequal = (
        replace(device, kind=kinds[d], memory_bytes=memory_bytes * (d + 1))
        for d, device in enumerate(equal.devices)
    )
    cluster = replace(equal, devices=tuple(unequal))
    return Problem.of(GraphArrays.from_graph(graph), cluster)


def best_parts_ns(
    problem: Problem, order: NDArray[np.int32], device_orders: list[tuple[int, ...]]
) -> int:
    """Return the smallest maximum load of all contiguous parts of an order.

    A group comes as a whole where its first op is.
    """
    count, group = problem.op_count, problem.graph.group.tolist()
    sequence: list[int] = []
    for i in order.tolist():
        together = [j for j in order.tolist() if j == i or group[j] == group[i] >= 0]
        sequence += [j for j in together if j not in sequence]
    plans = []
    for borders in combinations_with_replacement(range(count + 1), problem.device_count - 1):
        part = np.empty(count, np.int32)
        part[sequence] = np.searchsorted(borders, np.arange(count), side="right")
        if keeps_groups(problem, part):
            plans += [np.array(devices, np.int32)[part] for devices in device_orders]
    return int(max_load_ns(problem, np.array(plans)).min())


@settings(max_examples=40)
@given(
    st.integers(0, 10_000),
    st.integers(1, 7),
    st.integers(1, 4),
    st.sampled_from([10**12, 700_000]),
    st.booleans(),
)
def test_the_layer_split_of_a_chain_is_the_best_for_any_order_of_devices(
    seed: int, ops: int, devices: int, memory_bytes: int, host: bool
) -> None:
    problem = chain(seed, ops=ops, devices=devices, memory_bytes=memory_bytes, host=host)
    device_orders = list(permutations(range(devices)))
    best_ns = best_parts_ns(problem, problem.graph.topological, device_orders)
    if best_ns < INFEASIBLE_NS:
        assert max_load_ns(problem, split(problem).devices).tolist() == [best_ns]


def test_where_outputs_do_not_fit_for_good_only_parameters_count() -> None:
    graph = new_graph("hand")
    for i, share in enumerate((30, 30, 30, 90)):  # hundredths of a device's memory
        size = share * 10**7
        add_op(graph, f"{i}", cost_s={"*": 1e-3}, output_bytes=5 * 10**7, parameter_bytes=size)
        if i:
            add_edge(graph, f"{i - 1}", f"{i}")
    found = split(Problem.of(GraphArrays.from_graph(graph), one_kind(2)))
    # Three outputs would make 105 % of the first part, but only two are live at a time.
    assert found.devices.tolist() in ([0, 0, 0, 1], [1, 1, 1, 0])
    assert found.step_ns < INFEASIBLE_NS


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_orders_have_every_op_once_and_all_but_one_have_it_after_what_it_reads(seed: int) -> None:
    graph = random_problem(seed, ops=40).graph
    for find in (narrow_order, depth_first_order, folded_order, breadth_first_order):
        order = find(graph).tolist()
        position = {i: at for at, i in enumerate(order)}
        assert sorted(order) == list(range(len(graph)))
        if find is breadth_first_order:
            continue
        for i, (first, end) in enumerate(pairwise(graph.successor_start.tolist())):
            assert all(position[i] < position[v] for v in graph.successors[first:end].tolist())


def plain_narrow_order(graph: GraphArrays) -> list[int]:
    """Return the narrow order by looking at all ready ops each time."""
    reads: dict[int, list[int]] = {i: [] for i in range(len(graph))}
    readers: dict[int, list[int]] = {}
    for i, (first, end) in enumerate(pairwise(graph.successor_start.tolist())):
        readers[i] = graph.successors[first:end].tolist()
    for i, (first, end) in enumerate(pairwise(graph.predecessor_start.tolist())):
        reads[i] = graph.predecessors[first:end].tolist()
    unread = {i: len(of) for i, of in readers.items()}
    missing = {i: len(of) for i, of in reads.items()}
    since = {i: -1 for i in graph.topological.tolist() if not missing[i]}
    order: list[int] = []

    def growth(i: int) -> tuple[int, int]:
        return bool(readers[i]) - sum(unread[u] == 1 for u in reads[i]), -since[i]

    while since:
        chosen = min(since, key=growth)
        del since[chosen]
        order.append(chosen)
        for u in reads[chosen]:
            unread[u] -= 1
        for v in readers[chosen]:
            missing[v] -= 1
            if not missing[v]:
                since[v] = len(order)
    return order


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), ops=st.integers(1, 60))
def test_the_narrow_order_is_that_of_its_plain_form(seed: int, ops: int) -> None:
    graph = random_problem(seed, ops=ops).graph
    assert narrow_order(graph).tolist() == plain_narrow_order(graph)


def test_the_depth_first_order_has_weights_just_before_their_reader() -> None:
    graph = new_graph("hand")
    for name in ("w2", "w1", "x", "conv1", "conv2", "add"):
        add_op(graph, name, cost_s={"*": 1e-3})
    edges = (("x", "conv1"), ("w1", "conv1"), ("w2", "conv2"), ("conv1", "conv2"), ("conv2", "add"))
    for source, target in (*edges, ("x", "add")):
        add_edge(graph, source, target)
    arrays = GraphArrays.from_graph(graph)
    order = [arrays.ids[i] for i in depth_first_order(arrays)]
    assert order.index("w2") == order.index("conv2") - 1
    assert order[2:] == ["conv1", "w2", "conv2", "add"]


@pytest.mark.parametrize("find", [breadth_first_order, folded_order])
def test_a_training_step_is_folded(find: Callable[[GraphArrays], NDArray[np.int32]]) -> None:
    graph = new_graph("hand")
    for name in ("f0", "f1", "f2", "b2", "b1", "b0"):
        phase: Phase = "backward" if name[0] == "b" else "forward"
        add_op(graph, name, cost_s={"*": 1e-3}, phase=phase)
    for source, target in (("f0", "f1"), ("f1", "f2"), ("f2", "b2"), ("b2", "b1"), ("b1", "b0")):
        add_edge(graph, source, target)
    for k in range(3):  # what is saved
        if k < 2:
            add_edge(graph, f"f{k}", f"b{k}")
    arrays = GraphArrays.from_graph(graph)
    layers = [int(arrays.ids[i][1]) for i in find(arrays)]
    assert layers in ([0, 0, 1, 1, 2, 2], [2, 2, 1, 1, 0, 0])


@pytest.mark.slow
@settings(max_examples=80)
@given(
    seed=st.integers(0, 10**6),
    unequal=st.booleans(),
    pins=st.booleans(),
    tight=st.booleans(),
    groups=st.booleans(),
)
def test_pipeline_parts_are_the_best_of_all_parts_of_an_order(
    seed: int, unequal: bool, pins: bool, tight: bool, groups: bool
) -> None:
    memory_bytes = 10_000_000 if tight else 10**12
    problem = random_problem(
        seed, ops=9, devices=3, unequal=unequal, pins=pins, groups=groups, memory_bytes=memory_bytes
    )
    shuffled = np.random.default_rng(seed).permutation(9).astype(np.int32)
    for order in (*linear_orders(problem), shuffled):
        best_ns = best_parts_ns(problem, order, [(0, 1, 2)])
        if best_ns < INFEASIBLE_NS:
            assert max_load_ns(problem, pipeline_parts(problem, order)).tolist() == [best_ns]
            below = best_parts(problem, order, below_ns=best_ns + 1)
            assert below is not None
            assert max_load_ns(problem, below).tolist() == [best_ns]
            assert best_parts(problem, order, below_ns=best_ns) is None


@pytest.mark.parametrize("seed", range(6))
def test_a_search_is_never_worse_than_the_best_parts_of_any_of_its_orders(seed: int) -> None:
    problem = random_problem(
        seed, ops=10, devices=3, unequal=seed % 2 == 1, groups=seed % 3 == 0, memory_bytes=10**12
    )
    found = minimize_max_load(SearchRequest(problem, Budget(evaluations=1)))
    rows = list(permutations(range(3)))
    best_ns = min(best_parts_ns(problem, order, rows) for order in linear_orders(problem))
    assert max_load_ns(problem, found[0].devices)[0] <= best_ns


def test_devices_are_ordered_in_all_ways_that_differ() -> None:
    problem = chain(0, ops=3, devices=3, memory_bytes=10**12)
    assert len(device_orders(problem)) == 6
    assert device_orders(random_problem(0, ops=3, devices=3)) == [(0, 1, 2)]
    alternating = device_orders(random_problem(0, ops=3, devices=4, unequal=True))
    assert sorted(tuple(d % 2 for d in order) for order in alternating) == sorted(
        set(permutations((0, 0, 1, 1)))
    )
    many = device_orders(random_problem(0, ops=3, devices=8, unequal=True))
    assert many == [tuple(range(8)), tuple(range(7, -1, -1))]
