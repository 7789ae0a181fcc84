"""Plans of replicas: compared with every split, and properties of all plans."""

from __future__ import annotations

import signal
from dataclasses import replace
from itertools import product

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from envs.hardware.cluster import Cluster, load_cluster
from envs.hardware.units import milliseconds
from envs.problem import Problem
from envs.replicas.reductions import replicated
from envs.replicas.step import ReplicaSimulator
from envs.replicas.topology import levels_of, slot_networks
from envs.replication import Replication, ReplicationError
from envs.simulator import Simulator
from graphs.costs import with_part_of_batch
from graphs.extract import Workload
from graphs.gradients import gradients_of
from graphs.graph import GraphArrays, add_edge, add_op
from graphs.synthetic.shapes import Weights, layered
from placer.choose import PlacementError
from placer.job import Job
from placer.pipeline import optimize_job
from placer.progress import Silent
from placer.replicate.fitting import Factors
from placer.replicate.messages import remarks_of, verdict_of
from placer.replicate.plan import plan_job
from placer.replicate.simulation import variants
from placer.search.objectives import Objective
from placer.search.registry import placer_named
from tests.helpers.clusters import nodes
from tests.helpers.folders import ROOT
from tests.helpers.replica_plans import MB, SEARCH, layers, planned, rated, training

FAST = nodes(1, 4, inside_bytes_per_s=1e13)


def test_a_fast_network_makes_a_replica_of_every_device() -> None:
    found = planned(layers(), FAST)
    best = found.best
    assert best.name == "4 x 1"
    assert best.groups == (("n0:g0",), ("n0:g1",), ("n0:g2",), ("n0:g3",))
    assert best.efficiency > 0.99
    assert best.samples_per_s == pytest.approx(4 / 24e-3, rel=0.01)
    assert {split.name for split in found.splits} == {
        "1 x 1", "2 x 1", "3 x 1", "4 x 1", "1 x 2", "2 x 2", "1 x 4",
    }  # fmt: skip


def test_a_slow_network_between_nodes_places_within_them_or_leaves_one_idle() -> None:
    cluster = nodes(2, 2, inside_bytes_per_s=1e13, across_bytes_per_s=1e5)
    found = planned(layers(), cluster)
    assert found.best.name == "2 x 1"
    assert found.best.groups == (("n0:g0",), ("n0:g1",))
    assert "2 of 4 devices are left idle." in remarks_of(found)
    averaged = Replication(average_every=10**9)
    assert planned(layers(), cluster, averaged).best.name == "4 x 1"


def test_what_does_not_fit_on_one_device_is_placed_on_several() -> None:
    room = 110 * MB  # enough for the 80 MB of parameters of one tower, not for 160 MB
    graph = layers(8, towers="ab")
    cluster = nodes(1, 4, inside_bytes_per_s=1e13, memory_bytes=room)
    found = planned(graph, cluster)
    assert found.best.name == "2 x 2"
    assert found.best.result is not None
    assert all(size <= room for size in found.best.result.best.peak_memory_bytes.values())
    pure = found.pure(replicas=True)
    assert pure is not None
    assert pure.step is None
    assert "(4 x 1) is not possible" in verdict_of(found)
    with pytest.raises(PlacementError, match="fits nowhere"):
        planned(graph, cluster, Replication(replicas=4))


def test_a_global_batch_is_shared_and_each_replica_has_its_part() -> None:
    found = planned(layers(), FAST, Replication(batch="global", samples=64, accumulate=2))
    best = found.best
    assert best.name == "4 x 1"
    assert best.step is not None
    assert best.step.alone_s == pytest.approx(2 * 24e-3 / 8)
    assert best.samples_per_s == pytest.approx(64 / 6e-3, rel=0.02)
    assert any("divided" in remark for remark in remarks_of(found))


def test_micro_batches_hide_reductions_behind_the_rest_of_the_pipeline() -> None:
    search = replace(SEARCH, objective=Objective(micro_batches=4))
    found = planned(layers(), nodes(1, 4), Replication(replicas=2), search)
    assert found.best.name == "2 x 2"
    assert found.best.step is not None
    assert found.result.placement.micro_batches == 4
    assert found.best.step.hidden_s > 0
    assert found.best.step.alone_s == found.best.result.best.predicted_s  # type: ignore[union-attr]


def test_candidates_are_also_tried_with_gradients_first() -> None:
    job = Job(source=layers(), cluster=nodes(1, 1), search=SEARCH)
    result = optimize_job(job)
    gradients = gradients_of(result.problem.graph)
    makers = {op for ops in gradients.makers for op in ops}
    _, *others = variants(result.problem, result, gradients)
    early = [v.candidate for v in others if v.candidate.name.endswith("gradients first")]
    assert early
    for candidate in early:
        priority = candidate.placement.priority
        assert min(priority[op] for op in makers) > max(
            priority[op] for op in range(len(priority)) if op not in makers
        )


@pytest.mark.parametrize(("name", "ranks"), [("8xh100", [8]), ("4x8xh100", [8, 4])])
def test_the_example_clusters_have_the_levels_that_they_describe(
    name: str, ranks: list[int]
) -> None:
    cluster = load_cluster(ROOT / "examples" / f"{name}.toml")
    graph = GraphArrays.from_graph(layers(1))
    levels = levels_of(Problem.of(graph, cluster), range(len(cluster)))
    assert [level.ranks for level in levels] == ranks
    assert levels[0].bandwidth_bytes_per_s == 450e9
    assert all(level.bandwidth_bytes_per_s == 50e9 and level.ports == 8 for level in levels[1:])


def test_the_curve_repeats_the_outermost_level_and_never_gets_more_efficient() -> None:
    found = planned(layers(), nodes(2, 2, across_s=1e-5), Replication(samples=32))
    assert found.curve[0].replicas == 1
    assert found.curve[0].efficiency == 1
    assert found.curve[-1].devices == 4096
    inside = [point for point in found.curve if not point.beyond_cluster]
    assert max(point.devices for point in inside) == 4
    shares = [point.efficiency for point in found.curve]
    assert shares == sorted(shares, reverse=True)
    for point in found.curve:
        one = found.curve[0].samples_per_s
        assert point.samples_per_s == pytest.approx(point.replicas * one * point.efficiency)


@pytest.mark.parametrize("devices", [3, 6])
def test_the_curve_of_a_global_batch_keeps_the_batch(devices: int) -> None:
    """Steps take 24 ms for 48 samples; more replicas than samples are no faster than one each."""
    cluster = nodes(1, devices, inside_bytes_per_s=1e15)
    found = planned(layers(), cluster, Replication(batch="global", samples=48))
    assert found.best.replicas == devices
    assert found.curve[-1].devices >= 4096
    for point in found.curve:
        largest = -(-48 // point.replicas)
        assert point.samples_per_s == pytest.approx(48 / (24e-3 * largest / 48), rel=0.01)
        assert point.efficiency == pytest.approx(48 / point.replicas / largest, rel=0.01)
    assert found.best.efficiency == pytest.approx(1, rel=0.01)


def test_the_curve_says_where_the_batch_does_not_fit() -> None:
    graph = layers()
    for _, node in graph.nodes(data=True):
        node["output_bytes"] = 20 * MB
    cluster = nodes(1, 4, inside_bytes_per_s=1e15, memory_bytes=200 * MB)
    found = planned(graph, cluster, Replication(batch="global", samples=64))
    assert found.best.name == "4 x 1"
    assert [point.replicas for point in found.curve if not point.fits] == [1]
    assert any("does not fit on 1 replicas or fewer" in remark for remark in remarks_of(found))


def test_replicas_that_are_asked_for_are_compared_with_pure_ways() -> None:
    found = planned(layers(), FAST, Replication(replicas=2))
    assert found.best.name == "2 x 2"  # though 4 x 1 is better
    assert {split.name for split in found.splits if split.is_baseline} == {"4 x 1", "1 x 4"}
    alone = planned(layers(), nodes(1, 1), Replication(replicas=1))
    assert [split.name for split in alone.splits] == ["1 x 1"]


PAIR = nodes(1, 2)
CORES = replace(
    PAIR,
    devices=tuple(replace(one, name=f"core:{i}") for i, one in enumerate(PAIR.devices)),
    links=(replace(PAIR.links[0], between=("core:0", "core:1")),),
)
BITS = Replication(replicas=2, payload="1-bit")


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("cluster", "replication", "remark", "applies"),
    [
        (CORES, BITS, "Pinned cores", True),
        (PAIR, BITS, "Pinned cores", False),
        (CORES, BITS, "1-bit gradients is assumed to take no time", True),
        (CORES, replace(BITS, coding_bytes_per_s=1e9), "no time", False),
        (nodes(2, 1, inside_bytes_per_s=1e13), Replication(replicas=1), "simulated only", True),
        (nodes(2, 2), Replication(replicas=2), "simulated only", False),
    ],
)
def test_remarks_name_the_assumptions_of_a_plan(
    cluster: Cluster, replication: Replication, remark: str, applies: bool
) -> None:
    chosen = planned(layers(), cluster, replication)
    assert any(remark in sentence for sentence in remarks_of(chosen)) == applies
    if cluster is CORES:
        assert chosen.best.step is not None
        assert chosen.best.step.hidden_s == 0


@pytest.mark.slow
def test_inference_has_nothing_to_reduce() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    step = Workload.of(model, torch.randn(6, 8), training=False)
    found = planned(step, rated(2), Replication())
    assert found.best.name == "2 x 1"
    assert found.best.efficiency == 1
    assert found.best.samples == 12
    assert any("no gradients" in remark for remark in remarks_of(found))


@pytest.mark.slow
def test_a_model_is_extracted_again_for_a_smaller_batch() -> None:
    step = training()
    one = planned(step, rated(4), Replication(batch="global", replicas=4))
    assert one.best.samples == 8
    assert not any("divided" in remark for remark in remarks_of(one))
    assert one.best.result is not None
    full = planned(step, rated(4), Replication(replicas=4))
    assert full.best.result is not None
    assert one.best.result.problem.graph.flops.sum() * 4 == pytest.approx(
        full.best.result.problem.graph.flops.sum(), rel=0.05
    )


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("step", "replication", "message"),
    [
        (training(), Replication(replicas=3), "8 samples cannot be cut into 3 equal parts"),
        (training(), Replication(replicas=4, accumulate=4), "into 16 equal parts"),
        (
            Workload.of(
                nn.Linear(16, 4), (torch.randn(8, 16), torch.randn(4, 4)), lambda y, z: y.sum()
            ),
            Replication(replicas=2),
            "no first dimension",
        ),
        (
            Workload.of(  # a batch of one sample has no deviation
                nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)).train(),
                (torch.randn(2, 16), torch.randn(2, 8)),
                F.mse_loss,
            ),
            Replication(replicas=2),
            "one of 2 parts",
        ),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(
    step: Workload, replication: Replication, message: str
) -> None:
    with pytest.raises((PlacementError, ReplicationError), match=message):
        planned(step, rated(4), replace(replication, batch="global"))


@pytest.mark.slow
def test_splits_that_cannot_cut_the_batch_say_so() -> None:
    plan = planned(training(), rated(3), Replication(batch="global"))
    why = {split.name: split.why for split in plan.splits}
    assert why["3 x 1"].startswith("8 samples cannot be cut into 3 equal parts")
    assert not why["2 x 1"]


def test_a_part_of_a_batch_has_its_part_of_costs_and_activations_alone() -> None:
    graph = layers(1)
    add_op(graph, "update", cost_s={"*": 5e-3}, phase="optimizer", optimizer_bytes=7)
    add_edge(graph, "backward/a0", "update", 999)
    half = with_part_of_batch(graph, 2)
    assert half.nodes["a0"]["cost_s"] == {"*": 0.5e-3}
    assert half.nodes["a0"]["output_bytes"] == 500
    assert half.nodes["a0"]["parameter_bytes"] == 10 * MB
    assert half.nodes["update"] == graph.nodes["update"]
    assert half.edges["backward/a0", "update"]["bytes"] == 999
    assert graph.nodes["a0"]["cost_s"] == {"*": 1e-3}


@pytest.mark.slow
@settings(max_examples=6)
@given(seed=st.integers(0, 999))
def test_one_replica_is_what_plain_optimize_gives(seed: int) -> None:
    graph, cluster = random_training(seed), nodes(2, 2)
    search = replace(SEARCH, seed=seed)
    result = planned(graph, cluster, Replication(replicas=1), search).result
    plain = optimize_job(Job(source=graph, cluster=cluster, search=search))
    assert result.placement.devices == plain.placement.devices
    assert result.placement.priority == plain.placement.priority
    assert result.best.predicted_s == plain.best.predicted_s


@pytest.mark.slow
@settings(max_examples=8)
@given(
    seed=st.integers(0, 999),
    bandwidth=st.sampled_from([1e7, 1e9, 1e11]),
    share=st.sampled_from([0.3, 0.6, 2.0]),
)
def test_a_plan_fits_and_is_what_its_simulation_says(
    seed: int, bandwidth: float, share: float
) -> None:
    graph = random_training(seed)
    arrays = GraphArrays.from_graph(graph)
    room = int(share * (arrays.resident_bytes.sum() + arrays.output_bytes.sum()))
    cluster = nodes(2, 2, across_bytes_per_s=bandwidth, memory_bytes=room)
    try:
        found = planned(graph, cluster)
    except PlacementError:
        with pytest.raises(PlacementError):
            optimize_job(Job(source=graph, cluster=cluster, search=SEARCH))
        return
    for split in found.splits:
        if split.result is None or split.step is None:
            assert split.why
            continue
        problem, placement = split.result.problem, split.result.placement
        assert Simulator(problem).run(*placement.arrays()).feasible
        groups = [[cluster.index(name) for name in group] for group in split.groups]
        alone = ReplicaSimulator(problem).step(placement)
        again = replicated(alone, slot_networks(found.problem, groups))
        assert again.step_s == split.step_s
        assert split.samples_per_s <= found.best.samples_per_s


@pytest.mark.slow
@settings(max_examples=5)
@given(seed=st.integers(0, 999), bandwidth=st.sampled_from([1e8, 1e9, 1e10, 1e12]))
def test_on_tiny_clusters_no_split_is_better_than_the_plan(seed: int, bandwidth: float) -> None:
    """Compares every R and d, placed by the exact placer; costs do not depend on the order here."""
    graph = random_training(seed, ops=3)
    cluster = nodes(1, 3, inside_bytes_per_s=bandwidth)
    search = replace(SEARCH, placer=placer_named("exact", None))
    found = planned(graph, cluster, Replication(), search)
    for replicas, size in product(range(1, 4), repeat=2):
        if replicas * size > 3:
            continue
        groups = [range(r * size, (r + 1) * size) for r in range(replicas)]
        part = cluster.part(groups[0])
        one = optimize_job(Job(source=graph, cluster=part, search=search))
        whole = Problem.of(GraphArrays.from_graph(graph), cluster)
        alone = ReplicaSimulator(one.problem).step(one.placement)
        step = replicated(alone, slot_networks(whole, groups))
        assert found.best.samples_per_s >= replicas / step.step_s * (1 - 1e-12)


def test_stopped_early_it_keeps_what_was_found() -> None:
    class Impatient(Silent):
        def advance(self, share: float, text: str = "") -> None:
            if share > 0.5:
                signal.raise_signal(signal.SIGINT)

    found = plan_job(
        Job(source=layers(), cluster=nodes(2, 4), search=SEARCH, replicas=Replication()),
        Impatient(),
    )
    assert found.left_out > 0
    assert found.best.result is not None
    assert any(remark.startswith("Stopped early") for remark in remarks_of(found))


def test_too_many_replicas_and_devices_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"5 replicas .* has 4"):
        planned(layers(), FAST, Replication(replicas=5))
    first, last = PAIR.devices
    uneven = replace(PAIR, devices=(first, replace(last, memory_bytes=10**12)))
    with pytest.raises(ValueError, match="no 2 devices"):
        planned(layers(), uneven, Replication(replicas=2))
    for text, message in (("many", "replicas are 'many'"), (0, "replicas is 0, below 1")):
        with pytest.raises(ValueError, match=message):
            Replication.of(text)


def random_training(seed: int, ops: int = 8) -> nx.DiGraph[str]:
    rng = np.random.default_rng(seed)
    graph = layered(rng, ops=ops, width=3, weights=Weights(backward=True))
    for _, node in graph.nodes(data=True):
        if node["phase"] == "forward":
            node["parameter_bytes"] = int(rng.integers(0, 3)) * MB // 10
    return graph


def test_the_verdict_has_the_fitted_times_of_the_table() -> None:
    plan = planned(layers(towers="ab"), nodes(1, 2))
    step = plan.best.step
    assert step is not None
    fitted = replace(plan.best, factors=Factors(1.5, 2.0))
    splits = tuple(fitted if each is plan.best else each for each in plan.splits)
    plan = replace(plan, splits=splits)
    assert plan.best is fitted
    assert f"a step of {milliseconds(fitted.step_s)} ms" in verdict_of(plan)
    assert fitted.step_s > 1.4 * step.step_s
