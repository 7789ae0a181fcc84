from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.hardware.cluster import RANGES, SHARINGS, Sharing
from envs.problem import HORIZON_NS, Floats, Problem
from envs.simulator.max_load import max_load_ns
from graphs.graph import ANY_KIND, LARGEST_BYTES, GraphArrays, add_edge, add_op, new_graph
from placer.search.annealing.step_time import StepTimeAnnealing
from placer.search.evaluator import Evaluator
from placer.search.heuristics import heuristics
from placer.search.list_scheduler.arrays import (
    LONGEST_UNSCALED,
    SCALED_OPS,
    SchedulingArrays,
    scheduling_arrays,
)
from placer.search.list_scheduler.decoder import HEFT, WEIGHT_COUNT, decode, decode_batch
from tests.helpers.decoder_twin import decoded_twin
from tests.helpers.random_problems import keeps_groups, keeps_limits, random_problem
from tests.helpers.simulator_cases import fork, one_kind


def heft_twin(problem: Problem) -> tuple[list[int], list[int]]:
    """Return devices and order of ops by HEFT on first-come links, in plain Python."""
    graph, devices = problem.graph, range(problem.device_count)
    count = problem.op_count
    inputs: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    outputs: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for u in range(count):
        for k in range(graph.successor_start[u], graph.successor_start[u + 1]):
            v, size = int(graph.successors[k]), int(graph.edge_bytes[k])
            outputs[u].append((v, size))
            inputs[v].append((u, size))

    def send_ns(size: int, s: int, d: int) -> float:
        return float(
            problem.latency_s[s, d] * 1e9 + size * (1e9 / problem.bandwidth_bytes_per_s[s, d])
        )

    def mean_send_ns(size: int) -> float:
        return send_ns(size, 0, 1) * (1 - 1 / len(devices))  # all links are equal here

    level = [0.0] * count
    for u in reversed(graph.topological.tolist()):
        mean = sum(problem.cost_ns[u].tolist()) / len(devices)
        level[u] = mean + max((mean_send_ns(b) + level[v] for v, b in outputs[u]), default=0.0)

    home: dict[int, int] = {}
    finish: dict[int, float] = {}
    arrived: dict[tuple[int, int], float] = {}
    free = dict.fromkeys(devices, 0.0)
    queue = dict.fromkeys(range(problem.queue_count), 0.0)
    order: list[int] = []

    def arrival(u: int, size: int, d: int) -> float:
        if home[u] == d:
            return finish[u]
        if (u, d) in arrived:
            return arrived[u, d]
        q = int(problem.queue[home[u], d])
        begin = max(finish[u], queue[q]) if q >= 0 else finish[u]
        return begin + send_ns(size, home[u], d)

    while len(order) < count:
        ready = [v for v in range(count) if v not in home and all(u in home for u, _ in inputs[v])]
        v = max(ready, key=lambda i: (level[i], -i))
        ends = {
            d: max([free[d], *(arrival(u, b, d) for u, b in inputs[v])]) + problem.cost_ns[v, d]
            for d in devices
        }
        d = min(devices, key=lambda k: (ends[k], k))
        begin = free[d]
        for u, size in inputs[v]:
            at = arrival(u, size, d)
            if home[u] != d and (u, d) not in arrived:
                arrived[u, d] = at
                if problem.queue[home[u], d] >= 0:
                    queue[int(problem.queue[home[u], d])] = at
            begin = max(begin, at)
        finish[v] = free[d] = begin + float(problem.cost_ns[v, d])
        home[v] = d
        order.append(v)
    return [home[v] for v in range(count)], order


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("seed", range(6))
def test_heft_weights_decode_to_what_plain_heft_finds(seed: int, sharing: Sharing) -> None:
    problem = random_problem(seed, devices=2 + seed % 3, unequal=seed % 2 == 1, sharing=sharing)
    devices, order = heft_twin(problem)
    decoded, priority = decode(scheduling_arrays(problem), HEFT)
    assert decoded.tolist() == devices
    assert np.argsort(-priority).tolist() == order


@pytest.mark.slow_repeats
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 7, 8, 9, 16, 17])
def test_decodes_are_those_of_the_slow_twin_with_every_feature(
    devices: int, sharing: Sharing
) -> None:
    pins = devices % 2 == 1  # without, any op may run anywhere
    problem = random_problem(devices, devices=devices, unequal=True, pins=pins, sharing=sharing)
    arrays, rng = scheduling_arrays(problem), np.random.default_rng(devices)
    rows = rng.normal(size=(6, WEIGHT_COUNT))
    rows[3:] *= rng.random((3, WEIGHT_COUNT)) < 0.4  # most have no weight
    decoded, priority = decode_batch(arrays, rows)
    for k, row in enumerate(rows):
        expected, order = decoded_twin(arrays, row)
        assert decoded[k].tolist() == expected
        assert np.argsort(-priority[k]).tolist() == order


def blocks_in_a_row(count: int) -> SchedulingArrays:
    """Return equal blocks of six ops: one, four beside each other, and one."""
    graph = new_graph("blocks")
    for k in range(count):
        for v, cost in enumerate([1.0, 2.0, 5.0, 1.0, 3.0, 1.0]):
            size = int(1e9 * (v + 1))
            add_op(graph, f"{k}.{v}", cost_s={ANY_KIND: cost}, output_bytes=size)
        for v in range(1, 5):
            add_edge(graph, f"{k}.0", f"{k}.{v}")
            add_edge(graph, f"{k}.{v}", f"{k}.5")
        if k:
            add_edge(graph, f"{k - 1}.5", f"{k}.0")
    return scheduling_arrays(Problem.of(GraphArrays.from_graph(graph), one_kind(2)))


def test_features_of_single_ops_count_less_only_on_long_large_graphs() -> None:
    shortest, short, long = (blocks_in_a_row(count) for count in (6, SCALED_OPS // 6, 1000))
    assert len(short.cost) < SCALED_OPS < len(long.cost)
    assert shortest.critical_path < LONGEST_UNSCALED * shortest.scale < short.critical_path
    of_block = slice(6, 12)
    single = [0, 1, 4, 5, 6]
    expected = short.op_features[single, of_block]
    assert (shortest.op_features[single, of_block] == expected).all()
    scaled = long.op_features[single, of_block] * long.critical_path / long.scale
    assert scaled / LONGEST_UNSCALED == pytest.approx(expected, rel=1e-4)
    slack = short.op_features[3, of_block] * short.critical_path
    assert long.op_features[3, of_block] * long.critical_path == pytest.approx(slack, rel=1e-2)


def test_features_of_single_ops_order_those_of_long_and_longer_graphs_alike() -> None:
    def orders(arrays: SchedulingArrays, weight: float) -> set[tuple[int, ...]]:
        scores = arrays.order_base + weight * arrays.op_features[0]
        blocks = (-scores).reshape(-1, 6)[:-1].round(6)
        return {tuple(block) for block in blocks.argsort(axis=1, kind="stable").tolist()}

    weights = [-0.4, -0.3, -0.2, -0.1, 0.0]
    long, longer = blocks_in_a_row(SCALED_OPS // 6 + 1), blocks_in_a_row(SCALED_OPS)
    assert long.critical_path > LONGEST_UNSCALED * long.scale
    of_long = [orders(long, weight) for weight in weights]
    assert [len(found) for found in of_long] == [1] * len(weights)
    assert len(set.union(*of_long)) > 2
    assert [orders(longer, weight) for weight in weights] == of_long


@pytest.mark.slow_repeats
@pytest.mark.parametrize("spread", [0.0, 1e-30, 1.0, 1e30])
def test_ops_are_sorted_as_by_a_stable_sort(spread: float) -> None:
    count = 5000  # more than 64 words of ready ops
    problem = scheduling_arrays(random_problem(0, ops=count))
    scores = np.random.default_rng(0).integers(-9, 9, count) * spread
    alike = problem._replace(
        order_base=scores.astype(np.float32),
        predecessor_start=np.zeros(count + 1, np.int32),
        successor_start=np.zeros(count + 1, np.int32),
    )
    _, priority = decode(alike, np.zeros(WEIGHT_COUNT))
    assert np.argsort(-priority).tolist() == np.argsort(-scores, kind="stable").tolist()


def test_ops_are_sorted_by_scores_of_any_size_and_sign() -> None:
    scores = np.array([-1e38, 2.0, 0.0, 1e-45, -2.0, -0.0, -1e-45, 1e38])
    problem = scheduling_arrays(random_problem(0, ops=len(scores)))
    free = np.zeros(len(scores) + 1, np.int32)
    alike = problem._replace(
        order_base=scores.astype(np.float32), predecessor_start=free, successor_start=free.copy()
    )
    _, priority = decode(alike, np.zeros(WEIGHT_COUNT))
    assert np.argsort(-priority).tolist() == [7, 1, 3, 2, 5, 6, 4, 0]


weights = st.lists(st.floats(-3, 3), min_size=WEIGHT_COUNT, max_size=WEIGHT_COUNT)


@settings(max_examples=40)
@given(weights, st.integers(0, 1000), st.integers(1, 5))
def test_any_weights_keep_groups_and_limits_and_order(
    values: list[float], seed: int, devices: int
) -> None:
    problem = random_problem(seed, devices=devices, groups=True, pins=True, unequal=True)
    decoded, priority = decode(scheduling_arrays(problem), np.array(values))
    assert keeps_groups(problem, decoded)
    assert keeps_limits(problem, decoded)
    assert sorted(priority.tolist()) == list(range(1, problem.op_count + 1))
    graph = problem.graph
    source = np.repeat(np.arange(problem.op_count), np.diff(graph.successor_start))
    assert (priority[source] > priority[graph.successors]).all()


@settings(max_examples=20)
@given(weights, st.integers(0, 1000))
def test_a_batch_decodes_each_row_alone(values: list[float], seed: int) -> None:
    problem = scheduling_arrays(random_problem(seed))
    rows = np.stack([HEFT, np.array(values), HEFT])
    devices, priority = decode_batch(problem, rows)
    for row in range(3):
        alone = decode(problem, rows[row])
        assert (devices[row] == alone[0]).all()
        assert (priority[row] == alone[1]).all()


def test_a_full_device_is_left_out_where_another_has_room() -> None:
    roomy = random_problem(3, devices=2)
    parameters = int(roomy.graph.parameter_bytes.sum())
    tight = random_problem(3, devices=2, memory_bytes=int(0.8 * parameters))
    devices, _ = decode(scheduling_arrays(tight), np.zeros(WEIGHT_COUNT))
    held = np.bincount(devices, tight.graph.parameter_bytes, 2)
    assert held.max() <= 0.8 * parameters
    devices, _ = decode(scheduling_arrays(roomy), np.zeros(WEIGHT_COUNT))
    assert (devices == 0).all()


@pytest.mark.parametrize(
    "weights", [np.zeros((3, 20)), np.zeros(21), np.zeros((2, 3, 21)), np.full((1, 21), np.nan)]
)
def test_weights_of_another_shape_or_that_are_not_finite_are_refused(weights: Floats) -> None:
    with pytest.raises(ValueError, match=r"shape|finite"):
        decode_batch(scheduling_arrays(random_problem(0)), weights)


def large_edge(**link: Any) -> Problem:
    """Return a fork on two devices with one edge of the largest size and the others of 0 bytes."""
    graph = fork(3, moved=0)
    graph.edges["s", "0"]["bytes"] = LARGEST_BYTES
    cluster = one_kind(2, **{"latency_s": 0.0, "bandwidth_bytes_per_s": 1.0} | link)
    return Problem.of(GraphArrays.from_graph(graph), cluster)


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("key", ["latency_s", "bandwidth_bytes_per_s"])
def test_links_at_the_ends_of_their_ranges_are_searched_and_simulated(key: str, end: int) -> None:
    problem = large_edge(**{key: RANGES[key][end]})
    evaluator = Evaluator(problem)
    for plan in heuristics(evaluator):
        assert set(plan.devices.tolist()) <= {0, 1}
    run = StepTimeAnnealing(evaluator, heuristics(evaluator)[0], seed=0)
    run.run(50, first=0, total=50)
    assert run.best().step_ns <= heuristics(evaluator)[0].step_ns == 4000
    assert 0 <= problem.transfer_ns(LARGEST_BYTES, 0, 1) <= HORIZON_NS
    assert max_load_ns(problem, np.zeros((1, 4), np.int32)).tolist() == [4000]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_decoders_choose_devices_even_where_times_are_no_numbers(value: float) -> None:
    scheduling = Evaluator(large_edge()).scheduling
    scheduling.latency[:] = value
    devices, _ = decode(scheduling, HEFT)
    assert set(devices.tolist()) <= {0, 1}
    scheduling.allowed[:, 0] = False
    devices, _ = decode(scheduling._replace(any_device=False), HEFT)
    assert set(devices.tolist()) == {1}
