from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
from random_problems import keeps_groups, keeps_limits, random_problem

from envs.cluster import Sharing
from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS

pytest.importorskip("ortools")

from placer.placers import placer_named
from placer.search.budget import Budget
from placer.search.candidate import Candidate
from placer.search.exact import LARGEST
from placer.search.judge import Judge


def best_of_all(problem: Problem) -> int:
    """The shortest step over all placements and all orders."""
    judge, count = Judge(problem), problem.op_count
    orders = np.array(list(permutations(range(count))), np.float64)
    steps = [
        int(judge.costs(np.tile(plan, (len(orders), 1)), orders).min())
        for plan in np.array(list(product(range(problem.device_count), repeat=count)), np.int32)
        if keeps_groups(problem, plan) and keeps_limits(problem, plan)
    ]
    return min(steps)


def solved(problem: Problem) -> tuple[Candidate, bool]:
    """The best plan, and whether it is proven to be."""
    told: list[str] = []
    [found] = placer_named("exact").place(
        problem, Budget(evaluations=3000), 0, progress=lambda _, text: told.append(text)
    )
    return found, told[-1] == "exact, proven to be the best"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sharing", ["none", "egress", "bus"])
def test_it_is_the_best_of_all_plans_of_a_tiny_graph(seed: int, sharing: Sharing) -> None:
    problem = random_problem(
        seed,
        ops=5,
        devices=2,
        unequal=seed % 2 == 1,
        groups=seed > 2,
        pins=seed == 4,
        sharing=sharing,
    )
    found, proven = solved(problem)
    assert proven
    assert found.step_ns == best_of_all(problem)


@pytest.mark.parametrize("seed", range(4))
def test_without_queues_what_it_proves_is_never_beaten(seed: int) -> None:
    problem = random_problem(seed, ops=18, devices=3, unequal=seed > 1, sharing="none")
    found, proven = solved(problem)
    annealed = placer_named("annealing").place(problem, Budget(evaluations=8000), seed)
    assert proven
    assert found.step_ns <= annealed[0].step_ns


def test_parameters_are_spread_where_one_device_cannot_hold_them() -> None:
    parameters = int(random_problem(1, ops=10).graph.parameter_bytes.sum())
    problem = random_problem(1, ops=10, devices=2, memory_bytes=int(0.9 * parameters))
    found, _ = solved(problem)
    assert found.step_ns < INFEASIBLE_NS
    assert len(set(found.devices.tolist())) == 2


def test_a_graph_with_too_many_ops_is_refused_in_a_sentence() -> None:
    problem = random_problem(0, ops=LARGEST + 1)
    with pytest.raises(
        ValueError, match=r"has 81 ops; exact search takes at most 80: .*--groups 80"
    ):
        placer_named("exact").place(problem, Budget(evaluations=10), 0)
