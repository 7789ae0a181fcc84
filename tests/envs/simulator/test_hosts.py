"""Host threads in the simulator: hand-checked steps, and its plain specification."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.hardware.cluster import Cluster, Device, Link
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
from envs.simulator.max_load import loads_of
from envs.simulator.schedule import issue_order, repeats
from envs.simulator.trace import chrome_trace
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from placer.search.candidate import Kind
from placer.search.evaluator import Evaluator
from tests.helpers.host_twin import twin_host_step, twin_issue_order
from tests.helpers.simulator_cases import Case, problem_of, random_case, run, simulated_ns

SEEDS = st.integers(0, 2**32)


def host_case(seed: int, *, large: bool = False, bad_places: bool = True) -> Case:
    """Return a random case whose devices have up to three hosts, some of them none."""
    graph, cluster, devices, priority = random_case(seed, large=large, bad_places=bad_places)
    rng = random.Random(seed)
    count = rng.randint(1, 3)
    number = [rng.choice(range(count)) if rng.random() < 0.9 else -1 for _ in cluster.names]
    number[0] = 0
    hosts = tuple(
        Host(devices=named, overlap=rng.random() < 0.5)
        for k in range(count)
        if (named := tuple(n for n, at in zip(cluster.names, number, strict=True) if at == k))
    )
    return graph, replace(cluster, hosts=hosts), devices, priority


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
    assert schedule.issued.tolist() == twin_issue_order(case[0], case[3])
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


@pytest.mark.parametrize(
    ("large", "examples"),
    [(False, 600), (True, 8), pytest.param(False, 5000, marks=pytest.mark.slow)],
)
def test_hosts_equal_their_specification(large: bool, examples: int) -> None:
    @settings(max_examples=examples)
    @given(seed=SEEDS)
    def check(seed: int) -> None:
        assert_equals_twin(host_case(seed, large=large))

    check()


@settings(max_examples=60)
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
        assert schedule.issued.tolist() == twin_issue_order(graph, row)
        assert twin.blocked or schedule.step_ns == twin.step_ns


def test_random_cases_cover_hosts() -> None:
    seen: Counter[str] = Counter()
    for seed in range(900):
        case = host_case(seed)
        problem, devices, priority = problem_of(case)
        schedule = Simulator(problem).run(devices, priority)
        threads = problem.hosts
        assert threads is not None
        seen["blocked" if schedule.step_ns == INFEASIBLE_NS else "runs"] += 1
        seen["full"] += bool(schedule.reason) and schedule.step_ns < INFEASIBLE_NS
        for source, destination in zip(
            schedule.transfers.source, schedule.transfers.destination, strict=True
        ):
            ends = [bool(threads.synchronous[d]) for d in (source, destination)]
            overlap = bool(threads.overlap[source])
            one = threads.thread[source] == threads.thread[destination]
            seen[f"{ends} {overlap} {one}"] += 1
        seen["launches"] += bool(threads.launch_ns.any())
    assert min(seen.values()) >= 25, seen
    assert len(seen) >= 4 + 8


@settings(max_examples=300)
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


@settings(max_examples=150)
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


@settings(max_examples=150)
@given(seed=SEEDS)
def test_no_step_is_shorter_than_the_lower_bound(seed: int) -> None:
    problem, devices, priority = problem_of(host_case(seed, bad_places=False))
    step_ns = Simulator(problem, memory=False).run(devices, priority).step_ns
    if step_ns < INFEASIBLE_NS:
        assert lower_bound_ns(problem) <= step_ns


@settings(max_examples=200)
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


@settings(max_examples=100)
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


def machine(*, overlap: bool = False) -> Cluster:
    """Return two GPUs with launches of 10 us, and the CPU; copies of 1 byte take 100 us."""
    names = ("cuda:0", "cuda:1", "cpu")
    return Cluster(
        name="machine",
        devices=tuple(
            Device(
                name=name,
                kind=name.partition(":")[0],
                memory_bytes=10**9,
                launch_s=10e-6 if name != "cpu" else 0.0,
            )
            for name in names
        ),
        links=(
            Link(
                between=names, latency_s=100e-6, bandwidth_bytes_per_s=float("inf"), sharing="pair"
            ),
        ),
        hosts=(Host(devices=names, overlap=overlap),),
    )


def ops(costs_us: dict[str, float], edges: str = "") -> nx.DiGraph[str]:
    graph = new_graph("ops")
    for name, cost_us in costs_us.items():
        add_op(graph, name, cost_s={"*": cost_us * 1e-6}, output_bytes=1)
    for edge in edges.split():
        add_edge(graph, edge[0], edge[1])
    return graph


GPU, OTHER, CPU = 0, 1, 2


@pytest.mark.parametrize("devices", [[GPU] * 4, [GPU, OTHER] * 2])
def test_a_second_gpu_gains_nothing_where_launches_take_longest(devices: list[int]) -> None:
    schedule = run(ops(dict.fromkeys("abcd", 1.0)), machine(), devices)
    assert schedule.start_ns.tolist() == [10_000, 20_000, 30_000, 40_000]
    assert schedule.step_ns == 41_000


def test_ops_wait_in_the_queue_of_their_device() -> None:
    schedule = run(ops(dict.fromkeys("abc", 50.0)), machine(), [GPU, GPU, OTHER])
    assert schedule.start_ns.tolist() == [10_000, 60_000, 30_000]
    assert schedule.step_ns == 110_000


def test_an_op_on_the_cpu_delays_launches_that_come_after_it() -> None:
    graph = ops({"a": 5.0, "b": 200.0, "c": 5.0})
    first = run(graph, machine(), [GPU, CPU, GPU], [3.0, 2.0, 1.0])
    assert first.start_ns.tolist() == [10_000, 10_000, 220_000]
    last = run(graph, machine(), [GPU, CPU, GPU], [3.0, 1.0, 2.0])
    assert last.start_ns.tolist() == [10_000, 20_000, 20_000]
    assert (first.step_ns, last.step_ns) == (225_000, 220_000)


def test_a_copy_to_the_cpu_waits_for_the_whole_queue_and_blocks_the_thread() -> None:
    graph = ops({"a": 50.0, "b": 300.0, "c": 20.0, "d": 5.0}, "ac")
    schedule = run(graph, machine(), [GPU, GPU, CPU, OTHER], [4.0, 3.0, 2.0, 1.0])
    # b ends at 360; the copy takes 100, c 20, and only then d is launched.
    assert schedule.transfers.start_ns.tolist() == [360_000]
    assert schedule.start_ns.tolist() == [10_000, 60_000, 460_000, 490_000]
    beside = run(graph, machine(overlap=True), [GPU, GPU, CPU, OTHER], [4.0, 3.0, 2.0, 1.0])
    assert beside.transfers.start_ns.tolist() == [60_000]
    assert beside.start_ns.tolist() == [10_000, 60_000, 160_000, 190_000]


def test_a_copy_from_the_cpu_holds_the_thread_and_the_queue_of_its_destination() -> None:
    graph = ops({"a": 50.0, "b": 300.0, "c": 20.0, "d": 5.0}, "ac")
    schedule = run(graph, machine(), [CPU, GPU, GPU, OTHER], [4.0, 3.0, 2.0, 1.0])
    # b runs from 60 to 360; the copy is over at 460.
    assert schedule.start_ns.tolist() == [0, 60_000, 470_000, 480_000]


def test_a_copy_in_line_holds_the_queues_of_both_gpus() -> None:
    graph = ops({"a": 10.0, "b": 10.0, "c": 10.0, "d": 10.0}, "ab")
    schedule = run(graph, machine(), [GPU, OTHER, GPU, OTHER], [4.0, 3.0, 2.0, 1.0])
    # The copy takes from 20 to 120; the thread goes on.
    assert schedule.start_ns.tolist() == [10_000, 120_000, 120_000, 130_000]
    beside = run(graph, machine(overlap=True), [GPU, OTHER, GPU, OTHER], [4.0, 3.0, 2.0, 1.0])
    assert beside.start_ns.tolist() == [10_000, 120_000, 30_000, 130_000]


def test_a_device_without_a_host_has_a_thread_of_its_own() -> None:
    hosts = (Host(devices=("cuda:0", "cpu")),)
    schedule = run(
        ops(dict.fromkeys("abcd", 1.0)), replace(machine(), hosts=hosts), [GPU, OTHER] * 2
    )
    assert schedule.start_ns.tolist() == [10_000, 0, 20_000, 11_000]


def test_the_bound_counts_launches_of_the_thread() -> None:
    graph = ops(dict.fromkeys("abcdefgh", 1.0))
    for node in graph.nodes.values():
        node["devices"] = ("cuda:0", "cuda:1")
    problem = Problem.of(GraphArrays.from_graph(graph), machine())
    assert lower_bound_ns(problem) >= 80_000


def test_loads_count_launches() -> None:
    problem = Problem.of(GraphArrays.from_graph(ops({"a": 1.0, "b": 2.0})), machine())
    assert loads_of(problem, np.array([GPU, CPU], np.int32)).load_ns.tolist() == [11_000, 0, 2_000]


def test_the_path_names_the_launches_of_the_thread() -> None:
    graph = ops(dict.fromkeys("abc", 1.0))
    problem = Problem.of(GraphArrays.from_graph(graph), machine())
    schedule = Simulator(problem).run(np.zeros(3, np.int32), np.zeros(3))
    path = critical_path(problem, schedule)
    assert [(part.kind, part.end_ns) for part in path] == [
        ("host busy", 30_000),
        ("compute", 31_000),
    ]


def test_candidates_launch_before_ops_of_the_cpu_if_that_is_faster() -> None:
    problem = Problem.of(GraphArrays.from_graph(ops({"a": 200.0, "b": 200.0})), machine())
    devices, priority = np.array([CPU, GPU], np.int32), np.array([2.0, 1.0])
    evaluator = Evaluator(problem)
    assert evaluator.candidate(Kind.HEFT, devices, priority).step_ns == 210_000
    existing = evaluator.candidate(Kind.WARM_START, devices, priority)
    assert existing.step_ns == 410_000
    assert existing.priority.tolist() == priority.tolist()
