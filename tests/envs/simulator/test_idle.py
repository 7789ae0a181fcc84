"""Reasons for idle devices in a simulated step."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from envs.simulator import INFEASIBLE_NS, Simulator
from envs.simulator.critical_path import Holder, Idle, idle_times
from tests.helpers.simulator_cases import fork, one_kind, problem_of, random_case


def test_a_gap_is_cut_by_what_it_waits_for() -> None:
    case = (fork(2), one_kind(3, sharing="bus"), [0, 1, 2], [0.0] * 3)
    problem, devices, priority = problem_of(case)
    found = idle_times(problem, Simulator(problem).run(devices, priority))
    told = [(idle.device, idle.start_ns, idle.end_ns, idle.waiting) for idle in found]
    assert told == [
        (0, 1000, 6000, "nothing left"),
        (1, 0, 1000, "producer"),
        (1, 1000, 3000, "transfer"),
        (1, 4000, 6000, "nothing left"),
        (2, 0, 1000, "producer"),
        (2, 1000, 3000, "link busy"),
        (2, 3000, 5000, "transfer"),
    ]
    assert [(idle.producer, idle.reader) for idle in found if idle.device == 2] == [(0, 2)] * 3
    assert found[5].holder == Holder(op=0, source=0, destination=1)


def test_a_device_without_ops_has_nothing_to_do() -> None:
    problem, devices, priority = problem_of((fork(2), one_kind(2), [0, 0, 0], [0.0] * 3))
    found = idle_times(problem, Simulator(problem).run(devices, priority))
    assert found == [Idle(device=1, start_ns=0, end_ns=3000, waiting="nothing left")]


@settings(max_examples=200)
@given(seed=st.integers(0, 10**7))
def test_ops_and_idle_times_fill_the_step_of_every_device(seed: int) -> None:
    problem, devices, priority = problem_of(random_case(seed))
    schedule = Simulator(problem).run(devices, priority)
    found = idle_times(problem, schedule)
    if schedule.step_ns == INFEASIBLE_NS:
        assert found == []
        return
    for d in range(problem.device_count):
        own = [(idle.start_ns, idle.end_ns) for idle in found if idle.device == d]
        own += [
            (int(schedule.start_ns[i]), int(schedule.end_ns[i]))
            for i in range(problem.op_count)
            if devices[i] == d and schedule.end_ns[i] > schedule.start_ns[i]
        ]
        at = 0
        for start_ns, end_ns in sorted(own):
            assert start_ns == at < end_ns
            at = end_ns
        assert at == schedule.step_ns
    for idle in found:
        if idle.waiting != "nothing left":
            assert devices[idle.reader] == idle.device != devices[idle.producer]
            first, end = problem.graph.successor_start[idle.producer : idle.producer + 2]
            assert idle.reader in problem.graph.successors[first:end]
