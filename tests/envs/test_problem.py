"""A graph joined with a cluster: costs in ns, allowed devices, links and their queues."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from envs.hardware.cluster import Cluster, Device, Link
from envs.problem import NO_QUEUE, Problem
from graphs.graph import GraphArrays, add_edge, add_op, new_graph

torch.set_num_threads(1)


def cluster_of(*links: Link, kinds: str = "gggg") -> Cluster:
    devices = tuple(
        Device(name=f"d{k}", kind=kind, memory_bytes=1000 + k, launch_s=k * 1e-6)
        for k, kind in enumerate(kinds)
    )
    return Cluster(name="test", devices=devices, links=links)


def link(*between: str, **options: Any) -> Link:
    return Link(
        between=between or ("d0", "d1", "d2", "d3"),
        **{"latency_s": 2e-6, "bandwidth_bytes_per_s": 1e9, **options},
    )


def problem_of(cluster: Cluster, **op: Any) -> Problem:
    graph = new_graph("two")
    add_op(graph, "a", **{"cost_s": {"*": 1e-6}, **op})
    add_op(graph, "b", cost_s={"*": 1.5e-9})
    add_edge(graph, "a", "b")
    return Problem.of(GraphArrays.from_graph(graph), cluster)


def test_costs_include_the_launch_and_are_rounded_half_to_even() -> None:
    problem = problem_of(cluster_of())
    assert problem.cost_ns[0].tolist() == [1000, 2000, 3000, 4000]
    assert problem.cost_ns[1, 0] == 2  # rounded from 1.5
    for array in (problem.cost_ns, problem.allowed, problem.queue, problem.memory_bytes):
        assert not array.flags.writeable


def test_the_cost_of_the_own_kind_comes_before_that_of_any_kind() -> None:
    problem = problem_of(cluster_of(kinds="gc"), cost_s={"g": 5e-6, "*": 7e-6})
    assert problem.cost_ns[0].tolist() == [5000, 8000]


def test_ops_are_kept_from_devices_without_a_cost_or_permission() -> None:
    assert problem_of(cluster_of(kinds="gc"), cost_s={"g": 1.0}).allowed[0].tolist() == [1, 0]
    named = problem_of(cluster_of(), devices=("d1", "d3"))
    assert named.allowed[0].tolist() == [False, True, False, True]
    assert named.allowed[1].all()
    assert named.cheapest_ns().tolist() == [2000, 2]


def test_an_op_may_take_longest_where_it_is_kept_from() -> None:
    kinds = {"g": 1e-6, "c": 501.0}
    problem = problem_of(cluster_of(kinds="gc"), cost_s=kinds, devices=("d0",))
    assert problem.cost_ns[0].tolist() == [1000, 0]
    with pytest.raises(ValueError, match="op 'a' costs 501 s on d1"):
        problem_of(cluster_of(kinds="gc"), cost_s=kinds)


def test_a_group_may_only_be_where_all_its_ops_may() -> None:
    graph = new_graph("group")
    add_op(graph, "a", cost_s={"*": 1e-6}, colocate="g", devices=("d0", "d1"))
    add_op(graph, "b", cost_s={"*": 1e-6}, colocate="g", devices=("d1", "d2"))
    problem = Problem.of(GraphArrays.from_graph(graph), cluster_of())
    assert problem.allowed.tolist() == [[False, True, False, False]] * 2


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ({"cost_s": {"tpu": 1.0}}, "known for kind tpu"),
        ({"devices": ("d9",)}, "only d9"),
    ],
)
def test_ops_that_cannot_be_placed_are_named(op: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        problem_of(cluster_of(), **op)


def test_transfers_take_latency_and_bytes_over_bandwidth() -> None:
    problem = problem_of(cluster_of(link()))
    assert problem.transfer_ns(0, 0, 1) == 2000
    assert problem.transfer_ns(5000, 0, 1) == 7000


@pytest.mark.parametrize(
    ("sharing", "full_duplex", "queues", "equal", "different"),
    [
        ("bus", True, 1, [(0, 1), (1, 0), (2, 3)], []),
        ("pair", True, 12, [], [(0, 1), (1, 0), (2, 3)]),
        ("pair", False, 6, [(0, 1), (1, 0)], [(0, 1), (2, 3)]),
        ("egress", True, 4, [(0, 1), (0, 2), (0, 3)], [(0, 1), (1, 0)]),
        ("egress", False, 4, [(0, 1), (0, 2), (0, 3)], [(0, 1), (1, 0)]),
    ],
)
def test_sharing_says_which_transfers_wait_in_one_queue(
    sharing: str,
    full_duplex: bool,
    queues: int,
    equal: list[tuple[int, int]],
    different: list[tuple[int, int]],
) -> None:
    problem = problem_of(cluster_of(link(sharing=sharing, full_duplex=full_duplex)))
    assert problem.queue_count == queues
    assert len({problem.queue[pair] for pair in equal}) <= 1
    assert len({problem.queue[pair] for pair in different}) == len(different)
    ports = sharing == "egress" and not full_duplex
    assert (problem.second_queue[0, 1] == problem.queue[1, 0]) == ports
    assert (problem.second_queue == NO_QUEUE).all() != ports


@pytest.mark.parametrize(
    ("options", "queues", "equal", "different"),
    [
        ({"sharing": "egress"}, 3, [(0, 2), (1, 3)], [(0, 2), (2, 0), (3, 0)]),
        ({"sharing": "pair"}, 6, [(0, 2), (1, 2)], [(0, 2), (0, 3), (2, 0), (2, 3)]),
        ({"sharing": "pair", "full_duplex": False}, 3, [(0, 2), (2, 1)], [(0, 2), (0, 3), (2, 3)]),
        ({"sharing": "bus"}, 1, [(0, 2), (2, 3)], []),
    ],
)
def test_devices_that_share_a_port_share_its_queues(
    options: dict[str, Any],
    queues: int,
    equal: list[tuple[int, int]],
    different: list[tuple[int, int]],
) -> None:
    problem = problem_of(cluster_of(link(ports=(("d0", "d1"),), **options)))
    assert problem.queue_count == queues
    assert not problem.connected[0, 1]
    assert len({problem.queue[pair] for pair in equal}) == 1
    assert len({problem.queue[pair] for pair in different}) == len(different)


@pytest.mark.parametrize("options", [{"ingress": True}, {"full_duplex": False}])
def test_a_transfer_occupies_the_ports_of_both_ends(options: dict[str, Any]) -> None:
    problem = problem_of(cluster_of(link(ports=(("d0", "d1"), ("d2", "d3")), **options)))
    one_port = not options.get("ingress", False)
    assert problem.queue_count == (2 if one_port else 4)
    assert problem.queue[0, 2] == problem.queue[1, 3]
    assert problem.second_queue[0, 2] == problem.second_queue[1, 3] != problem.queue[0, 2]
    assert (problem.second_queue[0, 2] == problem.queue[2, 0]) == one_port


def test_the_first_listed_link_counts() -> None:
    fast = link("d0", "d1", latency_s=1e-6, order="priority", sharing="pair")
    problem = problem_of(cluster_of(fast, link(sharing="bus")))
    assert problem.latency_s[0, 1] == 1e-6
    assert problem.latency_s[0, 2] == 2e-6
    assert problem.queue_by_priority[problem.queue[0, 1]]
    assert not problem.queue_by_priority[problem.queue[0, 2]]


@pytest.mark.parametrize(("phase", "held"), [("forward", 64), ("backward", 0)])
def test_saved_bytes_are_held_unless_backward_is_in_the_graph(phase: str, held: int) -> None:
    graph = new_graph("saved")
    add_op(graph, "a", cost_s={"*": 1e-6}, saved_bytes=64)
    add_op(graph, "b", cost_s={"*": 1e-6}, phase="backward" if phase == "backward" else "forward")
    add_edge(graph, "a", "b")
    problem = Problem.of(GraphArrays.from_graph(graph), cluster_of())
    assert problem.held_bytes.tolist() == [held, 0]
