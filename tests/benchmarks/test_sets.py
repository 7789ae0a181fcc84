"""Schedules of ops on one core or both, checked by hand and by trying all placements."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

from benchmarks.machine.set_runs import BOTH, Plan, lists_of, measured_s
from benchmarks.machine.set_schedules import Costs, best_s, changes, order_of, plan_of, schedule_s
from envs.executors.cores.instruction_lists import Receive, Run, Send
from envs.hardware.discover import discover
from graphs.extract import Extraction, Workload, extract
from graphs.graph import GraphArrays
from graphs.models.two_towers import build
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


@pytest.mark.parametrize("seed", range(2))
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


@pytest.fixture(scope="module")
def towers() -> Extraction:
    model, inputs, loss = build()
    return extract(Workload(model, inputs, loss=loss))


def random_plan(extraction: Extraction, seed: int) -> Plan:
    """Return random places, in an order in which every op comes after what it reads."""
    arrays = GraphArrays.from_graph(extraction.graph)
    place = np.random.default_rng(seed).integers(0, 3, len(arrays)).astype(np.int32)
    return Plan(place=place, order=arrays.topological.astype(np.int32))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_ops_of_the_set_and_of_its_cores_never_run_at_the_same_time(
    towers: Extraction, seed: int
) -> None:
    plan = random_plan(towers, seed)
    lists = lists_of(towers.program, plan)
    sent: dict[tuple[int, int, int], tuple[int, int]] = {}
    counts: dict[tuple[int, int], int] = {}
    for device, listed in enumerate(lists):
        for at, instruction in enumerate(listed):
            if isinstance(instruction, Send):
                for to in instruction.destinations:
                    counts[device, to] = counts.get((device, to), 0) + 1
                    sent[device, to, counts[device, to]] = device, at
    # latest[d][p][e]: how many instructions of e have ended before instruction p of d ends
    latest = [[[0] * 3 for _ in listed] for listed in lists]
    done = [0, 0, 0]
    while any(at < len(listed) for at, listed in zip(done, lists, strict=True)):
        for device, listed in enumerate(lists):
            while done[device] < len(listed):
                at, instruction = done[device], listed[done[device]]
                now = list(latest[device][at - 1]) if at else [0, 0, 0]
                now[device] = at
                if isinstance(instruction, Receive):
                    source, place = sent[instruction.source, device, instruction.number]
                    if place >= done[source]:
                        break
                    now = [max(pair) for pair in zip(now, latest[source][place], strict=True)]
                    now[source] = max(now[source], place + 1)
                latest[device][at] = now
                done[device] += 1
    ran = [(d, p) for d in range(3) for p, each in enumerate(lists[d]) if isinstance(each, Run)]
    assert len(ran) == towers.program.op_count
    for d, p in ran:
        if d == BOTH:
            for other, q in ran:
                before = latest[d][p][other] > q or latest[other][q][d] > p
                assert other == BOTH or before, (d, p, other, q)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_schedules_with_sets_run(towers: Extraction) -> None:
    first_two = sorted(os.sched_getaffinity(0))[:2]
    cores = discover(",".join(f"core:{core}" for core in first_two)).devices
    plans = {"sets": random_plan(towers, 0), "others": random_plan(towers, 1)}
    medians_s = measured_s(towers, cores, plans, 1)
    assert medians_s.keys() == {"unplaced", *plans}
    assert all(step_s > 0 for step_s in medians_s.values())


def test_ops_are_ordered_by_their_starts() -> None:
    costs = costs_of(20, 3)
    place = np.zeros(20, np.int32)
    plan = plan_of(costs, place, 0.0)
    assert plan.order.tolist() == order_of(costs).tolist()


def test_changes_between_core_and_set_are_counted_by_core() -> None:
    place = np.array([0, 1, BOTH, BOTH, 0, 1, 1, BOTH], np.int32)
    assert changes(Plan(place=place, order=np.arange(8, dtype=np.int32))) == 6
