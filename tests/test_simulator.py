"""The compiled simulator keeps to its specification, and to what holds for every step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_cases import one_kind, problem_of, random_case
from simulator_twin import twin_step

from envs.cluster import Cluster
from envs.simulator import (
    IGNORE_MEMORY,
    INFEASIBLE_NS,
    NO_LIMIT_NS,
    Simulator,
    arrays_of,
    simulate_core,
    workspace_for,
)

torch.set_num_threads(1)


def assert_equals_twin(seed: int) -> str:
    case = random_case(seed)
    problem, devices, priority = problem_of(case)
    twin = twin_step(*case)
    simulator = Simulator(problem)
    schedule = simulator.run(devices, priority)
    room = [device.memory_bytes for device in case[1].devices]
    fits = not any(
        peak > size for peak, size in zip(twin.peak_bytes, room, strict=not twin.blocked)
    )
    (step_ns,) = simulator.step_ns(devices, priority)
    assert schedule.feasible == (fits and not twin.blocked)
    assert bool(schedule.why) != schedule.feasible
    if twin.blocked:
        assert schedule.step_ns == step_ns == INFEASIBLE_NS
        return "blocked"
    assert step_ns == (twin.step_ns if fits else INFEASIBLE_NS)
    assert schedule.step_ns == twin.step_ns
    assert Simulator(problem, memory=False).step_ns(devices, priority).tolist() == [twin.step_ns]
    assert schedule.start_ns.tolist() == [twin.start_ns[i] for i in range(len(devices))]
    assert schedule.end_ns.tolist() == [twin.end_ns[i] for i in range(len(devices))]
    assert schedule.peak_bytes.tolist() == twin.peak_bytes
    t = schedule.transfers
    rows = zip(
        t.start_ns,
        t.producer,
        t.destination,
        t.source,
        t.request_ns,
        t.end_ns,
        t.bytes,
        strict=True,
    )
    twin_rows = [
        (s.start_ns, s.producer, s.destination, s.source, s.request_ns, s.end_ns, s.size)
        for s in twin.sendings
    ]
    assert sorted(rows) == sorted(twin_rows)
    return "fits" if fits else "full"


@pytest.mark.parametrize("block", range(10))
def test_simulator_equals_its_specification(block: int) -> None:
    kinds = [assert_equals_twin(1000 * block + seed) for seed in range(100)]
    assert {"fits", "full", "blocked"} == set(kinds)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10, 60))
def test_simulator_equals_its_specification_on_many_more_cases(block: int) -> None:
    test_simulator_equals_its_specification(block)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(10**6, 10**7))
def test_one_device_takes_the_sum_of_costs(seed: int) -> None:
    graph, cluster, _, priority = random_case(seed, bad_places=False)
    first = Cluster(name="one", devices=cluster.devices[:1])
    problem, devices, levels = problem_of((graph, first, [0] * len(graph), priority))
    simulator = Simulator(problem, memory=False)
    assert simulator.step_ns(devices, levels).tolist() == [problem.cost_ns[:, 0].sum()]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(10**6, 10**7), factor=st.sampled_from([2, 3, 10]))
def test_scaling_all_times_scales_the_step(seed: int, factor: int) -> None:
    graph, cluster, devices, priority = random_case(seed, bad_places=False)
    steps = []
    for scale in (1, factor):
        scaled = graph.copy()
        for k, op in enumerate(scaled):
            scaled.nodes[op]["cost_s"] = {"*": k * scale * 1e-6}
        between = one_kind(len(cluster), latency_s=scale * 1e-6, bandwidth_bytes_per_s=math.inf)
        problem, where, levels = problem_of((scaled, between, devices, priority))
        if not problem.allowed.all():
            return
        steps.append(Simulator(problem, memory=False).step_ns(where, levels)[0])
    assert steps[1] == steps[0] * factor


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(10**6, 10**7), share=st.floats(0, 1.2))
def test_an_aborted_step_is_above_the_limit_and_any_other_exact(seed: int, share: float) -> None:
    problem, devices, priority = problem_of(random_case(seed))
    arrays, work = arrays_of(problem), workspace_for(problem)

    def step_ns(limit_ns: int) -> int:
        return simulate_core(arrays, work, devices, priority, limit_ns, IGNORE_MEMORY)

    exact = step_ns(NO_LIMIT_NS)
    if exact == INFEASIBLE_NS:
        return
    limit_ns = int(exact * share)
    answer = step_ns(limit_ns)
    assert answer == exact if exact <= limit_ns else answer > limit_ns
    assert step_ns(exact) == exact  # an aborted step leaves nothing behind


def test_a_batch_gives_what_single_placements_give() -> None:
    rng = np.random.default_rng(0)
    problem, _, _ = problem_of(random_case(7, bad_places=False))
    shape = (40, problem.op_count)
    devices = rng.integers(0, problem.device_count, shape).astype(np.int32)
    priority = rng.integers(0, 4, shape).astype(np.float64)
    devices.setflags(write=False)
    together = Simulator(problem).step_ns(devices, priority)
    alone = [Simulator(problem).step_ns(d, p)[0] for d, p in zip(devices, priority, strict=True)]
    assert together.tolist() == alone
    assert len(set(alone)) > 1
