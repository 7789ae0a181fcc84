"""Plans of replicas: compared with every split, and properties of all plans."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import placer as public
from envs.hardware.cluster import Cluster, Device, Link, cluster_to_toml, load_cluster
from envs.placement import Placement
from envs.problem import Problem
from envs.replicas.reductions import replicated
from envs.replicas.step import ReplicaSimulator
from envs.replicas.topology import levels_of, slot_networks
from envs.replication import Replication
from envs.simulator import Simulator
from graphs.costs import with_part_of_batch
from graphs.extract import Workload
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from graphs.graph_file import save_graph
from graphs.synthetic.mirror import with_backward
from graphs.synthetic.shapes import Weights, layered
from placer.choose import PlacementError
from placer.cli.main import main
from placer.job import Job, SearchConfig
from placer.parallel.plan import run_plan
from placer.pipeline import optimize_job
from placer.progress import Silent
from placer.replicate.messages import remarks_of, verdict_of
from placer.replicate.plan import plan_job
from placer.replicate.result import ReplicaPlan, ReplicatedResult
from placer.replicate.sources import batch_size, with_part_of_inputs
from placer.search.objectives import Objective
from placer.search.registry import placer_named
from tests.helpers.folders import ROOT
from tests.helpers.node_clusters import nodes

MB = 10**6
SEARCH = SearchConfig(policy=None, budget="400e")


def layers(count: int = 8, *, towers: str = "a") -> nx.DiGraph[str]:
    """Return towers, one per device, of layers of 1 ms forward, 2 ms backward and 10 MB."""
    forward = new_graph("towers")
    for tower, i in product(towers, range(count)):
        add_op(
            forward,
            f"{tower}{i}",
            cost_s={"*": 1e-3},
            output_bytes=1000,
            parameter_bytes=10 * MB,
        )
        if i:
            add_edge(forward, f"{tower}{i - 1}", f"{tower}{i}")
    return with_backward(forward)


def plan(
    source: Workload | nx.DiGraph[str],
    cluster: Cluster,
    wanted: Replication | None = None,
    search: SearchConfig = SEARCH,
) -> ReplicaPlan:
    replicas = wanted or Replication()
    return plan_job(Job(source=source, cluster=cluster, search=search, replicas=replicas))


def test_a_fast_network_makes_a_replica_of_every_device() -> None:
    found = plan(layers(), nodes(1, 4, inside_bytes_per_s=1e13))
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
    found = plan(layers(), cluster)
    assert found.best.name == "2 x 1"
    assert found.best.groups == (("n0:g0",), ("n0:g1",))
    assert "2 of 4 devices are left idle." in remarks_of(found)
    averaged = Replication(average_every=10**9)
    assert plan(layers(), cluster, averaged).best.name == "4 x 1"


def test_what_does_not_fit_on_one_device_is_placed_on_several() -> None:
    room = 110 * MB  # enough for the 80 MB of parameters of one tower, not for 160 MB
    graph = layers(8, towers="ab")
    cluster = nodes(1, 4, inside_bytes_per_s=1e13, memory_bytes=room)
    found = plan(graph, cluster)
    assert found.best.name == "2 x 2"
    assert found.best.result is not None
    assert all(size <= room for size in found.best.result.best.peak_memory_bytes.values())
    pure = found.pure(replicas=True)
    assert pure is not None
    assert pure.step is None
    assert "(4 x 1) is not possible" in verdict_of(found)
    with pytest.raises(PlacementError, match="fits nowhere"):
        plan(graph, cluster, Replication(replicas=4))


def test_the_placement_tells_of_its_replicas_and_survives_its_file(tmp_path: Path) -> None:
    wanted = Replication(
        replicas=2,
        accumulate=3,
        reduction="ring",
        payload="bf16",
        coding_bytes_per_s=2e9,
    )
    found = plan(layers(), nodes(1, 4), wanted).result
    groups = (("n0:g0", "n0:g1"), ("n0:g2", "n0:g3"))
    assert found.placement.replicas == replace(wanted, replicas=None, groups=groups)
    found.save(tmp_path / "placement.json")
    read = Placement.load(tmp_path / "placement.json", found.placement.device_names)
    assert read == found.placement
    assert read.predicted is not None
    assert read.predicted["replicated_step_s"] == found.replication.best.step_s


def test_the_placement_tells_what_auto_came_to(tmp_path: Path) -> None:
    """Two hosts of four devices, each host with a card of 10 Gbit/s."""
    cluster = nodes(2, 4, inside_bytes_per_s=1e11, across_bytes_per_s=1.25e9, across_s=1e-5)
    found = plan(layers(), cluster, Replication(replicas=8)).result
    replicas = found.placement.replicas
    assert replicas is not None
    assert replicas.algorithms == ("hierarchical",)
    assert replicas.levels == (4, 2)
    found.save(tmp_path / "placement.json")
    read = Placement.load(tmp_path / "placement.json", found.placement.device_names)
    assert read == found.placement
    run = run_plan(read, ranks=8)
    assert (run.sync.method, run.sync.levels, run.remarks) == ("hierarchical", (4, 2), ())
    peers = plan(layers(), nodes(1, 2), Replication(replicas=2)).replicas
    assert peers.algorithms
    assert "hierarchical" not in peers.algorithms
    assert peers.levels == ()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"groups": []}, "one or more groups"),
        ({"groups": [["a"], ["b", "c"]]}, "equally many"),
        ({"groups": [["a"], ["a"]]}, "replicas share a"),
        ({"groups": [["a"]], "batch": "half"}, "batch is 'half'"),
        ({"groups": [["a"]], "reduction": {"payload": 3}}, r"reduction\.payload is 3, not a str"),
        ({"groups": [["a"]], "reduction": {"coding_bytes_per_s": -1}}, "is -1.0"),
        ({"groups": [["a"]], "reduction": {"star": 1}}, r"unknown key replicas\.reduction\.star"),
        ({"groups": [["a"]], "algorithms": ["star"]}, "no reduction 'star'"),
        ({"groups": [["a"]], "levels": [2, 2]}, "levels 2x2"),
        ({"groups": [["a"]], "levels": 2}, r"replicas\.levels"),
    ],
)
def test_what_is_no_record_of_replicas_is_refused(record: object, message: str) -> None:
    file = {"format": "placer-placement/1", "devices": {"op": "a"}, "replicas": record}
    with pytest.raises(ValueError, match=message):
        Placement.from_dict(file)


def test_a_global_batch_is_shared_and_each_replica_has_its_part() -> None:
    cluster = nodes(1, 4, inside_bytes_per_s=1e13)
    found = plan(layers(), cluster, Replication(batch="global", samples=64, accumulate=2))
    best = found.best
    assert best.name == "4 x 1"
    assert best.step is not None
    assert best.step.alone_s == pytest.approx(2 * 24e-3 / 8)
    assert best.samples_per_s == pytest.approx(64 / 6e-3, rel=0.02)
    assert any("divided" in remark for remark in remarks_of(found))


def test_micro_batches_hide_reductions_behind_the_rest_of_the_pipeline() -> None:
    search = replace(SEARCH, objective=Objective(micro_batches=4))
    found = plan(layers(), nodes(1, 4), Replication(replicas=2), search)
    assert found.best.name == "2 x 2"
    assert found.best.step is not None
    assert found.result.placement.micro_batches == 4
    assert found.best.step.hidden_s > 0
    assert found.best.step.alone_s == found.best.result.best.predicted_s  # type: ignore[union-attr]


def test_a_placement_that_is_slower_alone_wins_where_it_hides_more() -> None:
    """One device takes the same time for any order; only early gradients hide communication."""
    found = plan(layers(), nodes(1, 2, inside_bytes_per_s=5e9), Replication(replicas=2))
    step = found.best.step
    assert step is not None
    assert step.communication_s == pytest.approx(8 * 2e-3)
    assert step.exposed_s < 0.5 * step.communication_s


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
    found = plan(layers(), nodes(2, 2, across_s=1e-5), Replication(samples=32))
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
    found = plan(layers(), cluster, Replication(batch="global", samples=48))
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
    found = plan(graph, cluster, Replication(batch="global", samples=64))
    assert found.best.name == "4 x 1"
    assert [point.replicas for point in found.curve if not point.fits] == [1]
    assert any("does not fit on 1 replicas or fewer" in remark for remark in remarks_of(found))


def test_replicas_that_are_asked_for_are_compared_with_pure_ways() -> None:
    cluster = nodes(1, 4, inside_bytes_per_s=1e13)
    found = plan(layers(), cluster, Replication(replicas=2))
    assert found.best.name == "2 x 2"  # though 4 x 1 is better
    assert {split.name for split in found.splits if split.is_baseline} == {"4 x 1", "1 x 4"}
    alone = plan(layers(), nodes(1, 1), Replication(replicas=1))
    assert [split.name for split in alone.splits] == ["1 x 1"]


def test_the_verdict_says_what_devices_gain_together_and_of_how_many_passes_a_step_is() -> None:
    cluster = nodes(1, 4, inside_bytes_per_s=1e13)
    found = plan(layers(), cluster, Replication(accumulate=2))
    assert found.best.name == "4 x 1"
    for words in ("166.7 samples/s", "4x", "2 passes", "48.00 ms for 2 samples"):
        assert words in verdict_of(found)


def test_what_is_assumed_of_pinned_cores_and_of_coding_is_told() -> None:
    names = ("core:0", "core:1")
    cores = Cluster(
        name="cores",
        devices=tuple(Device(name=name, kind="core", memory_bytes=10**12) for name in names),
        links=(Link(between=names, latency_s=0.0, bandwidth_bytes_per_s=1e10),),
    )
    bits = Replication(replicas=2, payload="1-bit")
    found = plan(layers(), cores, bits)
    assert found.best.step is not None
    assert found.best.step.hidden_s == 0
    assert any("Pinned cores" in remark for remark in remarks_of(found))
    assert any("no time" in remark for remark in remarks_of(found))
    found = plan(layers(), nodes(1, 2), replace(bits, coding_bytes_per_s=1e9))
    assert not any("Pinned" in told or "no time" in told for told in remarks_of(found))


def test_a_replica_across_hosts_is_told_to_be_simulated_only() -> None:
    across = plan(layers(), nodes(2, 1, inside_bytes_per_s=1e13), Replication(replicas=1))
    assert any("this plan is simulated only" in remark for remark in remarks_of(across))
    within = plan(layers(), nodes(2, 2), Replication(replicas=2))
    assert not any("simulated only" in remark for remark in remarks_of(within))


def test_inference_has_nothing_to_reduce() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    step = Workload.of(model, torch.randn(6, 8), training=False)
    found = plan(step, rated(2), Replication())
    assert found.best.name == "2 x 1"
    assert found.best.efficiency == 1
    assert found.best.samples == 12
    assert any("no gradients" in remark for remark in remarks_of(found))


def test_a_model_is_extracted_again_for_a_smaller_batch() -> None:
    step = training()
    one = plan(step, rated(4), Replication(batch="global", replicas=4))
    assert one.best.samples == 8
    assert not any("divided" in remark for remark in remarks_of(one))
    assert one.best.result is not None
    full = plan(step, rated(4), Replication(replicas=4))
    assert full.best.result is not None
    assert one.best.result.problem.graph.flops.sum() * 4 == pytest.approx(
        full.best.result.problem.graph.flops.sum(), rel=0.05
    )


def test_a_batch_that_cannot_be_cut_is_named() -> None:
    step = training()
    with pytest.raises(PlacementError, match="8 samples cannot be cut into 3 equal parts"):
        plan(step, rated(4), Replication(batch="global", replicas=3))
    with pytest.raises(PlacementError, match="into 16 equal parts"):
        plan(step, rated(4), Replication(batch="global", replicas=4, accumulate=4))
    found = plan(step, rated(3), Replication(batch="global"))
    why = {split.name: split.why for split in found.splits}
    assert why["3 x 1"].startswith("8 samples cannot be cut into 3 equal parts")
    assert not why["2 x 1"]
    apart = Workload.of(step.model, (torch.randn(8, 16), torch.randn(4, 4)), lambda y, z: y.sum())
    with pytest.raises(PlacementError, match="no first dimension"):
        plan(apart, rated(2), Replication(batch="global", replicas=2))


def test_a_model_that_refuses_a_smaller_batch_is_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    step = Workload.of(model.train(), (torch.randn(2, 16), torch.randn(2, 4)), F.mse_loss)
    with pytest.raises(PlacementError, match="one of 2 parts"):
        plan(step, rated(2), Replication(batch="global", replicas=2))


def test_a_batch_is_the_first_dimension_that_all_inputs_share() -> None:
    step = training()
    assert batch_size(step) == 8
    smaller = with_part_of_inputs(step, 4)
    assert smaller is not None
    assert [tuple(tensor.shape) for tensor in smaller.inputs] == [(2, 16), (2, 4)]
    assert with_part_of_inputs(step, 3) is None
    mixed = Workload.of(step.model, (torch.randn(8, 16), torch.randn(4, 4)), F.mse_loss)
    assert batch_size(mixed) is None
    assert with_part_of_inputs(mixed, 2) is None


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


@settings(max_examples=12)
@given(seed=st.integers(0, 999))
def test_one_replica_is_what_plain_optimize_gives(seed: int) -> None:
    graph, cluster = random_training(seed), nodes(2, 2)
    search = replace(SEARCH, seed=seed)
    planned = plan(graph, cluster, Replication(replicas=1), search).result
    plain = optimize_job(Job(source=graph, cluster=cluster, search=search))
    assert planned.placement.devices == plain.placement.devices
    assert planned.placement.priority == plain.placement.priority
    assert planned.best.predicted_s == plain.best.predicted_s


@settings(max_examples=15)
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
        found = plan(graph, cluster)
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


@settings(max_examples=8)
@given(seed=st.integers(0, 999), bandwidth=st.sampled_from([1e8, 1e9, 1e10, 1e12]))
def test_on_tiny_clusters_no_split_is_better_than_the_plan(seed: int, bandwidth: float) -> None:
    """Compares every R and d, placed by the exact placer; costs do not depend on the order here."""
    graph = random_training(seed, ops=3)
    cluster = nodes(1, 3, inside_bytes_per_s=bandwidth)
    search = replace(SEARCH, placer=placer_named("exact", None))
    found = plan(graph, cluster, Replication(), search)
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
        plan(layers(), nodes(1, 4), Replication(replicas=5))
    cluster = nodes(1, 2)
    first, last = cluster.devices
    uneven = replace(cluster, devices=(first, replace(last, memory_bytes=10**12)))
    with pytest.raises(ValueError, match="no 2 devices"):
        plan(layers(), uneven, Replication(replicas=2))
    pipelined = replace(SEARCH, objective=Objective(name="throughput", micro_batches=2))
    with pytest.raises(ValueError, match="objective throughput"):
        plan(layers(), cluster, Replication(), pipelined)
    with pytest.raises(ValueError, match="replicas are 'many'"):
        Replication.of("many")
    with pytest.raises(ValueError, match="replicas is 0, below 1"):
        Replication.of(0)


def test_the_command_prints_the_plan_and_writes_the_placement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_graph(layers(), tmp_path / "graph.json")
    (tmp_path / "cluster.toml").write_text(cluster_to_toml(nodes(1, 4)))
    out = tmp_path / "placement.json"
    command = [
        *("optimize", str(tmp_path / "graph.json"), "--devices", str(tmp_path / "cluster.toml")),
        *("--data-parallel", "auto,payload=fp16,coding-bytes-per-s=1e12"),
        *("--budget", "300e", "--out", str(out)),
    ]
    assert main([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    [best] = [split for split in data["splits"] if split["best"]]
    assert best["samples_per_s"] == max(split.get("samples_per_s", 0) for split in data["splits"])
    assert best["full_overlap_s"] <= best["step_s"] <= best["no_overlap_s"] * (1 + 1e-12)
    assert data["curve"][-1]["devices"] == 4096
    assert data["accumulate"] == 1
    assert main(["show", str(out)]) == 0
    assert f"the first of {best['replicas']} replicas on" in shown_of(capsys)
    written = json.loads(out.read_text())["replicas"]
    assert written["groups"] == best["groups"]
    assert written["reduction"]["payload"] == "fp16"
    assert written["reduction"]["coding_bytes_per_s"] == 1e12
    assert main(command) == 0
    shown = shown_of(capsys)
    assert f"> {best['replicas']} x {best['devices_each']} " in shown
    assert data["verdict"] in shown


MODEL = """
import torch
from torch import nn

def build():
    return nn.Linear(4, 4), (torch.randn(2, 4), torch.randn(2, 4)), nn.functional.mse_loss
"""


def test_the_command_says_how_to_train_what_was_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "c.toml").write_text(cluster_to_toml(rated(2)))
    target, out = f"{tmp_path}/model.py:build", tmp_path / "placement.json"
    command = [
        *("optimize", target, "--devices", str(tmp_path / "c.toml"), "--dtype", "bf16"),
        *("--data-parallel", "2", "--budget", "50e", "--out", str(out)),
    ]
    adam = ["--optimizer", "adam"]
    assert main([*command, *adam]) == 0
    said = (
        f"torchrun --nproc-per-node=2 -m placer.run {target} --placement {out} --steps 100 "
        "--optimizer adam --dtype bf16"
    )
    assert f"train it: {said}\n" in capsys.readouterr().err
    assert main([*command, *adam, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"] == said
    assert main([*command, "--inference"]) == 0
    assert "torchrun" not in capsys.readouterr().err


def test_from_python_replicas_come_with_the_placement() -> None:
    step = training()
    found = public.optimize(
        step.model,
        step.inputs,
        loss=F.mse_loss,
        devices=rated(2),
        search=public.SearchConfig(budget="100e", policy=None),
        replicas=public.Replication(replicas=2, batch="per-replica"),
        progress=False,
    )
    assert isinstance(found, ReplicatedResult)
    assert found.replication.best.samples == 16
    assert found.placement.replicas is not None
    assert len(found.placement.replicas.groups) == 2


def shown_of(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the printed output as one line."""
    return " ".join(capsys.readouterr().out.split())


def rated(count: int) -> Cluster:
    """Return devices of another machine, with rates."""
    cluster = nodes(1, count)
    devices: Iterator[Device] = (
        replace(device, peak_flop_per_s=1e12, bandwidth_bytes_per_s=1e11)
        for device in cluster.devices
    )
    return replace(cluster, devices=tuple(devices))


def training() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return Workload.of(model, (torch.randn(8, 16), torch.randn(8, 4)), F.mse_loss)


def random_training(seed: int, ops: int = 8) -> nx.DiGraph[str]:
    rng = np.random.default_rng(seed)
    graph = layered(rng, ops=ops, width=3, weights=Weights(backward=True))
    for _, node in graph.nodes(data=True):
        if node["phase"] == "forward":
            node["parameter_bytes"] = int(rng.integers(0, 3)) * MB // 10
    return graph
