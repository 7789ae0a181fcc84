"""The critical path of a simulated step, and what it waits for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_cases import fork, one_kind, problem_of, random_case

from envs.simulator import INFEASIBLE_NS, Simulator
from envs.simulator.critical import critical_path, critical_path_to_list


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


def test_a_path_tells_when_an_op_waited_for_its_device() -> None:
    problem, devices, priority = problem_of((fork(2), one_kind(1), [0, 0, 0], [0.0] * 3))
    path = critical_path(problem, Simulator(problem).run(devices, priority))
    assert [(p.op, p.after) for p in path] == [(0, "start"), (1, "input"), (2, "device busy")]
    assert critical_path_to_list(problem, path)[0]["device"] == "d0"


@settings(max_examples=200, deadline=None)
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
