"""Host threads in the simulator equal their plain specification."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.hardware.cluster import Cluster
from envs.hardware.host import Host
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
from envs.simulator.bounds import lower_bound_ns
from envs.simulator.critical_path import critical_path, idle_times
from envs.simulator.schedule import issue_order, repeats
from envs.simulator.trace import chrome_trace
from graphs.graph import GraphArrays
from tests.helpers.host_twin import twin_host_step, twin_issue_order
from tests.helpers.simulator_cases import Case, problem_of, random_case, simulated_ns

SEEDS = st.integers(0, 2**32)


def host_case(seed: int, *, large: bool = False, bad_places: bool = True) -> Case:
    """Return a random case whose devices have up to three hosts, some of them none."""
    graph, cluster, devices, priority = random_case(seed, large=large, bad_places=bad_places)
    rng = random.Random(seed)
    count = rng.randint(1, 3)
    number = [rng.choice(range(count)) if rng.random() < 0.9 else -1 for _ in cluster.names]
    number[0] = 0
    by_autograd = rng.random() < 0.5
    if by_autograd:
        graph = with_backward_pass(rng, graph)
    hosts = tuple(
        Host(devices=named, overlap=rng.random() < 0.5, autograd=by_autograd)
        for k in range(count)
        if (named := tuple(n for n, at in zip(cluster.names, number, strict=True) if at == k))
    )
    rated = tuple(
        replace(device, bandwidth_bytes_per_s=rng.choice([math.nan, 4e9, 1.7e10]))
        for device in cluster.devices
    )
    cluster = replace(cluster, devices=rated, hosts=hosts)
    for _, node in graph.nodes(data=True):
        known = [kind for kind in node["cost_s"] if rng.random() < 0.3]
        node["launch_s"] = {kind: rng.choice([0.0, 1e-6, 1.37e-5]) for kind in known}
    if rng.random() < 0.6:
        graph, cluster = with_large_tensors(graph, cluster, 1 << rng.randint(11, 17))
    return graph, cluster, devices, priority


def with_large_tensors(
    graph: nx.DiGraph[str], cluster: Cluster, factor: int
) -> tuple[nx.DiGraph[str], Cluster]:
    """Return both with so much more bytes, and so much faster links, that copies take as long."""
    graph = graph.copy()
    for _, node in graph.nodes(data=True):
        for name in node:
            if name.endswith("_bytes"):
                node[name] *= factor
    for *_, edge in graph.edges(data=True):
        edge["bytes"] *= factor
    return graph, replace(
        cluster,
        devices=tuple(replace(d, memory_bytes=d.memory_bytes * factor) for d in cluster.devices),
        links=tuple(
            replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor)
            for link in cluster.links
        ),
    )


def with_backward_pass(rng: random.Random, graph: nx.DiGraph[str]) -> nx.DiGraph[str]:
    """Return the graph with ops of a backward pass at its end, most named after a forward op."""
    ids = list(nx.lexicographical_topological_sort(graph))
    count = rng.randint(0, len(ids))
    forward, backward = ids[:count], ids[count:]
    names = {op: f"m:{op}" for op in forward}
    for op in backward:
        of = rng.choice([None, *forward])
        graph.nodes[op]["phase"] = rng.choice(["backward", "backward", "optimizer"])
        names[op] = f"m:backward/{of}" if of else op
    for op in forward:
        graph.nodes[op]["phase"] = "backward" if rng.random() < 0.05 else "forward"
    seen: set[str] = set()
    for op, name in names.items():
        names[op] = op if name in seen else name
        seen.add(name)
    renamed: nx.DiGraph[str] = nx.relabel_nodes(graph, names)
    return renamed


def assert_equals_twin(case: Case) -> None:
    problem, devices, priority = problem_of(case)
    twin = twin_host_step(*case)
    schedule = Simulator(problem).run(devices, priority)
    if twin.blocked:
        assert schedule.step_ns == INFEASIBLE_NS
        return
    count = range(len(devices))
    assert schedule.step_ns == twin.step_ns
    assert schedule.start_ns.tolist() == [twin.start_ns[i] for i in count]
    assert schedule.end_ns.tolist() == [twin.end_ns[i] for i in count]
    assert schedule.peak_bytes.tolist() == twin.peak_bytes
    assert schedule.issued is not None
    assert schedule.issued.tolist() == twin_issue_order(case[0], case[1], case[3])
    fits = bool((schedule.peak_bytes <= problem.memory_bytes).all())
    assert schedule.feasible == fits
    (step_ns,) = Simulator(problem).step_ns(devices, priority)
    assert step_ns == (twin.step_ns if fits else INFEASIBLE_NS)
    assert Simulator(problem, memory=False).step_ns(devices, priority) == [twin.step_ns]
    t = schedule.transfers
    rows = zip(t.start_ns, t.producer, t.destination, t.request_ns, t.end_ns, t.bytes, strict=True)
    assert sorted(rows) == sorted(
        (s.start_ns, s.producer, s.destination, s.request_ns, s.end_ns, s.size)
        for s in twin.sendings
    )
    for i in count:  # causes come earlier
        cause = int(schedule.cause[i])
        assert cause < 0 or schedule.end_ns[cause] <= schedule.start_ns[i]


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("large", "examples"),
    [(False, 200), (True, 4), pytest.param(False, 5000, marks=pytest.mark.slow)],
)
def test_hosts_equal_their_specification(large: bool, examples: int) -> None:
    @settings(max_examples=examples)
    @given(seed=SEEDS)
    def check(seed: int) -> None:
        assert_equals_twin(host_case(seed, large=large))

    check()


@settings(max_examples=20)
@given(seed=SEEDS)
def test_one_simulator_takes_other_priorities_and_back(seed: int) -> None:
    graph, cluster, devices, priority = host_case(seed, bad_places=False)
    problem = Problem.of(GraphArrays.from_graph(graph), cluster)
    simulator, rng = Simulator(problem), random.Random(seed)
    other = [value + rng.choice((0.0, 0.0, 1.5)) for value in priority]
    for row in (priority, other, other, priority):
        schedule = simulator.run(np.array(devices, np.int32), np.array(row))
        twin = twin_host_step(graph, cluster, devices, row)
        assert schedule.issued is not None
        assert schedule.issued.tolist() == twin_issue_order(graph, cluster, row)
        assert twin.blocked or schedule.step_ns == twin.step_ns


def test_random_cases_cover_hosts() -> None:
    seen: Counter[str] = Counter()
    for seed in range(500):
        case = host_case(seed)
        problem, devices, priority = problem_of(case)
        schedule = Simulator(problem).run(devices, priority)
        threads = problem.hosts
        assert threads is not None
        seen["blocked" if schedule.step_ns == INFEASIBLE_NS else "runs"] += 1
        seen["full"] += bool(schedule.reason) and schedule.step_ns < INFEASIBLE_NS
        t = schedule.transfers
        for source, destination, size in zip(t.source, t.destination, t.bytes, strict=True):
            ends = [bool(threads.synchronous[d]) for d in (source, destination)]
            seen["by autograd"] += threads.autograd
            overlap = bool(threads.overlap[source])
            one = threads.thread[source] == threads.thread[destination]
            seen[f"{ends} {overlap} {one}"] += 1
            if overlap and one and ends == [True, False]:
                seen[f"above 1 MiB {size > 1 << 20}, above 64 MiB {size > 64 << 20}"] += 1
        seen["launches"] += bool(threads.launch_ns.any())
        seen["launches of ops"] += bool((threads.op_launch_ns != threads.launch_ns).any())
    assert min(seen.values()) >= 8, seen
    assert len(seen) >= 4 + 8


@settings(max_examples=100)
@given(
    seed=SEEDS,
    share=st.floats(0, 1.2),
    memory=st.sampled_from([IGNORE_MEMORY, STOP_WHEN_FULL, RANK_EXCESS]),
)
def test_an_aborted_step_is_above_the_limit_and_any_other_exact(
    seed: int, share: float, memory: int
) -> None:
    problem, devices, priority = problem_of(host_case(seed))
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


@settings(max_examples=50)
@given(seed=SEEDS)
def test_a_step_fits_into_its_peaks_and_no_byte_less(seed: int) -> None:
    problem, devices, priority = problem_of(host_case(seed, bad_places=False))
    schedule = Simulator(problem).run(devices, priority)
    if schedule.step_ns == INFEASIBLE_NS:
        return
    for less in (0, 1):
        room = np.maximum(schedule.peak_bytes - less, 0)
        short = bool((room < schedule.peak_bytes).any())
        arrays = arrays_of(replace(problem, memory_bytes=room))
        work = workspace_for(problem)
        stopped = simulated_ns(arrays, work, devices, priority, STOP_WHEN_FULL)
        assert stopped == (INFEASIBLE_NS if short else schedule.step_ns)
        ranked = simulated_ns(arrays, work, devices, priority, RANK_EXCESS)
        assert ranked >= OVERFULL_NS if short else ranked == schedule.step_ns


@settings(max_examples=50)
@given(seed=SEEDS)
def test_no_step_is_shorter_than_the_lower_bound(seed: int) -> None:
    problem, devices, priority = problem_of(host_case(seed, bad_places=False))
    step_ns = Simulator(problem, memory=False).run(devices, priority).step_ns
    if step_ns < INFEASIBLE_NS:
        assert lower_bound_ns(problem) <= step_ns


@settings(max_examples=60)
@given(seed=SEEDS)
def test_critical_path_and_idle_times_fill_the_step(seed: int) -> None:
    problem, devices, priority = problem_of(host_case(seed, bad_places=False))
    schedule = Simulator(problem).run(devices, priority)
    if schedule.step_ns == INFEASIBLE_NS:
        return
    path = critical_path(problem, schedule)
    ends = [0, *(part.end_ns for part in path)]
    assert [part.start_ns for part in path] == ends[:-1]
    assert ends[-1] == schedule.step_ns
    free_ns = schedule.step_ns * problem.device_count
    free_ns -= int((schedule.end_ns - schedule.start_ns).sum())
    idles = idle_times(problem, schedule)
    assert sum(idle.end_ns - idle.start_ns for idle in idles) == free_ns
    assert chrome_trace(problem, schedule)["traceEvents"]


@settings(max_examples=30)
@given(seed=SEEDS)
def test_priorities_in_order_of_issue_repeat_the_schedule(seed: int) -> None:
    problem, devices, priority = problem_of(host_case(seed, bad_places=False))
    simulator = Simulator(problem)
    schedule = simulator.run(devices, priority)
    again = np.empty(len(devices))
    again[issue_order(problem, schedule)] = np.arange(len(devices), 0, -1)
    assert repeats(problem, schedule, again) or schedule.step_ns == INFEASIBLE_NS
    repeated = simulator.run(devices, again)
    assert repeated.start_ns.tolist() == schedule.start_ns.tolist()
    assert repeated.peak_bytes.tolist() == schedule.peak_bytes.tolist()
