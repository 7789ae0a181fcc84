"""``placer extract``, and ``optimize`` on its graph."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from graphs.graph_file import load_graph
from placer.cli.main import main

torch.set_num_threads(1)

MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, (torch.randn(2, 8), torch.randn(2, 4)), nn.functional.mse_loss
"""
ON_META = """
import torch
from torch import nn

def build():
    with torch.device("meta"):
        model = nn.Linear(8, 16)
    return model, torch.randn(2, 8)
"""
CORE = min(os.sched_getaffinity(0))
CLUSTER = """
format = "placer-cluster/1"
name = "two cores"
[[device]]
name = "core:0"
kind = "core"
memory_bytes = 1_000_000_000
[[device]]
name = "core:1"
kind = "core"
memory_bytes = 1_000_000_000
[[link]]
between = ["core:0", "core:1"]
latency_s = 1e-5
bandwidth_bytes_per_s = 1e9
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return f"{path}:build"


def test_a_model_is_extracted_with_measured_costs_and_its_graph_optimized(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, cluster, placement = (tmp_path / n for n in ("g.json", "cluster.toml", "p.json"))
    devices = ["--devices", f"core:{CORE}"]
    assert main(["extract", model, "--out", str(out), "--summary", *devices]) == 0
    told = capsys.readouterr()
    assert "critical path on core" in told.out
    assert "backward ops" in told.out
    assert str(out) in told.err
    graph = load_graph(out)
    assert "measured" in graph.graph["cost_source"]["core"]

    cluster.write_text(CLUSTER)
    arguments = ["optimize", str(out), "--cluster", str(cluster), "--budget", "50e"]
    arguments += ["--keep-together", "0", "--pin", "2=core:1", "--out", str(placement)]
    assert main(arguments) == 0
    device_of = json.loads(placement.read_text())["devices"]
    modules = {op_id: node["module"] for op_id, node in graph.nodes(data=True)}
    assert {d for op_id, d in device_of.items() if modules[op_id] == "2"} == {"core:1"}
    assert len({d for op_id, d in device_of.items() if modules[op_id] == "0"}) == 1


DESCRIBED = """
format = "placer-cluster/1"
[[device]]
name = "core:{core}"
kind = "core"
memory_bytes = 1_000_000_000
[[device]]
name = "gpu:0"
kind = "gpu"
memory_bytes = 1_000_000_000
launch_s = 2.0
peak_flop_per_s = 1e12
bandwidth_bytes_per_s = 1e11
[[link]]
between = ["core:{core}", "gpu:0"]
latency_s = 1e-5
bandwidth_bytes_per_s = 1e9
"""


def test_a_model_is_placed_on_a_cluster_that_is_only_partly_here(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, cluster, placement = (tmp_path / n for n in ("g.json", "cluster.toml", "p.json"))
    cluster.write_text(DESCRIBED.format(core=CORE))
    assert main(["extract", model, "--cluster", str(cluster), "--out", str(out), "--summary"]) == 0
    told = capsys.readouterr().out
    assert "total work on gpu" in told
    graph = load_graph(out)
    assert graph.graph["cost_source"]["gpu"] == "roofline of the cluster's rates"
    assert "measured" in graph.graph["cost_source"]["core"]
    for _, node in graph.nodes(data=True):
        seconds = max(node["flops"] / 1e12, node["moved_bytes"] / 1e11)
        assert node["cost_s"]["gpu"] == pytest.approx(seconds)

    arguments = ["optimize", model, "--cluster", str(cluster), "--budget", "50e", "--json"]
    assert main([*arguments, "--fresh", "--out", str(placement)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured"] is None
    assert found["cost_source"]["gpu"] == "roofline of the cluster's rates"
    assert found["cost_source"]["core"].startswith("measured 20")
    assert found["step_s"] < 2.0
    # With two seconds per launch, the described device is never worth using.
    assert set(json.loads(placement.read_text())["devices"].values()) == {f"core:{CORE}"}


def test_without_costs_nothing_is_measured_and_the_summary_says_so(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "graph.json"
    arguments = ["extract", model, "--inference", "--costs", "none"]
    assert main([*arguments, "--out", str(out), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["ops"] == {"forward": 3, "backward": 0, "optimizer": 0}
    assert summary["flops"] == 2 * 2 * (8 * 16 + 16 * 4)
    assert summary["parameter_bytes"] == 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert summary["saved_bytes"] == 0
    assert summary["work"] == {}
    assert summary["out"] == str(out)
    assert all(node["cost_s"] == {} for _, node in load_graph(out).nodes(data=True))

    assert main(["extract", str(out), "--summary"]) == 0
    assert "Costs are unknown" in capsys.readouterr().out


def test_a_model_on_meta_is_extracted_without_costs_and_never_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.py"
    path.write_text(ON_META)
    target = [f"{path}:build", "--inference"]
    assert main(["extract", *target, "--costs", "none", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ops"]["forward"] == 1
    assert main(["extract", *target, "--devices", f"core:{CORE}", "--json"]) == 1
    assert "on the meta device" in capsys.readouterr().err
    out = ["--out", str(tmp_path / "placement.json")]
    assert main(["optimize", *target, "--devices", f"core:{CORE}", *out]) == 1
    assert "placer extract --costs none" in capsys.readouterr().err


def test_the_summary_of_a_graph_file_counts_every_kind(
    files: Callable[..., tuple[Path, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    graph, _ = files()
    assert main(["extract", str(graph), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert sum(summary["ops"].values()) == 40
    for work in summary["work"].values():
        assert work["headroom"] == pytest.approx(work["total_s"] / work["critical_path_s"])
        costs_s = [op["cost_s"] for op in work["dearest"]]
        assert len(costs_s) == 10
        assert costs_s == sorted(costs_s, reverse=True)
    assert summary["work"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{model}"], "--summary"),
        (["{graph}", "--summary", "--costs", "measured"], "extracted already"),
        (["{model}", "--summary", "--costs", "none", "--devices", "core:0"], "asks for none"),
        (["{model}", "--summary", "--cluster", "{cluster}"], "peak_flop_per_s = "),
        (["{model}", "--json", "--cluster", "x", "--devices", "core:0"], "not both"),
        (["{graph}", "--out", "{graph}"], "the same file"),
        (["{graph}.json", "--summary"], "no file"),
        (["{model}", "--summary", "--inference", "--optimizer", "sgd"], "has no gradients for"),
        (["{graph}", "--summary", "--optimizer", "sgd"], "--optimizer can only be given for"),
    ],
)
def test_what_makes_no_sense_is_bad_usage(
    arguments: list[str],
    told: str,
    model: str,
    files: Callable[..., tuple[Path, Path]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    graph, cluster = files()
    before = graph.read_bytes()
    filled = [a.format(model=model, graph=graph, cluster=cluster) for a in arguments]
    assert main(["extract", *filled]) == 2
    assert told in capsys.readouterr().err
    assert graph.read_bytes() == before


def test_optimizer_and_dtype_are_part_of_the_step(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = ["extract", model, "--costs", "none"]
    assert main([*plain, "--json", "--optimizer", "adamw", "--dtype", "bf16"]) == 0
    summary = json.loads(capsys.readouterr().out)
    parameters = 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert summary["ops"]["optimizer"] == 4
    assert summary["gradient_bytes"] == parameters
    assert summary["optimizer_bytes"] == 2 * parameters + 4 * 4
    assert main([*plain, "--summary", "--optimizer", "sgd"]) == 0
    assert "No optimizer" not in capsys.readouterr().out
    assert main([*plain, "--summary"]) == 0
    assert "No optimizer is in the step" in capsys.readouterr().out


@pytest.mark.parametrize(("dtype", "told"), [("fp16", "not for CPUs"), ("int8", "is not one of")])
def test_a_dtype_that_there_is_not_is_bad_usage(
    dtype: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["extract", "model.py:build", "--summary", "--dtype", dtype])
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("demand", "told"),
    [
        (["--pin", "op3=c"], "pinned to 'c'"),
        (["--pin", "nothing=a"], "'nothing' matches no op"),
        (["--keep-together", "nothing"], "'nothing' matches no op"),
        (["--pin", "*=a", "--pin", "*=b"], "is given with a and with b"),
        (["--pin", "*=a", "--pin", "?*=b"], "overlap"),
    ],
)
def test_demands_that_cannot_be_met_are_bad_usage(
    demand: list[str],
    told: str,
    files: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    graph, cluster = files()
    out = tmp_path / "p.json"
    arguments = ["optimize", str(graph), "--cluster", str(cluster), "--budget", "50e"]
    assert main([*arguments, "--out", str(out), *demand]) == 2
    assert told in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("text", ["embed", "=core:0", "embed="])
def test_a_pin_without_name_or_device_is_bad_usage(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["optimize", "graph.json", "--pin", text])
    assert stopped.value.code == 2
    assert "NAME=DEVICE" in capsys.readouterr().err
