"""The rules of the simulator on steps calculated by hand, and its refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import networkx as nx
import numpy as np
import pytest

from envs.hardware.cluster import Cluster
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import (
    INFEASIBLE_NS,
    Simulated,
    Simulator,
)
from envs.simulator.bounds import lower_bound_ns
from envs.simulator.max_load import max_load_ns, overload_reason
from envs.simulator.micro_batches import Pipeline
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from tests.helpers.simulator_cases import fork, one_kind, problem_of, run


def senders(pairs: str, **costs_us: float) -> nx.DiGraph[str]:
    """Return senders of 9000 bytes and ops of 1 us that read them: "ax bx" is a -> x and b -> x."""
    graph = new_graph("senders")
    for name, cost_us in costs_us.items():
        add_op(graph, name, cost_s={"*": cost_us * 1e-6}, output_bytes=9000)
    for pair in pairs.split():
        source, target = pair[0], pair[1]
        if target not in graph:
            add_op(graph, target, cost_s={"*": 1e-6})
        add_edge(graph, source, target)
    return graph


def nodes(**options: Any) -> Cluster:
    """Return two nodes of two devices; devices of a node share a port of the only link."""
    return one_kind(4, ports=(("d0", "d1"), ("d2", "d3")), **options)


UNEQUAL = fork(3)
UNEQUAL.edges["s", "1"]["bytes"] = 5000
PORTS = senders("ax by cz", a=1, b=2, c=3)
CARDS = senders("ax by", a=1, b=1)
INCAST = senders("ax bx cy", a=1, b=1, c=1)
HALF: dict[str, Any] = {"full_duplex": False}


@pytest.mark.parametrize(
    ("graph", "cluster", "devices", "priority", "start_us"),
    [
        # A consumer elsewhere waits for latency and bytes: 1 us each.
        (fork(1), one_kind(2), [0, 1], None, [0, 3]),
        # Transfers from one device to two queue as the link says.
        (fork(2), one_kind(3, sharing="none"), [0, 1, 2], None, [0, 3, 3]),
        (fork(2), one_kind(3, sharing="pair"), [0, 1, 2], None, [0, 3, 3]),
        (fork(2), one_kind(3, sharing="egress"), [0, 1, 2], None, [0, 3, 5]),
        (fork(2), one_kind(3, sharing="bus"), [0, 1, 2], None, [0, 3, 5]),
        # A link by priority serves the more urgent consumer first.
        (fork(2), one_kind(3, order="priority"), [0, 1, 2], [0.0, 1.0, 2.0], [0, 5, 3]),
        # An output goes once to each device, and its largest edge counts.
        (UNEQUAL, one_kind(2), [0, 1, 1, 1], None, [0, 7, 8, 9]),
        # a: 0 -> 1 at 1 us; b: 2 -> 1 needs port 1; c: 2 -> 3 is requested later, but free.
        (PORTS, one_kind(4, **HALF), [0, 2, 2, 1, 1, 3], [0.0, 1.0, *[0.0] * 4],
         [0, 0, 2, 11, 25, 15]),
        # a on d0 and b on d1 send 10 us each to the other node, one after the other.
        (CARDS, nodes(), [0, 1, 2, 3], None, [0, 0, 11, 21]),
        (CARDS, one_kind(4), [0, 1, 2, 3], None, [0, 0, 11, 11]),
        # In opposite directions they exclude each other only on a half-duplex card.
        (CARDS, nodes(), [0, 2, 3, 1], None, [0, 0, 11, 11]),
        (CARDS, nodes(**HALF), [0, 2, 3, 1], None, [0, 0, 11, 21]),
        # a: 0 -> 2; b: 1 -> 2 and, made after it, c: 1 -> 0.
        (INCAST, one_kind(3), [0, 1, 1, 2, 0], None, [0, 0, 1, 11, 21]),
        # b waits to enter d2; c overtakes it on the way out of d1, into d0, which only sends.
        (INCAST, one_kind(3, ingress=True), [0, 1, 1, 2, 0], None, [0, 0, 1, 22, 12]),
    ],
)  # fmt: skip
def test_ops_start_when_calculated_by_hand(
    graph: nx.DiGraph[str],
    cluster: Cluster,
    devices: list[int],
    priority: list[float] | None,
    start_us: list[int],
) -> None:
    schedule = run(graph, cluster, devices, priority)
    assert schedule.start_ns.tolist() == [1000 * start for start in start_us]
    assert schedule.step_ns == 1000 * (max(start_us) + 1)


@pytest.mark.parametrize(("buses", "start_us"), [(("b", "b"), [0, 3, 5]), (("b", "c"), [0, 3, 3])])
def test_links_with_the_name_of_one_bus_share_it(buses: list[str], start_us: list[int]) -> None:
    plain = one_kind(3, sharing="bus")
    (link,) = plain.links
    links = tuple(
        replace(link, between=(plain.names[0], name), one_way=True, bus=bus)
        for name, bus in zip(plain.names[1:], buses, strict=True)
    )
    schedule = run(fork(2), replace(plain, links=links), [0, 1, 2])
    assert schedule.start_ns.tolist() == [1000 * start for start in start_us]


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


def test_a_full_device_is_named_with_what_is_missing_and_its_largest_ops() -> None:
    graph = fork(3, moved=400_000_000)
    graph.nodes["1"]["workspace_bytes"] = 900_000_000
    cluster = one_kind(2)
    schedule = run(graph, cluster, [0, 1, 1, 1])
    assert not schedule.feasible
    for part in ("d1 needs 1.3 GB for 3 ops", "300.0 MB too little", "largest: 1, 900.0 MB"):
        assert part in schedule.reason


def test_a_placement_without_a_link_says_which_edge_lacks_it() -> None:
    cluster = Cluster(name="apart", devices=one_kind(2).devices)
    schedule = run(fork(1), cluster, [0, 1])
    assert schedule.step_ns == INFEASIBLE_NS
    assert "op '0' on d1 needs the output of 's' on d0" in schedule.reason
    assert "edges without a link: 1" in schedule.reason


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([0, 5], "device 5 does not exist"),
        ([-5, 0], "device -5 does not exist"),
        ([0], r"must be \(B, 2\)"),
        ([0.7, 1.2], "float64, not whole numbers"),
        ([True, False], "bool"),
    ],
)
@pytest.mark.parametrize(
    "evaluate",
    [
        lambda problem, devices: Simulator(problem).step_ns(devices, np.zeros(len(devices))),
        max_load_ns,
        overload_reason,
    ],
)
def test_devices_of_no_placement_are_refused(
    evaluate: Callable[[Problem, Any], object], devices: list[Any], message: str
) -> None:
    problem, _, _ = problem_of((fork(1), one_kind(2), [0, 0], [0.0, 0.0]))
    with pytest.raises(ValueError, match=message):
        evaluate(problem, np.array(devices))


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        ([0.0], r"devices \(2,\) and priority \(1,\) differ in shape"),
        ([0.0, math.nan], "not a finite number"),
        ([0j, 1j], "priorities are of type"),
    ],
)
def test_priorities_of_no_placement_are_refused(priority: list[Any], message: str) -> None:
    problem, devices, _ = problem_of((fork(1), one_kind(2), [0, 0], [0.0, 0.0]))
    with pytest.raises(ValueError, match=message):
        Simulator(problem).step_ns(devices, np.array(priority))


def test_a_schedule_without_its_transfers_is_otherwise_the_same() -> None:
    problem, devices, priority = problem_of((fork(2), one_kind(3), [0, 1, 2], [0.0] * 3))
    simulator = Simulator(problem)
    whole = simulator.run(devices, priority)
    brief = simulator.run(devices, priority, transfers=False)
    places, devices[1] = devices.tolist(), 0  # a change of the caller's array changes no schedule
    assert brief.devices.tolist() == whole.devices.tolist() == places
    assert (len(whole.transfers), len(brief.transfers)) == (2, 0)
    assert brief.start_ns.tolist() == whole.start_ns.tolist()
    assert brief.peak_bytes.tolist() == whole.peak_bytes.tolist()
    assert brief.critical_chain() == whole.critical_chain()


def test_a_step_of_centuries_is_refused() -> None:
    problem, devices, priority = problem_of(
        (fork(1), one_kind(2, bandwidth_bytes_per_s=1e-9), [0, 1], [0.0, 0.0])
    )
    simulator = Simulator(problem)
    with pytest.raises(ValueError, match=r"more than 5\.5e\+09 s"):
        simulator.step_ns(devices, priority)
    with pytest.raises(ValueError, match=r"more than 5\.5e\+09 s"):
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


def test_devices_without_a_link_between_an_edge_are_infeasible_everywhere() -> None:
    apart = Cluster(name="apart", devices=one_kind(2).devices)
    problem = Problem.of(GraphArrays.from_graph(fork(1)), apart)
    devices, priority = np.array([[0, 1], [0, 0]], np.int32), np.zeros((2, 2))
    assert Simulator(problem).step_ns(devices, priority).tolist() == [INFEASIBLE_NS, 2000]
    assert max_load_ns(problem, devices).tolist() == [INFEASIBLE_NS, 2000]
    assert lower_bound_ns(problem) == 2000
    copies = Pipeline(problem, 2)
    steps = Simulator(copies.problem).step_ns(copies.devices(devices), copies.priority(priority))
    assert steps.tolist() == [INFEASIBLE_NS, 4000]
