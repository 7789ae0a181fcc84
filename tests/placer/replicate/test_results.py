"""Results of plans: a part of the batch, clusters without links, and what is said of them."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import placer
from envs.hardware.cluster import cluster_to_toml
from envs.replication import Replication
from graphs.graph_file import save_graph
from placer.cli.main import main
from placer.replicate.messages import remarks_of, verdict_of
from placer.report.html import report_data
from tests.helpers.clusters import nodes
from tests.helpers.replica_plans import layers, planned, rated, training
from tests.placer.report.test_report import data_of


@pytest.mark.slow
def test_a_plan_with_a_part_of_the_batch_is_evaluated_exported_and_applied() -> None:
    step = training()
    wanted = Replication(replicas=2, batch="global")
    result = planned(step, rated(2), wanted).result
    assert result.extraction is not None
    assert len(result.extraction.step.inputs[0]) == 4
    assert result.replication.extraction is not None
    assert result.replication.extraction.step is step
    assert placer.evaluate(result, progress=False).step_s == result.best.predicted_s
    renamed = {"n0:g0": "cuda:0"}
    assert placer.export(result, "device-map", renamed=renamed).content == {"": 0}
    search = placer.SearchConfig(policy=None, budget="50e", measure=False)
    wanted = Replication(replicas=1, accumulate=2, batch="global")
    here = placer.optimize(step, "cpu", search=search, replicas=wanted, progress=False)
    x, target = (own[4:] for own in step.inputs)
    expected = torch.nn.functional.mse_loss(step.model(x), target)
    placed = placer.apply(step, here)
    torch.testing.assert_close(placed.step(x, target).detach(), expected.detach())


def test_a_report_of_a_part_of_the_batch_has_no_commands_for_the_whole(tmp_path: Path) -> None:
    graph, out, page = tmp_path / "graph.json", tmp_path / "p.json", tmp_path / "page.html"
    save_graph(layers(), graph)
    (tmp_path / "c.toml").write_text(cluster_to_toml(nodes(1, 2)))
    words = ["optimize", str(graph), "--devices", str(tmp_path / "c.toml"), "--budget", "20e"]
    words += ["--out", str(out), "--report", str(page)]
    offered = {}
    for batch in ("global", "per-replica"):
        assert main([*words, "--data-parallel", f"2,batch={batch},samples=8"]) == 0
        commands = [shlex.split(each["command"])[1:] for each in data_of(page)["commands"]]
        offered[batch] = [command[0] for command in commands]
    assert offered["global"] == ["show"]
    assert offered["per-replica"] == ["evaluate", "evaluate", "show", "optimize"]


def test_one_replica_is_planned_where_no_link_joins_the_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = replace(nodes(1, 2), links=())
    found = planned(layers(), cluster, Replication())
    assert found.best.replicas == 1
    assert [point.replicas for point in found.curve] == [1]
    [two] = [each for each in found.splits if each.replicas == 2]
    assert "no link of cluster" in two.why
    save_graph(layers(), tmp_path / "graph.json")
    (tmp_path / "c.toml").write_text(cluster_to_toml(cluster))
    words = ["optimize", str(tmp_path / "graph.json"), "--devices", str(tmp_path / "c.toml")]
    words += ["--data-parallel", "auto", "--budget", "20e", "--out", str(tmp_path / "p.json")]
    assert main([*words, "--json"]) == 0
    assert [each["replicas"] for each in json.loads(capsys.readouterr().out)["curve"]] == [1]


def test_a_result_says_of_its_plan_what_is_printed() -> None:
    result = planned(layers(), nodes(1, 2), Replication(replicas=2)).result
    assert str(result) == result.verdict == verdict_of(result.replication)
    assert result.remarks == remarks_of(result.replication)
    data = report_data(result)
    assert (data["verdict"], data["remarks"]) == (result.verdict, result.remarks)
    printed = result.to_dict()
    assert (printed["verdict"], printed["remarks"]) == (result.verdict, result.remarks)
