"""The critical path of a simulated step, and the idle times of its devices."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.hardware.link_tables import NO_QUEUE
from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS, Schedule, Simulator
from envs.simulator.critical_path import (
    Holder,
    Stretch,
    critical_path,
    critical_path_to_list,
    idle_times,
)
from graphs.synthetic.flat import flat_graph
from tests.helpers.simulator_cases import fork, one_kind, problem_of, random_case


def test_a_path_tells_transfers_and_the_wait_for_their_link() -> None:
    case = (fork(2), one_kind(3, sharing="bus"), [0, 1, 2], [0.0] * 3)
    problem, devices, priority = problem_of(case)
    path = critical_path(problem, Simulator(problem).run(devices, priority))
    assert [(p.kind, p.op, p.start_ns, p.end_ns, p.after) for p in path] == [
        ("compute", 0, 0, 1000, "start"),
        ("link busy", 0, 1000, 3000, "input"),
        ("transfer", 0, 3000, 5000, "link busy"),
        ("compute", 2, 5000, 6000, "transfer"),
    ]
    assert critical_path_to_list(problem, path)[2] == {
        "kind": "transfer",
        "op": "s",
        "from": "d0",
        "to": "d2",
        "start_s": 3e-6,
        "end_s": 5e-6,
        "after": "link busy",
    }
    assert critical_path_to_list(problem, path)[1]["behind"] == {
        "op": "s",
        "from": "d0",
        "to": "d1",
    }


@settings(max_examples=60)
@given(seed=st.integers(0, 10**7))
def test_a_path_has_no_gap_from_start_to_end(seed: int) -> None:
    problem, devices, priority = problem_of(random_case(seed))
    schedule = Simulator(problem).run(devices, priority)
    path = critical_path(problem, schedule)
    if schedule.step_ns == INFEASIBLE_NS:
        assert path == []
        return
    assert path[0].start_ns == 0
    assert path[-1].end_ns == schedule.step_ns
    assert all(one.end_ns == other.start_ns for one, other in pairwise(path))
    busy = {"compute": 0, "transfer": 0, "link busy": 0}
    for part in path:
        busy[part.kind] += part.end_ns - part.start_ns
    chain = schedule.critical_chain()
    assert busy["compute"] == np.sum((schedule.end_ns - schedule.start_ns)[chain])
    for part in path:
        assert (part.holder is None) == (part.kind != "link busy" and part.after != "device busy")
        if part.holder is not None:
            assert holds(problem, schedule, part.holder, part) > 0


def holds(problem: Problem, schedule: Schedule, holder: Holder, part: Stretch) -> int:
    """Count the ops or transfers of the holder that block the part until it starts."""
    if part.kind == "compute":
        assert holder.source == holder.destination == part.source
        return int(schedule.end_ns[holder.op] == part.start_ns)
    sent = schedule.transfers

    def ports(source: int, destination: int) -> set[int]:
        queues = (problem.queue, problem.second_queue)
        return {int(queue[source, destination]) for queue in queues} - {NO_QUEUE}

    assert ports(holder.source, holder.destination) & ports(part.source, part.destination)
    same = (sent.producer == holder.op) & (sent.destination == holder.destination)
    ends = same & (sent.end_ns == part.end_ns) & (sent.start_ns < part.end_ns)
    return int(ends.sum())


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("count", "once"),
    [(50_000, True), (50_000, False), pytest.param(10**6, True, marks=pytest.mark.slow)],
)
def test_the_path_of_a_long_chain_between_two_devices_is_the_whole_chain(
    count: int, once: bool
) -> None:
    graph = flat_graph(
        "chain",
        cost_s=np.full(count, 1e-7),
        source=np.arange(count - 1),
        target=np.arange(1, count),
        output_bytes=np.ones(count, np.int64),
    )
    problem = Problem.of(graph, replace(one_kind(2), once_per_destination=once))
    devices = (np.arange(count) % 2).astype(np.int32)
    schedule = Simulator(problem).run(devices, np.zeros(count))
    assert schedule.step_ns == count * 100 + (count - 1) * 1001
    path = critical_path(problem, schedule)
    assert [part.op for part in path[::2]] == list(range(count))
    assert {part.kind for part in path[1::2]} == {"transfer"}


def test_an_idle_time_is_divided_by_what_the_device_waits_for() -> None:
    case = (fork(2), one_kind(3, sharing="bus"), [0, 1, 2], [0.0] * 3)
    problem, devices, priority = problem_of(case)
    idles = idle_times(problem, Simulator(problem).run(devices, priority))
    gaps = [(idle.device, idle.start_ns, idle.end_ns, idle.waiting) for idle in idles]
    assert gaps == [
        (0, 1000, 6000, "nothing left"),
        (1, 0, 1000, "producer"),
        (1, 1000, 3000, "transfer"),
        (1, 4000, 6000, "nothing left"),
        (2, 0, 1000, "producer"),
        (2, 1000, 3000, "link busy"),
        (2, 3000, 5000, "transfer"),
    ]
    assert [(idle.producer, idle.reader) for idle in idles if idle.device == 2] == [(0, 2)] * 3
    assert idles[5].holder == Holder(op=0, source=0, destination=1)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**7))
def test_ops_and_idle_times_fill_the_step_of_every_device(seed: int) -> None:
    problem, devices, priority = problem_of(random_case(seed))
    schedule = Simulator(problem).run(devices, priority)
    idles = idle_times(problem, schedule)
    if schedule.step_ns == INFEASIBLE_NS:
        assert idles == []
        return
    for d in range(problem.device_count):
        spans = [(idle.start_ns, idle.end_ns) for idle in idles if idle.device == d]
        spans += [
            (int(schedule.start_ns[i]), int(schedule.end_ns[i]))
            for i in range(problem.op_count)
            if devices[i] == d and schedule.end_ns[i] > schedule.start_ns[i]
        ]
        at = 0
        for start_ns, end_ns in sorted(spans):
            assert start_ns == at < end_ns
            at = end_ns
        assert at == schedule.step_ns
    for idle in idles:
        if idle.waiting != "nothing left":
            assert devices[idle.reader] == idle.device != devices[idle.producer]
            first, end = problem.graph.successor_start[idle.producer : idle.producer + 2]
            assert idle.reader in problem.graph.successors[first:end]
