from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.problem import Problem, toy_problem
from envs.simulator import INFEASIBLE_NS, OVERFULL_NS, Simulator
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from placer.search.annealing.blocks import blocks_of
from placer.search.annealing.run import Annealing, anneal
from placer.search.annealing.step_time import HOT, StepTimeAnnealing, initial_temperature
from placer.search.evaluator import Evaluator
from placer.search.heuristics import heuristics
from placer.search.request import Budget, SearchRequest
from tests.helpers.random_problems import keeps_groups, keeps_limits, random_problem
from tests.helpers.simulator_cases import one_kind


def test_a_plan_that_cannot_run_costs_no_less_because_the_one_before_lacked_memory() -> None:
    graph = new_graph("pair")
    for name in ("first", "second"):
        add_op(graph, name, cost_s={"*": 1e-3}, parameter_bytes=600_000_000)
    graph.nodes["second"]["devices"] = ["d0"]
    evaluator = Evaluator(Problem.of(GraphArrays.from_graph(graph), one_kind(2)))  # 1 GB each
    plans = np.array([[0, 0], [0, 1]], np.int32)
    overfull, forbidden = evaluator.costs(plans, np.zeros((2, 2))).tolist()
    assert OVERFULL_NS <= overfull < forbidden == INFEASIBLE_NS


@settings(max_examples=25)
@given(st.integers(0, 1000), st.integers(1, 4), st.integers(0, 6), st.booleans(), st.booleans())
def test_annealing_is_never_worse_than_its_start_and_keeps_all_rules(
    seed: int, devices: int, start: int, tight: bool, wild: bool
) -> None:
    problem = random_problem(
        seed,
        devices=devices,
        groups=True,
        pins=True,
        unequal=True,
        memory_bytes=20_000_000 if tight else 10**12,
    )
    evaluator = Evaluator(problem)
    known = heuristics(evaluator)
    begin = known[start % len(known)]
    options = {"hot": 0.02, "senders": 0.5} if wild else {}
    blocks = blocks_of(problem, sizes=(3, 8)) if wild else None
    run = StepTimeAnnealing(evaluator, begin, seed, blocks=blocks, **options)
    run.run(300, first=0, total=300)
    best = run.best()
    assert best.step_ns <= begin.step_ns
    assert keeps_groups(problem, best.devices)
    assert keeps_limits(problem, best.devices)
    step_ns = Simulator(problem).step_ns(best.devices, best.priority)[0]
    assert step_ns == best.step_ns
    assert best.step_ns in (run.best_cost, INFEASIBLE_NS)


def test_blocks_are_modules_their_parents_and_clusters_of_the_heaviest_edges() -> None:
    graph = new_graph("two layers")
    for name in ("a.x", "a.y", "b.x", "b.y"):
        for call in range(2):
            add_op(graph, f"{name}@{call}:op", cost_s={"*": 1e-3}, module=name)
    for call in range(2):
        add_edge(graph, f"a.x@{call}:op", f"b.y@{call}:op", 1000)
        add_edge(graph, f"a.y@{call}:op", f"b.x@{call}:op", 10)
    problem = Problem.of(GraphArrays.from_graph(graph), one_kind(2))
    blocks = blocks_of(problem, sizes=(2,))
    found = [
        {frozenset(row[a:b].tolist()) for a, b in zip(first, end, strict=True)}
        for first, end, row in zip(*blocks, strict=True)
    ]
    assert found == [
        {frozenset({0, 1, 2, 3}), frozenset({4, 5, 6, 7})},
        {frozenset({0, 1}), frozenset({2, 3}), frozenset({4, 5}), frozenset({6, 7})},
        {frozenset({0, 6}), frozenset({1, 7}), frozenset({2, 4}), frozenset({3, 5})},
    ]


def test_annealing_in_pieces_is_annealing_at_once() -> None:
    evaluator = Evaluator(random_problem(5, groups=True))
    start = heuristics(evaluator)[0]
    whole, pieces = (
        StepTimeAnnealing(evaluator, start, 7, hot=0.01, senders=0.3) for _ in range(2)
    )
    whole.run(1000, first=0, total=1000)
    for first, steps in ((0, 1), (1, 399), (400, 600)):
        pieces.run(steps, first=first, total=1000)
    assert whole.best_cost == pieces.best_cost
    assert (whole.best().devices == pieces.best().devices).all()
    assert (whole.best().priority == pieces.best().priority).all()


class Recorder(Annealing):
    """Records which moves of which schedule it should make."""

    best_cost = 0

    def __init__(self) -> None:
        self.runs: list[tuple[int, int, int]] = []

    def _run(self, steps: int, first: int, total: int) -> None:
        self.runs.append((steps, first, total))


@pytest.mark.parametrize(
    ("end", "moves", "total"), [(1.0, None, 100), (0.7, None, 70), (1.0, 9, 9)]
)
def test_all_moves_of_a_budget_are_made_in_order(end: float, moves: int | None, total: int) -> None:
    recorder, meter = Recorder(), SearchRequest(toy_problem(), Budget(evaluations=100)).meter()
    list(anneal(recorder, meter, end=end, moves=moves))
    made = [first + k for steps, first, _ in recorder.runs for k in range(steps)]
    assert made == list(range(total))
    assert {run[2] for run in recorder.runs} == {total}


def test_the_schedule_follows_the_clock_under_a_budget_in_seconds() -> None:
    recorder, seconds = Recorder(), count(0.0, 0.01)
    request = SearchRequest(toy_problem(), Budget(seconds=1.0), clock=lambda: next(seconds))
    list(anneal(recorder, request.meter()))
    shares = [first / total for _, first, total in recorder.runs]
    assert shares == pytest.approx(np.linspace(0.0, 1.0, len(shares)), abs=0.1)


def test_many_moves_for_an_op_begin_hotter_within_limits() -> None:
    heats = [initial_temperature(moves, 100) for moves in (0, 1000, 50_000, 100_000, 10**9)]
    assert heats == sorted(heats)
    assert heats[:3] == [HOT] * 3
    assert heats[3] == 4 * HOT
    assert heats[4] == 20 * HOT


def test_annealing_repairs_a_plan_that_does_not_fit() -> None:
    roomy = random_problem(1, devices=3)
    parameters = int(roomy.graph.parameter_bytes.sum())
    problem = random_problem(1, devices=3, memory_bytes=int(0.75 * parameters))
    evaluator = Evaluator(problem)
    start = heuristics(evaluator)[0]
    assert start.step_ns == INFEASIBLE_NS
    run = StepTimeAnnealing(evaluator, start, 0)
    assert run.best_cost >= OVERFULL_NS
    run.run(2000, first=0, total=2000)
    assert run.best_cost < OVERFULL_NS
    assert Simulator(problem).step_ns(run.best().devices, run.best().priority)[0] == run.best_cost
