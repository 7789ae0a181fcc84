"""``placer extract``, and ``optimize`` on its graph."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from graphs.graph_file import load_graph
from placer.cli.main import main

torch.set_num_threads(1)

MODEL = """
import numpy as np
import torch
from torch import nn

class Outside(nn.Module):
    def forward(self, x):
        return x * torch.from_numpy(np.ones(1, dtype=np.float32) + x.detach().numpy().mean())

class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        y = self.linear(x)
        return y if x.sum() > 0 else -y

def data():
    return torch.ones(2, 8), torch.zeros(2, 4)

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, (torch.randn(2, 8), torch.randn(2, 4)), nn.functional.mse_loss

def on_meta():
    with torch.device("meta"):
        model = nn.Linear(8, 16)
    return model, torch.randn(2, 8)

def branching():
    return Branch(), data(), nn.functional.mse_loss

def outside():
    model = nn.Sequential(nn.Linear(8, 4), Outside(), nn.Linear(4, 4))
    return model, data(), nn.functional.mse_loss
"""
PARAMETER_BYTES = 4 * (8 * 16 + 16 + 16 * 4 + 4)
CORE = f"core:{min(os.sched_getaffinity(0))}"
RATES = "launch_s = 2.0\npeak_flop_per_s = 1e12\nbandwidth_bytes_per_s = 1e11"
CLUSTER = """
format = "placer-cluster/1"
name = "two devices"
[[device]]
name = "{first}"
kind = "core"
memory_bytes = 1_000_000_000
[[device]]
name = "{second}"
kind = "{kind}"
memory_bytes = 1_000_000_000
{rates}
[[link]]
between = ["{first}", "{second}"]
latency_s = 1e-5
bandwidth_bytes_per_s = 1e9
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return str(path)


def test_a_model_is_extracted_with_measured_costs_and_its_graph_optimized(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, cluster, placement = (tmp_path / n for n in ("g.json", "cluster.toml", "p.json"))
    arguments = ["--out", str(out), "--summary", "--devices", CORE]
    assert main(["extract", f"{model}:build", *arguments]) == 0
    printed = capsys.readouterr()
    assert "critical path on core" in printed.out
    assert "backward ops" in printed.out
    assert str(out) in printed.err
    graph = load_graph(out)
    assert "measured" in graph.graph["cost_source"]["core"]

    cluster.write_text(CLUSTER.format(first="core:0", second="core:1", kind="core", rates=""))
    arguments = ["optimize", str(out), "--cluster", str(cluster), "--budget", "50e"]
    arguments += ["--keep-together", "0", "--pin", "2=core:1", "--out", str(placement)]
    assert main(arguments) == 0
    device_of = json.loads(placement.read_text())["devices"]
    modules = {op_id: node["module"] for op_id, node in graph.nodes(data=True)}
    assert {d for op_id, d in device_of.items() if modules[op_id] == "2"} == {"core:1"}
    assert len({d for op_id, d in device_of.items() if modules[op_id] == "0"}) == 1


def test_a_model_is_placed_on_a_cluster_that_is_only_partly_here(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, cluster, placement = (tmp_path / n for n in ("g.json", "cluster.toml", "p.json"))
    cluster.write_text(CLUSTER.format(first=CORE, second="gpu:0", kind="gpu", rates=RATES))
    arguments = [f"{model}:build", "--cluster", str(cluster)]
    assert main(["extract", *arguments, "--out", str(out), "--summary"]) == 0
    assert "total work on gpu" in capsys.readouterr().out
    graph = load_graph(out)
    assert graph.graph["cost_source"]["gpu"] == "roofline of the cluster's rates"
    assert "measured" in graph.graph["cost_source"]["core"]
    for _, node in graph.nodes(data=True):
        seconds = max(node["flops"] / 1e12, node["moved_bytes"] / 1e11)
        assert node["cost_s"]["gpu"] == pytest.approx(seconds)

    assert main(["optimize", *arguments, "--budget", "50e", "--json", "--out", str(placement)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured"] is None
    assert found["cost_source"]["gpu"] == "roofline of the cluster's rates"
    assert "measured 20" in found["cost_source"]["core"]
    assert found["step_s"] < 2.0
    # With two seconds per launch, the described device is never worth using.
    assert set(json.loads(placement.read_text())["devices"].values()) == {CORE}


def test_without_costs_nothing_is_measured_and_the_summary_says_so(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "graph.json"
    arguments = ["extract", f"{model}:build", "--inference", "--costs", "none"]
    assert main([*arguments, "--out", str(out), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["ops"] == {"forward": 3, "backward": 0, "optimizer": 0}
    assert summary["flops"] == 2 * 2 * (8 * 16 + 16 * 4)
    assert summary["parameter_bytes"] == PARAMETER_BYTES
    assert summary["saved_bytes"] == 0
    assert summary["work"] == {}
    assert summary["out"] == str(out)
    assert all(node["cost_s"] == {} for _, node in load_graph(out).nodes(data=True))

    assert main(["extract", str(out), "--summary"]) == 0
    assert "Costs are unknown" in capsys.readouterr().out


def test_a_model_on_meta_is_extracted_without_costs_and_never_run(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = [f"{model}:on_meta", "--inference"]
    assert main(["extract", *target, "--costs", "none", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ops"]["forward"] == 1
    assert main(["extract", *target, "--devices", CORE, "--json"]) == 1
    assert "on the meta device" in capsys.readouterr().err
    out = ["--out", str(tmp_path / "placement.json")]
    assert main(["optimize", *target, "--devices", CORE, *out]) == 1


def test_optimizer_and_dtype_are_part_of_the_step(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = ["extract", f"{model}:build", "--costs", "none"]
    assert main([*plain, "--json", "--optimizer", "adamw", "--dtype", "bf16"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["ops"]["optimizer"] == 4
    assert summary["gradient_bytes"] == PARAMETER_BYTES
    assert summary["optimizer_bytes"] == 2 * PARAMETER_BYTES + 4 * 4
    assert main([*plain, "--summary"]) == 0
    assert "No optimizer is in the step" in capsys.readouterr().out


def test_every_fall_back_of_the_extractor_is_reported_with_its_reason(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["extract", f"{model}:outside", "--costs", "none", "--json"]) == 0
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert summary["extractor"] == "modules"
    assert [tried["extractor"] for tried in summary["fell_back"]] == ["export", "dispatch"]
    for tried in summary["fell_back"]:
        assert ".numpy()" in tried["reason"]
        assert f"Not by {tried['extractor']}: {tried['reason']}" in printed.err
    assert "graph of modules" in printed.err


def test_a_forced_extractor_falls_back_to_nothing(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = ["extract", f"{model}:branching", "--json", "--devices", "cpu", "--extractor"]
    assert main([*measured, "dispatch"]) == 1
    assert "Try --extractor modules." in capsys.readouterr().err
    arguments = ["extract", f"{model}:branching", "--costs", "none", "--json", "--extractor"]
    assert main([*arguments, "export"]) == 1
    assert "control flow depends on the values in a tensor" in capsys.readouterr().err
    assert main([*arguments, "modules"]) == 0
    assert json.loads(capsys.readouterr().out)["extractor"] == "modules"


def test_a_graph_of_modules_is_optimized_by_the_simulator(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "placement.json"
    arguments = ["optimize", f"{model}:build", "--extractor", "modules", "--devices", CORE]
    assert main([*arguments, "--budget", "20e", "--policy", "none", "--out", str(out)]) == 0
    assert "graph of modules" in " ".join(capsys.readouterr().out.split())
    placement = json.loads(out.read_text())
    assert placement["measured"] is None
    assert set(placement["devices"]) >= {"0:Linear", "1:ReLU", "0:backward/Linear"}


def test_a_recording_is_measured_and_named_in_the_result(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "placement.json"
    arguments = ["optimize", f"{model}:branching", "--devices", CORE, "--budget", "20e", "--json"]
    assert main([*arguments, "--policy", "none", "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["extractor"] == "dispatch"
    assert found["measured"] is not None
    (line,) = found["depends_on_data"]
    assert "model.py" in line
    assert line in " ".join(found["remarks"])
