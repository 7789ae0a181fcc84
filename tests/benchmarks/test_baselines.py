"""Published search algorithms that the benchmarks compare with."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.baselines import cross_entropy, register_baselines
from benchmarks.baselines.groups import at_most
from benchmarks.baselines.sequence_to_sequence import SequenceNetwork, described
from envs.hardware.cluster import Cluster, Device, Link
from envs.problem import Problem
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from placer.search import registry
from placer.search.contract import CHECKS, Make
from placer.search.evaluator import Evaluator
from placer.search.grouping import units
from placer.search.list_scheduler.arrays import scheduling_arrays
from placer.search.registry import placer_named
from placer.search.request import Budget, SearchRequest
from tests.helpers.in_turn import in_turn
from tests.helpers.random_problems import keeps_groups, keeps_limits, random_problem


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the baselines for one test."""
    monkeypatch.setattr(registry, "_REGISTERED", {})
    register_baselines()


@pytest.mark.slow_repeats
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "name",
    in_turn(
        ["cross-entropy", "op-by-op", "sequence-to-sequence", "min-cut"],
        slow=["op-by-op", "sequence-to-sequence"],
    ),
)
def test_every_baseline_keeps_the_contract(name: str, check: Callable[[Make], None]) -> None:
    if name == "min-cut":
        pytest.importorskip("pymetis")
    check(lambda: placer_named(name))


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("name", "evaluations", "rank"),
    [("cross-entropy", 1500, 0), ("op-by-op", 100, 2), ("sequence-to-sequence", 400, 2)],
)
def test_a_tiny_graph_is_placed_well(name: str, evaluations: int, rank: int) -> None:
    problem = random_problem(3, ops=8, devices=2, unequal=True)
    plans = np.array(list(product(range(2), repeat=8)), np.int32)
    evaluator = Evaluator(problem)
    by_level = np.tile(evaluator.scheduling.bottom_level, (len(plans), 1))
    request = SearchRequest(problem, Budget(evaluations=evaluations))
    [found] = placer_named(name).place(request)
    assert found.step_ns <= np.sort(evaluator.costs(plans, by_level))[rank]


# Groups


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


# The cross-entropy method


def test_probabilities_move_to_how_often_the_elite_chose() -> None:
    drawn = np.array([[0, 1]] * 2 + [[1, 0]] * 18)
    costs = np.array([1, 2, *range(10, 28)])  # the elite is two of twenty
    before = np.full((2, 2), 0.5)
    expected = (
        cross_entropy.SMOOTHING * np.array([[1.0, 0.0], [0.0, 1.0]])
        + (1 - cross_entropy.SMOOTHING) * before
    )
    assert cross_entropy.moved(before, drawn, costs) == pytest.approx(expected)


def test_draws_follow_the_probabilities_and_never_take_what_has_none() -> None:
    probability = np.array([[0.0, 0.25, 0.75], [1.0, 0.0, 0.0]])
    drawn = cross_entropy.draw(probability, 4000, np.random.default_rng(0))
    share = (drawn[:, 0, None] == np.arange(3)).mean(axis=0)
    assert share == pytest.approx([0.0, 0.25, 0.75], abs=0.03)
    assert (drawn[:, 1] == 0).all()


# The sequence-to-sequence network


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


# Partitions by METIS


def on_pair(graph: nx.DiGraph[str], kinds: tuple[str, str]) -> Problem:
    names = ("a", "b")
    devices = tuple(
        Device(name=n, kind=k, memory_bytes=10**12) for n, k in zip(names, kinds, strict=True)
    )
    link = Link(between=names, latency_s=1e-6, bandwidth_bytes_per_s=1e9)
    return Problem.of(
        GraphArrays.from_graph(graph), Cluster(name="pair", devices=devices, links=(link,))
    )


def partition(problem: Problem) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    pytest.importorskip("pymetis")
    from benchmarks.baselines.min_cut import min_cut

    return min_cut(units(problem), scheduling_arrays(problem), 0)


def test_the_light_edge_between_groups_is_cut() -> None:
    graph = new_graph("blocks")
    for block in range(2):
        for i in range(10):
            group = f"{block}" if i < 2 else None
            size = 10**8
            add_op(graph, f"{block}.{i}", cost_s={"*": 1e-3}, output_bytes=size, colocate=group)
            for j in range(max(0, i - 3), i):
                add_edge(graph, f"{block}.{j}", f"{block}.{i}")
    add_edge(graph, "0.9", "1.0", 1000)
    cut = partition(on_pair(graph, ("k", "k")))
    assert len(set(cut[:10].tolist())) == len(set(cut[10:].tolist())) == 1
    assert cut[0] != cut[10]


def test_a_device_gets_work_in_proportion_to_its_speed() -> None:
    graph = new_graph("free")
    for i in range(400):
        add_op(graph, str(i), cost_s={"fast": 1e-3, "slow": 3e-3}, output_bytes=1)
        if i:
            add_edge(graph, str(i - 1), str(i))
    problem = on_pair(graph, ("fast", "slow"))
    share = np.bincount(partition(problem), minlength=2) / 400
    assert share == pytest.approx([0.75, 0.25], abs=0.03)
    assert (np.diff(partition(problem)) != 0).sum() <= 3
