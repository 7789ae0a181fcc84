"""Heuristics, among them the one that fills devices with layers in order, as people do by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.hardware.cluster import Cluster, Device, Link
from envs.problem import Floats, Ints, Problem
from envs.simulator import INFEASIBLE_NS, Simulator
from graphs.graph import GraphArrays, add_op, new_graph
from graphs.synthetic.shapes import Weights, layered
from placer.search.candidate import Kind, ranked
from placer.search.evaluator import Evaluator
from placer.search.heuristics import (
    first_layers,
    heuristics,
    layer_numbers,
    layer_split,
    round_robin,
    single_device,
)
from placer.search.list_scheduler.arrays import SchedulingArrays, scheduling_arrays
from placer.search.list_scheduler.decoder import HEFT, decode
from placer.search.list_scheduler.etf import WINDOW, etf, memory_etf
from placer.search.registry import placer_named
from placer.search.request import Budget, SearchRequest
from tests.helpers.random_problems import keeps_groups, keeps_limits, random_problem
from tests.helpers.simulator_cases import one_kind, problem_of, random_case

Schedule = Callable[[SchedulingArrays], tuple[Ints, Floats]]
ONCE = Budget(evaluations=1)


def heft(arrays: SchedulingArrays) -> tuple[Ints, Floats]:
    return decode(arrays, HEFT)


def chain(memory_bytes: tuple[int, ...], *, tied: bool = False) -> Problem:
    """Return six layers of two ops with 10 bytes of parameters each, and no outputs."""
    graph = new_graph("chain")
    names = [f"layers.{i}.{part}:op" for i in range(6) for part in ("a", "b")]
    for name in names:
        add_op(
            graph,
            name,
            module=name.partition(":")[0],
            cost_s={"*": 1e-3},
            parameter_bytes=10,
            colocate="tie" if tied and name in (names[0], names[-1]) else None,
        )
    nx.add_path(graph, names, bytes=0)
    cluster = one_kind(len(memory_bytes))
    devices = (
        replace(device, memory_bytes=size)
        for device, size in zip(cluster.devices, memory_bytes, strict=True)
    )
    return Problem.of(GraphArrays.from_graph(graph), replace(cluster, devices=tuple(devices)))


def filled(problem: Problem) -> list[int]:
    found: list[int] = first_layers(problem, -np.arange(problem.op_count, dtype=float)).tolist()
    return found


@pytest.mark.parametrize(
    ("memory_bytes", "layers"),
    [
        ((59, 1000), [0, 0, 1, 1, 1, 1]),
        ((60, 1000), [0, 0, 0, 1, 1, 1]),
        ((1000, 1000), [0, 0, 0, 0, 0, 0]),
        ((0, 1000), [1, 1, 1, 1, 1, 1]),
        ((25, 45, 1000), [0, 1, 1, 2, 2, 2]),
    ],
)
def test_whole_layers_fill_device_after_device(
    memory_bytes: tuple[int, ...], layers: list[int]
) -> None:
    assert filled(chain(memory_bytes)) == [d for d in layers for _ in range(2)]


def test_a_group_goes_with_its_first_layer_and_takes_room_there() -> None:
    problem = chain((59, 1000), tied=True)
    assert filled(problem) == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0]
    assert layer_numbers(problem).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 0]


@pytest.mark.parametrize("seed", range(3))
def test_limits_and_groups_are_kept_and_memory_too(seed: int) -> None:
    problem = random_problem(seed, groups=True, pins=True, memory_bytes=12_000_000)
    devices = first_layers(problem, -np.arange(problem.op_count, dtype=float))
    assert keeps_limits(problem, devices)
    assert keeps_groups(problem, devices)
    free = random_problem(seed, groups=True, memory_bytes=12_000_000)
    order = -np.arange(free.op_count, dtype=float)
    peaks = Simulator(free).run(first_layers(free, order), order).peak_bytes
    assert (peaks[:-1] <= free.memory_bytes[:-1]).all()


def test_layers_fill_devices_although_ops_are_pinned_to_the_first() -> None:
    problem = chain((45, 45, 1000))
    allowed = problem.allowed.copy()
    allowed[-1, 1:] = False
    pinned = replace(problem, allowed=allowed)
    assert filled(problem) == [0] * 4 + [1] * 4 + [2] * 4
    assert filled(pinned) == [0] * 2 + [1] * 4 + [2] * 5 + [0]


def test_layers_fill_devices_although_no_link_leads_to_the_last_one() -> None:
    problem = chain((45, 45, 1000))
    connected = problem.connected.copy()
    connected[0, 2] = connected[2, 0] = False
    assert filled(replace(problem, connected=connected)) == [0] * 4 + [1] * 4 + [2] * 4


def test_a_device_that_can_run_nothing_has_no_part_of_a_layer_split() -> None:
    problem = chain((1000, 1000, 1000))
    allowed = problem.allowed.copy()
    allowed[:, 2] = False
    without = replace(problem, allowed=allowed)
    assert layer_split(without).tolist() == [0] * 6 + [1] * 6


def test_outputs_that_nothing_reads_stay_and_take_room_for_the_next_op() -> None:
    graph = new_graph("sinks")
    for k in range(8):
        add_op(graph, f"{k}", cost_s={"gpu": 1e-4, "slow": 1e-2}, output_bytes=10**6)
    cluster = one_kind(2)
    first, second = (replace(device, memory_bytes=5_500_000) for device in cluster.devices)
    cluster = replace(cluster, devices=(first, replace(second, kind="slow")))
    found = heuristics(Evaluator(Problem.of(GraphArrays.from_graph(graph), cluster)))
    [heft_found] = [each for each in found if each.kind is Kind.HEFT]
    assert sorted(heft_found.devices.tolist()) == [0] * 5 + [1] * 3
    assert heft_found.step_ns < INFEASIBLE_NS


def test_it_is_a_candidate_only_where_a_device_is_too_small() -> None:
    small, ample = Evaluator(chain((60, 1000))), Evaluator(chain((1000, 1000)))
    assert "first layers" in {candidate.name for candidate in heuristics(small)}
    assert "first layers" not in {candidate.name for candidate in heuristics(ample)}
    alone = replace(small.problem.cluster, devices=small.problem.cluster.devices[:1], links=())
    names = [c.name for c in heuristics(Evaluator(Problem.of(small.problem.graph, alone)))]
    assert names == ["single d0"]


def test_trivial_placements_without_limits() -> None:
    problem = random_problem(0, ops=60, devices=3)
    order = problem.graph.topological
    for device in range(3):
        assert (single_device(problem, device) == device).all()
    split = layer_split(problem)[order]
    assert (np.diff(split) >= 0).all()
    load = np.bincount(split, problem.cost_ns[order, 0])
    assert load.max() < 1.3 * load.mean()
    unequal = random_problem(0, ops=200, devices=2, unequal=True)
    assert 0.15 < (layer_split(unequal) == 1).mean() < 0.4
    assert round_robin(problem)[order].tolist() == [i % 3 for i in range(60)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("single-device", Kind.SINGLE_DEVICE),
        ("round-robin", Kind.ROUND_ROBIN),
        ("heft", Kind.HEFT),
        ("etf", Kind.ETF),
    ],
)
def test_placers_of_rules_return_the_heuristics_best_first(name: str, kind: Kind) -> None:
    problem = random_problem(2, ops=40, devices=3, groups=True, unequal=True)
    known = ranked(c for c in heuristics(Evaluator(problem)) if c.kind is kind)
    found = placer_named(name).place(SearchRequest(problem, ONCE))
    assert [(c.name, c.devices.tolist()) for c in found] == [
        (c.name, c.devices.tolist()) for c in known
    ]


def test_memory_etf_keeps_room_for_outputs_that_etf_forgets() -> None:
    graph = random_problem(4, ops=20, devices=2).graph
    kept = graph.resident_bytes + graph.output_bytes
    problem = random_problem(4, ops=20, devices=2, memory_bytes=int(0.55 * kept.sum()))
    for name, fits in (("etf", False), ("m-etf", True)):
        [plan] = placer_named(name).place(SearchRequest(problem, ONCE))
        used = np.bincount(plan.devices, kept, minlength=2)
        assert bool((used <= problem.memory_bytes).all()) is fits


# Costs under load


def under_load() -> Problem:
    """Return three ops of 10, 12 and 11 us; beside others the first takes 20."""
    graph = new_graph("load")
    for name, alone_us, loaded_us in (("p", 10, 20), ("q", 12, 12), ("r", 11, 11)):
        add_op(
            graph,
            name,
            cost_s={"core": alone_us / 1e6},
            loaded_cost_s={"core": loaded_us / 1e6},
        )
    names = ("core:0", "core:1")
    devices = tuple(Device(name=name, kind="core", memory_bytes=10**9) for name in names)
    return Problem.of(GraphArrays.from_graph(graph), Cluster(name="two", devices=devices))


@pytest.mark.parametrize(
    ("name", "schedule"), [("heft", heft), ("etf", etf), ("m-etf", memory_etf)]
)
def test_list_schedulers_plan_with_costs_under_load_too(name: str, schedule: Schedule) -> None:
    problem = under_load()
    evaluator = Evaluator(problem)
    # By the costs alone q and r come first, and p, beside the end of q, takes until 31.
    devices, priority = schedule(evaluator.scheduling)
    assert devices.tolist() == [1, 0, 1]
    assert Simulator(problem).run(devices, priority).step_ns == 31_000
    [candidate] = placer_named(name).place(SearchRequest(problem, ONCE))
    assert candidate.devices.tolist() == [0, 1, 1]
    assert candidate.step_ns == 23_000


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_their_steps_are_simulated_and_no_longer_than_planned_with_costs_alone(seed: int) -> None:
    problem, _, _ = problem_of(random_case(seed, bad_places=False))
    evaluator = Evaluator(problem)
    schedules = {Kind.HEFT: heft, Kind.ETF: etf}
    for candidate in heuristics(evaluator):
        if candidate.kind not in schedules:
            continue
        alone = evaluator.candidate(
            candidate.kind, *schedules[candidate.kind](evaluator.scheduling)
        )
        assert candidate.step_ns <= alone.step_ns
        if problem.load is None:
            assert candidate.devices.tolist() == alone.devices.tolist()
        simulated = Simulator(problem).run(candidate.devices, candidate.priority)
        if simulated.feasible:
            assert candidate.step_ns == simulated.step_ns


def plain_etf(o: SchedulingArrays) -> tuple[list[int], list[int]]:
    """Return devices and ops in the order of their rounds, where transfers never wait."""
    count, devices = o.device_cost.shape
    rank = np.argsort(np.argsort(-o.bottom_level, kind="stable"))
    inputs = [
        [(int(o.predecessors[e]), float(o.edge_bytes[e])) for e in range(first, end)]
        for first, end in itertools.pairwise(o.predecessor_start.tolist())
    ]
    home, finish, free = [-1] * count, [0.0] * count, [0.0] * devices
    rounds: list[int] = []

    def begin(v: int, d: int) -> float:
        arrivals = [
            finish[p] + (o.latency[home[p], d] + size * o.ns_per_byte[home[p], d])
            if home[p] != d
            else finish[p]
            for p, size in inputs[v]
        ]
        return float(max([free[d], *arrivals]))

    while len(rounds) < count:
        is_ready = (
            v for v in range(count) if home[v] < 0 and all(home[p] >= 0 for p, _ in inputs[v])
        )
        window = sorted(is_ready, key=lambda v: rank[v])[:WINDOW]
        at, k, d = min((begin(v, d), k, d) for k, v in enumerate(window) for d in range(devices))
        v = window[k]
        home[v], finish[v] = d, at + o.cost[v, d]
        free[d] = finish[v]
        rounds.append(v)
    return home, rounds


def test_etf_equals_its_plain_form_with_more_ready_ops_than_its_window() -> None:
    rng = np.random.default_rng(0)
    graph = layered(rng, ops=500, width=250, weights=Weights(ratio=1.0))
    names = ("x:0", "x:1", "x:2")
    link = Link(between=names, latency_s=5e-6, bandwidth_bytes_per_s=1e9, sharing="none")
    devices = tuple(Device(name=name, kind="x", memory_bytes=10**15) for name in names)
    cluster = Cluster(name="three", devices=devices, links=(link,))
    arrays = scheduling_arrays(Problem.of(GraphArrays.from_graph(graph), cluster))
    found, priority = etf(arrays)
    home, rounds = plain_etf(arrays)
    assert found.tolist() == home
    assert np.argsort(-priority).tolist() == rounds


def test_costs_under_load_do_not_make_ops_allowed() -> None:
    graph = under_load().graph
    limited = replace(graph, allowed=(("core:1",), None, None))
    problem = Problem.of(limited, under_load().cluster)
    cost = scheduling_arrays(problem, loaded=True).device_cost
    assert cost.tolist() == [[0, 20_000], [12_000, 12_000], [11_000, 11_000]]
