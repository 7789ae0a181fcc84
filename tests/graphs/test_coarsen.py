"""Coarsening: acyclic, exact and deterministic groups, and the way back to ops."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.hardware.cluster import Cluster, Device
from envs.problem import Problem
from envs.simulator import Simulator
from graphs.coarsen.groups import Coarsened, coarsen
from graphs.coarsen.merging import cut_by_weight
from graphs.coarsen.sizes import SUMMED
from graphs.graph import (
    LARGEST_BYTES,
    PHASES,
    SIZES,
    GraphArrays,
    add_edge,
    add_op,
    attributes_of,
    new_graph,
)
from graphs.synthetic.mirror import with_backward

seeds = st.integers(0, 10**7)


def random_graph(
    seed: int, *, limits: bool = True, kinds: tuple[str, ...] = ("*", "gpu")
) -> nx.DiGraph[str]:
    """Return ops in shuffled order, with groups, allowed devices, unequal edges and integer ns.

    Ops of one group have a common device, and all ops have a cost for any kind.
    """
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 40))
    reach = int(rng.integers(1, 12))
    share = float(rng.choice([0.0, 0.3, 0.8]))
    graph = new_graph(f"random-{seed}")
    for i in rng.permutation(count).tolist():
        add_op(
            graph,
            f"op{i}",
            cost_s={
                kind: int(rng.choice([0, 3, 700, 40_000])) * 1e-9
                for kind in kinds
                if kind == "*" or rng.random() < 0.7
            },
            phase=PHASES[3 * i // count],
            module=f"layer.{i // 5}",
            flops=int(rng.integers(0, 1 << 50)),
            moved_bytes=int(rng.integers(0, 100)),
            output_bytes=int(rng.integers(0, 100)),
            parameter_bytes=int(rng.integers(0, 100)),
            gradient_bytes=int(rng.integers(0, 100)),
            optimizer_bytes=int(rng.integers(0, 100)),
            saved_bytes=int(rng.integers(0, 100)),
            workspace_bytes=int(rng.integers(0, 100)),
            colocate=f"together {rng.integers(4)}" if rng.random() < share else None,
            devices=("a", "bcd"[int(rng.integers(3))]) if limits and rng.random() < 0.2 else None,
        )
    for i in range(1, count):
        for source in set(rng.integers(max(0, i - reach), i, int(rng.integers(0, 4))).tolist()):
            add_edge(graph, f"op{source}", f"op{i}", int(rng.integers(0, 100)))
    return graph


def any_coarsened(seed: int, graph: nx.DiGraph[str]) -> Coarsened:
    rng = np.random.default_rng(seed)
    return coarsen(
        graph,
        most_groups=int(rng.integers(25, 40)) if rng.random() < 0.7 else None,
        least_cost_s=float(rng.choice([0.0, 1e-8, 1e-6])),
    )


def groups_of(found: Coarsened, graph: nx.DiGraph[str]) -> list[set[str]]:
    groups: list[set[str]] = [set() for _ in found.graph]
    for op_id, g in zip(graph, found.group_of.tolist(), strict=True):
        groups[g].add(op_id)
    return groups


@settings(max_examples=200)
@given(seed=seeds)
def test_groups_are_acyclic_and_add_up_as_in_a_slow_twin(seed: int) -> None:
    graph = random_graph(seed)
    found = any_coarsened(seed, graph)
    groups = groups_of(found, graph)
    assert nx.is_directed_acyclic_graph(found.graph)
    assert all(groups)
    assert sorted(found.running.tolist()) == list(range(len(graph)))
    assert np.all(np.diff(found.group_of[found.running]) >= 0)
    names = list(found.graph)
    index = list(graph)
    for g, members in enumerate(groups):
        node = attributes_of(found.graph, names[g])
        ops = {op_id: attributes_of(graph, op_id) for op_id in members}
        for size in SUMMED:
            assert found.graph.nodes[names[g]][size] == sum(graph.nodes[u][size] for u in members)
        leaving = {u for u in members if not graph.succ[u] or set(graph.succ[u]) - members}
        assert node["output_bytes"] == sum(ops[u]["output_bytes"] for u in leaving)
        for kind in ("*", "gpu"):
            known = [op["cost_s"].get(kind, op["cost_s"].get("*")) for op in ops.values()]
            total = sum(Fraction(s) for s in known if s is not None)
            own = any(kind in op["cost_s"] for op in ops.values())
            assert node["cost_s"].get(kind) == (float(total) if own else None)
        order = [index[i] for i in found.running[found.group_of[found.running] == g].tolist()]
        peak = 0
        for t, running in enumerate(order):
            held = sum(
                ops[u]["output_bytes"]
                for u in order[: t + 1]
                if u not in leaving and max(map(order.index, graph.succ[u])) >= t
            )
            peak = max(peak, held + ops[running]["workspace_bytes"])
        assert node["workspace_bytes"] == peak
        assert node["module"] == (
            "layer" if len({op["module"] for op in ops.values()}) > 1 else ops[order[0]]["module"]
        )
    expected: dict[tuple[str, str], int] = {}
    for a, b in itertools.permutations(range(len(groups)), 2):
        sent = [
            max(graph.edges[u, v]["bytes"] for v in readers)
            for u in groups[a]
            if (readers := set(graph.succ[u]) & groups[b])
        ]
        if sent:
            expected[names[a], names[b]] = sum(sent)
    assert {(a, b): data["bytes"] for a, b, data in found.graph.edges(data=True)} == expected


@settings(max_examples=100)
@given(seed=seeds)
def test_phases_and_allowed_devices_never_mix(seed: int) -> None:
    graph = random_graph(seed)
    found = any_coarsened(seed, graph)
    ops = {op_id: attributes_of(graph, op_id) for op_id in graph}
    limits = {op_id: set(op["devices"] or "abcd") for op_id, op in ops.items()}
    for members, name in zip(groups_of(found, graph), found.graph, strict=True):
        node = attributes_of(found.graph, name)
        for op_id in members:
            label = ops[op_id]["colocate"]
            alike = [u for u in graph if u == op_id or (label and ops[u]["colocate"] == label)]
            allowed = set.intersection(*(limits[u] for u in alike))
            assert ops[op_id]["phase"] == node["phase"]
            assert allowed == set(node["devices"] or "abcd")


@settings(max_examples=100)
@given(seed=seeds, most=st.integers(3, 40))
def test_there_are_few_enough_groups_and_colocated_ops_share_their_devices(
    seed: int, most: int
) -> None:
    graph = random_graph(seed, limits=False, kinds=("*",))
    found = coarsen(graph, most_groups=most)  # one group for each phase is always possible
    assert len(found) <= most
    labels = [node["colocate"] or name for name, node in found.graph.nodes(data=True)]
    placed, _ = found.expand(np.unique(labels, return_inverse=True)[1], np.zeros(len(found)))
    device_of: dict[str, int] = {}
    for op_id, device in zip(graph, placed.tolist(), strict=True):
        if (label := attributes_of(graph, op_id)["colocate"]) is not None:
            assert device_of.setdefault(label, device) == device


@settings(max_examples=100)
@given(seed=seeds)
def test_one_device_takes_as_long_as_before(seed: int) -> None:
    graph = random_graph(seed, limits=False)
    found = any_coarsened(seed, graph)
    one = Cluster(name="one", devices=(Device(name="a", kind="gpu", memory_bytes=1 << 60),))
    steps = []
    for each in (graph, found.graph):
        problem = Problem.of(GraphArrays.from_graph(each), one)
        here = np.zeros((1, problem.op_count), np.int32)
        steps.append(int(Simulator(problem).step_ns(here, np.zeros((1, problem.op_count)))[0]))
    assert steps[0] == steps[1]


@settings(max_examples=100)
@given(seed=seeds)
def test_expanded_priorities_keep_the_order_of_groups_and_of_their_ops(seed: int) -> None:
    graph = random_graph(seed)
    found = any_coarsened(seed, graph)
    rng = np.random.default_rng(seed)
    of_groups = rng.integers(0, 4, len(found)).astype(np.float64)
    devices = rng.integers(0, 5, len(found))
    placed, priority = found.expand(devices, of_groups)
    assert placed.tolist() == devices[found.group_of].tolist()
    assert sorted(priority.tolist()) == list(range(1, len(graph) + 1))
    first_is_more = sorted(range(len(graph)), key=lambda i: -priority[i])
    keys = [(-of_groups[found.group_of[i]], int(found.group_of[i])) for i in first_is_more]
    assert keys == sorted(keys)
    index = {op_id: i for i, op_id in enumerate(graph)}
    for u, v in graph.edges:
        if found.group_of[index[u]] == found.group_of[index[v]]:
            assert priority[index[u]] > priority[index[v]]


def line(count: int, cost_s: float = 1e-3) -> nx.DiGraph[str]:
    graph = new_graph("line")
    for i in range(count):
        add_op(graph, str(i), cost_s={"*": cost_s}, output_bytes=10 + i)
        if i:
            add_edge(graph, str(i - 1), str(i))
    return graph


def branches(count: int, length: int) -> nx.DiGraph[str]:
    """Return a fork, equal chains and a join."""
    graph = new_graph("branches")
    add_op(graph, "fork", cost_s={"*": 1e-6})
    for b in range(count):
        for i in range(length):
            add_op(graph, f"{b}.{i}", cost_s={"*": 1e-6}, module=f"branch{b}")
            add_edge(graph, f"{b}.{i - 1}" if i else "fork", f"{b}.{i}", 8)
    add_op(graph, "join", cost_s={"*": 1e-6})
    for b in range(count):
        add_edge(graph, f"{b}.{length - 1}", "join", 8)
    return graph


def test_without_arguments_only_what_costs_nothing_is_merged() -> None:
    assert len(coarsen(line(5))) == 5
    assert len(coarsen(line(5, cost_s=0.0))) == 1


def test_a_cheap_chain_becomes_one_op_and_branches_stay_apart() -> None:
    found = coarsen(branches(4, 6), least_cost_s=1e-6)
    assert sorted(found.graph) == ["0.0 +5", "1.0 +5", "2.0 +5", "3.0 +5", "fork", "join"]


@pytest.mark.parametrize(
    ("input_s", "reader_s", "least_cost_s", "groups"),
    [(0.0, 1e-3, 1e-4, 10), (1.0, 1e-3, 4.5e-3, 6)],  # dear readers; side work in groups of four
)
def test_a_group_takes_in_no_more_side_work_than_is_cheap(
    input_s: float, reader_s: float, least_cost_s: float, groups: int
) -> None:
    graph = new_graph("star")
    add_op(graph, "input", cost_s={"*": input_s})
    for i in range(9):
        add_op(graph, f"reader{i}", cost_s={"*": reader_s})
        add_edge(graph, "input", f"reader{i}")
    assert len(coarsen(graph, least_cost_s=least_cost_s)) == groups


def test_cheap_by_one_kind_may_be_dear_by_another() -> None:
    graph = new_graph("line")
    for name in "ab":
        add_op(graph, name, cost_s={"cpu": 1.0, "gpu": 1e-6})
    add_edge(graph, "a", "b")
    assert len(coarsen(graph, least_cost_s=1e-3)) == 1
    assert len(coarsen(graph, least_cost_s=1e-3, kind="cpu")) == 2
    with pytest.raises(ValueError, match=r"kind 'tpu'; known are cpu, gpu"):
        coarsen(graph, kind="tpu")


def test_branches_are_cut_where_they_end() -> None:
    found = coarsen(branches(8, 10), most_groups=10)
    branch_groups = {found.group_of[1 + b * 10 + i] for b in range(8) for i in range(10)}
    assert len(branch_groups) == 8


def test_a_chain_is_cut_by_weight_in_one_pass_and_heavy_ops_stay_alone() -> None:
    graph = new_graph("chain")
    for i in range(7):
        add_op(graph, str(i), cost_s={"*": 1.0}, output_bytes=10)
        if i:
            add_edge(graph, str(i - 1), str(i))
    weight = np.array([1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0])
    ops, each = GraphArrays.from_graph(graph), np.arange(7)
    found = cut_by_weight(ops, each, np.zeros(7, np.int64), weight, 2.0)
    assert found.tolist() == [0, 0, 1, 2, 3, 3, 4]


def test_ops_without_costs_are_grouped_by_their_number() -> None:
    graph = line(100)
    for op_id in graph:
        graph.nodes[op_id]["cost_s"] = {}
    found = coarsen(graph, most_groups=10, least_cost_s=1.0)
    assert np.bincount(found.group_of).max() <= 12
    assert all(node["cost_s"] == {} for _, node in found.graph.nodes(data=True))


def test_what_is_kept_together_becomes_one_op() -> None:
    found = coarsen(branches(3, 4), keep_together=["branch1"])
    assert "1.0 +3" in found.graph
    assert attributes_of(found.graph, "1.0 +3")["colocate"] is None
    assert len(found) == 2 + 2 * 4 + 1


def test_a_group_that_a_path_leaves_and_enters_again_stays_apart_on_one_device() -> None:
    found = coarsen(line(4), keep_together=["[03]"])
    assert list(found.graph) == ["0", "1", "2", "3"]
    labels = {op_id: node["colocate"] for op_id, node in found.graph.nodes(data=True)}
    assert labels["0"] == labels["3"] is not None
    assert labels["1"] is labels["2"] is None


def test_forward_and_backward_of_a_module_share_a_device_as_two_ops() -> None:
    graph = with_backward(branches(2, 5))
    found = coarsen(graph, keep_together=["branch0"])
    together = [n for _, n in found.graph.nodes(data=True) if n["colocate"] is not None]
    assert sorted(node["phase"] for node in together) == ["backward", "forward"]
    assert {node["colocate"] for node in together} == {"kept together: branch0"}


@pytest.mark.parametrize(("most", "labels"), [(80, 40), (4, 2)])
def test_groups_of_shared_devices_are_united_only_if_few_groups_are_asked_for(
    most: int, labels: int
) -> None:
    found = coarsen(with_backward(line(40), together=True), most_groups=most)
    assert len({node["colocate"] for _, node in found.graph.nodes(data=True)}) == labels
    assert len(found) <= most


def test_too_few_groups_for_the_limits_are_refused() -> None:
    graph = line(4)
    graph.nodes["1"]["devices"] = ("a",)
    with pytest.raises(ValueError, match=r"2 groups are too few.*allow more"):
        coarsen(graph, most_groups=2)
    assert len(coarsen(graph, most_groups=3)) == 3


def test_ops_that_must_share_a_device_but_cannot_are_refused() -> None:
    for key, values in (("devices", [("a",), ("b",)]), ("cost_s", [{"x": 1.0}, {"y": 1.0}])):
        graph = line(2)
        for op_id, value in zip(graph, values, strict=True):
            graph.nodes[op_id].update({"colocate": "both", key: value})
        with pytest.raises(ValueError, match="ops '0', '1' must share a device"):
            coarsen(graph)


def test_sums_of_a_group_are_at_most_the_largest_size() -> None:
    graph = new_graph("large")
    sizes: Any = dict.fromkeys(SIZES, LARGEST_BYTES)
    for name in "abc":
        add_op(graph, name, cost_s={"*": 1.0}, **sizes)
    for source in "ab":
        add_edge(graph, source, "c")
    [group] = GraphArrays.from_graph(coarsen(graph, most_groups=1).graph).ids
    whole = coarsen(graph, most_groups=1).graph.nodes[group]
    assert [whole[name] for name in SIZES] == [LARGEST_BYTES] * len(SIZES)
    apart = GraphArrays.from_graph(coarsen(graph, keep_together=["[ab]"]).graph)
    assert apart.edge_bytes.tolist() == [LARGEST_BYTES]


def test_loaded_costs_of_a_group_are_the_sum_of_those_of_its_ops() -> None:
    graph = new_graph("chain")
    for name, loaded_s in (("a", {"x": 3.0}), ("b", {}), ("c", {}), ("alone", {})):
        add_op(graph, name, cost_s={"x": 2.0}, loaded_cost_s=loaded_s, phase="forward")
    add_edge(graph, "a", "b")
    add_edge(graph, "b", "c")
    coarse = coarsen(graph, least_cost_s=4.0).graph
    costs = [(node["cost_s"], node["loaded_cost_s"]) for node in coarse.nodes.values()]
    assert costs == [({"x": 6.0}, {"x": 7.0}), ({"x": 2.0}, {})]


def test_launches_of_a_group_are_the_sum_where_all_are_known() -> None:
    graph = new_graph("chain")
    for name in "abc":
        add_op(graph, name, cost_s={"x": 2.0, "*": 1.0}, launch_s={"x": 0.5}, phase="forward")
    add_op(graph, "alone", cost_s={"x": 2.0})
    graph.nodes["a"]["launch_s"] |= {"*": 3.0}
    add_edge(graph, "a", "b")
    add_edge(graph, "b", "c")
    coarse = coarsen(graph, least_cost_s=4.0).graph
    assert [node["launch_s"] for node in coarse.nodes.values()] == [{"x": 1.5}, {}]


def test_groups_say_where_costs_come_from_that_are_not_those_of_their_kind() -> None:
    graph = line(4)
    graph.graph["cost_source"] = {"*": "measured"}
    for op_id, node in graph.nodes(data=True):
        node["cost_s"] = {"*": 1.0}
        node["cost_source"] = {"*": "cached"} if op_id == "1" else {}
    found = coarsen(graph, keep_together=["[01]", "[23]"])
    sources = {op_id: node["cost_source"] for op_id, node in found.graph.nodes(data=True)}
    assert sources == {"0 +1": {"*": "measured; cached"}, "2 +1": {}}
    assert found.graph.graph["cost_source"] == {"*": "measured"}
