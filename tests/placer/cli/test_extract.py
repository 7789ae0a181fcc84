"""``placer extract``, and ``optimize`` on its graph."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from graphs.graph_file import load_graph
from placer.cli.main import main

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

DATA = torch.ones(2, 8), torch.zeros(2, 4)

def build():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, DATA, nn.functional.mse_loss

def on_meta():
    return nn.Linear(8, 16, device="meta"), torch.randn(2, 8)

def branching():
    return Branch(), DATA, nn.functional.mse_loss

def outside():
    model = nn.Sequential(nn.Linear(8, 4), Outside(), nn.Linear(4, 4))
    return model, DATA, nn.functional.mse_loss
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


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return what a command that succeeds prints as JSON."""
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def test_a_model_is_extracted_with_measured_costs_and_its_graph_optimized(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, cluster, placement = (tmp_path / n for n in ("g.json", "cluster.toml", "p.json"))
    arguments = ["--out", str(out), "--summary", "--devices", CORE]
    assert main(["extract", f"{model}:build", *arguments]) == 0
    printed = capsys.readouterr()
    assert "critical path on core" in printed.out
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


@pytest.mark.slow
def test_a_model_is_placed_on_a_cluster_that_is_only_partly_here(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, cluster, placement = (tmp_path / n for n in ("g.json", "cluster.toml", "p.json"))
    cluster.write_text(CLUSTER.format(first=CORE, second="gpu:0", kind="gpu", rates=RATES))
    arguments = [f"{model}:build", "--cluster", str(cluster)]
    assert main(["extract", *arguments, "--out", str(out)]) == 0
    graph = load_graph(out)
    for _, node in graph.nodes(data=True):
        seconds = max(node["flops"] / 1e12, node["moved_bytes"] / 1e11)
        assert node["cost_s"]["gpu"] == pytest.approx(seconds)

    arguments += ["--budget", "50e", "--out", str(placement)]
    optimized = json_of(capsys, "optimize", *arguments)
    assert optimized["measured"] is None
    for source in (graph.graph["cost_source"], optimized["cost_source"]):
        assert source["gpu"] == "roofline of the cluster's rates"
        assert "measured 20" in source["core"]
    # With two seconds per launch, the described device is never worth using.
    assert optimized["step_s"] < 2.0
    assert set(json.loads(placement.read_text())["devices"].values()) == {CORE}


@pytest.mark.slow
def test_without_costs_nothing_is_measured(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "graph.json"
    options = ["--inference", "--costs", "none", "--out", str(out)]
    summary = json_of(capsys, "extract", f"{model}:build", *options)
    assert summary["ops"] == {"forward": 3, "backward": 0, "optimizer": 0}
    assert summary["flops"] == 2 * 2 * (8 * 16 + 16 * 4)
    assert summary["parameter_bytes"] == PARAMETER_BYTES
    assert summary["saved_bytes"] == 0
    assert summary["work"] == {}
    assert summary["out"] == str(out)
    assert all(node["cost_s"] == {} for _, node in load_graph(out).nodes(data=True))
    assert main(["extract", str(out), "--summary"]) == 0
    assert "Costs are unknown" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_on_meta_is_extracted_without_costs_and_never_run(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = [f"{model}:on_meta", "--inference"]
    assert json_of(capsys, "extract", *target, "--costs", "none")["ops"]["forward"] == 1
    out = str(tmp_path / "out.json")
    for command in ("extract", "optimize"):
        assert main([command, *target, "--devices", CORE, "--out", out]) == 2
        assert "on the meta device" in capsys.readouterr().err


@pytest.mark.slow
def test_optimizer_and_dtype_are_part_of_the_step(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--costs", "none", "--optimizer", "adamw", "--dtype", "bf16"]
    summary = json_of(capsys, "extract", f"{model}:build", *options)
    assert summary["ops"]["optimizer"] == 4
    assert summary["gradient_bytes"] == PARAMETER_BYTES
    assert summary["optimizer_bytes"] == 2 * PARAMETER_BYTES + 4 * 4


def test_every_fall_back_of_the_extractor_is_reported_with_its_reason(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["extract", f"{model}:outside", "--costs", "none", "--json"]) == 0
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert summary["extractor"] == "modules"
    assert [tried["extractor"] for tried in summary["fell_back"]] == ["export", "dispatch"]
    for tried, before in zip(
        summary["fell_back"], ("Not by export", "Whole modules are placed, not ops"), strict=True
    ):
        assert ".numpy()" in tried["reason"]
        assert f"{before}: {tried['reason']}" in printed.err


@pytest.mark.parametrize(
    ("extractor", "costs", "error"),
    [
        ("dispatch", "--devices cpu", "Try --extractor modules."),
        ("export", "--costs none", "control flow depends on the values in a tensor"),
    ],
)
def test_a_forced_extractor_falls_back_to_nothing(
    extractor: str, costs: str, error: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--json", "--extractor", extractor, *costs.split()]
    assert main(["extract", f"{model}:branching", *options]) == 2
    assert error in capsys.readouterr().err


def test_what_no_extractor_takes_is_told_in_whole_sentences(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--summary", "--devices", "cpu", "--optimizer", "sgd"]
    assert main(["extract", f"{model}:branching", *options]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("placer: no extractor takes ")
    assert f'File "{model}", line ' in error
    assert "choose with torch.where" in error
    assert error.endswith("a graph of modules has no ops for an optimizer: leave it out.")
    assert "..." not in error


@pytest.mark.slow
def test_a_graph_of_modules_is_measured_on_cores(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "placement.json"
    arguments = ["optimize", f"{model}:build", "--extractor", "modules", "--devices", CORE]
    options = ["--budget", "20e", "--policy", "none", "--out", str(out)]
    optimized = json_of(capsys, *arguments, *options)
    assert optimized["extractor"] == "modules"
    assert optimized["measured"] is not None
    placement = json.loads(out.read_text())
    assert set(placement["devices"]) >= {"0:Linear", "1:ReLU", "0:backward/Linear"}
    export = ["export", str(out), f"{model}:build", "--format", "device-map"]
    assert main([*export, "--extractor", "modules", "--as", f"{CORE}=cuda:0"]) == 0
    assert json.loads(capsys.readouterr().out) == {"": 0}


def test_one_reason_of_two_extractors_is_given_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "class Cache:\n    def __init__(self, x): self.x = x\n    def __copy__(self): return self\n"
        "class Model(nn.Linear):\n    def forward(self, x):\n"
        "        return {'out': super().forward(x), 'past': Cache(x * 2)}\n"
        "def build(): return Model(4, 4), torch.ones(2, 4)\n"
    )
    assert main(["extract", f"{path}:build", "--inference", "--costs", "none", "--summary"]) == 0
    error = capsys.readouterr().err
    assert error.count("returns a Cache") == 1
    assert "Whole modules are placed, not ops: " in error
    assert "Not by" not in error


def test_a_recording_is_measured_and_named_in_the_result(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["optimize", f"{model}:branching", "--devices", CORE, "--budget", "20e"]
    options = ["--policy", "none", "--out", str(tmp_path / "placement.json")]
    options += ["--extractor", "dispatch"]
    optimized = json_of(capsys, *arguments, *options)
    assert optimized["extractor"] == "dispatch"
    assert optimized["measured"] is not None
    (line,) = optimized["depends_on_data"]
    assert "model.py" in line
    assert line in optimized["verdict"]


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("import no_such_package_here", "pip install no_such_package_here, or put"),
        ("import no_such_package_here.inner", "needs no_such_package_here, which"),
        ("def build():\n    import no_such_package_here", "pip install no_such_package_here"),
        ("import json.no_such_part", "No module named 'json.no_such_part'"),
    ],
)
def test_a_missing_package_is_named_with_how_to_install_it(
    line: str, advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "needs_more.py"
    path.write_text(f"{line}\n")
    for command in (["extract", "--summary"], ["optimize"]):
        assert main([*command, f"{path}:build", "--devices", CORE, "--inference"]) == 2
        assert advice in " ".join(capsys.readouterr().err.split())


@pytest.mark.filterwarnings("ignore")  # torch warns, once, that such tensors are deprecated
def test_a_quantized_model_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("placer.costed_step.runtime_for", None)
    path = tmp_path / "quantized.py"
    path.write_text(
        "import torch\nfrom torch import nn\ndef build():\n    model = nn.Linear(8, 8)\n"
        "    packed = torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8)\n"
        "    model.register_buffer('w', packed)\n    return model, torch.randn(2, 8)\n"
    )
    assert main(["optimize", f"{path}:build", "--devices", CORE, "--inference"]) == 2
    error = capsys.readouterr().err
    assert "w of Linear is a torch.qint8: quantized weights cannot be placed" in error
