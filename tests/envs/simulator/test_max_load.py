"""The max-load objective: by hand, and against its plain twin."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.instances import profiled
from envs.compiled import compiled_borrowing
from envs.hardware.cluster import Cluster, Device
from envs.simulator import INFEASIBLE_NS
from envs.simulator.bounds import load_bound_ns
from envs.simulator.max_load import (
    LoadArrays,
    Loads,
    count_op,
    load_arrays,
    loads_for,
    loads_of,
    max_load_ns,
    overload_reason,
)
from graphs.graph import add_op, new_graph
from tests.helpers.random_problems import every_placement, random_problem
from tests.helpers.simulator_cases import Case, fork, one_kind, problem_of, random_case
from tests.helpers.simulator_twin import Sending, _cost_ns, _link, _may_run, _transfer_ns

KEPT = ("parameter", "gradient", "optimizer", "output", "workspace")
"""Op attributes whose sum is the memory used on a device."""


def twin_loads(
    graph: nx.DiGraph[str], cluster: Cluster, devices: list[int]
) -> tuple[list[int], bool]:
    """Return the load of each device in nanoseconds, and whether the placement is feasible."""
    where = dict(zip(graph, devices, strict=True))
    names = list(cluster.names)
    load = [0] * len(names)
    used = [0] * len(names)
    feasible = all(_may_run(graph, cluster, op, where[op]) for op in graph)

    def pay(d: int, transfer_ns: int) -> None:
        if cluster.devices[d].kind != "cpu":
            load[d] += transfer_ns

    for op in graph:
        home, node = where[op], graph.nodes[op]
        if _may_run(graph, cluster, op, home):
            load[home] += _cost_ns(graph, cluster, op, home)
        used[home] += sum(node[f"{name}_bytes"] for name in KEPT)
        needed_by: dict[int, int] = {}
        for reader in graph.successors(op):
            size = graph.edges[op, reader]["bytes"]
            needed_by[where[reader]] = max(size, needed_by.get(where[reader], 0))
        needed_by.pop(home, None)
        times = [0]
        for d, size in needed_by.items():
            if _link(cluster, names, home, d) is None:
                feasible = False
                continue
            times.append(_transfer_ns(cluster, names, Sending(0, home, d, 0, size, [])))
            pay(d, times[-1])
        pay(home, max(times))
    room = [device.memory_bytes for device in cluster.devices]
    return load, feasible and all(u <= m for u, m in zip(used, room, strict=True))


def test_both_ends_pay_for_a_transfer_once() -> None:
    problem, devices, _ = problem_of((fork(4), one_kind(3), [0, 0, 1, 1, 2], [0.0] * 5))
    # d0: s, one op, one 2 us transfer out; d1: two ops, one transfer in; d2: one op, one in.
    assert loads_of(problem, devices).load_ns.tolist() == [4000, 4000, 3000]
    assert max_load_ns(problem, devices).tolist() == [4000]
    assert max_load_ns(problem, np.stack([devices, devices * 0])).tolist() == [4000, 5000]
    with pytest.raises(ValueError, match="one placement, not 3"):
        loads_of(problem, np.tile(devices, (3, 1)))


def test_a_cpu_pays_for_no_transfer() -> None:
    pair = one_kind(2)
    host = Device(name="d0", kind="cpu", memory_bytes=10**9)
    cluster = Cluster(name="host", devices=(host, pair.devices[1]), links=pair.links)
    problem, devices, _ = problem_of((fork(1), cluster, [0, 1], [0.0] * 2))
    assert loads_of(problem, devices).load_ns.tolist() == [1000, 3000]
    assert loads_of(problem, devices[::-1]).load_ns.tolist() == [1000, 3000]


def test_memory_is_the_sum_over_all_ops() -> None:
    graph = new_graph("sizes")
    for name in "ab":
        add_op(graph, name, cost_s={"*": 1e-6}, output_bytes=300_000_000)
        graph.nodes[name].update(parameter_bytes=200_000_000, workspace_bytes=100_000_000)
    problem, devices, _ = problem_of((graph, one_kind(2), [0, 1], [0.0] * 2))
    assert max_load_ns(problem, devices).tolist() == [1000]
    assert overload_reason(problem, devices) == ""
    assert max_load_ns(problem, devices * 0).tolist() == [INFEASIBLE_NS]
    assert "d0 needs 1.2 GB for 2 ops but has 1.0 GB" in overload_reason(problem, devices * 0)


def assert_loads_are_exact(case: Case) -> None:
    problem, devices, _ = problem_of(case)
    load, feasible = twin_loads(*case[:3])
    assert loads_of(problem, devices).load_ns.tolist() == load
    expected = max(load) if feasible else INFEASIBLE_NS
    assert max_load_ns(problem, devices).tolist() == [expected]
    assert bool(overload_reason(problem, devices)) != feasible


@pytest.mark.parametrize("examples", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_loads_equal_their_plain_count(examples: int) -> None:
    @settings(max_examples=examples)
    @given(seed=st.integers(0, 2**32))
    def check(seed: int) -> None:
        assert_loads_are_exact(random_case(seed, large=seed % 20 == 0))

    check()


@compiled_borrowing
def count_ops(
    arrays: LoadArrays,
    loads: Loads,
    devices: NDArray[np.int32],
    order: NDArray[np.int64],
    sign: int,
) -> None:
    for i in order:
        count_op(arrays, loads, devices, i, sign)


@settings(max_examples=30)
@given(seed=st.integers(0, 10**7))
def test_loads_stay_exact_when_ops_are_taken_away_and_added(seed: int) -> None:
    problem, devices, _ = problem_of(random_case(seed))
    arrays = load_arrays(problem)
    loads = loads_for(arrays)
    order = np.random.default_rng(seed).permutation(problem.op_count)
    for sign in (1, -1, 1):
        count_ops(arrays, loads, devices, order, sign)
    assert loads.load_ns.tolist() == loads_of(problem, devices).load_ns.tolist()


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), tight=st.booleans(), pins=st.booleans(), unequal=st.booleans())
def test_no_placement_has_a_smaller_load_than_the_bound(
    seed: int, tight: bool, pins: bool, unequal: bool
) -> None:
    memory_bytes = 8_000_000 if tight else 10**12
    problem = random_problem(
        seed, ops=7, devices=3, groups=True, pins=pins, unequal=unequal, memory_bytes=memory_bytes
    )
    assert load_bound_ns(problem) <= max_load_ns(problem, every_placement(problem)).min()


def test_one_heavy_op_bounds_the_load() -> None:
    problem = profiled("alexnet")
    heaviest_ns = int(problem.cost_ns.max())
    assert heaviest_ns > problem.cost_ns[:, 0].sum() / 4
    assert load_bound_ns(problem) == heaviest_ns
