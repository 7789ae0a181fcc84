"""The compiled simulator agrees with its specification and with properties of all steps."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import product

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from envs.hardware.cluster import LINK_ORDERS, SHARINGS, Cluster
from envs.problem import Problem
from envs.simulator import (
    IGNORE_MEMORY,
    INFEASIBLE_NS,
    NO_LIMIT_NS,
    OVERFULL_NS,
    RANK_EXCESS,
    STOP_WHEN_FULL,
    Simulator,
    arrays_of,
    workspace_for,
)
from graphs.graph import GraphArrays
from tests.helpers.simulator_cases import (
    Case,
    fork,
    one_kind,
    problem_of,
    random_case,
    simulated_ns,
)
from tests.helpers.simulator_twin import twin_step


def assert_equals_twin(case: Case) -> None:
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
    assert bool(schedule.reason) != schedule.feasible
    if twin.blocked:
        assert schedule.step_ns == step_ns == INFEASIBLE_NS
        assert not any((*schedule.start_ns, *schedule.end_ns, *schedule.peak_bytes))
        assert set(schedule.cause.tolist()) == {-1}
        assert len(schedule.transfers) == 0
        return
    assert step_ns == (twin.step_ns if fits else INFEASIBLE_NS)
    assert schedule.step_ns == twin.step_ns
    without = Simulator(problem, memory=False)
    assert without.step_ns(devices, priority).tolist() == [twin.step_ns]
    assert without.work.start_ns.tolist() == schedule.start_ns.tolist()
    assert without.work.cause.tolist() == schedule.cause.tolist()
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


def goes_express(graph: nx.DiGraph[str], cluster: Cluster) -> bool:
    return arrays_of(Problem.of(GraphArrays.from_graph(graph), cluster)).express


def test_random_cases_cover_every_option() -> None:
    seen: Counter[object] = Counter()
    for seed in range(400):
        case = random_case(seed)
        graph, cluster, devices, priority = case
        problem, where, levels = problem_of(case)
        schedule = Simulator(problem).run(where, levels)
        fits = "fits" if schedule.feasible else "full"
        seen["blocked" if schedule.step_ns == INFEASIBLE_NS else fits] += 1
        seen["groups"] += sum(node["colocate"] == "g" for node in graph.nodes.values()) > 1
        seen["once"] += cluster.once_per_destination
        seen["every edge"] += not cluster.once_per_destination
        seen["launch"] += any(device.launch_s for device in cluster.devices)
        seen["two kinds"] += len({device.kind for device in cluster.devices}) > 1
        seen["load"] += problem.load is not None
        seen["loads of two hosts"] += problem.load is not None and (
            len(set(problem.load.machine[problem.load.machine >= 0].tolist())) > 1
        )
        seen["ties"] += len(set(priority)) < len(priority)
        seen["no cost"] += any(0.0 in node["cost_s"].values() for node in graph.nodes.values())
        seen["no bytes"] += any(edge["bytes"] == 0 for *_, edge in graph.edges(data=True))
        seen["held"] += any(node["saved_bytes"] for node in graph.nodes.values())
        seen["express"] += len(set(devices)) > 1 and goes_express(graph, cluster)
        seen["workspace"] += any(node["workspace_bytes"] for node in graph.nodes.values())
        for u, v in graph.edges:  # count links that carry transfers
            ends = {cluster.names[devices[list(graph).index(op)]] for op in (u, v)}
            link = cluster.link_between(*sorted(ends)) if len(ends) > 1 else None
            if link is not None:
                seen[link.sharing, link.full_duplex, link.order] += 1
                seen[link.sharing, link.full_duplex, "ports"] += bool(link.ports)
                seen["ingress"] += link.ingress
                seen["one way"] += link.one_way
                seen["infinite"] += link.bandwidth_bytes_per_s == math.inf
                seen["no latency"] += link.latency_s == 0
    links = product(SHARINGS, (True, False), LINK_ORDERS)
    ports = product(("egress", "pair"), (True, False), ("ports",))
    names = ("once", "every edge", "launch", "two kinds", "ties", "no cost", "no bytes", "held")
    more = ("load", "workspace", "infinite", "no latency", "groups", "ingress", "one way")
    expected = {*links, *ports, *names, *more, "blocked", "fits", "full"}
    assert {option for option in expected if seen[option] >= 20} == expected
    assert 100 <= seen["express"] <= 300


SEEDS = st.integers(0, 2**32)


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("large", "examples"),
    [
        (False, 300),
        (True, 8),
        pytest.param(False, 5000, marks=pytest.mark.slow),
        pytest.param(True, 200, marks=pytest.mark.slow),
    ],
)
def test_simulator_equals_its_specification(large: bool, examples: int) -> None:
    @settings(max_examples=examples)
    @given(seed=SEEDS)
    def check(seed: int) -> None:
        assert_equals_twin(random_case(seed, large=large))

    check()


@settings(max_examples=60)
@given(seed=st.integers(10**6, 10**7))
def test_a_step_fits_into_its_peaks_and_no_byte_less(seed: int) -> None:
    problem, devices, priority = problem_of(random_case(seed, bad_places=False))
    schedule = Simulator(problem).run(devices, priority)
    if not schedule.step_ns < INFEASIBLE_NS:
        return
    peaks = schedule.peak_bytes
    plenty = peaks + 2**40  # enough memory, which is checked before the first op starts

    def measured(memory_bytes: NDArray[np.int64], memory: int) -> tuple[int, list[int]]:
        """Return the step and the bytes missing on every device."""
        arrays = arrays_of(replace(problem, memory_bytes=memory_bytes))
        work = workspace_for(problem)
        step_ns = simulated_ns(arrays, work, devices, priority, memory)
        return step_ns, np.maximum(work.devices["peak_bytes"] - memory_bytes, 0).tolist()

    nothing = [0] * len(peaks)
    for room in (peaks, plenty):
        assert measured(room, STOP_WHEN_FULL)[0] == schedule.step_ns
        assert measured(room, RANK_EXCESS) == (schedule.step_ns, nothing)
    for d in np.flatnonzero(peaks):
        less = peaks - (np.arange(len(peaks)) == d)
        assert measured(less, STOP_WHEN_FULL)[0] == INFEASIBLE_NS
        cost_ns, missing = measured(less, RANK_EXCESS)
        assert cost_ns >= OVERFULL_NS
        assert missing == (peaks - less).tolist()


@settings(max_examples=130)
@given(
    seed=st.integers(10**6, 10**7),
    share=st.floats(0, 1.2),
    memory=st.sampled_from([IGNORE_MEMORY, STOP_WHEN_FULL, RANK_EXCESS]),
)
def test_an_aborted_step_is_above_the_limit_and_any_other_exact(
    seed: int, share: float, memory: int
) -> None:
    problem, devices, priority = problem_of(random_case(seed))
    arrays, work = arrays_of(problem), workspace_for(problem)

    def step_ns(limit_ns: int) -> int:
        return simulated_ns(arrays, work, devices, priority, memory, limit_ns)

    exact = step_ns(NO_LIMIT_NS)
    if exact == INFEASIBLE_NS:
        return
    limit_ns = int(exact * share)
    answer = step_ns(limit_ns)
    assert answer == exact if exact <= limit_ns else answer > limit_ns
    assert step_ns(exact) == exact  # an aborted step leaves no state


@settings(max_examples=40)
@given(seed=st.integers(10**6, 10**7), threads=st.integers(2, 5), rows=st.integers(1, 50))
def test_a_batch_gives_what_single_placements_give_in_any_number_of_threads(
    seed: int, threads: int, rows: int
) -> None:
    problem, _, _ = problem_of(random_case(seed))
    rng = np.random.default_rng(seed)
    shape = (rows, problem.op_count)
    devices = rng.integers(0, problem.device_count, shape).astype(np.int32)
    priority = rng.integers(0, 4, shape).astype(np.float64)
    devices.setflags(write=False)
    one, many = Simulator(problem), Simulator(problem, threads=threads)
    alone = [one.step_ns(d, p)[0] for d, p in zip(devices, priority, strict=True)]
    assert one.step_ns(devices, priority).tolist() == alone
    for _ in range(2):
        assert many.step_ns(devices, priority).tolist() == alone


def test_a_step_of_centuries_is_refused_by_every_thread() -> None:
    problem, devices, priority = problem_of(
        (fork(1), one_kind(2, bandwidth_bytes_per_s=1e-9), [0, 1], [0.0, 0.0])
    )
    rows = np.tile(devices, (9, 1))
    rows[:8] = 0
    rows[5] = devices
    for threads in (1, 2, 4):
        with pytest.raises(ValueError, match=r"placement 5 of 9: a step of .* more than"):
            Simulator(problem, threads=threads).step_ns(rows, np.tile(priority, (9, 1)))
    with pytest.raises(ValueError, match=r"^a step of 'fork' takes more than"):
        Simulator(problem).step_ns(devices, priority)
    with pytest.raises(ValueError, match="threads is 0"):
        Simulator(problem, threads=0)
