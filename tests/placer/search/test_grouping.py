from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from envs.problem import Problem
from envs.simulator.bounds import missing_link
from graphs.coarsen.merging import edge_sources
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from placer.search import grouping
from placer.search.evaluator import Evaluator
from placer.search.grouping import level_above, spread, units
from placer.search.heuristics import heuristics
from placer.search.portfolio import Portfolio
from placer.search.request import Budget, SearchRequest
from tests.helpers.random_problems import keeps_groups, keeps_limits, random_problem
from tests.helpers.simulator_cases import one_kind


@pytest.mark.parametrize("seed", range(4))
def test_any_choice_for_units_keeps_groups_and_limits(seed: int) -> None:
    problem = random_problem(seed, groups=True, pins=True, unequal=True)
    rows = units(problem)
    rng = np.random.default_rng(seed)
    choice = np.array([rng.choice(np.flatnonzero(row)) for row in rows.allowed])
    devices = rows.expand(choice)
    assert keeps_groups(problem, devices)
    assert keeps_limits(problem, devices)
    assert (rows.cost_ns.sum(axis=0) <= problem.cost_ns.sum(axis=0)).all()
    wish = rng.integers(problem.device_count, size=problem.op_count)
    assert keeps_groups(problem, spread(problem, wish))
    assert keeps_limits(problem, spread(problem, wish))


def test_groups_are_numbered_in_topological_order_of_their_first_ops() -> None:
    problem = random_problem(4, groups=True)
    of_ops = units(problem).group_of[problem.graph.topological]
    first = np.unique(of_ops, return_index=True)[1]
    assert (np.diff(first) > 0).all()


@pytest.mark.parametrize("seed", range(6))
def test_groups_add_up_their_ops_and_form_no_cycle(seed: int) -> None:
    problem = random_problem(seed, ops=120, groups=seed % 2 == 1, pins=seed > 2, unequal=True)
    level = level_above(problem)
    groups, group_of = level.problem, level.group_of
    assert groups.op_count < problem.op_count / 2 or seed > 0
    assert (edge_sources(groups.graph) < groups.graph.successors).all()
    assert sorted(level.running.tolist()) == list(range(problem.op_count))
    for g in range(groups.op_count):
        members = np.flatnonzero(group_of == g)
        assert (problem.allowed[members] == groups.allowed[g]).all()
        assert groups.cost_ns[g].tolist() == problem.cost_ns[members].sum(axis=0).tolist()
        assert groups.held_bytes[g] == problem.held_bytes[members].sum()
        assert groups.graph.resident_bytes[g] == problem.graph.resident_bytes[members].sum()


@pytest.mark.parametrize("seed", range(4))
def test_expanded_placements_keep_the_limits_and_are_simulated(seed: int) -> None:
    problem = random_problem(seed, ops=120, groups=True, pins=True, unequal=True)
    level, evaluator = level_above(problem), Evaluator(problem)
    starts = level.starts(heuristics(Evaluator(level.problem)), evaluator)
    assert starts
    for start in starts:
        assert keeps_groups(problem, start.devices)
        assert keeps_limits(problem, start.devices)
        assert start.step_ns == evaluator.costs(start.devices[None], start.priority[None])[0]


def test_what_fits_into_no_memory_is_no_start() -> None:
    problem = random_problem(0, ops=120, memory_bytes=1000)
    level = level_above(problem)
    assert level.starts(heuristics(Evaluator(level.problem)), Evaluator(problem)) == []


def test_a_search_by_levels_repeats_and_is_never_worse_than_the_heuristics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grouping, "GROUPED_OPS", 100)  # two levels above the ops
    problem = random_problem(5, ops=1000, devices=4, unequal=True)
    request = SearchRequest(problem, Budget(evaluations=600), seed=3)
    found, again = (Portfolio().place(request) for _ in range(2))
    assert found[0].devices.tolist() == again[0].devices.tolist()
    assert found[0].step_ns == again[0].step_ns
    best = min(candidate.step_ns for candidate in heuristics(Evaluator(problem)))
    assert found[0].step_ns < best
    onward = Portfolio().place(replace(request, start=found[0]))  # of the ops, not of the groups
    assert onward[0].step_ns <= found[0].step_ns


def test_where_links_keep_no_group_together_a_search_goes_on_by_ops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one link, from d0 to d1: all a must be on d0, as they feed x, and all b on d1, as y."""
    graph = new_graph("one way")
    cluster = one_kind(2, one_way=True)
    names = cluster.names
    add_op(graph, "y", cost_s={"*": 1e-5}, output_bytes=10, devices=names[1:])
    add_op(graph, "x", cost_s={"*": 1e-5}, output_bytes=10, devices=names[:1])
    for i in range(200):
        add_op(graph, f"a{i}", cost_s={"*": 1e-5}, output_bytes=10)
        add_op(graph, f"b{i}", cost_s={"*": 1e-5}, output_bytes=10)
        for source, target in ((f"a{i}", "x"), (f"a{i}", f"b{i}"), ("y", f"b{i}")):
            add_edge(graph, source, target)
    problem = Problem.of(GraphArrays.from_graph(graph), cluster)
    assert missing_link(level_above(problem).problem)
    assert not missing_link(problem)
    monkeypatch.setattr(grouping, "GROUPED_OPS", 100)
    found = Portfolio().place(SearchRequest(problem, Budget(evaluations=60)))
    assert len(found) > 2
