from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from placer.placers import placer_named
from placer.policies.sequence import SequenceNetwork, described
from placer.search.budget import Budget
from placer.search.evaluator import Evaluator
from placer.search.grouping import at_most
from placer.search.request import SearchRequest
from tests.helpers.random_problems import random_problem


def test_the_probabilities_of_all_placements_add_up_to_one() -> None:
    torch.manual_seed(0)
    problem = random_problem(2, ops=4, devices=2, pins=True)
    groups = at_most(problem, 4)
    shares, features = described(groups)
    network = SequenceNetwork(shares.shape[1], features.shape[1], 2)
    network.device.weight.data *= 5.0  # far from uniform
    chances = torch.rand((4000, len(groups)))
    with torch.no_grad():
        drawn, logs = network(shares, features, torch.from_numpy(groups.allowed), chances)
    chance_of = {
        tuple(row): float(log.exp()) for row, log in zip(drawn.tolist(), logs, strict=True)
    }
    assert sum(chance_of.values()) == pytest.approx(1.0, abs=1e-3)
    for plan in product(range(2), repeat=len(groups)):
        if not groups.allowed[np.arange(len(groups)), plan].all():
            assert plan not in chance_of
        else:
            share = float((drawn == torch.tensor(plan)).all(dim=1).float().mean())
            assert share == pytest.approx(chance_of.get(plan, 0.0), abs=0.03)


def test_features_say_what_reads_what() -> None:
    problem = random_problem(0, ops=3, devices=2)
    shares, features = described(at_most(problem, 3))
    assert shares.tolist() == np.eye(3).tolist()  # every op has its own type
    graph = problem.graph
    for target in range(3):
        first, end = graph.predecessor_start[target], graph.predecessor_start[target + 1]
        sources = graph.predecessors[first:end].tolist()
        assert features[target, 3:6].tolist() == [float(i in sources) for i in range(3)]


def test_it_learns_to_leave_a_slow_device_out() -> None:
    problem = random_problem(3, ops=8, devices=2, unequal=True)
    [found] = placer_named("sequence-to-sequence").place(
        SearchRequest(problem, Budget(evaluations=400))
    )
    plans = np.array(list(product(range(2), repeat=8)), np.int32)
    evaluator = Evaluator(problem)
    steps = np.sort(
        evaluator.costs(plans, np.tile(evaluator.scheduling.bottom_level, (len(plans), 1)))
    )
    assert found.step_ns <= steps[2]
