"""The rules of the simulator on steps calculated by hand, and its refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from envs.hardware.cluster import Cluster
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import (
    INFEASIBLE_NS,
    Simulated,
    Simulator,
)
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from tests.helpers.random_problems import random_problem
from tests.helpers.simulator_cases import fork, one_kind, problem_of, run

torch.set_num_threads(1)


def test_a_consumer_elsewhere_waits_for_latency_and_bytes() -> None:
    schedule = run(fork(1), one_kind(2), [0, 1])
    assert schedule.start_ns.tolist() == [0, 1000 + 1000 + 1000]
    assert schedule.step_ns == 4000
    assert schedule.critical_chain() == [0, 1]


@pytest.mark.parametrize(
    ("sharing", "starts"), [("none", [1000, 1000]), ("pair", [1000, 1000]),
                            ("egress", [1000, 3000]), ("bus", [1000, 3000])],
)  # fmt: skip
def test_transfers_from_one_device_to_two_queue_as_the_link_says(
    sharing: str, starts: list[int]
) -> None:
    schedule = run(fork(2), one_kind(3, sharing=sharing), [0, 1, 2])
    assert schedule.transfers.start_ns.tolist() == starts
    assert schedule.transfers.destination.tolist() == [1, 2]


def test_a_link_by_priority_serves_the_more_urgent_consumer_first() -> None:
    cluster = one_kind(3, sharing="egress", order="priority")
    schedule = run(fork(2), cluster, [0, 1, 2], [0.0, 1.0, 2.0])
    assert schedule.transfers.destination.tolist() == [2, 1]


def test_an_output_goes_once_to_each_device_and_its_largest_edge_counts() -> None:
    graph = fork(3)
    graph.edges["s", "1"]["bytes"] = 5000
    schedule = run(graph, one_kind(2), [0, 1, 1, 1])
    assert schedule.transfers.bytes.tolist() == [5000]
    assert schedule.start_ns.tolist() == [0, 7000, 8000, 9000]


def test_half_duplex_ports_let_a_later_transfer_pass_one_that_has_to_wait() -> None:
    graph = new_graph("ports")
    for name, cost in (("a", 1e-6), ("b", 2e-6), ("c", 3e-6)):
        add_op(graph, name, cost_s={"*": cost}, output_bytes=9000)
    for name in ("x", "y", "z"):
        add_op(graph, name, cost_s={"*": 1e-6})
    for source, target in ("ax", "by", "cz"):
        add_edge(graph, source, target)
    cluster = one_kind(4, sharing="egress", full_duplex=False)
    # a: 0 -> 1 from 1 us to 11 us; b: 2 -> 1 needs port 1; c: 2 -> 3 is requested later, but free.
    schedule = run(graph, cluster, [0, 2, 2, 1, 1, 3], [0, 1, 0, 0, 0, 0])
    assert schedule.transfers.producer.tolist() == [0, 2, 1]
    assert schedule.transfers.start_ns.tolist() == [1000, 5000, 15000]


def nodes(**options: Any) -> Cluster:
    """Return two nodes of two devices; devices of a node share a port of the only link."""
    return one_kind(4, ports=(("d0", "d1"), ("d2", "d3")), **options)


def test_devices_of_a_node_share_its_network_card() -> None:
    graph = new_graph("cards")
    for name in ("a", "b"):
        add_op(graph, name, cost_s={"*": 1e-6}, output_bytes=9000)
    for source, target in (("a", "x"), ("b", "y")):
        add_op(graph, target, cost_s={"*": 1e-6})
        add_edge(graph, source, target)
    # a on d0 and b on d1 send 10 us each to the other node, one after the other.
    assert run(graph, nodes(), [0, 1, 2, 3]).transfers.start_ns.tolist() == [1000, 11000]
    assert run(graph, one_kind(4), [0, 1, 2, 3]).transfers.start_ns.tolist() == [1000, 1000]
    # In opposite directions they exclude each other only on a half-duplex card.
    assert run(graph, nodes(), [0, 2, 3, 1]).transfers.start_ns.tolist() == [1000, 1000]
    half = nodes(full_duplex=False)
    assert run(graph, half, [0, 2, 3, 1]).transfers.start_ns.tolist() == [1000, 11000]
    assert run(graph, nodes(), [0, 1, 1, 3]).step_ns == INFEASIBLE_NS  # no link inside a node


def test_ingress_lets_a_receiver_take_one_transfer_at_a_time() -> None:
    graph = new_graph("incast")
    for name in "abc":
        add_op(graph, name, cost_s={"*": 1e-6}, output_bytes=9000)
    add_op(graph, "x", cost_s={"*": 1e-6})
    add_op(graph, "y", cost_s={"*": 1e-6})
    for source, target in ("ax", "bx", "cy"):
        add_edge(graph, source, target)
    where = [0, 1, 1, 2, 0]  # a: 0 -> 2; b: 1 -> 2 and, made after it, c: 1 -> 0
    free = run(graph, one_kind(3), where)
    assert free.transfers.start_ns.tolist() == [1000, 1000, 11000]
    # b waits to enter d2; c overtakes it on the way out of d1, into d0, which only sends.
    ingress = run(graph, one_kind(3, ingress=True), where)
    assert ingress.transfers.producer.tolist() == [0, 2, 1]
    assert ingress.transfers.start_ns.tolist() == [1000, 2000, 12000]


def test_peak_memory_counts_what_is_alive() -> None:
    graph = new_graph("memory")
    add_op(graph, "a", cost_s={"*": 1e-6}, output_bytes=100, parameter_bytes=7, workspace_bytes=50)
    add_op(graph, "b", cost_s={"*": 1e-6}, output_bytes=10, saved_bytes=3)
    add_op(graph, "c", cost_s={"*": 1e-6}, output_bytes=1, workspace_bytes=40)
    add_edge(graph, "a", "b")
    add_edge(graph, "b", "c")
    # a: 7 + 100 + 50; then a and b: 7 + 100 + 10 + 3; then b and c: 7 + 10 + 3 + 1 + 40.
    assert run(graph, one_kind(1), [0, 0, 0]).peak_bytes.tolist() == [157]
    # On d0 only a; on d1 the copy of a, then b with it, then b and c.
    assert run(graph, one_kind(2), [0, 1, 1]).peak_bytes.tolist() == [157, 113]


def test_gradients_and_optimizer_state_are_there_throughout() -> None:
    graph = fork(2, moved=100)
    graph.nodes["1"].update(parameter_bytes=1000, gradient_bytes=1000, optimizer_bytes=2000)
    # d1 holds them while idle, then op 1 and its copy of the output of s.
    assert run(graph, one_kind(2), [0, 0, 1]).peak_bytes.tolist() == [100, 4100]
    assert run(graph, one_kind(1), [0, 0, 0]).peak_bytes.tolist() == [4100]


def test_a_full_device_is_named_with_what_is_missing_and_its_largest_ops() -> None:
    graph = fork(3, moved=400_000_000)
    graph.nodes["1"]["parameter_bytes"] = 900_000_000
    cluster = one_kind(2)
    schedule = run(graph, cluster, [0, 1, 1, 1])
    assert not schedule.feasible
    for told in ("d1 needs 1.3 GB for 3 ops", "300.0 MB too little", "largest: 1, 900.0 MB"):
        assert told in schedule.why


def test_a_placement_without_a_link_says_which_edge_lacks_it() -> None:
    cluster = Cluster(name="apart", devices=one_kind(2).devices)
    schedule = run(fork(1), cluster, [0, 1])
    assert schedule.step_ns == INFEASIBLE_NS
    assert "op '0' on d1 needs the output of 's' on d0" in schedule.why
    assert "edges without a link: 1" in schedule.why


@pytest.mark.parametrize(
    ("devices", "priority", "message"),
    [
        ([0, 5], [0.0, 0.0], "device 5 does not exist"),
        ([0, -1], [0.0, 0.0], "device -1 does not exist"),
        ([0], [0.0], r"must be \(B, 2\)"),
        ([0, 0], [0.0], r"devices \(2,\) and priority \(1,\) differ in shape"),
        ([0, 0], [0.0, math.nan], "not a finite number"),
    ],
)
def test_arrays_that_name_no_placement_are_refused(
    devices: list[int], priority: list[float], message: str
) -> None:
    problem, _, _ = problem_of((fork(1), one_kind(2), [0, 0], [0.0, 0.0]))
    with pytest.raises(ValueError, match=message):
        Simulator(problem).step_ns(np.array(devices, np.int32), np.array(priority))


def test_devices_that_are_not_whole_numbers_are_refused() -> None:
    problem, devices, priority = problem_of((fork(1), one_kind(2), [0, 0], [0.0, 0.0]))
    halves: Any = devices + 0.5
    with pytest.raises(ValueError, match="float64, not whole numbers"):
        Simulator(problem).step_ns(halves, priority)


@pytest.mark.parametrize("priority", [[0j, 1j], ["a", "b"]])
def test_priorities_that_are_no_numbers_are_refused(priority: Any) -> None:
    problem, devices, _ = problem_of((fork(1), one_kind(2), [0, 0], [0.0, 0.0]))
    with pytest.raises(ValueError, match="priorities are of type"):
        Simulator(problem).step_ns(devices, np.array(priority))


def test_a_schedule_without_its_transfers_is_otherwise_the_same() -> None:
    problem, devices, priority = problem_of((fork(2), one_kind(3), [0, 1, 2], [0.0] * 3))
    simulator = Simulator(problem)
    whole = simulator.run(devices, priority)
    brief = simulator.run(devices, priority, transfers=False)
    assert (len(whole.transfers), len(brief.transfers)) == (2, 0)
    assert brief.start_ns.tolist() == whole.start_ns.tolist()
    assert brief.peak_bytes.tolist() == whole.peak_bytes.tolist()
    assert brief.critical_chain() == whole.critical_chain()


def test_a_schedule_keeps_its_devices_when_the_caller_changes_theirs() -> None:
    problem, devices, priority = problem_of((fork(1), one_kind(2), [0, 1], [0.0, 0.0]))
    schedule = Simulator(problem).run(devices, priority)
    devices[1] = 0
    assert schedule.devices.tolist() == [0, 1]


@pytest.mark.parametrize("bandwidth", [1.0, 1e-9])
def test_a_step_beyond_the_horizon_is_refused(bandwidth: float) -> None:
    problem, devices, priority = problem_of(
        (fork(1), one_kind(2, bandwidth_bytes_per_s=bandwidth), [0, 1], [0.0, 0.0])
    )
    simulator = Simulator(problem)
    with pytest.raises(ValueError, match="more than 550 s"):
        simulator.step_ns(devices, priority)
    with pytest.raises(ValueError, match="more than 550 s"):
        simulator.run(devices, priority)
    assert simulator.step_ns(devices * 0, priority).tolist() == [2000]


def test_the_backend_times_placements_and_explains_those_it_cannot_time() -> None:
    graph, cluster = GraphArrays.from_graph(fork(1)), one_kind(2)
    backend = Simulated(Problem.of(graph, cluster))
    good = Placement.of(graph, cluster, np.array([0, 1]), np.zeros(2))
    other = Placement.of(GraphArrays.from_graph(fork(2)), cluster, np.array([0, 1, 1]), np.zeros(3))
    answer, refused = backend.evaluate([good, other])
    assert answer.step_s == 4e-6
    assert answer.parts == {"compute": 2e-6, "transfer": 2e-6}
    assert answer.peak_memory_bytes == {"d0": 1000, "d1": 1000}
    assert not refused.feasible
    assert refused.step_s == math.inf
    assert "not for 'fork'" in refused.why


def test_the_backend_gives_the_same_answers_in_several_threads() -> None:
    problem = random_problem(0, ops=20)
    rows = np.random.default_rng(0).integers(0, 3, (40, 20))
    placements = [
        replace(
            Placement.of(problem.graph, problem.cluster, row, np.zeros(20)),
            micro_batches=1 + k % 2,
        )
        for k, row in enumerate(rows)
    ]
    one = Simulated(problem).evaluate(placements)
    several = Simulated(problem, threads=3)
    assert several.evaluate(placements) == several.evaluate(placements) == one
    assert len({result.step_s for result in one}) > 5
    with pytest.raises(ValueError, match="threads is 0"):
        Simulated(problem, threads=0)


def test_a_chain_of_many_ops_needs_no_recursion() -> None:
    graph = new_graph("chain")
    for i in range(20_000):
        add_op(graph, str(i), cost_s={"*": 1e-6}, output_bytes=1)
        if i:
            add_edge(graph, str(i - 1), str(i))
    devices = [i % 2 for i in range(20_000)]
    cluster = one_kind(2, bandwidth_bytes_per_s=math.inf)
    assert run(graph, cluster, devices).step_ns == 20_000 * 1000 + 19_999 * 1000
