"""Steps beyond the horizon of the compiled simulator, as public graphs with abstract times have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from envs.hardware.cluster import Cluster
from envs.problem import HORIZON_NS, Problem
from envs.simulator import INFEASIBLE_NS, Simulator
from envs.simulator.bounds import load_bound_ns, lower_bound_ns, pace_ns
from envs.simulator.critical_path import critical_path, idle_times
from envs.simulator.max_load import max_load_ns
from envs.simulator.time_units import in_units, search_unit_ns, unit_for
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from tests.helpers.simulator_cases import Case, fork, one_kind, problem_of, random_case
from tests.helpers.simulator_twin import twin_step


def slowed(case: Case, factor: float) -> Case:
    """Return the case with all times ``factor`` times as long."""
    graph, cluster, devices, priority = case
    graph = graph.copy()
    for node in graph.nodes.values():
        for costs in ("cost_s", "loaded_cost_s"):
            node[costs] = {kind: cost * factor for kind, cost in node[costs].items()}
    slower = Cluster(
        name=cluster.name,
        devices=tuple(replace(d, launch_s=d.launch_s * factor) for d in cluster.devices),
        links=tuple(
            replace(
                link,
                latency_s=link.latency_s * factor,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / factor,
            )
            for link in cluster.links
        ),
        once_per_destination=cluster.once_per_destination,
    )
    return graph, slower, devices, priority


def abstract_case(seed: int, *, whole: bool) -> Case:
    """Return a random graph whose ops cost 1e3 to 1e6 s, on unequal devices."""
    rng = np.random.default_rng(seed)
    graph = new_graph("abstract")
    for i in range(40):
        costs = 10.0 ** rng.uniform(3.0, 6.0, 2)
        costs = costs.round() if whole else costs
        sizes = int(rng.integers(0, 10**6))
        add_op(graph, str(i), cost_s=dict(zip(("a", "b"), costs, strict=True)), output_bytes=sizes)
        for u in rng.choice(i, min(i, 2), replace=False).tolist():
            add_edge(graph, str(u), str(i))
    cluster = one_kind(4, latency_s=7.0, bandwidth_bytes_per_s=1.0 if whole else 3.0)
    kinds = ("a", "b", "a", "b")
    devices = tuple(replace(d, kind=k) for d, k in zip(cluster.devices, kinds, strict=True))
    places, priority = rng.integers(0, 4, 40).tolist(), rng.random(40).tolist()
    return graph, replace(cluster, devices=devices), places, priority


def test_units_are_the_smallest_powers_of_ten_that_hold_a_time() -> None:
    assert [unit_for(ns) for ns in (0, HORIZON_NS - 1, HORIZON_NS)] == [1, 1, 10]
    assert unit_for(10 * HORIZON_NS) == 100


@pytest.mark.parametrize("seed", range(8))
def test_whole_seconds_are_exact_to_the_last_digit(seed: int) -> None:
    case = abstract_case(seed, whole=True)
    problem, devices, priority = problem_of(case)
    twin, schedule = twin_step(*case), Simulator(problem).run(devices, priority)
    assert twin.step_ns > 1000 * HORIZON_NS
    assert schedule.step_ns == twin.step_ns
    assert schedule.start_ns.tolist() == [twin.start_ns[i] for i in range(len(devices))]
    assert schedule.end_ns.tolist() == [twin.end_ns[i] for i in range(len(devices))]
    assert schedule.peak_bytes.tolist() == twin.peak_bytes
    sent = schedule.transfers
    rows = zip(sent.start_ns, sent.producer, sent.request_ns, sent.end_ns, strict=True)
    twin_rows = [(s.start_ns, s.producer, s.request_ns, s.end_ns) for s in twin.sendings]
    assert sorted(rows) == sorted(twin_rows)


@pytest.mark.parametrize("seed", range(8))
def test_other_times_are_rounded_by_less_than_a_millionth_of_the_step(seed: int) -> None:
    case = abstract_case(seed, whole=False)
    problem, devices, priority = problem_of(case)
    twin, schedule = twin_step(*case), Simulator(problem).run(devices, priority)
    starts = [twin.start_ns[i] for i in range(len(devices))]
    assert schedule.step_ns != twin.step_ns
    assert schedule.step_ns == pytest.approx(twin.step_ns, rel=1e-9)
    assert schedule.start_ns == pytest.approx(starts, rel=0.0, abs=1e-9 * twin.step_ns)


@pytest.mark.parametrize("seed", range(50))
def test_a_long_step_is_that_of_a_short_one_times_the_unit(seed: int) -> None:
    case = random_case(seed)
    long_case = slowed(case, 1e10)
    problem, devices, priority = problem_of(long_case)
    schedule = Simulator(problem).run(devices, priority)
    if schedule.step_ns < HORIZON_NS or schedule.step_ns == INFEASIBLE_NS:
        return
    unit_ns = unit_for(schedule.step_ns)
    twin = twin_step(*slowed(case, 1e10 / unit_ns))
    assert schedule.step_ns == twin.step_ns * unit_ns
    assert schedule.end_ns.tolist() == [twin.end_ns[i] * unit_ns for i in range(len(devices))]
    steps = Simulator(problem, memory=False).step_ns(devices, priority)
    assert steps.tolist() == [schedule.step_ns]
    path = critical_path(problem, schedule)
    assert [part.start_ns for part in path] == [0, *(part.end_ns for part in path[:-1])]
    assert path[-1].end_ns == schedule.step_ns
    idle_ns = sum(idle.end_ns - idle.start_ns for idle in idle_times(problem, schedule))
    busy_ns = int((schedule.end_ns - schedule.start_ns).sum())
    assert idle_ns + busy_ns == schedule.step_ns * problem.device_count


def test_short_and_long_steps_of_one_batch_each_have_their_unit() -> None:
    problem, devices, priority = problem_of(
        (fork(1), one_kind(2, bandwidth_bytes_per_s=1.0), [0, 1], [0.0, 0.0])
    )
    rows = np.array([devices, devices * 0, devices, devices * 0 + 1], np.int32)
    for threads in (1, 2):
        simulator = Simulator(problem, threads=threads)
        steps = simulator.step_ns(rows, np.tile(priority, (4, 1)))
        # 1 us for each op, 1000 s and 1 us for the transfer, counted in 10 ns
        assert steps.tolist() == [1_000_000_003_000, 2000, 1_000_000_003_000, 2000]


@pytest.mark.parametrize("seed", range(8))
def test_bounds_of_long_steps_hold_and_are_those_of_short_ones(seed: int) -> None:
    case = abstract_case(seed, whole=False)
    problem, devices, _ = problem_of(case)
    short, _, _ = problem_of(slowed(case, 1e-6))
    for bound in (lower_bound_ns, pace_ns, load_bound_ns):
        assert bound(problem) == pytest.approx(bound(short) * 1e6, rel=1e-6)
    assert max_load_ns(problem, devices)[0] >= load_bound_ns(problem)
    loads = [int(max_load_ns(each, devices)[0]) for each in (problem, short)]
    assert loads[0] == pytest.approx(loads[1] * 1e6, rel=1e-6)


def test_a_bound_rounds_down_and_never_above_the_step() -> None:
    graph = new_graph("hand")
    add_op(graph, "a", cost_s={"*": 1e6 + 15e-9}, output_bytes=0)
    add_op(graph, "b", cost_s={"*": 1e6 + 25e-9})
    add_edge(graph, "a", "b")
    problem = Problem.of(GraphArrays.from_graph(graph), one_kind(1))
    exact_ns = int(problem.cost_ns.sum())
    assert 0.999_999 * exact_ns < lower_bound_ns(problem) <= exact_ns


def test_a_search_counts_in_nanoseconds_where_all_ops_are_below_the_horizon() -> None:
    problem, _, _ = problem_of(abstract_case(0, whole=True))
    work_ns = int(problem.cheapest_ns().sum())
    short = in_units(problem, unit_for(work_ns))
    assert search_unit_ns(short) == 1
    assert in_units(short, 1) is short
    unit_ns = search_unit_ns(problem)
    assert HORIZON_NS / 10 <= 32 * work_ns / unit_ns < HORIZON_NS
    assert search_unit_ns(problem, micro_batches=10) == 10 * unit_ns


def test_ops_of_more_than_73_years_in_all_are_refused() -> None:
    graph = new_graph("long")
    for i in range(3):
        add_op(graph, str(i), cost_s={"*": 1e9})
    with pytest.raises(ValueError, match=r"cost 3e\+09 s in all.*2\.3e\+09 s: scale"):
        Problem.of(GraphArrays.from_graph(graph), one_kind(2))
    graph.nodes["0"]["cost_s"] = {"*": 3e9}
    with pytest.raises(ValueError, match=r"op '0' costs 3e\+09 s on d0; an op may take 63 years"):
        Problem.of(GraphArrays.from_graph(graph), one_kind(2))
