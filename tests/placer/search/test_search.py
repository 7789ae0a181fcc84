from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from envs.simulator import INFEASIBLE_NS, Simulator
from placer.search.budget import Budget, Meter
from placer.search.candidate import Candidate, Kind, distinct, ranked
from placer.search.evaluator import Evaluator
from placer.search.heuristics import heuristics, layer_split, round_robin, single_device
from placer.search.list_scheduler.decoder import HEFT, WEIGHT_COUNT
from placer.search.portfolio import search
from placer.search.request import SearchRequest
from tests.helpers.random_problems import keeps_groups, keeps_limits, random_problem


class Fixed:
    """Policy with constant proposals."""

    def propose(
        self, evaluator: Evaluator, known: list[Candidate]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        assert known[0].kind is Kind.SINGLE_DEVICE
        return np.array([HEFT]), np.full((1, WEIGHT_COUNT), 0.3)


class Several:
    """Policy that proposes bad weights first and the good ones last."""

    def __init__(self, good: NDArray[np.float64]) -> None:
        self.good = good

    def propose(
        self, evaluator: Evaluator, known: list[Candidate]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        means = np.stack([-HEFT, 0 * HEFT, self.good])
        return means, np.zeros_like(means)


def test_all_proposals_of_a_policy_are_tried() -> None:
    problem = random_problem(3, ops=60, devices=3)
    evaluator = Evaluator(problem)
    rows = HEFT + np.random.default_rng(0).normal(0.0, 0.5, (200, WEIGHT_COUNT))
    costs = evaluator.decode(rows)[2]
    good = rows[int(costs.argmin())]
    known = len(heuristics(evaluator))
    found = search(SearchRequest(problem, Budget(evaluations=4 * (known + 3))), Several(good))
    assert min(c.step_ns for c in found if c.name != "annealing") <= costs.min()


def test_samples_go_farther_than_a_policy_is_sure_of() -> None:
    problem = random_problem(3, ops=60, devices=3)
    known = {c.name: c.step_ns for c in heuristics(Evaluator(problem))}
    found = search(SearchRequest(problem, Budget(evaluations=400)), Several(HEFT))
    assert min(c.step_ns for c in found if c.name == "policy") < known["HEFT"]


@pytest.mark.parametrize(
    ("text", "seconds", "evaluations"),
    [
        ("20s", 20.0, None),
        (" 1.5S ", 1.5, None),
        ("2m", 120.0, None),
        ("1e4e", None, 10_000),
        ("30 evals", None, 30),
    ],
)
def test_budgets_are_seconds_or_evaluations(
    text: str, seconds: float | None, evaluations: int | None
) -> None:
    budget = Budget.parse(text)
    assert (budget.seconds, budget.evaluations) == (seconds, evaluations)
    assert Budget.parse(str(budget)) == budget


@pytest.mark.parametrize("text", ["", "20", "-1s", "0e", "1.5e", "nan s", "20h"])
def test_nonsense_is_no_budget_and_the_message_shows_one(text: str) -> None:
    with pytest.raises(ValueError, match=r"20s|4000e"):
        Budget.parse(text)


def test_a_budget_is_not_both() -> None:
    with pytest.raises(ValueError, match="either"):
        Budget(seconds=1.0, evaluations=1)


def test_a_meter_stops_when_asked_and_stays_stopped() -> None:
    answers = iter([False, True, False])
    meter = Meter(Budget(evaluations=10), should_stop=lambda: next(answers))
    assert not meter.over()
    assert meter.over()
    assert meter.over()


@settings(max_examples=25)
@given(st.integers(0, 1000), st.integers(1, 5), st.booleans())
def test_heuristics_keep_groups_and_limits(seed: int, devices: int, unequal: bool) -> None:
    problem = random_problem(seed, devices=devices, groups=True, pins=True, unequal=unequal)
    for candidate in heuristics(Evaluator(problem)):
        assert keeps_groups(problem, candidate.devices)
        assert keeps_limits(problem, candidate.devices)
        assert candidate.is_single or not candidate.name.startswith("single")


def test_trivial_placements_without_limits() -> None:
    problem = random_problem(0, ops=60, devices=3)
    order = problem.graph.topological
    for device in range(3):
        assert (single_device(problem, device) == device).all()
    split = layer_split(problem)[order]
    assert (np.diff(split) >= 0).all()
    load = np.bincount(split, problem.cost_ns[order, 0])
    assert load.max() < 1.3 * load.mean()
    assert round_robin(problem)[order].tolist() == [i % 3 for i in range(60)]


def test_a_slow_device_gets_a_smaller_part_of_the_layers() -> None:
    problem = random_problem(0, ops=200, devices=2, unequal=True)
    share = np.bincount(layer_split(problem), minlength=2) / 200
    assert 0.15 < share[1] < 0.4


@pytest.mark.parametrize("policy", [None, Fixed()])
def test_evaluations_and_a_seed_decide_the_result(policy: Fixed | None) -> None:
    problem = random_problem(11, ops=60, groups=True, order="priority")
    runs = [
        search(SearchRequest(problem, Budget(evaluations=700), seed=seed), policy)
        for seed in (3, 3, 4)
    ]
    first, second, other = (
        [(c.name, c.step_ns, c.devices.tobytes(), c.priority.tobytes()) for c in run]
        for run in runs
    )
    assert first == second
    assert first != other


@settings(max_examples=8)
@given(st.integers(0, 100), st.integers(1, 4))
def test_candidates_are_sorted_judged_and_never_worse_than_heuristics(
    seed: int, devices: int
) -> None:
    problem = random_problem(seed, devices=devices, groups=True, pins=True)
    found = search(SearchRequest(problem, Budget(evaluations=400), seed=seed), Fixed())
    steps = [c.step_ns for c in found]
    assert steps == sorted(steps)
    names = {c.name for c in found}
    assert sum(c.kind is Kind.SINGLE_DEVICE for c in found) == devices
    if devices > 1:
        assert {"layer split", "round robin", "HEFT", "ETF"} <= names
    simulator = Simulator(problem)
    for candidate in found:
        assert simulator.step_ns(candidate.devices, candidate.priority)[0] == candidate.step_ns
        assert keeps_groups(problem, candidate.devices)
        assert keeps_limits(problem, candidate.devices)
        assert not candidate.devices.flags.writeable


def test_search_beats_the_heuristics_where_there_is_room() -> None:
    problem = random_problem(2, ops=120, devices=4, order="priority")
    found = search(SearchRequest(problem, Budget(evaluations=3000)))
    heuristic = min(c.step_ns for c in found if c.name in ("HEFT", "ETF"))
    assert found[0].step_ns < 0.97 * heuristic


def test_plans_that_do_not_fit_come_last() -> None:
    parameters = int(random_problem(1).graph.parameter_bytes.sum())
    problem = random_problem(1, memory_bytes=int(0.75 * parameters))
    found = search(SearchRequest(problem, Budget(evaluations=2000)))
    assert found[0].step_ns < INFEASIBLE_NS
    assert {c.name for c in found if c.step_ns == INFEASIBLE_NS} >= {
        f"single device:{d}" for d in range(3)
    }


def test_a_search_that_is_stopped_at_once_still_has_the_heuristics() -> None:
    problem = random_problem(1)
    found = search(SearchRequest(problem, Budget(seconds=1000.0), should_stop=lambda: True))
    assert {"HEFT", "ETF", "layer split"} <= {c.name for c in found}


def test_a_search_stops_soon_after_it_is_asked() -> None:
    problem = random_problem(1, ops=300)
    asked: list[int] = []

    def stop_at_third() -> bool:
        asked.append(1)
        return len(asked) > 2

    search(SearchRequest(problem, Budget(seconds=1000.0), should_stop=stop_at_third))
    assert len(asked) == 3


def test_a_search_ends_when_nothing_can_be_better() -> None:
    problem = random_problem(1, ops=2, devices=2)
    assert problem.graph.edge_count == 1
    found = search(SearchRequest(problem, Budget(seconds=1000.0)))
    assert found[0].name == "single device:0"
    assert found[0].step_ns == problem.cost_ns[:, 0].sum()


def test_progress_rises_to_one() -> None:
    shares: list[float] = []
    request = SearchRequest(
        random_problem(1),
        Budget(evaluations=300),
        progress=lambda share, text: shares.append(share),
    )
    search(request, Fixed())
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_distinct_keeps_the_first_of_equal_plans() -> None:
    def plan(name: str, device: int, step_ns: int) -> Candidate:
        devices = np.full(3, device, np.int32)
        return Candidate(
            kind=Kind.OTHER, name=name, devices=devices, priority=np.zeros(3), step_ns=step_ns
        )

    plans = [plan("slow", 0, 9), plan("quick", 1, 3), plan("same as quick", 1, 3)]
    assert [c.name for c in ranked(plans)] == ["quick", "same as quick", "slow"]
    assert [c.name for c in distinct(ranked(plans), 5)] == ["quick", "slow"]
    assert [c.name for c in distinct(ranked(plans), 1)] == ["quick"]
