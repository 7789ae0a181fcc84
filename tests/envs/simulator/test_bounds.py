"""Lower bounds hold for every simulated step, and are tight on small problems as claimed."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations, product
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from envs.hardware.cluster import LONGEST_S, MOST_DEVICES, Cluster, Device
from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS, Schedule, Simulator, bounds
from envs.simulator.bounds import _shares, lower_bound_ns, missing_link, pace_ns
from envs.simulator.paths import paths_of
from envs.simulator.reasons import memory_shortfall
from graphs.graph import ANY_KIND, GraphArrays, add_edge, add_op, new_graph
from graphs.synthetic.planted import Planted, planted
from graphs.synthetic.shapes import Weights, fork_join, layered
from tests.helpers.random_problems import random_problem
from tests.helpers.simulator_cases import one_kind, problem_of, random_case


def bound_of(graph: nx.DiGraph[str], cluster: Cluster) -> int:
    return lower_bound_ns(Problem.of(GraphArrays.from_graph(graph), cluster))


def independent(count: int, cost_s: dict[str, float]) -> nx.DiGraph[str]:
    graph = new_graph("independent")
    for i in range(count):
        add_op(graph, str(i), cost_s=cost_s)
    return graph


@settings(max_examples=50)
@given(seed=st.integers(0, 10**7))
def test_no_step_is_below_the_bound(seed: int) -> None:
    problem, _, priority = problem_of(random_case(seed))
    rng = np.random.default_rng(seed)
    shape = (20, problem.op_count)
    devices = rng.integers(0, problem.device_count, shape).astype(np.int32)
    steps = Simulator(problem, memory=False).step_ns(devices, np.tile(priority, (20, 1)))
    if missing_link(problem):
        assert (steps == INFEASIBLE_NS).all()
    else:
        assert steps.min() >= lower_bound_ns(problem)


BEHIND = [(i // 5 * 5 - 1, i) for i in range(5, 14) if i % 5 < 4]


@pytest.mark.parametrize(
    ("count", "edges", "devices", "bound_ns"),
    [
        (5, [(0, 1), (1, 2), (2, 3), (3, 4)], 3, 10_000),  # the length of a chain
        (12, [], 4, 6000),  # a share of the work
        (3, [(0, 1)], 1, 6000),  # all work
        # Four ops on two devices, a bottleneck, four ops: 2 + 1 + 2 ops, though work / 2 is 4.5.
        (9, [(i, 4) for i in range(4)] + [(4, i) for i in range(5, 9)], 2, 10_000),
        # Three times four ops with a bottleneck in between: 2 + 1 + 2 + 1 + 2 ops.
        (14, [(i, i // 5 * 5 + 4) for i in range(9) if i % 5 < 4] + BEHIND, 2, 16_000),
        # Four ops behind the first, then the last: 1 + 2 + 1 ops, though 2 of 8 are independent.
        (8, [(0, i) for i in range(1, 5)] + [(i, 5) for i in range(1, 5)], 2, 8000),
    ],
)
def test_bounds_by_hand(
    count: int, edges: list[tuple[int, int]], devices: int, bound_ns: int
) -> None:
    graph = independent(count, {"*": 2e-6})
    for source, target in edges:
        add_edge(graph, str(source), str(target))
    assert bound_of(graph, one_kind(devices)) == bound_ns


def test_the_pace_of_a_pipeline_leaves_the_optimizer_out_where_that_is_asked_for() -> None:
    graph = independent(12, {"*": 1e-6})
    for i in range(4):
        add_op(graph, f"update{i}", cost_s={"*": 9e-6}, phase="optimizer")
    problem = Problem.of(GraphArrays.from_graph(graph), one_kind(4))
    assert pace_ns(problem) == 12_000
    assert pace_ns(problem, optimizer=False) == 3000
    only = Problem.of(problem.graph, one_kind(1))
    assert (pace_ns(only), pace_ns(only, optimizer=False)) == (48_000, 12_000)


@pytest.mark.parametrize("slow_s", [3e-6, 100e-6])
def test_slow_devices_do_not_count_as_fast_ones(slow_s: float) -> None:
    graph = independent(400, {"gpu": 1e-6, "cpu": slow_s})
    devices = [Device(name=kind, kind=kind, memory_bytes=1) for kind in ("gpu", "cpu")]
    best_s = 400 / (1 / 1e-6 + 1 / slow_s)  # both always busy
    bound_s = bound_of(graph, Cluster(name="mixed", devices=tuple(devices))) / 1e9
    assert 0.97 * best_s < bound_s <= best_s


def two_kinds() -> Cluster:
    """Return one device of kind x and one of kind y, linked with 1 us and 1 GB/s."""
    pair = one_kind(2)
    devices = tuple(replace(d, kind=k) for d, k in zip(pair.devices, "xy", strict=True))
    return replace(pair, devices=devices)


def test_a_path_counts_transfers_that_no_placement_avoids() -> None:
    graph = new_graph("apart")
    add_op(graph, "a", cost_s={"x": 1e-6}, output_bytes=1000)
    add_op(graph, "b", cost_s={"x": 9e-6, "y": 1e-6}, output_bytes=2000)
    add_op(graph, "c", cost_s={"y": 1e-6})
    add_edge(graph, "a", "b")
    add_edge(graph, "b", "c")
    # Moving to y for b: 1 + (1 + 1) + 1 + 1; staying on x: 1 + 9 + (1 + 2) + 1.
    assert bound_of(graph, two_kinds()) == 5000
    graph.edges["a", "b"]["bytes"] = 30_000  # now b is better on x
    assert bound_of(graph, two_kinds()) == 14_000


def test_every_bound_holds_for_the_best_of_all_placements() -> None:
    tight = 0
    for seed in range(40):
        problem, _, _ = problem_of(random_case(seed, bad_places=False))
        if problem.device_count**problem.op_count > 20_000:
            continue
        every = product(range(problem.device_count), repeat=problem.op_count)
        devices = np.array(list(every), np.int32)
        steps = Simulator(problem, memory=False).step_ns(devices, np.zeros(devices.shape))
        assert lower_bound_ns(problem) <= steps.min()
        tight += lower_bound_ns(problem) == steps.min()
    assert tight > 5


def every_order(problem: Problem) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Return all devices (B, N) with all priorities (B, N)."""
    count = problem.op_count
    devices = np.array(list(product(range(problem.device_count), repeat=count)), np.int32)
    priority = np.array(list(permutations(range(count))), np.float64)
    return np.repeat(devices, len(priority), axis=0), np.tile(priority, (len(devices), 1))


def small(seed: int) -> Problem:
    """Return 5 or 6 ops in up to three stages, on two devices of one or two kinds."""
    rng = np.random.default_rng(seed)
    graph = new_graph("small")
    stage = sorted(rng.integers(0, 3, int(rng.integers(5, 7))).tolist())
    for i in range(len(stage)):
        cost_s = {kind: 1e-6 * int(rng.integers(1, 9)) for kind in "xy"}
        add_op(graph, str(i), cost_s=cost_s, output_bytes=int(rng.integers(0, 9000)))
    for u, v in combinations(range(len(stage)), 2):
        if stage[u] < stage[v] and rng.random() < 0.8:
            add_edge(graph, str(u), str(v))
    cluster = two_kinds()
    if rng.random() < 0.5:
        equal = tuple(replace(device, kind="x") for device in cluster.devices)
        cluster = replace(cluster, devices=equal)
    return Problem.of(GraphArrays.from_graph(graph), cluster)


@settings(max_examples=20)
@given(seed=st.integers(0, 10**7))
def test_the_bound_is_at_most_the_optimum(seed: int) -> None:
    problem = small(seed)
    steps = Simulator(problem, memory=False).step_ns(*every_order(problem))
    assert pace_ns(problem) <= lower_bound_ns(problem) <= steps.min()


def plainly_longest(problem: Problem) -> int:
    """Return the longest time before, in and after an op, as the docstring of paths_of says it."""
    graph, devices = problem.graph, range(problem.device_count)
    shares, total = _shares(problem.cost_ns, problem.allowed)
    work = (shares // total).tolist()
    edges = [
        (u, int(v), int(graph.edge_bytes[e]))
        for u in range(problem.op_count)
        for e in range(graph.successor_start[u], graph.successor_start[u + 1])
        for v in [graph.successors[e]]
    ]
    before, after = (
        _plain_heads(problem, work, order, edges)
        for order, edges in (
            (graph.topological.tolist(), edges),
            (graph.topological[::-1].tolist(), [(v, u, size) for u, v, size in edges]),
        )
    )
    return max(
        min(
            before[v][d] + int(problem.cost_ns[v, d]) + after[v][d]
            for d in devices
            if problem.allowed[v, d]
        )
        for v in range(problem.op_count)
    )


def _plain_heads(
    problem: Problem, work: list[int], order: list[int], edges: list[tuple[int, int, int]]
) -> list[list[int]]:
    """Return the least time before every op on every device; all devices are linked alike."""
    devices = range(problem.device_count)
    reached = nx.DiGraph([(u, v) for u, v, _ in edges])
    reached.add_nodes_from(order)
    heads = [[0 for _ in devices] for _ in order]
    for v in order:
        for here in devices:
            for u, target, size in edges:
                if target == v:
                    heads[v][here] = max(
                        heads[v][here],
                        min(
                            heads[u][there]
                            + int(problem.cost_ns[u, there])
                            + (problem.transfer_ns(size, there, here) if there != here else 0)
                            for there in devices
                            if problem.allowed[u, there]
                        ),
                    )
        ancestors = nx.ancestors(reached, v)
        for u in ancestors:
            later = [w for w in ancestors if min(heads[w]) >= min(heads[u])]
            least = min(heads[u]) + sum(work[w] for w in later)
            heads[v] = [max(head, least) for head in heads[v]]
    return heads


@settings(max_examples=30)
@given(seed=st.integers(0, 10**7))
def test_the_bound_equals_its_plain_form(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = Weights(ratio=float(rng.uniform(0.0, 2.0)), backward=bool(rng.random() < 0.5))
    if rng.random() < 0.5:
        graph = layered(rng, ops=24, width=4, weights=weights)
    else:
        graph = fork_join(rng, width=4, depth=2, weights=weights)
    for _, node in graph.nodes(data=True):
        cost_s = node["cost_s"][ANY_KIND]
        node["cost_s"] = {"x": cost_s, "y": cost_s * float(rng.uniform(0.5, 2.0))}
    problem = Problem.of(GraphArrays.from_graph(graph), two_kinds())
    plain_ns = max(pace_ns(problem), plainly_longest(problem))
    assert lower_bound_ns(problem) == plain_ns


def apart(*limits: tuple[str, ...]) -> Problem:
    """Return a chain of ops with these allowed devices; of d0, d1, d2 only d0 and d1 are linked."""
    graph = independent(0, {})
    for i, names in enumerate(limits):
        add_op(graph, str(i), cost_s={"*": 1e-6}, devices=names)
        if i:
            add_edge(graph, str(i - 1), str(i))
    three = one_kind(3)
    link = replace(three.links[0], between=("d0", "d1"))
    return Problem.of(GraphArrays.from_graph(graph), replace(three, links=(link,)))


def test_ops_that_no_link_can_join_are_named_instead_of_a_bound() -> None:
    assert missing_link(apart(("d0",), ("d1", "d2"), ("d1",))) == ""
    problem = apart(("d0", "d1"), ("d2",))
    reason = missing_link(problem)
    assert reason.startswith("op '1' may run on d2 and needs the output of '0'")
    assert '["d0", "d2"]' in reason
    with pytest.raises(ValueError, match="op '1' may run on d2"):
        lower_bound_ns(problem)
    # Each edge has a link, but any device for op 1 cuts one of them.
    chain = apart(("d0",), ("d1", "d2"), ("d2",))
    assert "op '0' may run on d0" in missing_link(chain)
    assert missing_link(problem_of(random_case(3))[0]) == ""


def replayed(made: Planted, cluster: Cluster) -> tuple[Problem, Schedule]:
    """Return the simulated step of the planted placement."""
    problem = Problem.of(GraphArrays.from_graph(made.graph), cluster)
    order = -np.arange(problem.op_count, dtype=np.float64)  # ops are listed by start time
    return problem, Simulator(problem).run(np.array(made.devices, np.int32), order)


@pytest.mark.parametrize("devices", [1, 2, 5])
@pytest.mark.parametrize(
    "options",
    [
        {"sharing": "none"},
        {"sharing": "bus"},
        {"sharing": "pair", "full_duplex": False},
        {"sharing": "egress", "ingress": True, "order": "priority"},
        {"sharing": "egress", "full_duplex": False},
    ],
)
def test_planted_placements_reach_the_bound(devices: int, options: dict[str, Any]) -> None:
    made = planted(np.random.default_rng(devices), devices=devices, ops_per_device=12)
    home = dict(zip(made.graph, made.devices, strict=True))
    sent = len({(u, home[v]) for u, v in made.graph.edges if home[u] != home[v]})
    # A transfer waits at most once for every other one, so all of them together fit into the gap.
    each_s = made.gap_s / (sent + 1)
    cluster = one_kind(
        devices,
        latency_s=each_s / 2,
        bandwidth_bytes_per_s=made.largest_bytes / (each_s / 2),
        **options,
    )
    problem, schedule = replayed(made, with_memory(cluster, 10**12))
    assert len(schedule.transfers) == sent
    assert schedule.step_ns == round(made.step_s * 1e9) == lower_bound_ns(problem)


def with_memory(cluster: Cluster, *memory_bytes: int) -> Cluster:
    """Return the cluster with other memory sizes, one for each device or one for all."""
    sizes = memory_bytes * (len(cluster) if len(memory_bytes) == 1 else 1)
    devices = (
        replace(device, memory_bytes=size)
        for device, size in zip(cluster.devices, sizes, strict=True)
    )
    return replace(cluster, devices=tuple(devices))


def sized(sizes: list[int], groups: list[str | None] | None = None) -> nx.DiGraph[str]:
    graph = independent(0, {})
    for i, size in enumerate(sizes):
        group = groups[i] if groups else None
        add_op(graph, str(i), cost_s={"*": 1e-6}, parameter_bytes=size, colocate=group)
    return graph


def too_large(graph: nx.DiGraph[str], *memory_bytes: int) -> str:
    names = (f"d{k}" for k in range(len(memory_bytes)))
    devices = tuple(
        Device(name=name, kind="gpu", memory_bytes=size)
        for name, size in zip(names, memory_bytes, strict=True)
    )
    cluster = Cluster(name="bins", devices=devices)
    return memory_shortfall(Problem.of(GraphArrays.from_graph(graph), cluster))


def test_what_cannot_be_packed_is_told_with_numbers() -> None:
    assert too_large(sized([5, 5]), 5, 5) == ""
    assert "'1' has 7 bytes of parameters" in too_large(sized([1, 7]), 6, 5)
    together = too_large(sized([3, 1, 3], ["g", None, "g"]), 5, 5)
    assert "'0' and the 1 that share its device have 6 bytes" in together
    assert "have 12 bytes, but all of d0, d1 together have 11" in too_large(sized([4] * 3), 6, 5)
    assert "3 ops or groups have 4 bytes" in too_large(sized([4, 4, 4]), 6, 6)
    assert "2 devices have room" in too_large(sized([4, 4, 4]), 7, 7, 3)


@settings(max_examples=30)
@given(seed=st.integers(0, 10**7))
def test_whatever_some_placement_fits_is_not_called_too_large(seed: int) -> None:
    problem, _, priority = problem_of(random_case(seed))
    rng = np.random.default_rng(seed)
    devices = rng.integers(0, problem.device_count, (20, problem.op_count)).astype(np.int32)
    steps = Simulator(problem).step_ns(devices, np.tile(priority, (20, 1)))
    assert not memory_shortfall(problem) or (steps == INFEASIBLE_NS).all()


def test_bounds_hold_for_the_dearest_op_on_most_devices() -> None:
    graph = new_graph("dear")
    add_op(graph, "dear", cost_s={"*": 0.99 * LONGEST_S})
    devices = tuple(Device(name=f"d{i}", kind="k", memory_bytes=1) for i in range(MOST_DEVICES))
    problem = Problem.of(GraphArrays.from_graph(graph), Cluster(name="c", devices=devices))
    assert 0 < pace_ns(problem) <= lower_bound_ns(problem) == problem.cost_ns[0, 0]


@pytest.mark.parametrize("seed", range(4))
def test_paths_over_equal_links_are_those_over_links_that_hardly_differ(seed: int) -> None:
    problem = random_problem(seed, ops=60, devices=4, unequal=True, pins=True)
    even = np.full((4, 4), 7e9)  # bytes per second: no transfer takes half a nanosecond more
    uneven = even.copy()
    uneven[0, 1] = np.nextafter(7e9, np.inf)  # no transfer takes a nanosecond less
    equal, other = (paths_of(replace(problem, bandwidth_bytes_per_s=b)) for b in (even, uneven))
    assert (equal.head_ns == other.head_ns).all()
    assert (equal.tail_ns == other.tail_ns).all()


def test_of_many_ops_some_are_enough_for_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(0, ops=300, devices=3, unequal=True)
    of_all = pace_ns(problem)
    monkeypatch.setattr(bounds, "SAMPLED", 100)
    assert 0.95 * of_all < pace_ns(problem) < 1.05 * of_all
    shares, total = bounds._shares(problem.cost_ns, problem.allowed)
    # The weights are those of some ops, the bound is of all: no assignment has less work.
    assert pace_ns(problem) == -(-int(shares.sum()) // total)
