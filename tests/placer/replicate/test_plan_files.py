"""A plan of replicas in placement files, on the command line and in Python."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import placer
from envs.collectives import MeasuredAllReduce
from envs.hardware.cluster import Cluster, Link, cluster_to_toml
from envs.hardware.discover import present
from envs.placement import Placement
from envs.replication import Replication
from graphs.graph_file import save_graph
from placer.cli.main import main
from placer.parallel import collectives
from placer.parallel.collectives import Transport
from placer.parallel.local_ranks import Seat
from placer.parallel.plan import run_plan
from placer.replicate.messages import remarks_of
from placer.replicate.sources import StepSource
from placer.report.replicas import plan_to_dict, print_plan
from tests.fake_cuda import fake_cuda
from tests.helpers.clusters import nodes
from tests.helpers.processes import all_end, descendants
from tests.helpers.replica_plans import layers, planned, rated, training


def test_a_placement_records_its_replicas_and_survives_its_file(tmp_path: Path) -> None:
    wanted = Replication(
        replicas=2, accumulate=3, reduction="ring", payload="bf16", coding_bytes_per_s=2e9
    )
    result = planned(layers(), nodes(1, 4), wanted).result
    groups = (("n0:g0", "n0:g1"), ("n0:g2", "n0:g3"))
    assert result.placement.replicas == replace(wanted, replicas=None, groups=groups)
    result.save(tmp_path / "placement.json")
    read = Placement.load(tmp_path / "placement.json", result.placement.device_names)
    assert read == result.placement
    assert read.predicted is not None
    assert read.predicted["replicated_step_s"] == result.replication.best.step_s


def test_the_step_of_one_of_several_replicas_is_called_so(tmp_path: Path) -> None:
    cluster = nodes(1, 4)
    result = planned(layers(), cluster, Replication(replicas=2)).result
    result.save(tmp_path / "placement.json")
    found = placer.evaluate(tmp_path / "placement.json", layers(), cluster, progress=False)
    assert "the step of one of 2 replicas, without reductions" in found.remark


def test_a_placement_records_the_algorithms_that_auto_chose(tmp_path: Path) -> None:
    """Two hosts of four devices, each host with a card of 10 Gbit/s."""
    cluster = nodes(2, 4, inside_bytes_per_s=1e11, across_bytes_per_s=1.25e9, across_s=1e-5)
    result = planned(layers(), cluster, Replication(replicas=8)).result
    replicas = result.placement.replicas
    assert replicas is not None
    assert replicas.algorithms == ("hierarchical",)
    assert replicas.levels == (4, 2)
    result.save(tmp_path / "placement.json")
    read = Placement.load(tmp_path / "placement.json", result.placement.device_names)
    assert read == result.placement
    run = run_plan(read, ranks=8)
    assert (run.sync.method, run.sync.levels, run.remarks) == ("hierarchical", (4, 2), ())
    peers = planned(layers(), nodes(1, 2), Replication(replicas=2)).replicas
    assert peers.algorithms
    assert "hierarchical" not in peers.algorithms
    assert peers.levels == ()


def test_hierarchical_reductions_take_times_measured_for_their_levels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = nodes(2, 2, inside_bytes_per_s=1e11, across_bytes_per_s=1.25e9)
    asked: list[set[tuple[int, ...]]] = []

    def measured(_: StepSource, levels: set[tuple[int, ...]]) -> MeasuredAllReduce:
        asked.append(levels)
        rows = [(ranks, size, 0.5) for ranks in sorted(levels) for size in (1, 2)]
        return MeasuredAllReduce("gloo", ((2, 1, 0.25), (2, 2, 0.25)), tuple(rows))

    monkeypatch.setattr(StepSource, "collectives", measured)
    wanted = Replication(replicas=4, reduction="hierarchical")
    plan = planned(layers(), cluster, wanted)
    assert asked == [{(2, 2)}]
    assert plan.reduces_as_measured
    assert plan.best.step is not None
    assert {reduction.seconds for _, reduction in plan.best.step.reductions} == {0.5}
    assert plan.replicas.levels == (2, 2)
    by_links = planned(layers(), cluster, replace(wanted, reduction="tree"))
    assert asked[1:] == [set()]
    assert not by_links.reduces_as_measured
    assert any("from the latency and bandwidth" in remark for remark in remarks_of(by_links))


def gpus() -> Cluster:
    """Return two fake GPUs with the link between them."""
    cluster = present(["cuda:0", "cuda:1"])
    link = Link(between=cluster.names, latency_s=1e-5, bandwidth_bytes_per_s=2e10)
    devices = tuple(replace(device, memory_bytes=10**9) for device in cluster.devices)
    return replace(cluster, devices=devices, links=(link,))


@pytest.mark.slow
def test_reductions_between_gpus_of_this_machine_take_the_times_of_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path))
    seats: list[list[Seat]] = []

    def measured(transport: Transport, of_ranks: list[Seat]) -> MeasuredAllReduce:
        seats.append(of_ranks)
        return MeasuredAllReduce(transport.name, ((2, 1, 0.5), (2, 2, 0.5)))

    monkeypatch.setattr(collectives, "measure", measured)
    with fake_cuda(2):
        plan = planned(training(), gpus(), Replication(replicas=2))
        assert planned(training(), gpus(), Replication(replicas=2)).reduces_as_measured
    assert [[seat.gpus for seat in each] for each in seats] == [[("GPU-fake 0",), ("GPU-fake 1",)]]
    assert plan.best.step is not None
    assert {reduction.seconds for _, reduction in plan.best.step.reductions} == {0.5}
    assert any("by times of nccl" in remark for remark in remarks_of(plan))


@pytest.mark.slow
def test_a_plan_says_what_it_assumes_where_ranks_cannot_use_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path))
    before = descendants()
    with fake_cuda(2):
        plan = planned(training(), gpus(), Replication(replicas=2))
    assert plan.collectives is None
    [remark, *_] = remarks_of(plan)
    assert "(2 ranks, 10 us, 20.0 GB/s), as reductions of nccl could not be measured" in remark
    assert all_end(descendants() - before)
    assert not list(tmp_path.glob("collectives-*"))


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
        ({"groups": [["a"]], "algorithms": ["star"]}, "reduction is 'star', not one of"),
        ({"groups": [["a"]], "levels": [2, 2]}, "levels 2x2"),
        ({"groups": [["a"]], "levels": 2}, r"replicas\.levels"),
    ],
)
def test_wrong_replicas_in_a_file_are_refused(record: object, message: str) -> None:
    file = {"format": "placer-placement/1", "devices": {"op": "a"}, "replicas": record}
    with pytest.raises(ValueError, match=message):
        Placement.from_dict(file)


def test_replicas_without_links_have_dashes_and_a_reason() -> None:
    out = io.StringIO()
    plan = planned(layers(1), replace(nodes(1, 2), links=()), Replication(replicas=1))
    print_plan(plan, Console(file=out, width=200))
    row, reason = (
        line for line in out.getvalue().splitlines() if line.lstrip().startswith("2 x 1")
    )
    assert row.split() == ["2", "x", "1", *"------"]
    assert "no link" in reason


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
    from_python = placer.optimize(
        tmp_path / "graph.json",
        tmp_path / "cluster.toml",
        budget="300e",
        replicas=placer.Replication(payload="fp16", coding_bytes_per_s=1e12),
        progress=False,
    )
    assert str(from_python) == data["verdict"]
    assert from_python.to_dict()["curve"] == data["curve"]
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


@pytest.mark.slow
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


def shown_of(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the printed output as one line."""
    return " ".join(capsys.readouterr().out.split())


def test_steps_without_any_time_are_plain_json() -> None:
    graph = layers()
    for _, node in graph.nodes(data=True):
        node.update(cost_s={"*": 0.0}, parameter_bytes=0, gradient_bytes=0, output_bytes=0)
    data = plan_to_dict(planned(graph, nodes(1, 2), Replication(replicas=2)))
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert None in [split.get("samples_per_s", 0.0) for split in data["splits"]]
