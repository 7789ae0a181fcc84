from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.problem import toy_problem
from placer.search.grouping import at_most, units
from tests.helpers.random_problems import keeps_groups, keeps_limits, random_problem


@settings(max_examples=40)
@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 40), st.booleans())
def test_any_choice_for_groups_keeps_co_location_and_pins(
    seed: int, devices: int, most: int, pins: bool
) -> None:
    problem = random_problem(seed, devices=devices, groups=True, pins=pins, unequal=True)
    groups = at_most(problem, most)
    rng = np.random.default_rng(seed)
    choice = np.array([rng.choice(np.flatnonzero(row)) for row in groups.allowed])
    devices_of_ops = groups.expand(choice)
    assert keeps_groups(problem, devices_of_ops)
    assert keeps_limits(problem, devices_of_ops)
    assert sorted(set(groups.group_of.tolist())) == list(range(len(groups)))
    if not pins:
        assert len(groups) <= max(most, 1)
    everywhere = np.asarray(groups.allowed.all(axis=1))
    of_ops = problem.cost_ns[everywhere[groups.group_of]].sum(axis=0)
    assert (groups.cost_ns[everywhere].sum(axis=0) == of_ops).all()


def test_few_ops_are_left_as_they_are() -> None:
    problem = random_problem(1, groups=True)
    assert (at_most(problem, 100).group_of == units(problem).group_of).all()


def test_groups_are_numbered_in_topological_order_of_their_first_ops() -> None:
    problem = random_problem(4, groups=True)
    of_ops = units(problem).group_of[problem.graph.topological]
    first = np.unique(of_ops, return_index=True)[1]
    assert (np.diff(first) > 0).all()


def test_two_towers_are_two_groups() -> None:
    problem = toy_problem()
    groups = at_most(problem, 2)
    assert len(groups) == 2
    tower_of = {
        name: {int(groups.group_of[problem.graph.ids.index(f"{name}.{i}")]) for i in range(6)}
        for name in ("left", "right")
    }
    assert all(len(found) == 1 for found in tower_of.values())
    assert tower_of["left"] != tower_of["right"]
