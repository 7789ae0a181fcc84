"""Steps of replicas: by hand, against a plain twin, and properties of all of them."""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from envs.collectives import MeasuredAllReduce
from envs.hardware.cluster import Cluster
from envs.placement import Placement
from envs.problem import Problem
from envs.replicas.reductions import (
    Buckets,
    busiest_ns,
    reduced_ns,
    replicated,
    serial_ns,
)
from envs.replicas.step import ReplicaSimulator, ReplicaStep
from envs.replicas.topology import SlotNetwork, slot_networks
from envs.replication import Replication
from envs.simulator import Simulator
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from graphs.synthetic.mirror import with_backward
from graphs.synthetic.shapes import Weights, layered
from tests.helpers.clusters import nodes
from tests.helpers.replicas_twin import twin_buckets, twin_ends, twin_step_ns

MB = 10**6
RING = Replication(reduction="ring")


def training_step(layers: int = 3, *, updates: bool = True) -> GraphArrays:
    """Return a chain of layers: 1 ms forward, 2 ms backward, 10 MB of parameters, 0.5 ms update."""
    forward = new_graph("chain")
    for i in range(layers):
        add_op(forward, f"l{i}", cost_s={"*": 1e-3}, output_bytes=1, parameter_bytes=10 * MB)
        if i:
            add_edge(forward, f"l{i - 1}", f"l{i}")
    graph = with_backward(forward)
    for i in range(layers if updates else 0):
        add_op(graph, f"u{i}", cost_s={"*": 0.5e-3}, phase="optimizer")
        add_edge(graph, f"backward/l{i}", f"u{i}", 0)
    return GraphArrays.from_graph(graph)


def placed(problem: Problem, devices: ArrayLike, *, micro_batches: int = 1) -> Placement:
    """Return a placement with ops in graph order."""
    order = -np.arange(problem.op_count)
    placement = Placement.of(problem.graph, problem.cluster, np.asarray(devices), order)
    return replace(placement, micro_batches=micro_batches)


def step_of(problem: Problem, devices: ArrayLike | None = None) -> ReplicaStep:
    """Simulate a replica with ops in graph order, by default all on the first device."""
    where = np.zeros(problem.op_count, int) if devices is None else devices
    return ReplicaSimulator(problem).step(placed(problem, where))


def random_step(seed: int, devices: int, *, updates: bool) -> ReplicaStep:
    rng = np.random.default_rng(seed)
    graph = layered(rng, ops=int(rng.integers(4, 14)), width=3, weights=Weights(backward=True))
    for op_id in list(graph):
        if graph.nodes[op_id]["phase"] == "forward":
            graph.nodes[op_id]["parameter_bytes"] = int(rng.integers(0, 4)) * MB
        elif updates and rng.random() < 0.5:
            add_op(graph, f"{op_id} update", cost_s={"*": 5e-5}, phase="optimizer")
            add_edge(graph, op_id, f"{op_id} update", 0)
    problem = Problem.of(GraphArrays.from_graph(graph), nodes(1, devices))
    where = rng.integers(0, devices, problem.op_count)
    micro_batches = int(rng.integers(1, 4))
    placement = placed(problem, where, micro_batches=micro_batches)
    return ReplicaSimulator(problem).step(
        replace(placement, priority=tuple(rng.random(len(where))))
    )


NETWORKS = st.tuples(
    st.integers(1, 3),  # devices of a replica
    st.integers(2, 6),  # replicas
    st.sampled_from([1e8, 1e9, 1e10, 1e12]),
    st.sampled_from([0.0, 1e-5]),
    st.booleans(),
)


def networks_of(
    drawn: tuple[int, int, float, float, bool],
) -> tuple[SlotNetwork, ...]:
    """Return networks of replicas, each on a node whose devices share a card or have their own."""
    devices, replicas, bandwidth, latency_s, own_cards = drawn
    cluster = nodes(
        replicas, devices, across_bytes_per_s=bandwidth, across_s=latency_s, own_cards=own_cards
    )
    problem = Problem.of(training_step(), cluster)
    groups = [range(r * devices, (r + 1) * devices) for r in range(replicas)]
    return slot_networks(problem, groups)


def test_two_replicas_by_hand() -> None:
    """The last layer is ready after 5 ms, 10 MB take 10 ms; then two more, and an update."""
    alone = Problem.of(training_step(), nodes(1, 1))
    step = step_of(alone)
    assert step.step_ns == 10.5e6  # 3 + 6 ms, then the updates
    assert step.ready_ns.tolist() == [5e6, 7e6, 9e6]
    pair = Problem.of(training_step(), nodes(2, 1, across_bytes_per_s=1e9))
    how = replace(RING, bucket_bytes=10 * MB)
    found = replicated(step, slot_networks(pair, [[0], [1]]), how)
    assert found.end_ns.tolist() == [15e6, 25e6, 35e6]
    assert found.step_s == pytest.approx(36.5e-3)  # and three updates
    assert found.communication_s == pytest.approx(30e-3)
    assert found.exposed_s == pytest.approx(26e-3)
    assert found.hidden_s == pytest.approx(4e-3)  # from 5 to 9 ms
    assert found.full_overlap_s == pytest.approx(30e-3)
    assert [how.algorithm for _, how in found.reductions] == ["ring"] * 3
    one_bucket = replicated(step, slot_networks(pair, [[0], [1]]), replace(how, bucket_bytes=MB))
    assert one_bucket.end_ns.tolist() == found.end_ns.tolist()  # gradients are never split
    two_buckets = replicated(step, slot_networks(pair, [[0], [1]]), RING)  # 20 MB, then 10
    assert two_buckets.end_ns.tolist() == [27e6, 37e6]


def test_rings_take_the_measured_times_of_the_backend_where_there_are_any() -> None:
    """Gradients of 30 MB; 10 MB in 4 ms and 20 MB in 6 ms make 8 ms, half of the bytes 5 ms."""
    step = step_of(Problem.of(training_step(), nodes(1, 1)))
    pair = Problem.of(training_step(), nodes(2, 1, across_bytes_per_s=1e9))
    measured = MeasuredAllReduce("gloo", ((2, 10 * MB, 4e-3), (2, 20 * MB, 6e-3)))
    networks = slot_networks(pair, [[0], [1]], measured)

    def communication_s(**how: Any) -> float:
        return replicated(step, networks, Replication(bucket_bytes=30 * MB, **how)).communication_s

    assert communication_s() == communication_s(reduction="ring") == pytest.approx(8e-3)
    assert communication_s(payload="fp16") == pytest.approx(5e-3)
    assert communication_s(reduction="tree") == pytest.approx(60e-3)  # up and down at 1 GB/s


def test_updates_come_after_all_reductions_though_the_placement_has_them_early() -> None:
    problem = Problem.of(training_step(), nodes(1, 1))
    late = placed(problem, [0] * problem.op_count)
    early = replace(late, priority=tuple(range(problem.op_count)))
    first, last = Simulator(problem).run(*early.arrays()), Simulator(problem).run(*late.arrays())
    is_update = np.array([name.startswith("u") for name in problem.graph.ids])
    assert first.start_ns[is_update].min() < last.start_ns[is_update].min()
    pair = Problem.of(training_step(), nodes(2, 1, across_bytes_per_s=1e9))
    networks = slot_networks(pair, [[0], [1]])
    found = [ReplicaSimulator(problem).step(placement) for placement in (early, late)]
    assert [step.ready_ns.tolist() for step in found] == [[5e6, 7e6, 9e6]] * 2
    assert [step.update_ns.tolist() for step in found] == [[1.5e6]] * 2
    assert [replicated(step, networks, RING).step_s for step in found] == [38.5e-3] * 2


def test_updates_of_an_idle_device_wait_for_the_pass() -> None:
    """The last layer has its own device, which could update it while the others run backward."""
    step = step_of(
        Problem.of(training_step(), nodes(1, 2, inside_bytes_per_s=1e15)),
        [0, 0, 1, 1, 0, 0, 0, 0, 1],
    )
    assert step.update_ns.tolist() == [1e6, 0.5e6]
    assert step.step_ns == step.pass_ns + 1e6


def test_slots_that_share_a_card_reduce_one_after_the_other() -> None:
    buckets = Buckets(
        slot=np.array([0, 1, 2], np.int32),
        size_bytes=np.ones(3, np.int64),
        ready_ns=np.array([2, 0, 1], np.int64),
    )
    shared = [frozenset({7}), frozenset({7}), frozenset({8})]
    duration_ns = np.array([5, 4, 3])
    assert reduced_ns(buckets, duration_ns, shared).tolist() == [9, 4, 4]
    assert serial_ns(buckets, duration_ns, shared) == 9
    assert busiest_ns(buckets, duration_ns, shared) == 9
    joined = [frozenset({7}), frozenset({7, 8}), frozenset({8})]
    assert serial_ns(buckets, duration_ns, joined) == 12
    assert busiest_ns(buckets, duration_ns, joined) == 9


def test_a_gradient_made_elsewhere_is_sent_to_its_parameters_before_the_step_ends() -> None:
    problem = Problem.of(training_step(2, updates=False), nodes(1, 2, inside_bytes_per_s=1e10))
    step = step_of(problem, [0, 0, 1, 1])
    assert step.slot.tolist() == [0, 0]
    assert step.step_ns == 6e6
    assert step.ready_ns.tolist() == [4e6 + 1e6, 6e6]  # 10 MB at 10 GB/s; updates take no time


def test_with_micro_batches_a_gradient_is_ready_in_the_last() -> None:
    problem = Problem.of(training_step(2), nodes(1, 1))
    one = step_of(problem)
    four = ReplicaSimulator(problem).step(placed(problem, [0] * problem.op_count, micro_batches=4))
    assert four.step_ns == 4 * 6e6 + 1e6
    assert (four.ready_ns - one.ready_ns).tolist() == [3 * 6e6] * 2
    assert four.update_ns.tolist() == one.update_ns.tolist() == [1e6]


def renamed(cluster: Cluster, names: dict[str, str]) -> Cluster:
    def of(group: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(names[name] for name in group)

    devices = tuple(replace(device, name=names[device.name]) for device in cluster.devices)
    links = tuple(
        replace(link, between=of(link.between), ports=tuple(map(of, link.ports)))
        for link in cluster.links
    )
    return replace(cluster, devices=devices, links=links)


@pytest.mark.parametrize("host", ["", "n1:"])
def test_pinned_cores_give_all_gradients_at_the_end_to_one_process(host: str) -> None:
    gpus = nodes(2, 2, across_bytes_per_s=1e9)
    cores = renamed(gpus, {name: f"{host}core:{i}" for i, name in enumerate(gpus.names)})
    steps = []
    for cluster in (gpus, cores):
        replica = Problem.of(training_step(), cluster.part([0, 1]))
        one = step_of(replica, [0, 1, 0, 0, 1, 0, 0, 1, 0])
        networks = slot_networks(Problem.of(training_step(), cluster), [[0, 1], [2, 3]])
        steps.append((one, replicated(one, networks, RING)))
    (free, overlapped), (one, found) = steps
    assert one.pass_ns == free.pass_ns
    assert free.update_ns.tolist() == [1e6, 0.5e6]
    assert one.update_ns.tolist() == [1.5e6] * 2
    assert one.step_ns == one.pass_ns + 1.5e6
    assert one.ready_ns.tolist() == [one.pass_ns] * 3
    assert [size for size, _ in found.reductions] == [20 * MB, 10 * MB]
    assert found.step_s == pytest.approx((one.pass_ns + 30e6 + one.update_ns[0]) / 1e9)
    assert str(found.hidden_s) == "0.0"
    assert overlapped.hidden_s > 0


def test_only_the_last_of_accumulated_passes_reduces() -> None:
    step = step_of(Problem.of(training_step(), nodes(1, 1)))
    networks = networks_of((1, 2, 1e9, 0.0, False))
    one, four = replicated(step, networks), replicated(step, networks, Replication(accumulate=4))
    assert four.alone_s - one.alone_s == pytest.approx(3 * 9e-3)  # without updates
    assert four.exposed_s == pytest.approx(one.exposed_s)


def test_coding_takes_its_time_in_every_bucket_or_average() -> None:
    step = step_of(Problem.of(training_step(), nodes(1, 1)))
    networks = networks_of((1, 2, 1e9, 0.0, False))
    bits = replace(RING, payload="1-bit", bucket_bytes=10 * MB)
    coded = replace(bits, coding_bytes_per_s=1e9)
    free, found = replicated(step, networks, bits), replicated(step, networks, coded)
    assert found.communication_s - free.communication_s == pytest.approx(30e-3)  # 30 MB
    assert found.end_ns.tolist()[0] == 5e6 + 10e6 + 10e6 / 32
    assert found.hidden_s == pytest.approx(4e-3)  # from 5 to 9 ms
    averaged = Replication(average_every=16, coding_bytes_per_s=3e9)
    found = replicated(step, networks, averaged)
    assert found.exposed_s == pytest.approx((30e-3 + 10e-3) / 16)
    assert found.hidden_s == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"payload": "fp4"}, "payload.* 'fp4'"),
        ({"average_every": 0}, "average_every.* 0"),
        ({"accumulate": 0}, "accumulate.* 0"),
        ({"bucket_bytes": 0}, "bucket_bytes.* 0"),
        ({"coding_bytes_per_s": 0.0}, r"coding_bytes_per_s.* 0\.0"),
        ({"reduction": "star"}, "reduction.* 'star'"),
        ({"average_every": 4, "payload": "1-bit"}, "full precision, not as 1-bit"),
    ],
)
def test_replication_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Replication(**options)


def test_a_placement_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="n0:g0"):
        step_of(Problem.of(training_step(), nodes(1, 1, memory_bytes=MB)))


@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12), st.integers(0, 6)), max_size=12),
    queues=st.lists(st.frozensets(st.integers(0, 2), max_size=2), min_size=4, max_size=4),
)
def test_reductions_end_as_in_the_twin(
    rows: list[tuple[int, int, int]], queues: list[AbstractSet[int]]
) -> None:
    """Rows are (slot, ready, duration); buckets of a slot may be ready in any order."""
    buckets = Buckets(
        slot=np.array([slot for slot, _, _ in rows], np.int32),
        size_bytes=np.ones(len(rows), np.int64),
        ready_ns=np.array([ready for _, ready, _ in rows], np.int64),
    )
    duration_ns = [duration for _, _, duration in rows]
    ends = reduced_ns(buckets, np.array(duration_ns, np.int64), queues).tolist()
    assert ends == twin_ends([(slot, 1, ready) for slot, ready, _ in rows], duration_ns, queues)
    if rows:
        durations = np.array(duration_ns, np.int64)
        assert max(ends) >= busiest_ns(buckets, durations, queues)
        latest = int(buckets.ready_ns.max())
        assert max(ends) <= latest + serial_ns(buckets, durations, queues)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 999),
    drawn=NETWORKS,
    updates=st.booleans(),
    cap=st.sampled_from([MB, 5 * MB]),
    payload=st.sampled_from(["fp32", "fp16", "1-bit"]),
)
def test_a_step_is_that_of_the_twin_and_between_no_and_full_overlap(
    seed: int, drawn: tuple[int, int, float, float, bool], updates: bool, cap: int, payload: str
) -> None:
    step = random_step(seed, drawn[0], updates=updates)
    networks = networks_of(drawn)
    how = Replication(bucket_bytes=cap, payload=payload)
    found = replicated(step, networks, how)
    buckets = twin_buckets(step, cap)
    durations = [
        round(how.all_reduce(size, networks[slot].levels).seconds * 1e9)
        for slot, size, _ in buckets
    ]
    ends = twin_ends(buckets, durations, [network.queues for network in networks])
    assert found.step_s == twin_step_ns(step, buckets, ends) / 1e9
    assert found.full_overlap_s <= found.step_s <= found.no_overlap_s * (1 + 1e-12)
    assert 0 <= found.exposed_s <= found.communication_s * (1 + 1e-12) + 1e-15
    assert found.alone_s == step.step_ns / 1e9
    assert sum(size for size, _ in found.reductions) == step.size_bytes.sum()


@settings(max_examples=40)
@given(seed=st.integers(0, 999), drawn=NETWORKS, accumulate=st.integers(1, 3))
def test_one_replica_and_a_network_that_takes_no_time_leave_the_plain_step(
    seed: int, drawn: tuple[int, int, float, float, bool], accumulate: int
) -> None:
    step = random_step(seed, drawn[0], updates=True)
    devices, replicas, _, _, own_cards = drawn
    alone = [SlotNetwork(levels=(), queues=frozenset())] * devices
    free = networks_of((devices, replicas, math.inf, 0.0, own_cards))
    how = Replication(accumulate=accumulate)
    plain = replicated(step, alone, how)
    assert plain.step_s == plain.alone_s
    assert plain.communication_s == 0
    assert replicated(step, free, how).step_s == plain.step_s
    if accumulate == 1:
        assert plain.step_s == step.step_ns / 1e9


@pytest.mark.parametrize(("updates", "devices"), [(False, 2), (True, 1)])
def test_the_step_alone_is_what_the_simulator_says(updates: bool, devices: int) -> None:
    """Except for updates that the simulator runs during the pass on another device."""
    problem = Problem.of(training_step(updates=updates), nodes(1, devices))
    where = [i % devices for i in range(problem.op_count)]
    placement = placed(problem, where)
    schedule = Simulator(problem).run(*placement.arrays())
    assert ReplicaSimulator(problem).step(placement).step_ns == schedule.step_ns
