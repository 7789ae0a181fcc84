"""The default search and its parts alone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS, OVERFULL_NS, Simulator
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from placer.policies import load
from placer.search.annealing.step_time import MOST_STARTS, STEPS_PER_START
from placer.search.candidate import Candidate, Kind, ranked
from placer.search.evaluator import Evaluator
from placer.search.heuristics import heuristics
from placer.search.list_scheduler.decoder import HEFT, WEIGHT_COUNT, decode
from placer.search.portfolio import Portfolio, _Search
from placer.search.registry import placer_named
from placer.search.request import Budget, SearchRequest
from placer.search.workers import Workers
from tests.helpers.random_problems import best_step_ns, keeps_groups, keeps_limits, random_problem
from tests.helpers.simulator_cases import one_kind


class Fixed:
    """Policy with constant proposals."""

    def __init__(self, *means: NDArray[np.float64], deviation: float = 0.0) -> None:
        self.means = np.stack(means)
        self.deviation = deviation

    def propose(
        self, evaluator: Evaluator, known: list[Candidate]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        assert known[0].kind is Kind.SINGLE_DEVICE
        return self.means, np.full_like(self.means, self.deviation)


def test_all_proposals_of_a_policy_are_tried() -> None:
    problem = random_problem(3, ops=60, devices=3)
    evaluator = Evaluator(problem)
    rows = HEFT + np.random.default_rng(0).normal(0.0, 0.5, (200, WEIGHT_COUNT))
    costs = evaluator.decode(rows)[2]
    policy = Fixed(-HEFT, 0 * HEFT, rows[int(costs.argmin())])
    budget = Budget(evaluations=4 * (len(heuristics(evaluator)) + 3))
    found = Portfolio(policy).place(SearchRequest(problem, budget))
    assert min(c.step_ns for c in found if c.kind is Kind.POLICY) <= costs.min()


def test_a_policy_has_its_share_of_the_budget_that_the_heuristics_leave() -> None:
    problem = random_problem(3, ops=60, devices=12)
    spent = len(heuristics(Evaluator(problem)))
    costs = Evaluator(problem).decode(np.stack([HEFT, -HEFT, 0 * HEFT]))[2]
    request = SearchRequest(problem, Budget(evaluations=spent + 12))
    found = Portfolio(Fixed(HEFT, -HEFT, 0 * HEFT)).place(request)
    kinds = {c.kind: c.step_ns for c in found}
    assert spent > 12  # more than the heuristics leave
    assert kinds.get(Kind.POLICY, kinds[Kind.HEFT]) == costs.min()
    assert Kind.EVOLUTION in kinds


def test_a_slow_machine_finds_the_same_with_as_many_evaluations() -> None:
    problem, policy = random_problem(3, ops=60, devices=3), load("synthetic-only")

    def found(tick_s: float) -> list[tuple[Kind, int]]:
        times_s = (tick * tick_s for tick in itertools.count())
        request = SearchRequest(problem, Budget(evaluations=150), clock=times_s.__next__)
        return [(c.kind, c.step_ns) for c in Portfolio(policy).place(request)]

    assert found(1e-9) == found(0.02) == found(1.0)


def test_samples_vary_even_if_a_policy_is_sure() -> None:
    problem = random_problem(3, ops=60, devices=3)
    request = SearchRequest(problem, Budget(evaluations=400))
    step_ns = {c.kind: c.step_ns for c in Portfolio(Fixed(-HEFT, HEFT)).place(request)}
    assert step_ns[Kind.POLICY] < step_ns[Kind.HEFT]


@settings(max_examples=8)
@given(st.integers(0, 100), st.integers(1, 4))
def test_candidates_are_ranked_simulated_and_never_worse_than_heuristics(
    seed: int, devices: int
) -> None:
    problem = random_problem(seed, devices=devices, groups=True, pins=True)
    shares: list[float] = []
    request = SearchRequest(
        problem, Budget(evaluations=400), seed=seed, progress=lambda share, _: shares.append(share)
    )
    found = Portfolio(Fixed(HEFT, deviation=0.3)).place(request)
    steps = [c.step_ns for c in found]
    assert steps == sorted(steps)
    names = [c.name for c in found]
    assert {c.name for c in heuristics(Evaluator(problem))} <= set(names)
    assert len(names) == len(set(names))
    simulator = Simulator(problem)
    for candidate in found:
        assert simulator.step_ns(candidate.devices, candidate.priority)[0] == candidate.step_ns
        assert keeps_groups(problem, candidate.devices)
        assert keeps_limits(problem, candidate.devices)
        assert not candidate.devices.flags.writeable
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_search_ends_when_nothing_can_be_better() -> None:
    problem = random_problem(1, ops=2, devices=2)
    assert problem.graph.edge_count == 1
    found = Portfolio().place(SearchRequest(problem, Budget(seconds=1000.0)))
    assert found[0].name == "single device:0"
    assert found[0].step_ns == problem.cost_ns[:, 0].sum()


@pytest.mark.parametrize("seed", range(4))
def test_annealing_finds_the_optimum_of_a_tiny_graph(seed: int) -> None:
    problem = random_problem(seed, ops=6, devices=2, unequal=seed % 2 == 1)
    budget = Budget(evaluations=MOST_STARTS * STEPS_PER_START + 100)
    found = placer_named("annealing").place(SearchRequest(problem, budget, seed=seed))
    assert found[0].step_ns == best_step_ns(problem)


def test_evolution_begins_with_heft_and_gets_better() -> None:
    problem = random_problem(2, ops=80, devices=4)
    placer = placer_named("evolution")
    first, later = (
        placer.place(SearchRequest(problem, Budget(evaluations=count)))[0].step_ns
        for count in (1, 500)
    )
    known = {candidate.kind: candidate.step_ns for candidate in heuristics(Evaluator(problem))}
    assert first == known[Kind.HEFT]
    assert later < first


def test_the_policy_begins_with_its_first_proposal() -> None:
    problem = random_problem(2, ops=80, devices=4)
    policy, evaluator = load("generalist"), Evaluator(problem)
    means, _ = policy.propose(evaluator, heuristics(evaluator))
    request = SearchRequest(problem, Budget(evaluations=1))
    [found] = placer_named("policy", policy).place(request)
    assert found.devices.tolist() == decode(evaluator.scheduling, means[0])[0].tolist()


@pytest.mark.parametrize("once", [True, False])
def test_received_copies_count_where_they_take_more_than_outputs(*, once: bool) -> None:
    graph = new_graph("fan")
    add_op(graph, "source", cost_s={"*": 1e-4}, output_bytes=1_000_000 if once else 100_000)
    for k in range(10):
        add_op(graph, f"{k}", cost_s={"*": 1e-3})
        add_edge(graph, "source", f"{k}", 1_200_000 if once else 100_000)
    cluster = one_kind(2)
    size = 1_000_000 if once else 450_000
    devices = tuple(replace(each, memory_bytes=size) for each in cluster.devices)
    cluster = replace(cluster, devices=devices, once_per_destination=once)
    problem = Problem.of(GraphArrays.from_graph(graph), cluster)
    simulator = Simulator(problem)
    found = Portfolio().place(SearchRequest(problem, Budget(evaluations=60)))
    steps_ns = [int(simulator.step_ns(each.devices, each.priority)[0]) for each in found]
    assert [each.step_ns for each in found] == steps_ns
    assert steps_ns[0] < INFEASIBLE_NS == steps_ns[-1]


def test_where_nothing_fits_what_misses_least_is_the_best() -> None:
    problem = random_problem(0, ops=60, devices=4)
    needed = int(problem.graph.resident_bytes.sum())
    devices = problem.cluster.devices
    small = tuple(replace(each, memory_bytes=int(0.26 * needed)) for each in devices)
    problem = Problem.of(problem.graph, replace(problem.cluster, devices=small))
    evaluator = Evaluator(problem)
    known = heuristics(evaluator)
    costs = {c.name: int(evaluator.costs(c.devices[None], c.priority[None])[0]) for c in known}
    assert min(costs.values()) >= OVERFULL_NS
    assert ranked(known)[0].name == min(costs, key=costs.__getitem__)
    rows = HEFT + np.random.default_rng(0).normal(0.0, 0.5, (12, WEIGHT_COUNT))
    search = _Search(SearchRequest(problem, Budget(evaluations=100)), Workers(1), bounded=False)
    search.begin()
    decoded = search._decode(Kind.POLICY, rows, 1.0)
    assert len(decoded) == len(rows)
    assert search.new[0].cost == decoded.min() < decoded[-1]


def test_on_one_device_an_order_is_found_in_which_the_step_fits() -> None:
    graph = new_graph("two branches")
    for branch in "ab":
        add_op(graph, f"{branch}0", cost_s={"*": 1e-3}, output_bytes=10**7)
        add_op(graph, f"{branch}1", cost_s={"*": 1e-3})
        add_edge(graph, f"{branch}0", f"{branch}1")
    cluster = one_kind(1)
    device = replace(cluster.devices[0], memory_bytes=15_000_000)
    problem = Problem.of(GraphArrays.from_graph(graph), replace(cluster, devices=(device,)))
    best = Portfolio().place(SearchRequest(problem, Budget(evaluations=200)))[0]
    assert best.step_ns == 4_000_000
    for node in graph:
        graph.nodes[node]["parameter_bytes"] = 10**7
    problem = Problem.of(GraphArrays.from_graph(graph), problem.cluster)
    assert len(Portfolio().place(SearchRequest(problem, Budget(evaluations=200)))) == 1
