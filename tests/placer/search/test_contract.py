"""Every placer keeps the contract, and the contract notices who breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from envs.simulator import INFEASIBLE_NS
from placer.policies import load
from placer.search import contract, registry
from placer.search.candidate import Candidate, Kind
from placer.search.compilation import load_compiled_code
from placer.search.contract import CHECKS, Make, contract_problems
from placer.search.evaluator import Evaluator
from placer.search.heuristics import RoundRobin, Rule, SingleDevice
from placer.search.objectives import Objective
from placer.search.portfolio import AnnealingPlacer
from placer.search.registry import placer_named
from placer.search.request import Budget, SearchRequest
from placer.search.sampling import BudgetedEvaluator, Sampling
from tests.helpers.in_turn import in_turn
from tests.helpers.random_problems import random_problem

POLICY = load("generalist")
NAMES = [listing.name for listing in registry.BUILT_IN]


@pytest.mark.slow_repeats
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", in_turn(NAMES, slow=["exact"]))
def test_every_placer_keeps_the_contract(name: str, check: Callable[[Make], None]) -> None:
    check(lambda: placer_named(name, POLICY))


class Anywhere(Rule):
    """Ignores where ops are allowed to run."""

    def candidates(self, evaluator: Evaluator) -> list[Candidate]:
        count = evaluator.problem.op_count
        return [evaluator.candidate(Kind.OTHER, np.zeros(count, np.int32), np.zeros(count))]


class Optimist(RoundRobin):
    """Reports infeasible candidates as feasible."""

    def place(self, request: SearchRequest) -> list[Candidate]:
        return [replace(c, step_ns=c.step_ns % INFEASIBLE_NS) for c in super().place(request)]


class Unseeded(Sampling):
    """Uses its own random numbers, whatever the seed."""

    random: ClassVar[np.random.Generator] = np.random.default_rng(0)

    def sample(self, budgeted: BudgetedEvaluator, seed: int) -> None:
        problem = budgeted.evaluator.problem
        devices = problem.allowed.argmax(axis=1).astype(np.int32)
        budgeted.evaluate(devices, self.random.random(problem.op_count))


class Endless(Sampling):
    """Evaluates a thousand placements, whatever the budget and requests to stop."""

    def sample(self, budgeted: BudgetedEvaluator, seed: int) -> None:
        problem = budgeted.evaluator.problem
        devices = problem.allowed.argmax(axis=1).astype(np.int32)
        budgeted.meter.over()
        for _ in range(1000):
            budgeted.evaluate(devices, np.zeros(problem.op_count))


class Spendthrift(AnnealingPlacer):
    """Makes three thousand moves, whatever the budget."""

    def place(self, request: SearchRequest) -> list[Candidate]:
        return super().place(replace(request, budget=Budget(evaluations=3000)))


class Backward(SingleDevice):
    """Returns the worst candidate first."""

    def place(self, request: SearchRequest) -> list[Candidate]:
        return super().place(request)[::-1]


class BackwardLoads(Backward):
    """Returns the largest load first."""

    objectives: ClassVar[tuple[str, ...]] = ("max-load",)


class Empty(RoundRobin):
    """Returns no candidates."""

    def place(self, request: SearchRequest) -> list[Candidate]:
        return []


@pytest.mark.parametrize(
    ("make", "check"),
    [
        (Anywhere, contract.placements_are_complete),
        (Optimist, contract.steps_are_simulated),
        (Backward, contract.steps_are_simulated),
        (BackwardLoads, contract.steps_are_simulated),
        (Unseeded, contract.seed_determines_candidates),
        (Endless, contract.evaluations_are_limited),
        (Spendthrift, contract.evaluations_are_limited),
        (Endless, contract.time_is_limited),
        (Spendthrift, contract.time_is_limited),
        (Endless, contract.stops_are_obeyed),
        (Empty, contract.one_evaluation_suffices),
    ],
)
def test_a_check_notices_who_breaks_it(make: Make, check: Callable[[Make], None]) -> None:
    with pytest.raises(AssertionError):
        check(make)


@pytest.mark.parametrize("name", ["portfolio", "annealing", "evolution", "policy"])
def test_compiled_code_is_loaded_before_the_budget_begins(name: str) -> None:
    load_compiled_code.cache_clear()
    is_loaded: list[bool] = []

    def clock() -> float:
        is_loaded.append(bool(load_compiled_code.cache_info().currsize))
        return 0.0

    request = SearchRequest(contract_problems()[0], Budget(evaluations=20), clock=clock)
    placer_named(name, POLICY).place(request)
    assert is_loaded
    assert all(is_loaded)


@pytest.mark.slow_repeats
@pytest.mark.parametrize("name", in_turn(NAMES, slow=["exact"]))
def test_heuristics_are_always_candidates_whatever_the_objective(name: str) -> None:
    problem = random_problem(3, ops=12, devices=3)
    for objective in (
        Objective(),
        Objective(micro_batches=2),
        Objective(name="throughput", micro_batches=3),
        Objective(name="max-load"),
    ):
        if objective.name not in placer_named(name, POLICY).objectives:
            with pytest.raises(ValueError, match="not max-load; 'portfolio' serves all"):
                placer_named(name, POLICY, objective=objective.name)
            continue
        placer = placer_named(name, POLICY, objective=objective.name)
        found = objective.search(SearchRequest(problem, Budget(evaluations=30)), placer)
        names = [candidate.name for candidate in found]
        heuristics = [f"single device:{d}" for d in range(3)] + ["layer split", "HEFT", "ETF"]
        assert all(names.count(name) == 1 for name in heuristics)
        assert {candidate.devices.shape for candidate in found} == {(12,)}
        if objective == Objective():
            steps = [candidate.step_ns for candidate in found]
            assert steps == sorted(steps)
