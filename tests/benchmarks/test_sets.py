"""Schedules of ops on one core or both, checked by hand and by trying all placements."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.machine.sets import BOTH, Costs, best_s, order_of, schedule_s
from graphs.graph import GraphArrays
from graphs.synthetic.shapes import layered


def costs_of(ops: int, seed: int) -> Costs:
    """Return a random graph whose ops take 0.5 to 1.1 of their time on both cores."""
    rng = np.random.default_rng(seed)
    graph = GraphArrays.from_graph(layered(rng, ops=ops, width=3))
    one_s = graph.costs_for("*")
    cost_s = np.column_stack([one_s, one_s * rng.uniform(0.5, 1.1, ops)])
    return Costs(graph=graph, cost_s=cost_s, latency_s=1e-5, bandwidth_bytes_per_s=1e11)


def step_s(costs: Costs, place: list[int], change_s: float) -> float:
    graph = costs.graph
    hand_over_s = costs.latency_s + graph.output_bytes / costs.bandwidth_bytes_per_s
    return schedule_s(
        order_of(costs),
        np.array(place, np.int32),
        graph.predecessor_start.copy(),
        graph.predecessors.copy(),
        hand_over_s,
        costs.cost_s,
        change_s,
        np.empty(len(graph)),
    )


def test_an_op_on_the_set_waits_for_both_cores_and_for_the_change() -> None:
    nothing = np.zeros(0, np.int32)
    starts = np.zeros(4, np.int32)
    cost_s = np.array([[3.0, 2.0], [4.0, 2.0], [5.0, 2.0]])
    ends = np.empty(3)

    def ended(place: list[int]) -> list[float]:
        order, where = np.arange(3, dtype=np.int32), np.array(place, np.int32)
        schedule_s(order, where, starts, nothing, np.ones(3), cost_s, 0.5, ends)
        return ends.tolist()

    assert ended([0, 1, BOTH]) == [3.0, 4.0, 6.5]
    assert ended([0, BOTH, 1]) == [3.0, 5.5, 11.0]
    assert ended([BOTH, BOTH, BOTH]) == [2.5, 4.5, 6.5]


def test_a_value_of_the_other_core_is_handed_over() -> None:
    starts, reads = np.array([0, 0, 1], np.int32), np.zeros(1, np.int32)
    cost_s, ends = np.full((2, 2), 1.0), np.empty(2)
    for second, expected in ((0, 2.0), (1, 2.25), (BOTH, 2.0)):
        place = np.array([0, second], np.int32)
        order = np.arange(2, dtype=np.int32)
        assert schedule_s(order, place, starts, reads, np.full(2, 0.25), cost_s, 0.0, ends) == (
            expected
        )


@pytest.mark.parametrize("seed", range(4))
def test_search_finds_the_best_of_all_placements_of_few_ops(seed: int) -> None:
    costs = costs_of(7, seed)
    alone, both = np.zeros(7, np.int32), np.full(7, BOTH, np.int32)
    for widths in (2, 3):
        found_s, place = best_s(costs, 1e-5, [alone, both][: widths - 1], widths, 20_000)
        assert found_s == step_s(costs, place.tolist(), 1e-5)
        least_s = min(
            step_s(costs, list(one), 1e-5) for one in itertools.product(range(widths), repeat=7)
        )
        assert found_s == pytest.approx(least_s, rel=1e-9)


def test_no_search_ends_above_where_it_starts() -> None:
    costs = costs_of(60, 9)
    rng = np.random.default_rng(0)
    start = rng.integers(0, 3, 60).astype(np.int32)
    found_s, _ = best_s(costs, 0.0, [start], 3, 200)
    assert found_s <= step_s(costs, start.tolist(), 0.0)
