from __future__ import annotations

import numpy as np
import pytest

from placer.search.grouping import spread, units
from tests.helpers.random_problems import keeps_groups, keeps_limits, random_problem


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
