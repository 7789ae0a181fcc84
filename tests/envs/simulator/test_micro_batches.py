"""Micro-batches: pipelines calculated by hand, and the plain expansion of any graph."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest

from envs.hardware.cluster import Cluster, Link
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS, Schedule, Simulated, Simulator
from envs.simulator.micro_batches import Pipeline
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from tests.helpers.simulator_cases import fork, one_kind, problem_of, random_case
from tests.helpers.simulator_twin import twin_step


def twin_graph(
    graph: nx.DiGraph[str], cluster: Cluster, m: int, in_flight: int
) -> tuple[nx.DiGraph[str], list[str], list[int]]:
    """Return the graph of m micro-batches, and for each of its ops the copied op and its batch."""
    whole = new_graph("whole")
    ids = list(graph)
    phase = {op: graph.nodes[op]["phase"] for op in ids}
    origin: list[str] = []
    batch: list[int] = []

    def copy(op: str, k: int) -> str:
        return op if phase[op] == "optimizer" else f"{op}[{k}]"

    def add(name: str, op: str, k: int) -> None:
        data = dict(graph.nodes[op])
        data["colocate"] = data["colocate"] or f"copies of {op}"
        if k > 0:
            data.update(parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0)
        whole.add_node(name, **data)
        origin.append(op)
        batch.append(k)

    for k in range(m):
        for op in ids:
            if k == 0 or phase[op] != "optimizer":
                add(copy(op, k), op, k)
    sums = [
        op
        for op in ids
        if phase[op] == "backward"
        and all(phase[reader] == "optimizer" for reader in graph.successors(op))
    ]
    for k in range(m):
        for u, v in graph.edges:
            if whole.has_edge(copy(u, k), copy(v, k)):
                continue  # both ops exist only once
            if u in sums and k < m - 1:
                continue
            add_edge(whole, copy(u, k), copy(v, k), graph.edges[u, v]["bytes"])
        for op in sums:
            if k > 0:
                add_edge(whole, copy(op, k - 1), copy(op, k))
    last = last_backward(graph, cluster)
    for k in range(in_flight, m if last else 0):
        gate = f"gate[{k}]"
        assert last is not None
        add(gate, last, k)
        for size in [name for name in whole.nodes[gate] if name.endswith("_bytes")]:
            whole.nodes[gate][size] = 0
        whole.nodes[gate].update(phase="forward")
        add_edge(whole, copy(last, k - in_flight), gate, 0)
        for op in ids:
            if phase[op] == "forward" and graph.in_degree(op) == 0:
                add_edge(whole, gate, copy(op, k), 0)
    return whole, origin, batch


def last_backward(graph: nx.DiGraph[str], cluster: Cluster) -> str | None:
    """Return the backward op that ends last on unlimited fastest devices without transfers.

    An op may use the devices that are allowed for its whole co-location group.
    """
    end: dict[str, int] = {}
    order = list(nx.lexicographical_topological_sort(graph, key=list(graph).index))
    for op in order:
        end[op] = max((end[u] for u in graph.predecessors(op)), default=0) + min(
            round((cost + device.launch_s) * 1e9)
            for device in cluster.devices
            for cost in [_cost_s(graph, op, device.kind, device.name)]
            if cost is not None
            and all(
                _cost_s(graph, other, device.kind, device.name) is not None
                for other in graph
                if graph.nodes[other]["colocate"] == graph.nodes[op]["colocate"] is not None
            )
        )
    backward = [op for op in order if graph.nodes[op]["phase"] == "backward"]
    return max(reversed(backward), key=end.__getitem__, default=None)


def twin_priority(
    graph: nx.DiGraph[str], whole: nx.DiGraph[str], origin: list[str], batch: list[int],
    priority: list[float],
) -> list[float]:  # fmt: skip
    """Return priorities that order the ops as in 1F1B."""
    priority_of = dict(zip(graph, priority, strict=True))
    place = {op: i for i, op in enumerate(graph)}

    def urgency(j: int) -> tuple[int, int, float, int]:
        phases = ["backward", "optimizer", "forward"]
        is_gate = names[j].startswith("gate[")
        kind = 0 if is_gate else 1 + phases.index(whole.nodes[names[j]]["phase"])
        return kind, batch[j], -priority_of[origin[j]], place[origin[j]]

    names = list(whole)
    order = sorted(range(len(names)), key=urgency)
    return [-float(order.index(j)) for j in range(len(names))]


def _cost_s(graph: nx.DiGraph[str], op: str, kind: str, name: str) -> float | None:
    node = graph.nodes[op]
    if node["devices"] is not None and name not in node["devices"]:
        return None
    costs: dict[str, float] = node["cost_s"]
    return costs.get(kind, costs.get("*"))


FREE = {"latency_s": 0.0, "bandwidth_bytes_per_s": math.inf}


def stages(count: int, *, training: bool = False, optimizer: bool = False) -> nx.DiGraph[str]:
    """Return stages i: f of 1 us and 1000 bytes, b of 2 us, w makes a gradient, o of 5 us."""
    graph = new_graph("stages")
    for i in range(count):
        add_op(graph, f"f{i}", cost_s={"*": 1e-6}, output_bytes=1000, parameter_bytes=7)
        if i:
            add_edge(graph, f"f{i - 1}", f"f{i}")
    for i in reversed(range(count if training else 0)):
        add_op(graph, f"b{i}", cost_s={"*": 2e-6}, phase="backward")
        add_edge(graph, f"f{i}", f"b{i}")
        if i < count - 1:
            add_edge(graph, f"b{i + 1}", f"b{i}")
        add_op(graph, f"w{i}", cost_s={"*": 0.0}, phase="backward", output_bytes=100)
        add_edge(graph, f"b{i}", f"w{i}")
        if optimizer:
            add_op(graph, f"o{i}", cost_s={"*": 5e-6}, phase="optimizer", output_bytes=100)
            add_edge(graph, f"w{i}", f"o{i}")
    return graph


def devices_of(graph: nx.DiGraph[str]) -> np.ndarray:
    return np.array([int(op[1:]) for op in graph], np.int32)


def pipeline_of(
    graph: nx.DiGraph[str], cluster: Cluster, m: int, in_flight: int | None = None
) -> Pipeline:
    return Pipeline(Problem.of(GraphArrays.from_graph(graph), cluster), m, in_flight=in_flight)


def run_stages(graph: nx.DiGraph[str], d: int, m: int, in_flight: int | None = None) -> Schedule:
    pipeline = pipeline_of(graph, one_kind(d, **FREE), m, in_flight)
    where = devices_of(graph)
    return Simulator(pipeline.problem).run(
        pipeline.devices(where), pipeline.priority(np.zeros(len(where)))
    )


@pytest.mark.parametrize(("d", "m"), [(1, 2), (2, 1), (3, 7), (5, 2)])
def test_a_pipeline_takes_m_plus_d_minus_1_turns(d: int, m: int) -> None:
    assert run_stages(stages(d), d, m).step_ns == (m + d - 1) * 1000
    assert run_stages(stages(d, training=True), d, m).step_ns == (m + d - 1) * 3000


@pytest.mark.parametrize("d", [1, 2, 5])
def test_as_many_micro_batches_are_in_flight_as_there_are_devices(d: int) -> None:
    graph = stages(d, training=True)
    for m in (12, 24):
        peaks = run_stages(graph, d, m).peak_bytes
        # Parameters, the sum of gradients, and one output for each micro-batch in flight.
        assert peaks[0] == 7 + 100 + 1000 * d
        assert (peaks <= 7 + 200 + 2000 * d).all()  # other devices also hold a received input
    if d > 1:
        eager = run_stages(graph, d, 12, in_flight=12)
        assert eager.peak_bytes[0] > peaks[0] + 1000
        assert eager.step_ns == run_stages(graph, d, 12).step_ns
        assert run_stages(graph, d, 12, in_flight=1).step_ns == 12 * d * 3000


def twin_equals(seed: int) -> str:
    rng = random.Random(seed)
    graph, cluster, devices, priority = random_case(seed)
    for op in graph:
        last = graph.out_degree(op) == 0
        graph.nodes[op]["phase"] = rng.choice(["forward", "backward", *["optimizer"] * last])
    m, in_flight = rng.randint(1, 4), rng.randint(1, 3)
    problem, where, levels = problem_of((graph, cluster, devices, priority))
    pipeline = Pipeline(problem, m, in_flight=in_flight)
    whole, origin, batch = twin_graph(graph, cluster, m, in_flight)
    places = dict(zip(graph, devices, strict=True))
    twin = twin_step(
        whole,
        cluster,
        [places[op] for op in origin],
        twin_priority(graph, whole, origin, batch, priority),
    )
    schedule = Simulator(pipeline.problem).run(pipeline.devices(where), pipeline.priority(levels))
    copies = pipeline.problem.graph
    assert list(copies.ids) == list(whole)
    position = np.argsort(copies.topological)
    source = np.repeat(np.arange(len(copies)), np.diff(copies.successor_start))
    assert (position[source] < position[copies.successors]).all()
    if twin.blocked:
        assert schedule.step_ns == INFEASIBLE_NS
        return "blocked"
    assert schedule.step_ns == twin.step_ns
    assert schedule.start_ns.tolist() == [twin.start_ns[j] for j in range(len(whole))]
    assert schedule.peak_bytes.tolist() == twin.peak_bytes
    again = Problem.of(GraphArrays.from_graph(whole), cluster)
    for column in ("output_bytes", "parameter_bytes", "successors", "edge_bytes", "phase"):
        ours, plain = getattr(pipeline.problem.graph, column), getattr(again.graph, column)
        assert ours.tolist() == plain.tolist()
    return "ran" if m <= in_flight else "gated"


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    "block", [*range(3), *(pytest.param(k, marks=pytest.mark.slow) for k in range(10, 30))]
)
def test_copies_in_flat_arrays_equal_a_plain_graph_of_them(block: int) -> None:
    kinds = {twin_equals(1000 * block + seed) for seed in range(100)}
    assert kinds == {"blocked", "ran", "gated"}


def test_batches_of_placements_are_copied_row_by_row() -> None:
    pipeline = pipeline_of(stages(3, training=True), one_kind(3), 4)
    rng = np.random.default_rng(0)
    devices = rng.integers(0, 3, (5, 9)).astype(np.int32)
    priority = rng.random((5, 9))
    for row in range(5):
        assert (pipeline.devices(devices)[row] == pipeline.devices(devices[row])).all()
        assert (pipeline.priority(priority)[row] == pipeline.priority(priority[row])).all()


def test_the_backend_answers_for_a_placement_in_micro_batches() -> None:
    graph, cluster = stages(3), one_kind(3, **FREE)
    arrays = GraphArrays.from_graph(graph)
    backend = Simulated(Problem.of(arrays, cluster))
    whole = Placement.of(arrays, cluster, devices_of(graph), np.zeros(3))
    one, many = backend.evaluate([whole, replace(whole, micro_batches=8)])
    assert (one.step_s, one.period_s) == (3e-6, None)
    assert many.step_s == pytest.approx((8 + 3 - 1) * 1e-6)
    assert many.period_s == pytest.approx(1e-6)


def test_a_placement_says_how_many_micro_batches_are_in_flight() -> None:
    graph, cluster = stages(3, training=True), one_kind(3, **FREE)
    arrays = GraphArrays.from_graph(graph)
    backend = Simulated(Problem.of(arrays, cluster))
    placement = replace(
        Placement.of(arrays, cluster, devices_of(graph), np.zeros(9)), micro_batches=8
    )
    placements = [replace(placement, in_flight=n) for n in (None, 1, 3, 8)]
    steps = [round(result.step_s * 1e9) for result in backend.evaluate(placements)]
    assert steps == [(8 + 2) * 3000, 8 * 9000, (8 + 2) * 3000, (8 + 2) * 3000]
    peaks = [result.peak_memory_bytes["d0"] for result in backend.evaluate(placements)]
    assert peaks[1] < peaks[0] == peaks[2] < peaks[3]
    assert [Placement.from_dict(p.to_dict()).in_flight for p in placements] == [None, 1, 3, 8]
    assert "in_flight" not in placement.to_dict()
    with pytest.raises(ValueError, match="in_flight is 0, not within 1"):
        replace(placement, in_flight=0)


def test_there_is_no_period_where_more_micro_batches_cannot_run() -> None:
    graph = stages(3, training=True)
    add_op(graph, "l2", cost_s={"*": 1e-6}, devices=("d2",))
    pairs = (("d0", "d1"), ("d1", "d2"))
    links = tuple(Link(between=pair, latency_s=0, bandwidth_bytes_per_s=1e9) for pair in pairs)
    cluster, arrays = replace(one_kind(3), links=links), GraphArrays.from_graph(graph)
    placed = Placement.of(arrays, cluster, devices_of(graph), np.zeros(len(arrays)))
    [found] = Simulated(Problem.of(arrays, cluster)).evaluate([replace(placed, micro_batches=3)])
    assert found.feasible
    assert found.period_s is None
    assert found.no_period_reason.startswith("6 micro-batches cannot run: op 'l2[3]' on d2")


def test_steps_that_cannot_be_repeated_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = new_graph("strange")
    add_op(graph, "update", cost_s={"*": 1e-6}, phase="optimizer")
    add_op(graph, "loss", cost_s={"*": 1e-6})
    add_edge(graph, "update", "loss")
    with pytest.raises(ValueError, match="optimizer op 'update' feeds forward op 'loss'"):
        pipeline_of(graph, one_kind(1), 2)
    monkeypatch.setattr("envs.simulator.micro_batches.LARGEST", 8)
    with pytest.raises(ValueError, match="8 micro-batches"):
        pipeline_of(stages(1), one_kind(1), 8)
    with pytest.raises(ValueError, match="micro_batches is 0"):
        pipeline_of(stages(1), one_kind(1), 0)
    with pytest.raises(ValueError, match="in_flight is 0"):
        pipeline_of(stages(1), one_kind(1), 2, in_flight=0)


def test_micro_batches_whose_bytes_do_not_add_up_are_refused() -> None:
    graph = fork(2)
    graph.nodes["s"]["output_bytes"] = 1 << 60
    problem = Problem.of(GraphArrays.from_graph(graph), one_kind(2))
    with pytest.raises(ValueError, match="bytes in all"):
        Pipeline(problem, 4)
