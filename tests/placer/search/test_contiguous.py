from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, pairwise, permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS
from envs.simulator.max_load import max_load_ns
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from placer.search.candidate import Candidate
from placer.search.contiguous import narrow_order, pipeline_parts
from placer.search.registry import placer_named
from placer.search.request import Budget, SearchRequest
from tests.helpers.random_problems import random_problem
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
    """Return the smallest maximum load of all contiguous parts of an order."""
    count = problem.op_count
    plans = []
    for borders in combinations_with_replacement(range(count + 1), problem.device_count - 1):
        part = np.empty(count, np.int32)
        part[order] = np.searchsorted(borders, np.arange(count), side="right")
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
def test_the_narrow_order_has_every_op_once_and_after_what_it_reads(seed: int) -> None:
    graph = random_problem(seed, ops=40).graph
    order = narrow_order(graph).tolist()
    position = {i: at for at, i in enumerate(order)}
    assert sorted(order) == list(range(len(graph)))
    for i, (first, end) in enumerate(pairwise(graph.successor_start.tolist())):
        assert all(position[i] < position[v] for v in graph.successors[first:end].tolist())


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), unequal=st.booleans(), pins=st.booleans(), tight=st.booleans())
def test_pipeline_parts_are_the_best_of_all_parts_of_an_order(
    seed: int, unequal: bool, pins: bool, tight: bool
) -> None:
    memory_bytes = 10_000_000 if tight else 10**12
    problem = random_problem(
        seed, ops=9, devices=3, unequal=unequal, pins=pins, memory_bytes=memory_bytes
    )
    for order in (problem.graph.topological, narrow_order(problem.graph)):
        best_ns = best_parts_ns(problem, order, [(0, 1, 2)])
        if best_ns < INFEASIBLE_NS:
            assert max_load_ns(problem, pipeline_parts(problem, order)).tolist() == [best_ns]
