"""Benchmarks of large and huge graphs, on small ones; and of what learning is worth there."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from benchmarks.large_graphs import huge, large, learning, problems
from benchmarks.record import Effort
from graphs.graph import PHASES, attributes_of
from placer.policies import load
from placer.search.portfolio import Portfolio
from placer.search.request import Budget


@pytest.mark.parametrize("kinds", ["e", "u", "x"])
def test_large_problems_are_compared_with_heuristics_and_bound(kinds: str) -> None:
    small = replace(
        problems.LARGE[-1], make=partial(problems.layered_graph, 1, 60, 4, 0.5), kinds=kinds
    )
    budgets = [Budget(evaluations=30)]
    [(name, scores)] = large.large_scores(Portfolio(), [small], budgets, 2).items()
    assert name == f"transformer, 60, 8{kinds}"
    assert 0 < 1 / scores["reference / bound"] <= min(scores["30e"]) <= 1
    costs = small.problem().cost_ns
    distinct = {"e": 1, "u": 2, "x": 8}[kinds]
    assert len(np.unique(costs, axis=1).T) == distinct
    [*_, mean] = large.large_table({name: scores}, budgets).rows
    assert mean[0] == "geometric mean"


def test_huge_problems_are_compared_with_heuristics_and_bound() -> None:
    small = replace(
        problems.LARGE[-1], make=partial(problems.layered_graph, 1, 60, 4, 0.5), kinds="e"
    )
    found = huge.searched(Portfolio(), huge.Huge("small", small.problem, Budget(evaluations=30)), 2)
    assert found["ops"] == 60
    assert 0 < found["bound"] <= min(found["steps"]) <= max(found["steps"]) <= 1
    [row] = huge.huge_table({"small": found}).rows
    assert row[0] == "small, 60 ops"
    assert len(row) == len(huge.COLUMNS)


@pytest.mark.slow
def test_learning_is_compared_at_equal_decodes() -> None:
    small = replace(problems.LARGE[-1], make=partial(problems.layered_graph, 1, 60, 4, 0.5))
    items = [replace(small, kinds=kinds) for kinds in "eu"]
    of = learning.proposers()
    found = learning.compared(of, items, (16, 64), 2, seconds=False)
    assert [own.name for own in found[16]] == list(of)
    for few, many in zip(found[16], found[64], strict=True):
        assert many.median() <= few.median() <= 1.0
    again = learning.compared(of, items, (16,), 2, seconds=False)
    assert [own.ratios.tolist() for own in again[16]] == [own.ratios.tolist() for own in found[16]]
    table = learning.learning_table("Learning", items, found, unit="decodes")
    assert table.columns[1:3] == ("16 decodes", "16 decodes, unequal")
    assert [len(row) for row in table.rows] == [5] * len(of)


def test_siblings_are_smaller_graphs_of_the_same_makers_on_the_same_devices() -> None:
    for problem, sibling in problems.SIBLING_PAIRS:
        assert (sibling.make.func, sibling.label) == (problem.make.func, problem.label)
        own, made = sibling.make.args, problem.make.args
        assert own != made
        # The first is a seed, or a number of layers.
        assert all(small <= large for small, large in zip(own[1:], made[1:], strict=True))
    for problem, sibling in problems.QUICK_PAIRS:
        assert sibling.make().order() < problem.make().order()


def test_evolved_weights_are_better_than_what_the_policy_proposes() -> None:
    item = problems.planted_unequal(1)[0][0]
    policy = load("generalist")
    weights = learning.evolve_weights(item, policy, 100)
    proposer = learning.WithWeights(weights, policy)
    proposed, deviations = proposer.propose(item.evaluator, item.known)
    own, own_deviations = policy.propose(item.evaluator, item.known)
    assert np.array_equal(proposed, [weights, *own])
    assert np.array_equal(deviations, [own_deviations.mean(axis=0), *own_deviations])
    costs = item.evaluator.decode(proposed)[2]
    assert costs[0] < costs[1:].min()


@pytest.mark.slow
def test_problems_are_searched_beside_evolved_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(problems.LARGE[-1], make=partial(problems.layered_graph, 1, 60, 4, 0.5))
    pairs = [(replace(small, kinds=kinds), replace(small, kinds=kinds)) for kinds in "eu"]
    monkeypatch.setattr(learning, "SECONDS", (0.05,))
    out: dict[str, Any] = {}
    table = learning.parts(Effort("quick"), [], [], pairs, [])["evolved"](out)
    assert table is not None
    assert out["problems"] == ["transformer, 8e", "transformer, 8u"]
    assert [row[0] for row in table.rows] == list(out["0.05"])
    assert np.shape(out["0.05"]["initial weights"]["ratios"]) == (1, 2)
    decodes: dict[str, Any] = {}
    learning.parts(Effort("quick"), [], [], pairs, [])["evolved-decodes"](decodes)
    found = {name: np.array(of["ratios"]) for name, of in decodes["16"].items()}
    assert list(found) == list(out["0.05"])
    for name, ratios in found.items():  # those of the problem itself are decoded first of all
        assert (found["generalist, its own weights"] <= ratios).all(), name


@pytest.mark.slow
def test_longer_searches_stand_beside_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "SECONDS", (0.05,))
    small = replace(problems.LARGE[-1], make=partial(problems.layered_graph, 1, 60, 4, 0.5))
    out: dict[str, Any] = {}
    table = learning.parts(Effort("quick"), [small], [], [], [])["longer"](out)
    assert table is not None
    assert list(table.columns) == ["proposals", "0.05 s", "0.6 s"]
    assert [row[0] for row in table.rows] == list(learning.initial_and_default())


@pytest.mark.slow
def test_foreign_graphs_are_large_and_every_one_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(problems.FOREIGN) == 10
    graph = problems.FOREIGN[-1].make()
    assert 6_000 <= len(graph) <= 12_000
    assert {attributes_of(graph, op)["phase"] for op in graph} == set(PHASES)
    small = replace(problems.LARGE[-1], make=partial(problems.layered_graph, 1, 60, 4, 0.5))
    monkeypatch.setattr(learning, "SECONDS", (0.05,))
    out: dict[str, Any] = {}
    two = [replace(small, kinds=kinds) for kinds in "eu"]
    table = learning.parts(Effort("quick"), [], [], [], two)["foreign"](out)
    assert table is not None
    assert [row[0] for row in table.rows] == [*out["problems"], "geometric mean"]
    assert list(table.columns) == ["problem", *learning.proposers()]


@pytest.mark.parametrize("part", ["learning", "evolved"])
def test_proposals_are_compared_on_huge_graphs(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    small = replace(problems.LARGE[-1], make=partial(problems.layered_graph, 1, 60, 4, 0.5))
    smaller = small.resized(2, 30, 4, 0.5)
    monkeypatch.setattr(huge, "QUICK_PAIR", (small, smaller))
    monkeypatch.setattr(huge, "QUICK_SECONDS", 0.05)
    out: dict[str, Any] = {}
    table = huge.parts(Effort("quick"))[part](out)
    assert table is not None
    names = learning.proposers() if part == "learning" else learning.with_evolved(small, smaller, 4)
    assert list(table.columns[1:]) == list(out["0.05"]) == list(names)
    assert [row[0] for row in table.rows] == [small.label, "geometric mean"]
    assert all(0.0 < of["median"] <= 1.0 for of in out["0.05"].values())
