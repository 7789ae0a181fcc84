"""Beam search of the list scheduler, and the searches of a portfolio with it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.large_graphs.problems import planted_unequal
from envs.hardware.cluster import Cluster, Device, Link
from envs.problem import Floats, Problem
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from placer.search.candidate import Kind, ranked
from placer.search.evaluator import Evaluator
from placer.search.heuristics import heft_candidate, heuristics
from placer.search.list_scheduler.beam import Beam
from placer.search.list_scheduler.beams import (
    TRIALS,
    WIDEST,
    affordable_width,
    beam_candidates,
)
from placer.search.portfolio import Portfolio
from placer.search.request import Budget, SearchRequest
from tests.helpers.random_problems import keeps_groups, keeps_limits, random_problem

PLENTY = 1_000_000


def unequal_problem(
    costs_s: list[list[float]], edges: tuple[tuple[int, int], ...] = (), *, transfer_s: float = 1.0
) -> Problem:
    """Return ops with costs by device; a transfer never waits for another."""
    graph = new_graph("unequal")
    for v, row in enumerate(costs_s):
        cost_s = {f"kind {d}": cost for d, cost in enumerate(row)}
        add_op(graph, f"op{v}", cost_s=cost_s, output_bytes=1000)
    for u, v in edges:
        add_edge(graph, f"op{u}", f"op{v}")
    names = tuple(f"device:{d}" for d in range(len(costs_s[0])))
    devices = tuple(
        Device(name=name, kind=f"kind {d}", memory_bytes=10**12) for d, name in enumerate(names)
    )
    link = Link(
        between=names,
        latency_s=0.0,
        bandwidth_bytes_per_s=1000 / transfer_s,
        sharing="none",
        order="fifo",
    )
    cluster = Cluster(name="unequal", devices=devices, links=(link,))
    return Problem.of(GraphArrays.from_graph(graph), cluster)


def searched(problem: Problem, start_ns: Floats, width: int = 4) -> tuple[list[int], float]:
    """Return the devices that a beam search finds, and the simulated step in seconds."""
    evaluator = Evaluator(problem)
    beam = Beam(evaluator.scheduling, width)
    devices, priority = beam.search(start_ns, urgency=0.0, eager=True)
    return devices.tolist(), float(evaluator.costs(devices[None], priority[None])[0]) / 1e9


def test_an_op_leaves_the_fastest_device_to_one_that_gains_more() -> None:
    # Device 0 is faster at both, but only a little at the first.
    problem = unequal_problem([[4.0, 5.0], [2.0, 6.0]])
    assert heft_candidate(Evaluator(problem)).step_ns == 6e9
    assert searched(problem, np.zeros(2)) == ([1, 0], 5.0)


@pytest.mark.parametrize(("transfer_s", "expected"), [(0.5, [0, 0, 1]), (10.0, [0, 0, 0])])
def test_a_transfer_counts(transfer_s: float, expected: list[int]) -> None:
    # 0 is read by 1 and 2, which take 2 s each: 1 + 4 s on a device, 1 + 0.5 + 2 s on two.
    costs_s = [[1.0, 9.0], [2.0, 2.0], [2.0, 2.0]]
    problem = unequal_problem(costs_s, ((0, 1), (0, 2)), transfer_s=transfer_s)
    devices, step_s = searched(problem, np.array([0.0, 1e9, 1e9]))
    assert sorted(devices) == expected
    assert step_s == (3.5 if transfer_s < 1.0 else 5.0)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 1000),
    st.integers(2, 7),
    st.integers(1, 6),
    st.floats(0.0, 0.1),
    st.booleans(),
)
def test_every_op_has_a_device_that_respects_groups_and_limits(
    seed: int, devices: int, width: int, urgency: float, eager: bool
) -> None:
    problem = random_problem(seed, devices=devices, groups=True, pins=True, unequal=True)
    evaluator = Evaluator(problem)
    start_ns = np.random.default_rng(seed).uniform(0.0, 1e6, problem.op_count)
    beam = Beam(evaluator.scheduling, width)
    found, priority = beam.search(start_ns, urgency=urgency, eager=eager)
    assert keeps_groups(problem, found)
    assert keeps_limits(problem, found)
    for v in range(problem.op_count):
        first, end = problem.graph.predecessor_start[v : v + 2]
        assert (priority[problem.graph.predecessors[first:end]] > priority[v]).all()
    again, same = beam.search(start_ns, urgency=urgency, eager=eager)
    assert again.tolist() == found.tolist()
    assert same.tolist() == priority.tolist()


@pytest.mark.slow_repeats
@pytest.mark.parametrize("eager", [False, True])
def test_the_simulated_schedule_is_almost_the_one_that_was_searched(eager: bool) -> None:
    for item, _ in planted_unequal(3):
        evaluator = item.evaluator
        heft = heft_candidate(evaluator)
        evaluator.costs(heft.devices[None], heft.priority[None])
        start_ns = evaluator.work.start_ns[: len(heft.devices)].astype(np.float64)
        beam = Beam(evaluator.scheduling, WIDEST)
        devices, priority = beam.search(start_ns, urgency=0.02, eager=eager)
        step_ns = evaluator.costs(devices[None], priority[None])[0]
        late_ns = evaluator.work.start_ns[: len(devices)] + priority
        assert (np.abs(late_ns) < 1e-3 * step_ns).mean() > 0.99
        assert late_ns.max() < 1e-3 * step_ns  # ops that start out of order start earlier
        assert step_ns < heft.step_ns


def test_searches_get_nearer_to_planted_optima_than_heuristics() -> None:
    _, (item, made) = planted_unequal(2)
    evaluator = item.evaluator
    known = ranked(heuristics(evaluator))
    found = list(beam_candidates(evaluator, known[:1], WIDEST, seed=0))
    assert known[0].step_ns > 1.09e9 * made.step_s
    assert min(each.step_ns for each in found) < 1.01e9 * made.step_s
    assert {each.kind for each in found} == {Kind.BEAM}


def test_a_search_that_is_over_ends_at_once() -> None:
    [(item, _)] = planted_unequal(1)
    known = ranked(heuristics(item.evaluator))
    assert not list(beam_candidates(item.evaluator, known[:1], 4, seed=0, is_over=lambda: True))


def test_a_search_in_small_steps_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(2, ops=40, unequal=True)
    arrays, start_ns = Evaluator(problem).scheduling, np.arange(40.0)
    whole, expected = Beam(arrays, 3).search(start_ns, urgency=0.02, eager=True)
    monkeypatch.setattr("placer.search.list_scheduler.beam.PLACED_AT_ONCE", 21)
    in_parts = Beam(arrays, 3)
    placed = list(in_parts.steps(start_ns, urgency=0.02, eager=True))
    assert placed == [7, 14, 21, 28, 35, 40]
    devices, priority = in_parts.found()
    assert devices.tolist() == whole.tolist()
    assert priority.tolist() == expected.tolist()


def test_searches_end_where_they_do_not_help() -> None:
    problem = random_problem(1, ops=40, unequal=True)
    evaluator = Evaluator(problem)
    best = Portfolio().place(SearchRequest(problem, Budget(evaluations=4000)))[0]
    found = list(beam_candidates(evaluator, [best], 4, seed=0))
    assert len(found) <= TRIALS
    assert min(each.step_ns for each in found) >= best.step_ns


def test_width_follows_the_budget() -> None:
    unequal = Evaluator(random_problem(0, unequal=True))
    widths = [affordable_width(unequal, count) for count in (0, 200, 1000, 4000, PLENTY)]
    assert widths[:2] == [0, 0]
    assert widths == sorted(widths)
    assert 0 < widths[2] < widths[3] <= widths[4] == WIDEST


def test_equal_devices_and_scarce_memory_are_left_to_other_searches() -> None:
    equal = Evaluator(random_problem(0))
    scarce = Evaluator(random_problem(0, unequal=True, memory_bytes=30_000_000))
    assert scarce.scheduling.memory_matters
    assert affordable_width(equal, PLENTY) == affordable_width(scarce, PLENTY) == 0


def test_the_portfolio_searches_by_beams_on_unequal_devices() -> None:
    [(item, _)] = planted_unequal(1)
    request = SearchRequest(item.evaluator.problem, Budget(evaluations=4000))
    assert Kind.BEAM in {each.kind for each in Portfolio().place(request)}
