"""Problems with costs fitted to steps that were "measured" by a simulator with other costs."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import numpy as np
import pytest

from envs.costs.factors import CLASSES, LAUNCH, LOAD, class_of
from envs.hardware.cluster import Cluster, Device, Link
from envs.hardware.host import Host
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import Simulated, Simulator
from envs.simulator.fitting import (
    fitted_factors,
    grouped_problem,
    load_shares,
    scaled_problem,
)
from graphs.coarsen.groups import coarsen
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from tests.helpers.clusters import toy_pair

OPS = ("convolution", "addmm", "sum", "cat", "relu")


def graph_of_all_classes(seed: int, chains: int = 10, length: int = 5) -> nx.DiGraph[str]:
    """Return chains of ops of one class each."""
    rng = np.random.default_rng(seed)
    graph = new_graph("chains")
    for chain in range(chains):
        for i in range(length):
            name = f"{chain}.{i}"
            cost_s = {"*": float(rng.uniform(1e-3, 2e-3))}
            add_op(graph, name, op=OPS[chain % len(OPS)], cost_s=cost_s, output_bytes=1000)
            if i:
                add_edge(graph, f"{chain}.{i - 1}", name)
    return graph


def placements_of(problem: Problem, count: int) -> list[Placement]:
    """Return random placements, in an order of their own, each chain on one device."""
    rng = np.random.default_rng(1)
    chains = np.array([int(name.split(".")[0]) for name in problem.graph.ids])
    return [
        Placement.of(
            problem.graph,
            problem.cluster,
            rng.integers(problem.device_count, size=chains.max() + 1).astype(np.int32)[chains],
            rng.permutation(problem.op_count).astype(np.float64),
        )
        for _ in range(count)
    ]


def measured_s(problem: Problem, placements: list[Placement]) -> list[float]:
    return [each.step_s for each in Simulated(problem).evaluate(placements)]


def test_factors_of_a_machine_are_found_from_its_steps() -> None:
    problem = Problem.of(GraphArrays.from_graph(graph_of_all_classes(0)), toy_pair("a", "b"))
    true = dict(zip(CLASSES, (1.3, 0.9, 1.1, 1.0, 0.8), strict=True))
    machine = scaled_problem(problem, {"x": true})
    placements = placements_of(problem, 200)
    factors = fitted_factors(problem, placements, measured_s(machine, placements))
    assert factors.keys() == {"x"}
    assert factors["x"] == pytest.approx(true, rel=0.02)
    fitted = scaled_problem(problem, factors)
    others = placements_of(problem, 210)[200:]
    assert measured_s(fitted, others) == pytest.approx(measured_s(machine, others), rel=0.02)


def test_steps_as_predicted_change_nothing() -> None:
    problem = Problem.of(GraphArrays.from_graph(graph_of_all_classes(0)), toy_pair("a", "b"))
    placements = placements_of(problem, 5)
    factors = fitted_factors(problem, placements, measured_s(problem, placements))
    assert factors == {"x": dict.fromkeys(CLASSES, 1.0)}


def test_costs_beside_busy_devices_are_fitted_alike() -> None:
    graph = graph_of_all_classes(0)
    for _, node in graph.nodes(data=True):
        node["loaded_cost_s"] = {"*": 1.3 * node["cost_s"]["*"]}
    problem = Problem.of(GraphArrays.from_graph(graph), toy_pair("a", "b"))
    assert problem.load is not None
    true = dict(zip(CLASSES, (1.2, 0.9, 1.1, 1.0, 0.9), strict=True))
    machine = scaled_problem(problem, {"x": true})
    assert machine.load is not None
    np.testing.assert_allclose(machine.load.extra_ns, 0.3 * machine.cost_ns, atol=1)
    placements = placements_of(problem, 100)
    fitted = scaled_problem(
        problem, fitted_factors(problem, placements, measured_s(machine, placements))
    )
    others = placements_of(problem, 110)[100:]
    assert measured_s(fitted, others) == pytest.approx(measured_s(machine, others), rel=0.02)


def loaded_problem(cluster: Cluster, seed: int = 0) -> Problem:
    graph = graph_of_all_classes(seed)
    for _, node in graph.nodes(data=True):
        node["loaded_cost_s"] = {"*": 1.1 * node["cost_s"]["*"]}
    return Problem.of(GraphArrays.from_graph(graph), cluster)


def test_the_factor_of_the_load_tells_one_device_from_several() -> None:
    problem = loaded_problem(toy_pair("a", "b"))
    true = {**dict.fromkeys(CLASSES, 0.95), LOAD: 1.2}
    machine = scaled_problem(problem, {"x": true})
    zeros = np.zeros(problem.op_count)
    alone = Placement.of(problem.graph, problem.cluster, zeros.astype(np.int32), zeros)
    placements = [alone, *placements_of(problem, 4)]
    factors = fitted_factors(problem, placements, measured_s(machine, placements))
    assert factors["x"][LOAD] == pytest.approx(1.2, rel=0.03)
    fitted = scaled_problem(problem, factors)
    assert measured_s(fitted, placements) == pytest.approx(
        measured_s(machine, placements), rel=0.02
    )
    no_less = scaled_problem(problem, {"x": {LOAD: 0.5}})
    assert no_less.load is not None
    assert not no_less.load.extra_ns.any()


@pytest.mark.parametrize("seed", range(4))
def test_shares_of_busy_devices_are_those_that_the_simulator_charges(seed: int) -> None:
    names = ("n0:a", "n0:b", "n0:c", "n1:a", "n1:b")
    problem = loaded_problem(toy_pair(*names), seed)
    assert problem.load is not None
    seen: set[float] = set()
    for placement in placements_of(problem, 8):
        schedule = Simulator(problem).run(*placement.arrays())
        ops, where = np.arange(problem.op_count), schedule.devices
        shares = load_shares(problem, schedule)
        extra_ns = problem.load.extra_ns[ops, where] * shares
        took_ns = schedule.end_ns - schedule.start_ns
        np.testing.assert_allclose(took_ns, problem.cost_ns[ops, where] + extra_ns, atol=1)
        assert set(np.round(shares[where >= 3], 9)) <= {0.0, 1.0}
        seen |= set(np.round(shares[where < 3], 9))
    assert seen == {0.0, 0.5, 1.0}


def test_launches_keep_their_time_and_a_kind_without_ops_gets_no_factor() -> None:
    devices = (
        Device(name="a", kind="x", memory_bytes=1 << 40, launch_s=1e-3),
        Device(name="b", kind="y", memory_bytes=1 << 40),
    )
    link = Link(between=("a", "b"), latency_s=1e-5, bandwidth_bytes_per_s=1e9)
    cluster = Cluster(name="pair", devices=devices, links=(link,))
    problem = Problem.of(GraphArrays.from_graph(graph_of_all_classes(0, 1, 10)), cluster)
    machine = scaled_problem(problem, {"x": {"convolution": 1.25}})
    zeros = np.zeros(problem.op_count)
    alone = [Placement.of(problem.graph, cluster, zeros.astype(np.int32), zeros)]
    factors = fitted_factors(problem, alone, measured_s(machine, alone))
    assert factors.keys() == {"x"}
    assert factors["x"]["convolution"] == pytest.approx(1.25, rel=0.01)
    assert (machine.cost_ns[:, 1] == problem.cost_ns[:, 1]).all()
    work_ns = problem.cost_ns[:, 0] - 1_000_000
    np.testing.assert_allclose(machine.cost_ns[:, 0], 1.25 * work_ns + 1_000_000, atol=1)


def launching_problem() -> Problem:
    """Return chains on two GPUs of one thread, whose launches take up to thrice their ops."""
    graph = graph_of_all_classes(0)
    rng = np.random.default_rng(2)
    for _, node in graph.nodes(data=True):
        node["launch_s"] = {"*": float(rng.uniform(0.0, 3.0)) * node["cost_s"]["*"]}
    cluster = toy_pair("a", "b")
    host = Host(devices=cluster.names, overlap=True)
    return Problem.of(GraphArrays.from_graph(graph), replace(cluster, hosts=(host,)))


def test_the_factor_of_launches_is_told_from_those_of_ops() -> None:
    problem = launching_problem()
    true = {**dict(zip(CLASSES, (1.3, 0.9, 1.1, 1.0, 0.8), strict=True)), LAUNCH: 1.2}
    machine = scaled_problem(problem, {"x": true})
    placements = placements_of(problem, 200)
    factors = fitted_factors(problem, placements, measured_s(machine, placements))
    assert factors["x"][LAUNCH] == pytest.approx(1.2, rel=0.02)
    others = placements_of(problem, 210)[200:]
    fitted = scaled_problem(problem, factors)
    assert measured_s(fitted, others) == pytest.approx(measured_s(machine, others), rel=0.02)


def test_launches_of_groups_are_scaled_with_those_of_ops() -> None:
    problem = launching_problem()
    graph = graph_of_all_classes(0)
    for i, op_id in enumerate(graph):
        graph.nodes[op_id]["launch_s"] = {"*": float(problem.graph.launches_for("x")[i])}
    groups = coarsen(graph, least_cost_s=5e-3)
    assert len(groups) < len(graph)
    scaled = scaled_problem(problem, {"x": {LAUNCH: 2.0}})
    found = grouped_problem(groups, scaled).graph.launches_for("x")
    expected = np.bincount(groups.group_of, 2.0 * problem.graph.launches_for("x"), len(groups))
    np.testing.assert_allclose(found, expected)


def test_groups_cost_what_their_ops_do() -> None:
    graph = graph_of_all_classes(2)
    groups = coarsen(graph, most_groups=7)
    problem = Problem.of(GraphArrays.from_graph(graph), toy_pair("a", "b"))
    plain = Problem.of(GraphArrays.from_graph(groups.graph), problem.cluster)
    assert (grouped_problem(groups, problem).cost_ns == plain.cost_ns).all()
    fitted = scaled_problem(problem, {"x": {"convolution": 1.3, "copy": 0.8}})
    of_ops = np.array([{"convolution": 1.3, "copy": 0.8}.get(class_of(op), 1.0) for op in OPS])
    of_chain = of_ops[[int(name.split(".")[0]) % len(OPS) for name in problem.graph.ids]]
    expected_s = np.bincount(groups.group_of, problem.graph.costs_for("x") * of_chain)
    cost_ns = grouped_problem(groups, fitted).cost_ns[:, 0]
    np.testing.assert_allclose(cost_ns, expected_s * 1e9, atol=2)


def test_loaded_costs_are_scaled_with_the_costs() -> None:
    graph = new_graph("loaded")
    for name in "ab":
        add_op(graph, name, op="addmm", cost_s={"x": 1e-3}, loaded_cost_s={"x": 1.25e-3})
    problem = Problem.of(GraphArrays.from_graph(graph), toy_pair("a", "b"))
    load = scaled_problem(problem, {"x": {"matrix product": 1.2}}).load
    assert load is not None
    assert load.extra_ns.tolist() == [[300_000, 300_000]] * 2
