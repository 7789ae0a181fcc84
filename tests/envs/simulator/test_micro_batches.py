"""Micro-batches: pipelines calculated by hand, and the plain expansion of any graph."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest

from envs.hardware.cluster import Cluster
from envs.placement import Placement
from envs.problem import Problem
from envs.simulator import INFEASIBLE_NS, Schedule, Simulated, Simulator
from envs.simulator.micro_batches import Pipeline
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from tests.helpers.micro_batches_twin import twin_graph, twin_priority
from tests.helpers.simulator_cases import fork, one_kind, problem_of, random_case
from tests.helpers.simulator_twin import twin_step

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
    return Pipeline.of(Problem.of(GraphArrays.from_graph(graph), cluster), m, in_flight=in_flight)


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


def test_the_optimizer_runs_once_after_the_last_micro_batch() -> None:
    graph = stages(2, training=True, optimizer=True)
    schedule = run_stages(graph, 2, 4)
    # 1F1B ends its backward on stage 1 at 13 us, on stage 0 at 15 us; then 5 us each.
    assert schedule.step_ns == (4 + 2 - 1) * 3000 + 5000
    assert len(schedule.devices) == 4 * 6 + 2 + 2  # four copies, the optimizer, two gates


def twin_equals(seed: int) -> str:
    rng = random.Random(seed)
    graph, cluster, devices, priority = random_case(seed)
    for op in graph:
        last = graph.out_degree(op) == 0
        graph.nodes[op]["phase"] = rng.choice(["forward", "backward", *["optimizer"] * last])
    m, in_flight = rng.randint(1, 4), rng.randint(1, 3)
    problem, where, levels = problem_of((graph, cluster, devices, priority))
    pipeline = Pipeline.of(problem, m, in_flight=in_flight)
    whole, origin, batch = twin_graph(graph, cluster, m, in_flight)
    places = dict(zip(graph, devices, strict=True))
    twin = twin_step(
        whole,
        cluster,
        [places[op] for op in origin],
        twin_priority(graph, whole, origin, batch, priority),
    )
    schedule = Simulator(pipeline.problem).run(pipeline.devices(where), pipeline.priority(levels))
    assert list(pipeline.problem.graph.ids) == list(whole)
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
        Pipeline.of(problem, 4)
