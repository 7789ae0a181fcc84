from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from envs.problem import Floats, Ints, Problem
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from graphs.synthetic.planted import planted
from placer.search.candidate import Kind
from placer.search.evaluator import Evaluator
from placer.search.list_scheduler.arrays import SchedulingArrays
from placer.search.list_scheduler.decoder import HEFT, WEIGHT_COUNT
from placer.search.list_scheduler.sight import (
    FARTHEST,
    OF_PLAN,
    SIGHT_COUNT,
    Sight,
    device_prices,
)
from placer.search.list_scheduler.soft_log import soft_log
from tests.helpers.random_problems import keeps_groups, keeps_limits, random_problem
from tests.helpers.simulator_cases import one_kind

REPEAT = np.array([1e6, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])


def random_plan(evaluator: Evaluator, seed: int) -> tuple[Ints, Floats]:
    """Return random devices, and starts in a random schedule, of a problem where all may go."""
    rng = np.random.default_rng(seed)
    problem = evaluator.problem
    devices: Ints = rng.integers(0, problem.device_count, (problem.op_count,), np.int32)
    priority: Floats = rng.random((problem.op_count,))
    plan = evaluator.candidate(Kind.OTHER, devices, priority)
    evaluator.look_at(plan)
    return plan.devices, evaluator.work.start_ns[: len(devices)].astype(np.float64)


def edges(problem: Problem) -> list[tuple[int, int, int]]:
    """Return source, target and bytes of every edge, by source."""
    graph = problem.graph
    source = np.repeat(np.arange(problem.op_count), np.diff(graph.successor_start))
    return list(
        zip(source.tolist(), graph.successors.tolist(), graph.edge_bytes.tolist(), strict=True)
    )


def log(x: float) -> float:
    return float(soft_log(np.array([x]))[0])


def test_tails_of_ops_without_cost_that_start_with_their_readers() -> None:
    graph = new_graph("views")
    for name, cost in (("reader", 1e-3), ("last", 5e-3), ("view", 0.0)):
        add_op(graph, name, cost_s={"*": cost})
    add_edge(graph, "view", "reader")
    add_edge(graph, "reader", "last")
    evaluator = Evaluator(Problem.of(GraphArrays.from_graph(graph), one_kind(2)))
    plan = evaluator.candidate(Kind.OTHER, np.zeros(3, np.int32), np.zeros(3))
    for _ in range(2):
        evaluator.look_at(plan)
        assert evaluator.sight.tail.tolist() == [6e6, 5e6, 6e6]


def test_tail_is_the_longest_path_along_edges_and_devices() -> None:
    problem = random_problem(3, ops=40)
    evaluator = Evaluator(problem)
    devices, start = random_plan(evaluator, 3)
    cost = problem.cost_ns[np.arange(40), devices].tolist()
    after: dict[int, list[tuple[int, float]]] = {v: [] for v in range(40)}
    for u, v, size in edges(problem):
        send = problem.transfer_ns(size, 0, 1) if devices[u] != devices[v] else 0.0
        after[u].append((v, send))
    for d in range(3):
        row = sorted(np.flatnonzero(devices == d).tolist(), key=start.__getitem__)
        for u, v in pairwise(row):
            after[u].append((v, 0.0))
    tail: dict[int, float] = {}
    for u in sorted(range(40), key=start.__getitem__, reverse=True):
        tail[u] = cost[u] + max((send + tail[v] for v, send in after[u]), default=0.0)
    assert evaluator.sight.tail.tolist() == pytest.approx([tail[v] for v in range(40)], abs=2 * 40)


def decoded_twin(
    problem: Problem, arrays: SchedulingArrays, sight: Sight, start: Floats, w: Floats
) -> list[int]:
    """Decode HEFT's weights and those of the sight in plain Python, where links never wait."""
    count, device_count = arrays.device_cost.shape
    inputs: dict[int, list[tuple[int, float]]] = {v: [] for v in range(count)}
    outputs: dict[int, list[tuple[int, float]]] = {v: [] for v in range(count)}
    for u, v, size in edges(problem):
        send = float(arrays.latency[0, 1] + size * arrays.ns_per_byte[0, 1])
        inputs[v].append((u, send))
        outputs[u].append((v, send))
    scale, prices = arrays.scale, device_prices(arrays.device_cost, arrays.allowed)
    home: dict[int, int] = {}
    finish: dict[int, float] = {}
    free = [0.0] * device_count
    for position in range(count):
        ready = [v for v in range(count) if v not in home and all(u in home for u, _ in inputs[v])]
        assert ready, f"no op is ready at {position}"

        def early(v: int) -> float:
            end = float(sight.tail.max())
            early, long = 10.0 * (1.0 - start[v] / end), 10.0 * sight.tail[v] / end
            return float(arrays.order_base[v] + w[6] * early + w[7] * long)

        v = max(ready, key=lambda i: (early(i), -i))
        begin = [
            max([free[d]] + [finish[u] + (send if home[u] != d else 0.0) for u, send in inputs[v]])
            for d in range(device_count)
        ]
        ends = [begin[d] + float(arrays.cost[v, d]) for d in range(device_count)]
        through = [
            ends[d]
            + max(
                (sight.tail[x] + (send if sight.home[x] != d else 0.0) for x, send in outputs[v]),
                default=0.0,
            )
            for d in range(device_count)
        ]
        near = [
            sum(send for x, send in outputs[v] if sight.home[x] == d) for d in range(device_count)
        ]
        cost = arrays.device_cost[v]
        priced = cost * prices
        value = [
            -2.0 * min((ends[d] - min(ends)) / scale, 10.0)
            + w[0] * (sight.home[v] == d)
            + w[1] * log((through[d] - min(through)) / scale)
            + w[2] * min((through[d] - min(through)) / scale, FARTHEST)
            + w[3] * log((cost[d] - cost.min()) / scale)
            + w[4] * log((priced[d] - priced.min()) / scale)
            + w[5] * near[d] / max(sum(near), 1e-300)
            for d in range(device_count)
        ]
        d = int(np.argmax(value))
        home[v], finish[v], free[d] = d, ends[d], ends[d]
    return [home[v] for v in range(count)]


@pytest.mark.parametrize("seed", range(6))
def test_decodes_in_sight_equal_their_plain_twin(seed: int) -> None:
    problem = random_problem(seed, ops=25, unequal=seed % 2 == 1, sharing="none")
    evaluator = Evaluator(problem)
    _, start = random_plan(evaluator, seed)
    weights = np.random.default_rng(seed).normal(0.0, 1.0, SIGHT_COUNT)
    devices, _, _ = evaluator.decode(np.concatenate([HEFT, weights])[None])
    twin = decoded_twin(problem, evaluator.scheduling, evaluator.sight, start, weights)
    assert devices[0].tolist() == twin


def test_nothing_of_a_sight_is_left_for_decodes_without_one() -> None:
    problem = random_problem(2, ops=40, unequal=True)
    evaluator = Evaluator(problem)
    random_plan(evaluator, 2)
    rng = np.random.default_rng(2)
    plain, sighted = rng.normal(size=(4, WEIGHT_COUNT)), rng.normal(size=SIGHT_COUNT)
    fresh, _, _ = Evaluator(problem).decode(plain)
    for row, expected in zip(plain, fresh, strict=True):
        evaluator.decode(np.concatenate([row, 3.0 * sighted])[None])
        devices, _, _ = evaluator.decode(row[None])
        assert devices[0].tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_is_repeated_where_its_devices_weigh_most(seed: int) -> None:
    problem = random_problem(seed, unequal=True)
    evaluator = Evaluator(problem)
    plan, _ = random_plan(evaluator, seed)
    devices, _, _ = evaluator.decode(np.concatenate([HEFT, REPEAT])[None])
    assert devices[0].tolist() == plan.tolist()


def test_decodes_in_sight_keep_groups_and_limits_and_order() -> None:
    for seed in range(8):
        problem = random_problem(seed, devices=4, groups=True, pins=True, unequal=True)
        evaluator = Evaluator(problem)
        evaluator.look_at(evaluator.candidate(Kind.OTHER, *_decoded(evaluator, HEFT)))
        rng = np.random.default_rng(seed)
        rows = rng.normal(0.0, 1.0, (5, WEIGHT_COUNT + SIGHT_COUNT))
        decoded, priority, _ = evaluator.decode(rows)
        graph = problem.graph
        source = np.repeat(np.arange(problem.op_count), np.diff(graph.successor_start))
        for row, order in zip(decoded, priority, strict=True):
            assert keeps_groups(problem, row)
            assert keeps_limits(problem, row)
            assert (order[source] > order[graph.successors]).all()


def _decoded(evaluator: Evaluator, weights: Floats) -> tuple[Ints, Floats]:
    devices, priority, _ = evaluator.decode(weights[None])
    return devices[0], priority[0]


def test_without_a_plan_or_advantages_the_weights_of_a_sight_do_not_matter() -> None:
    problem = random_problem(5)
    evaluator = Evaluator(problem)
    assert evaluator.sight.equal_devices
    plain, order = _decoded(evaluator, HEFT)
    weights = np.zeros(SIGHT_COUNT)
    weights[OF_PLAN[:4]] = 1.0
    devices, priority = _decoded(evaluator, np.concatenate([HEFT, weights]))
    assert devices.tolist() == plain.tolist()
    assert priority.tolist() == order.tolist()


def test_prices_leave_every_op_to_the_device_with_the_comparative_advantage() -> None:
    # Device 0 is better at both kinds of ops: 3 times at the first, 1.5 times at the second.
    cost = np.array([[2.0, 6.0]] * 10 + [[2.0, 3.0]] * 10)
    price = device_prices(cost, np.ones((20, 2), np.bool_))
    assert (cost * price).argmin(axis=1).tolist() == [0] * 10 + [1] * 10


@pytest.mark.parametrize("seed", range(3))
def test_prices_prove_most_of_a_planted_optimum(seed: int) -> None:
    made = planted(
        np.random.default_rng(seed), devices=3, prices=(1.0, 2.0, 3.0), premium=0.5 * seed
    )
    graph = GraphArrays.from_graph(made.graph)
    cost = np.stack([graph.costs_for(f"device:{d}") for d in range(3)], axis=1)
    price = device_prices(cost, np.ones(cost.shape, np.bool_))
    assert price.mean() == pytest.approx(1.0)
    proved_s = float((cost * price).min(axis=1).sum()) / 3
    assert 0.97 * made.step_s < proved_s <= made.step_s * (1 + 1e-4)
