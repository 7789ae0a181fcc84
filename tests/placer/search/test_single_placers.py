"""Known results of single placers; the contract tests are in test_placers."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest

from placer.placers import placer_named
from placer.policies import load
from placer.search.annealing.step_time import MOST_STARTS, STEPS_PER_START
from placer.search.budget import Budget
from placer.search.candidate import Kind
from placer.search.evaluator import Evaluator
from placer.search.heuristics import heuristics
from placer.search.list_scheduler.decoder import HEFT, decode
from placer.search.list_scheduler.etf import etf
from placer.search.portfolio import search
from placer.search.request import SearchRequest
from tests.helpers.random_problems import random_problem

ONCE = Budget(evaluations=1)


def test_the_best_single_device_comes_first() -> None:
    problem = random_problem(1, ops=20, devices=3, unequal=True)
    found = placer_named("single-device").place(SearchRequest(problem, ONCE))
    assert found[0].step_ns == problem.cost_ns.sum(axis=0).min()
    assert sorted(set(plan.devices.tolist()).pop() for plan in found) == [0, 1, 2]


def test_round_robin_deals_the_ops_out() -> None:
    problem = random_problem(1, ops=10, devices=3)
    [found] = placer_named("round-robin").place(SearchRequest(problem, ONCE))
    assert found.devices[problem.graph.topological].tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]


def test_list_schedulers_are_those_of_the_search() -> None:
    problem = random_problem(2, ops=40, devices=3, groups=True, unequal=True)
    evaluator = Evaluator(problem)
    for name, plan in (
        ("heft", decode(evaluator.scheduling, HEFT)),
        ("etf", etf(evaluator.scheduling)),
    ):
        [found] = placer_named(name).place(SearchRequest(problem, ONCE))
        assert found.devices.tolist() == plan[0].tolist()
        assert found.priority.tolist() == plan[1].tolist()


def test_memory_etf_keeps_room_for_outputs_that_etf_forgets() -> None:
    graph = random_problem(4, ops=20, devices=2).graph
    kept = graph.resident_bytes + graph.output_bytes
    problem = random_problem(4, ops=20, devices=2, memory_bytes=int(0.55 * kept.sum()))
    for name, fits in (("etf", False), ("m-etf", True)):
        [plan] = placer_named(name).place(SearchRequest(problem, ONCE))
        used = np.bincount(plan.devices, kept, minlength=2)
        assert bool((used <= problem.memory_bytes).all()) is fits


@pytest.mark.parametrize("seed", range(4))
def test_annealing_finds_the_best_plan_of_a_tiny_graph(seed: int) -> None:
    problem = random_problem(seed, ops=6, devices=2, unequal=seed % 2 == 1)
    evaluator = Evaluator(problem)
    orders = np.array(list(permutations(range(6))), np.float64)
    plans = np.array(list(product(range(2), repeat=6)), np.int32)
    best = min(
        int(evaluator.costs(np.tile(plan, (len(orders), 1)), orders).min()) for plan in plans
    )
    budget = Budget(evaluations=MOST_STARTS * STEPS_PER_START + 100)
    assert (
        placer_named("annealing").place(SearchRequest(problem, budget, seed=seed))[0].step_ns
        == best
    )


def test_evolution_begins_with_heft_and_gets_better() -> None:
    problem = random_problem(2, ops=80, devices=4)
    placer = placer_named("evolution")
    first, later = (
        placer.place(SearchRequest(problem, Budget(evaluations=count)))[0].step_ns
        for count in (1, 500)
    )
    assert first == placer_named("heft").place(SearchRequest(problem, ONCE))[0].step_ns
    assert later < first


def test_the_policy_begins_with_its_own_proposal() -> None:
    problem = random_problem(2, ops=80, devices=4)
    policy, evaluator = load("generalist"), Evaluator(problem)
    means, _ = policy.propose(evaluator, heuristics(evaluator))
    [first, *_] = placer_named("policy", policy).place(SearchRequest(problem, ONCE))
    assert (
        first.step_ns
        == evaluator.candidate(Kind.POLICY, *decode(evaluator.scheduling, means[0])).step_ns
    )


def test_the_portfolio_is_the_search_with_a_policy() -> None:
    problem = random_problem(5, ops=40, devices=3)
    policy, budget = load("generalist"), Budget(evaluations=300)
    ours, theirs = (
        [(plan.name, plan.step_ns) for plan in found]
        for found in (
            placer_named("portfolio", policy).place(SearchRequest(problem, budget, seed=7)),
            search(SearchRequest(problem, budget, seed=7), policy),
        )
    )
    assert ours == theirs
