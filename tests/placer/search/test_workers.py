"""Several workers search as one: the same answer every time, and no thread is left."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np
import pytest

from envs.problem import toy_problem
from placer.policies import load
from placer.search.annealing.islands import (
    EXCHANGES,
    FIRST_EXCHANGE,
    anneal_islands,
    continue_from_best,
)
from placer.search.annealing.run import Annealing
from placer.search.annealing.step_time import StepTimeAnnealing
from placer.search.candidate import Candidate
from placer.search.contract import CHECKS, Make
from placer.search.evaluator import Evaluator
from placer.search.heuristics import heuristics
from placer.search.list_scheduler.decoder import WEIGHT_COUNT
from placer.search.list_scheduler.sight import SIGHT_COUNT
from placer.search.registry import placer_named
from placer.search.request import Budget, SearchRequest
from placer.search.workers import FEWEST_PAIRS, Team, Workers
from tests.helpers.random_problems import random_problem

POLICY = load("generalist")
SEARCHES = (("portfolio", "latency"), ("portfolio", "max-load"), ("annealing", "latency"))


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("search")]


class Together:
    """A placer with three workers, whatever the request says."""

    objectives: ClassVar[tuple[str, ...]] = ("latency", "throughput", "max-load")

    def __init__(self, name: str) -> None:
        self.placer = placer_named(name, POLICY)

    def place(self, request: SearchRequest) -> list[Candidate]:
        return self.placer.place(replace(request, workers=3))


@pytest.mark.slow_repeats
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ["portfolio", "annealing"])
def test_workers_keep_the_contract(name: str, check: Callable[[Make], None]) -> None:
    check(lambda: Together(name))


@pytest.mark.slow_repeats
@pytest.mark.parametrize(("name", "objective"), SEARCHES)
def test_seed_evaluations_and_workers_determine_the_result(name: str, objective: str) -> None:
    problem = random_problem(3, ops=1300, devices=8)
    assert 2 * problem.cost_ns.size >= FEWEST_PAIRS  # decodes are divided, too
    placer = placer_named(name, POLICY, objective=objective)
    request = SearchRequest(problem, Budget(evaluations=300), seed=5, objective=objective)
    found = [
        [(c.name, c.step_ns, c.devices.tobytes(), c.priority.tobytes()) for c in candidates]
        for candidates in (placer.place(replace(request, workers=2)) for _ in range(2))
    ]
    assert found[0] == found[1]


def test_workers_decode_as_one_does() -> None:
    evaluator = Evaluator(random_problem(3, ops=1300, devices=8, unequal=True))
    plan = heuristics(evaluator)[-1]
    rng = np.random.default_rng(0)
    with Workers(3) as workers:
        team = Team(evaluator, workers)
        for width in (WEIGHT_COUNT, WEIGHT_COUNT + SIGHT_COUNT):
            for count in (1, 2, 7):
                evaluator.look_at(plan)
                weights = rng.normal(0.0, 1.0, (count, width))
                ours, alone = team.decode(weights), evaluator.decode(weights)
                assert [part.tolist() for part in ours] == [part.tolist() for part in alone]


class Recorder(Annealing):
    """Records which moves of which schedule it should make."""

    best_cost = 0

    def __init__(self) -> None:
        self.made: list[int] = []

    def _run(self, steps: int, first: int, total: int) -> None:
        assert first + steps <= total
        self.made += range(first, first + steps)


@pytest.mark.parametrize("evaluations", [1, 2, 3, 1000, 1001])
def test_every_island_makes_an_equal_share_of_the_moves(evaluations: int) -> None:
    islands, exchanges = [Recorder(), Recorder()], []
    meter = SearchRequest(toy_problem(), Budget(evaluations=evaluations)).meter()

    def exchange() -> int:
        exchanges.append(len(islands[0].made))
        return 0

    with Workers(2) as workers:
        list(anneal_islands(islands, meter, workers, exchange=exchange))
    assert all(island.made == list(range(evaluations // 2)) for island in islands)
    if evaluations >= 1000:
        assert len(exchanges) == EXCHANGES
        assert exchanges[0] == FIRST_EXCHANGE * 500
        assert np.ptp(np.diff(exchanges)) <= 1


def test_islands_continue_from_the_best_of_them() -> None:
    evaluator = Evaluator(random_problem(5, ops=60, devices=3, groups=True))
    starts = heuristics(evaluator)[:2]
    islands = [
        StepTimeAnnealing(each, start, seed)
        for seed, (each, start) in enumerate(
            zip((evaluator, evaluator.twin()), starts, strict=True)
        )
    ]
    for island in islands:
        island.run(200, first=0, total=1000)
    costs = [island.best_cost for island in islands]
    assert costs[0] != costs[1]
    assert continue_from_best(islands) == 1
    assert [island.best_cost for island in islands] == [min(costs)] * 2
    assert (islands[0].best().devices == islands[1].best().devices).all()
    for island in islands:
        island.run(800, first=200, total=1000)
        best = island.best()
        assert evaluator.costs(best.devices[None], best.priority[None]).tolist() == [best.step_ns]


def test_an_error_of_any_worker_is_raised_when_all_have_ended() -> None:
    ended: list[int] = []

    def work(number: int) -> int:
        if number == 2:
            raise ValueError("worker 2")
        ended.append(number)
        return number

    with Workers(4) as workers:
        assert workers.run([partial(work, k) for k in (3, 1, 4)]) == [3, 1, 4]
        ended.clear()
        with pytest.raises(ValueError, match="worker 2"):
            workers.run([partial(work, k) for k in range(4)])
    assert sorted(ended) == [0, 1, 3]


@pytest.mark.slow_repeats
@pytest.mark.parametrize(("name", "objective"), SEARCHES)
def test_ctrl_c_ends_all_threads(name: str, objective: str) -> None:
    def press(share: float, _: str) -> None:
        if share > 0.5:
            signal.raise_signal(signal.SIGINT)

    request = SearchRequest(
        random_problem(3, ops=1300, devices=8),
        Budget(seconds=1.0),
        objective=objective,
        progress=press,
        workers=2,
    )
    with pytest.raises(KeyboardInterrupt):
        placer_named(name, POLICY, objective=objective).place(request)
