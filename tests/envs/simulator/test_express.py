"""The simulator's fast path gives exactly the results of its slow path."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from envs.problem import Problem
from envs.simulator import (
    IGNORE_MEMORY,
    INFEASIBLE_NS,
    NO_LIMIT_NS,
    RANK_EXCESS,
    STOP_WHEN_FULL,
    Simulator,
    arrays_of,
    workspace_for,
)
from envs.simulator.kernel.arrays import EXPRESS
from graphs.graph import add_edge, add_op, new_graph
from tests.helpers.random_problems import random_problem
from tests.helpers.simulator_cases import fork, one_kind, problem_of, random_case, simulated_ns

SEEDS = st.integers(10**6, 10**7)


class BothWays:
    """Simulator with the fast path where it applies, and one with the slow path."""

    def __init__(self, problem: Problem) -> None:
        arrays = arrays_of(problem)
        self.memory_bytes = problem.memory_bytes
        self.ways = [
            (each, workspace_for(problem)) for each in (arrays, arrays._replace(express=False))
        ]

    def went_express(self) -> bool:
        express, not_express = (bool(work.counts[EXPRESS]) for _, work in self.ways)
        assert not not_express
        return express

    def step_ns(
        self,
        devices: NDArray[np.int32],
        priority: NDArray[np.float64],
        memory: int,
        limit_ns: int = NO_LIMIT_NS,
    ) -> int:
        """Compare all results of both paths and return the step."""
        short, long = (
            simulated_ns(arrays, work, devices, priority, memory, limit_ns)
            for arrays, work in self.ways
        )
        if limit_ns < long < INFEASIBLE_NS:
            assert short > limit_ns
            return short
        assert short == long
        if long < INFEASIBLE_NS:
            (_, one), (_, other) = self.ways
            assert one.start_ns.tolist() == other.start_ns.tolist()
            assert one.cause.tolist() == other.cause.tolist()
            assert one.end_ns.tolist() == other.end_ns.tolist()
            excess = [
                np.maximum(work.devices["peak_bytes"] - self.memory_bytes, 0).tolist()
                for work in (one, other)
            ]
            assert memory != RANK_EXCESS or excess[0] == excess[1]
        return short


@settings(max_examples=60)
@given(seed=SEEDS, shares=st.lists(st.floats(0, 1.2), max_size=4))
def test_both_ways_agree_on_every_option(seed: int, shares: list[float]) -> None:
    problem, devices, priority = problem_of(random_case(seed))
    both = BothWays(problem)
    exact = both.step_ns(devices, priority, IGNORE_MEMORY)
    for memory in (IGNORE_MEMORY, STOP_WHEN_FULL, RANK_EXCESS):
        both.step_ns(devices, priority, memory)
        for share in shares if exact < INFEASIBLE_NS else ():
            both.step_ns(devices, priority, memory, int(exact * share))


@settings(max_examples=20)
@given(seed=SEEDS, room=st.sampled_from([0.5, 1.0, 1.1, 1.5, 3.0]), excess=st.booleans())
def test_both_ways_agree_where_memory_is_tight(seed: int, room: float, excess: bool) -> None:
    problem = random_problem(seed, ops=60, devices=4)
    rng = np.random.default_rng(seed)
    devices = rng.integers(0, 4, (12, 60)).astype(np.int32)
    priority = rng.integers(0, 9, (12, 60)).astype(np.float64)
    peak_bytes = Simulator(problem).run(devices[0], priority[0]).peak_bytes
    both = BothWays(replace(problem, memory_bytes=(peak_bytes * room).astype(np.int64)))
    memory = RANK_EXCESS if excess else STOP_WHEN_FULL
    for row in range(12):
        both.step_ns(devices[row], priority[row], memory)


def test_the_express_path_follows_memory_that_does_not_hold_everything_at_once() -> None:
    graph = new_graph("chain")
    for i in range(100):
        add_op(graph, str(i), cost_s={"*": 1e-6}, output_bytes=1000)
        if i:
            add_edge(graph, str(i - 1), str(i))
    problem, devices, priority = problem_of((graph, one_kind(2), [0, 1] * 50, [0.0] * 100))
    for room, express in ((10_000, True), (2_000, True), (1_999, False)):
        both = BothWays(replace(problem, memory_bytes=np.full(2, room)))
        answer = both.step_ns(devices, priority, STOP_WHEN_FULL)
        assert both.went_express() == express
        # An op needs its output and the copy of its input on its device.
        assert (answer < INFEASIBLE_NS) == (room >= 2_000)


@pytest.mark.parametrize(("count", "express"), [(64, True), (65, False)])
def test_sets_hold_64_devices(count: int, express: bool) -> None:
    place = list(range(count))
    problem, devices, priority = problem_of(
        (fork(count - 1), one_kind(count), place[::-1], [0.0] * count)
    )
    both = BothWays(problem)
    # Each transfer in the queue takes 2 us; after the last one its op takes 1 us.
    assert both.step_ns(devices, priority, IGNORE_MEMORY) == 1000 + 2000 * (count - 1) + 1000
    assert both.went_express() == express


@pytest.mark.parametrize("cost_s", [1e-6, 0.0])  # an op that takes no time needs the full path
@pytest.mark.parametrize(
    ("link", "express"),
    [
        ({"sharing": "none"}, True),
        ({"sharing": "egress"}, True),
        ({"sharing": "pair"}, True),
        ({"sharing": "pair", "full_duplex": False}, True),
        ({"sharing": "bus"}, True),
        ({"sharing": "egress", "full_duplex": False}, False),
        ({"sharing": "bus", "order": "priority"}, False),
        ({"latency_s": 0.0, "bandwidth_bytes_per_s": float("inf")}, False),
    ],
)
def test_links_that_serve_in_order_of_request_take_the_express_path(
    link: dict[str, object], express: bool, cost_s: float
) -> None:
    graph = fork(3)
    graph.nodes["0"]["cost_s"] = {"*": cost_s}
    problem, devices, priority = problem_of((graph, one_kind(3, **link), [0, 1, 2, 1], [0.0] * 4))
    both = BothWays(problem)
    both.step_ns(devices, priority, IGNORE_MEMORY)
    assert both.went_express() == (express and cost_s > 0)
