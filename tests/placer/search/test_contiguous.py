from __future__ import annotations

from itertools import combinations_with_replacement, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from envs.hardware.cluster import Cluster, Device, Link
from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS
from envs.simulator.max_load import max_load_ns
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from placer.search.contiguous import MOST_PLACES, contiguous, narrow_order, pipeline_parts
from placer.search.registry import placer_named
from placer.search.request import Budget, SearchRequest
from tests.helpers.random_problems import keeps_groups, keeps_limits, random_problem


def chain(
    seed: int,
    *,
    ops: int,
    devices: int,
    memory_bytes: int = 10**12,
    parameter_bytes: int = 10**6,
    host: bool = False,
) -> Problem:
    """Return a random chain on unequal devices, with a separate link between every two of them."""
    rng = np.random.default_rng(seed)
    graph = new_graph("chain")
    for i in range(ops):
        add_op(
            graph,
            str(i),
            cost_s={f"kind{d}": float(rng.uniform(1e-4, 1e-3)) for d in range(devices - host)}
            | ({"cpu": 1e-3} if host else {}),
            output_bytes=int(rng.integers(0, 10**6)),
            parameter_bytes=int(rng.integers(0, parameter_bytes)),
        )
        if i:
            add_edge(graph, str(i - 1), str(i))
    kinds = [f"kind{d}" for d in range(devices - host)] + ["cpu"] * host
    cluster = Cluster(
        name="unequal",
        devices=tuple(
            Device(name=f"d{d}", kind=kind, memory_bytes=memory_bytes)
            for d, kind in enumerate(kinds)
        ),
        links=tuple(
            Link(
                between=(f"d{a}", f"d{b}"),
                latency_s=float(rng.uniform(0, 1e-4)),
                bandwidth_bytes_per_s=float(rng.uniform(1e9, 1e10)),
                one_way=True,
            )
            for a, b in permutations(range(devices), 2)
        ),
    )
    return Problem.of(GraphArrays.from_graph(graph), cluster)


def all_splits(ops: int, devices: int) -> NDArray[np.int32]:
    """Return every contiguous split into at most one part per device, in every device order."""
    splits = []
    for order in permutations(range(devices)):
        for cuts in np.ndindex(*(ops + 1,) * (devices - 1)):
            if list(cuts) == sorted(cuts):
                part = np.searchsorted(np.array(cuts), np.arange(ops), side="right")
                splits.append(np.array(order)[part])
    return np.array(splits, np.int32)


@settings(max_examples=40)
@given(
    st.integers(0, 10_000),
    st.integers(1, 7),
    st.integers(1, 4),
    st.sampled_from([10**12, 3_000_000]),
    st.booleans(),
)
def test_of_a_chain_it_is_the_best_of_all_contiguous_splits(
    seed: int, ops: int, devices: int, memory_bytes: int, host: bool
) -> None:
    problem = chain(seed, ops=ops, devices=devices, memory_bytes=memory_bytes, host=host)
    best = int(max_load_ns(problem, all_splits(ops, devices)).min())
    found = contiguous(problem)
    if best == INFEASIBLE_NS:
        assert found is None
    else:
        assert found is not None
        assert max_load_ns(problem, found)[0] == best


def test_a_split_can_be_computed_in_the_head() -> None:
    graph = new_graph("hand")
    for i, cost_s in enumerate((3e-3, 1e-3, 1e-3, 3e-3)):
        add_op(graph, str(i), cost_s={"*": cost_s}, output_bytes=10**9 if i == 1 else 0)
        if i:
            add_edge(graph, str(i - 1), str(i))
    names = ("a", "b")
    link = Link(between=names, latency_s=1e-4, bandwidth_bytes_per_s=1e12)
    devices = tuple(Device(name=name, kind="k", memory_bytes=10**12) for name in names)
    problem = Problem.of(
        GraphArrays.from_graph(graph), Cluster(name="pair", devices=devices, links=(link,))
    )
    # Cut in the middle: 4 ms + 1.1 ms of transfer. One op earlier or later: 5 ms + 0.1 ms, no
    # better.
    found = contiguous(problem)
    assert found is not None
    assert int(max_load_ns(problem, found)[0]) == 5_100_000
    assert found.tolist() in ([0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1])


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(1, 6), st.booleans())
def test_groups_and_pins_are_kept_whatever_the_graph(
    seed: int, devices: int, unequal: bool
) -> None:
    problem = random_problem(seed, devices=devices, groups=True, pins=True, unequal=unequal)
    found = contiguous(problem)
    assert found is not None
    assert keeps_groups(problem, found)
    assert keeps_limits(problem, found)


def test_large_graphs_are_cut_at_some_places_only_and_are_still_balanced() -> None:
    problem = chain(0, ops=3 * MOST_PLACES, devices=3)
    found = contiguous(problem)
    assert found is not None
    load = max_load_ns(problem, found)[0]
    ideal = problem.cost_ns.sum(axis=0).min() / 3
    assert load < 1.2 * ideal
    assert len(np.flatnonzero(np.diff(found))) == 2


def test_where_outputs_do_not_fit_for_good_the_simulator_decides() -> None:
    problem = chain(1, ops=20, devices=2, memory_bytes=4_000_000, parameter_bytes=1000)
    assert problem.graph.output_bytes.sum() > 8_000_000
    assert contiguous(problem) is None
    [best, *_] = placer_named("layer-split").place(SearchRequest(problem, Budget(evaluations=1)))
    assert best.step_ns < INFEASIBLE_NS
    assert len(set(best.devices.tolist())) == 2


@pytest.mark.parametrize("objective", ["latency", "max-load"])
def test_the_placer_is_the_balanced_split(objective: str) -> None:
    problem = chain(3, ops=20, devices=3)
    found = placer_named("layer-split", objective=objective).place(
        SearchRequest(problem, Budget(evaluations=1), objective=objective)
    )
    expected = contiguous(problem)
    assert expected is not None
    assert [plan.devices.tolist() for plan in found] == [expected.tolist()]


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_the_narrow_order_has_every_op_once_and_after_what_it_reads(seed: int) -> None:
    graph = random_problem(seed, ops=40).graph
    order = narrow_order(graph).tolist()
    position = {i: at for at, i in enumerate(order)}
    assert sorted(order) == list(range(len(graph)))
    for i, (first, end) in enumerate(pairwise(graph.successor_start.tolist())):
        assert all(position[i] < position[v] for v in graph.successors[first:end].tolist())


def best_parts_ns(problem: Problem, order: NDArray[np.int32]) -> int:
    count = problem.op_count
    plans = []
    for borders in combinations_with_replacement(range(count + 1), problem.device_count - 1):
        plan = np.empty(count, np.int32)
        plan[order] = np.searchsorted(borders, np.arange(count), side="right")
        plans.append(plan)
    return int(max_load_ns(problem, np.array(plans)).min())


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
        best_ns = best_parts_ns(problem, order)
        if best_ns < INFEASIBLE_NS:
            assert max_load_ns(problem, pipeline_parts(problem, order)).tolist() == [best_ns]
