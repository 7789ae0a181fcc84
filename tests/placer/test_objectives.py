"""Objectives other than latency: predicted, bounded and searched."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import placer
from envs.placement import Placement
from envs.simulator import INFEASIBLE_NS, Simulated
from graphs.graph import PHASES, add_edge, add_op, new_graph
from placer.search.annealing.max_load import minimize_max_load
from placer.search.candidate import Kind
from placer.search.objectives import Objective
from placer.search.portfolio import Portfolio
from placer.search.registry import placer_named
from placer.search.request import Budget, SearchRequest, SearchTrace
from tests.helpers.random_problems import random_problem
from tests.helpers.simulator_cases import Case, one_kind, problem_of, random_case


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    "search",
    [
        {"objective": "max-load"},
        {"objective": "throughput", "micro_batches": 4},
        {"micro_batches": 4},
        {"micro_batches": 4, "in_flight": 1},
    ],
)
def test_the_objective_is_predicted_as_it_is_evaluated_and_not_below_its_bound(
    files: Callable[..., tuple[Path, Path]], search: dict[str, Any]
) -> None:
    config = placer.SearchConfig(budget="500e", **search)
    result = placer.optimize(*files(), search=config, progress=False)
    evaluated = placer.evaluate(result, progress=False).to_dict()
    predicted, placement = result.placement.predicted or {}, result.placement
    key = {"max-load": "max_load_s", "throughput": "period_s"}.get(placement.objective, "step_s")
    assert (placement.micro_batches, placement.in_flight) == (
        search.get("micro_batches", 1),
        search.get("in_flight"),
    )
    for name in ("step_s", key):
        assert evaluated[name] == pytest.approx(predicted[name], rel=0, abs=1e-15)
    assert result.lower_bound_s <= evaluated[key] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "speed"}, "'speed'"),
        ({"name": "throughput"}, "2 or more"),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"micro_batches": 2, "in_flight": 0}, "in_flight is 0, not within 1"),
        ({"in_flight": 2}, "in_flight is of several micro-batches"),
    ],
)
def test_objectives_that_mean_nothing_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**arguments)


def test_a_full_device_has_its_own_reason_in_each_objective() -> None:
    problem = random_problem(0, ops=20, devices=2, memory_bytes=12_000_000)
    alone = Placement.of(problem.graph, problem.cluster, np.zeros(20, np.int32), np.zeros(20))
    for name in ("latency", "max-load"):
        said = Objective(name=name).predict(Simulated(problem), alone)
        assert said.objective_s == np.inf
        assert "device:0 needs" in said.why
        assert said.times_s["step_s"] > 0


def phased(seed: int) -> Case:
    """Return a random case whose ops belong to all three phases."""
    rng = random.Random(seed)
    graph, cluster, devices, priority = random_case(seed, bad_places=False)
    for op in graph:
        last = graph.out_degree(op) == 0
        graph.nodes[op]["phase"] = rng.choice(["forward", "backward", *["optimizer"] * last])
    return graph, cluster, devices, priority


@settings(max_examples=100)
@given(seed=st.integers(0, 10**7), micro_batches=st.integers(2, 4))
def test_no_period_is_below_the_lower_bound(seed: int, micro_batches: int) -> None:
    problem, devices, priority = problem_of(phased(seed))
    placement = Placement.of(problem.graph, problem.cluster, devices, priority)
    objective = Objective(name="throughput", micro_batches=micro_batches)
    prediction = objective.predict(
        Simulated(problem), replace(placement, micro_batches=micro_batches)
    )
    costs_s = problem.cost_ns[np.arange(len(devices)), devices] / 1e9
    loads_s = np.bincount(devices, costs_s * (problem.graph.phase != PHASES.index("optimizer")))
    if prediction.objective_s < np.inf:
        assert prediction.objective_s >= objective.lower_bound_s(problem)
        assert prediction.objective_s >= loads_s.max() * (1 - 1e-12)


def test_a_period_is_not_the_difference_of_two_short_steps_where_no_pace_is_as_fast() -> None:
    graph = new_graph("short")
    for op in "dcbefa":
        add_op(graph, op, cost_s={"*": 1e-6}, phase="backward" if op in "bce" else "forward")
    for source, target in ("de", "cd", "bd", "bf", "ac", "ae"):
        add_edge(graph, source, target, 1000 if source == "c" else 0)
    plain = one_kind(5, latency_s=3.7e-6, bandwidth_bytes_per_s=7e8, sharing="none")
    launch_s = (1e-6, 0.0, 0.0, 2.5e-7, 2.5e-7)
    devices = [replace(d, launch_s=s) for d, s in zip(plain.devices, launch_s, strict=True)]
    case = (graph, replace(plain, devices=tuple(devices)), [1, 3, 0, 4, 4, 2], [0.0] * 6)
    problem, where, levels = problem_of(case)
    placement = Placement.of(problem.graph, problem.cluster, where, levels)
    simulated = Simulated(problem)
    two, four = (simulated.run(replace(placement, micro_batches=m))[1].step_ns for m in (2, 4))
    # The busiest device works 2.5 us per micro-batch; in any placement some device has 1.464 us.
    assert (four - two) / 2 == 1250
    objective = Objective(name="throughput", micro_batches=2)
    assert objective.lower_bound_s(problem) == 1.464e-6
    assert objective.predict(simulated, replace(placement, micro_batches=2)).objective_s == 2.5e-6


def test_the_optimizer_is_no_part_of_the_bound_of_a_further_micro_batch() -> None:
    graph = new_graph("training")
    add_op(graph, "forward", cost_s={"*": 1e-6})
    add_op(graph, "update", cost_s={"*": 5e-6}, phase="optimizer")
    add_edge(graph, "forward", "update")
    problem, devices, priority = problem_of((graph, one_kind(1), [0, 0], [0.0, 0.0]))
    assert Objective(name="throughput", micro_batches=4).lower_bound_s(problem) == 1e-6
    assert Objective(name="max-load").lower_bound_s(problem) == 6e-6
    placement = Placement.of(problem.graph, problem.cluster, devices, priority)
    objective = Objective(name="throughput", micro_batches=4)
    said = objective.predict(Simulated(problem), replace(placement, micro_batches=4))
    assert said.objective_s == 1e-6
    assert said.times_s["step_s"] == pytest.approx(9e-6)


def test_a_step_stays_feasible_where_twice_as_many_micro_batches_are_too_long() -> None:
    graph = new_graph("long")
    add_op(graph, "a", cost_s={"*": 4e8})
    problem, devices, priority = problem_of((graph, one_kind(1), [0], [0.0]))
    placement = replace(
        Placement.of(problem.graph, problem.cluster, devices, priority), micro_batches=3
    )
    [result] = Simulated(problem).evaluate([placement])
    assert (result.feasible, result.step_s, result.period_s) == (True, 1.2e9, None)
    assert result.no_period_reason.startswith(
        "6 micro-batches cannot be simulated: the ops of graph 'long' cost 2.4e+09 s"
    )
    said = Objective(micro_batches=3).predict(Simulated(problem), placement)
    assert (said.objective_s, said.why) == (1.2e9, "")
    said = Objective(name="throughput", micro_batches=3).predict(Simulated(problem), placement)
    assert said.objective_s == np.inf
    assert said.why == result.no_period_reason


def test_a_search_compares_long_steps_where_only_too_small_devices_would_be_fast() -> None:
    graph = new_graph("long")
    for number in range(8):
        add_op(graph, str(number), cost_s={"fast": 1.0, "slow": 150.0}, parameter_bytes=100)
    kinds = {"d0": ("fast", 99), "d1": ("slow", 10**9), "d2": ("slow", 10**9)}
    cluster = one_kind(3)
    devices = tuple(
        replace(each, kind=kinds[each.name][0], memory_bytes=kinds[each.name][1])
        for each in cluster.devices
    )
    problem, *_ = problem_of((graph, replace(cluster, devices=devices), [1] * 8, [0.0] * 8))
    trace = SearchTrace()
    request = SearchRequest(problem, Budget(evaluations=400), search_trace=trace)
    [best, *_] = Objective().search(request, Portfolio())
    assert best.step_ns == 4 * 150 * 10**9
    assert min(each.cost_s for each in trace.parts["annealing"].improvements) == 600.0


def test_a_search_compares_steps_that_are_long_by_transfers_alone() -> None:
    graph = new_graph("far apart")
    for number in range(6):
        pinned = ("d0",) if number == 0 else ("d1",) if number == 3 else None
        add_op(graph, str(number), cost_s={"*": 1.0}, devices=pinned)
    for number in range(5):
        add_edge(graph, str(number), str(number + 1))
    problem, *_ = problem_of((graph, one_kind(2, latency_s=600.0), [0] * 6, [0.0] * 6))
    candidates = Objective().search(SearchRequest(problem, Budget(evaluations=400)), Portfolio())
    steps = {candidate.kind: candidate.step_ns for candidate in candidates}
    assert 600 * 10**9 < steps[Kind.HEFT] < steps[Kind.ROUND_ROBIN] < INFEASIBLE_NS


def test_the_pace_of_updates_alone_is_no_time() -> None:
    graph = new_graph("updates")
    add_op(graph, "update", cost_s={"*": 1.0}, phase="optimizer")
    problem, *_ = problem_of((graph, one_kind(2), [0], [0.0]))
    assert Objective(name="throughput", micro_batches=2).lower_bound_s(problem) == 0.0


def test_for_throughput_balanced_loads_are_a_candidate_unless_the_rule_has_none() -> None:
    problem = random_problem(0, ops=40, devices=3)
    budget, objective = Budget(evaluations=2000), Objective(name="throughput", micro_batches=4)
    balanced = minimize_max_load(SearchRequest(problem, budget.part(0.3)))[0]
    plans = objective.search(SearchRequest(problem, budget), Portfolio())
    assert plans[-1].name == "balanced loads"
    assert plans[-1].devices.tolist() == balanced.devices.tolist()
    plans = objective.search(SearchRequest(problem, budget), placer_named("heft"))
    assert "balanced loads" not in {plan.name for plan in plans}
