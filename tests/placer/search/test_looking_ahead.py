"""PEFT and lookahead: the example of the papers, and plain twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.hardware.cluster import Cluster, Device, Link
from envs.problem import Floats, Ints, Problem
from envs.simulator import Simulator
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from placer.search.evaluator import Evaluator
from placer.search.list_scheduler.arrays import SchedulingArrays, scheduling_arrays
from placer.search.list_scheduler.looking_ahead import lookahead, optimistic_costs, peft
from tests.helpers.random_problems import keeps_groups, keeps_limits, random_problem

Schedule = Callable[[SchedulingArrays], tuple[Ints, Floats]]

# Figure 1 of Arabnejad and Barbosa: costs on three processors, and of communication
COSTS: Final = (
    (22, 21, 36), (22, 18, 18), (32, 27, 43), (7, 10, 4), (29, 27, 35),
    (26, 17, 24), (14, 25, 30), (29, 23, 36), (15, 21, 8), (13, 16, 33),
)  # fmt: skip
SENT: Final = {
    (1, 2): 17, (1, 3): 31, (1, 4): 29, (1, 5): 13, (1, 6): 7, (2, 8): 3, (2, 9): 30, (3, 7): 16,
    (4, 8): 11, (4, 9): 7, (5, 9): 57, (6, 8): 5, (7, 10): 9, (8, 10): 42, (9, 10): 7,
}  # fmt: skip


def published() -> Problem:
    """Return the example in microseconds."""
    graph = new_graph("figure 1")
    for task, costs in enumerate(COSTS, 1):
        add_op(graph, str(task), cost_s={f"p{k}": cost / 1e6 for k, cost in enumerate(costs)})
    for (source, target), cost in SENT.items():
        add_edge(graph, str(source), str(target), cost)
    names = ("p0", "p1", "p2")
    link = Link(between=names, latency_s=0.0, bandwidth_bytes_per_s=1e6, sharing="none")
    devices = tuple(Device(name=name, kind=name, memory_bytes=10**9) for name in names)
    cluster = Cluster(name="figure 1", devices=devices, links=(link,), once_per_destination=False)
    return Problem.of(GraphArrays.from_graph(graph), cluster)


def test_the_optimistic_costs_of_the_published_example() -> None:
    found = optimistic_costs(scheduling_arrays(published())) / 1e3
    assert found.round(6).tolist() == [
        [64, 68, 86], [42, 39, 42], [27, 41, 43], [42, 39, 50], [28, 37, 28],
        [42, 39, 44], [13, 16, 22], [13, 16, 33], [13, 16, 20], [0, 0, 0],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "expected", "makespan_us"),
    [
        (peft, [0, 0, 0, 0, 2, 1, 0, 1, 2, 1], 122),
        # Published as 127: the simulator lets task 9, which is ready, run before task 8.
        (lookahead, [1, 1, 0, 2, 1, 2, 0, 1, 1, 1], 126),
    ],
)
def test_the_published_example_is_placed_as_published(
    schedule: Schedule, expected: list[int], makespan_us: int
) -> None:
    problem = published()
    rank_us: dict[int, float] = {}
    for task in range(10, 0, -1):  # as published: a transfer counts in full
        rest = [cost + rank_us[v] for (u, v), cost in SENT.items() if u == task]
        rank_us[task] = sum(COSTS[task - 1]) / 3 + max(rest, default=0.0)
    ranks = 1e3 * np.array([rank_us[task] for task in range(1, 11)])
    arrays = scheduling_arrays(problem)._replace(bottom_level=ranks)
    devices, priority = schedule(arrays)
    assert devices.tolist() == expected
    assert Simulator(problem).run(devices, priority).step_ns == 1000 * makespan_us


class Twin:
    """Plain list scheduling on links that never queue."""

    def __init__(self, problem: Problem) -> None:
        graph, count = problem.graph, problem.op_count
        self.problem, self.count = problem, count
        self.devices = range(problem.device_count)
        self.cost = problem.cost_ns.tolist()
        self.reads: list[dict[int, int]] = [{} for _ in range(count)]
        self.readers: list[list[int]] = [[] for _ in range(count)]
        for u in range(count):
            for k in range(graph.successor_start[u], graph.successor_start[u + 1]):
                v = int(graph.successors[k])
                self.reads[v][u] = int(graph.edge_bytes[k])
                self.readers[u].append(v)
        self.home: dict[int, int] = {}
        self.finish: dict[int, float] = {}
        self.free = [0.0 for _ in self.devices]

    def sending_ns(self, size: int) -> float:
        latency_s, rate = self.problem.latency_s[0, 1], self.problem.bandwidth_bytes_per_s[0, 1]
        return float(latency_s * 1e9 + size * (1e9 / rate))  # all links are equal here

    def optimistic(self) -> list[list[float]]:
        table = [[0.0 for _ in self.devices] for _ in range(self.count)]
        for u in reversed(self.problem.graph.topological.tolist()):
            for d in self.devices:
                ends = [
                    min(
                        table[v][e]
                        + self.cost[v][e]
                        + (0.0 if e == d else self.sending_ns(self.reads[v][u]))
                        for e in self.devices
                    )
                    for v in self.readers[u]
                ]
                table[u][d] = max(ends, default=0.0)
        return table

    def data_ns(self, v: int, d: int) -> float:
        """Return when the inputs of an op that are placed arrive on a device."""
        return max(
            (
                self.finish[u] + (0.0 if self.home[u] == d else self.sending_ns(size))
                for u, size in self.reads[v].items()
                if u in self.home
            ),
            default=0.0,
        )

    def end_ns(self, v: int, d: int) -> float:
        return max(self.free[d], self.data_ns(v, d)) + float(self.cost[v][d])

    def last_reader_ns(self, v: int, d: int) -> float:
        """Return when the last reader of an op could end, each alone, if the op runs there."""
        if not self.readers[v]:
            return self.end_ns(v, d)
        free, end = self.free[d], self.end_ns(v, d)
        self.home[v], self.finish[v], self.free[d] = d, end, end
        last = max(min(self.end_ns(w, e) for e in self.devices) for w in self.readers[v])
        del self.home[v], self.finish[v]
        self.free[d] = free
        return last

    def run(self, rank: list[float], value: Callable[[int, int], float]) -> list[int]:
        while len(self.home) < self.count:
            ready = [
                v
                for v in range(self.count)
                if v not in self.home and self.reads[v].keys() <= self.home.keys()
            ]
            v = max(ready, key=lambda v: (rank[v], -v))
            d = min(self.devices, key=lambda d: value(v, d))
            end = self.end_ns(v, d)
            self.home[v], self.finish[v], self.free[d] = d, end, end
        return [self.home[v] for v in range(self.count)]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), devices=st.integers(2, 4), unequal=st.booleans())
def test_they_equal_their_plain_twins(seed: int, devices: int, unequal: bool) -> None:
    problem = random_problem(seed, ops=25, devices=devices, unequal=unequal, sharing="none")
    arrays, twin = scheduling_arrays(problem), Twin(problem)
    table = twin.optimistic()
    assert optimistic_costs(arrays) == pytest.approx(np.array(table))
    rank = [sum(row) / devices for row in table]
    assert peft(arrays)[0].tolist() == twin.run(rank, lambda v, d: twin.end_ns(v, d) + table[v][d])
    ahead = Twin(problem)
    level = arrays.bottom_level.tolist()
    assert lookahead(arrays)[0].tolist() == ahead.run(level, ahead.last_reader_ns)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), groups=st.booleans(), pins=st.booleans())
def test_they_keep_groups_and_limits(seed: int, groups: bool, pins: bool) -> None:
    problem = random_problem(seed, ops=30, groups=groups, pins=pins, unequal=True)
    for schedule in (peft, lookahead):
        devices, priority = schedule(Evaluator(problem).scheduling)
        assert keeps_groups(problem, devices)
        assert keeps_limits(problem, devices)
        assert sorted(priority.tolist()) == list(range(1, 31))
