"""``--extractor``, and the reasons for every fall-back."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import placer
from graphs.extract import ExtractionError
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

def plain():
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU()), data(), nn.functional.mse_loss

def branching():
    return Branch(), data(), nn.functional.mse_loss

def outside():
    model = nn.Sequential(nn.Linear(8, 4), Outside(), nn.Linear(4, 4))
    return model, data(), nn.functional.mse_loss
"""
CORE = f"core:{min(os.sched_getaffinity(0))}"


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return str(path)


def test_extract_tells_every_fall_back_and_its_reason(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["extract", f"{model}:outside", "--costs", "none", "--json"]) == 0
    told = capsys.readouterr()
    summary = json.loads(told.out)
    assert summary["extractor"] == "modules"
    assert [tried["extractor"] for tried in summary["fell_back"]] == ["export", "dispatch"]
    for tried in summary["fell_back"]:
        assert ".numpy()" in tried["reason"]
        assert f"Not by {tried['extractor']}: {tried['reason']}" in told.err
    assert "graph of modules" in told.err


def test_an_export_has_nothing_to_tell(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["extract", f"{model}:plain", "--costs", "none", "--json"]) == 0
    told = capsys.readouterr()
    summary = json.loads(told.out)
    assert (summary["extractor"], summary["fell_back"]) == ("export", [])
    assert summary["depends_on_data"] == []
    assert "Not by" not in told.err


def test_a_forced_extractor_falls_back_to_nothing(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["extract", f"{model}:branching", "--costs", "none", "--json", "--extractor"]
    assert main([*arguments, "export"]) == 1
    assert "control flow depends on the values in a tensor" in capsys.readouterr().err
    assert main([*arguments, "modules"]) == 0
    assert json.loads(capsys.readouterr().out)["extractor"] == "modules"


def test_the_option_that_helps_is_named(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["extract", f"{model}:branching", "--json", "--devices", "cpu"]
    assert main([*arguments, "--extractor", "dispatch"]) == 1
    assert "Try --extractor modules." in capsys.readouterr().err


def test_a_graph_of_modules_is_optimized_by_the_simulator(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "placement.json"
    arguments = ["optimize", f"{model}:plain", "--extractor", "modules", "--devices", CORE]
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


def test_what_was_recorded_is_not_applied_to_other_data() -> None:
    class Branch(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y if x.sum() > 0 else -y

    found = placer.optimize(
        Branch(4, 4),
        (torch.ones(2, 4), torch.zeros(2, 4)),
        loss=torch.nn.functional.mse_loss,
        devices=CORE,
        search=placer.SearchConfig(budget="20e", policy=None, measure=False),
        progress=False,
    )
    assert any("other inputs may take another path" in remark for remark in found.remarks)
    assert found.extraction is not None
    with pytest.raises(ExtractionError, match="reads values of tensors") as refused:
        placer.apply(found.extraction.step.model, found)
    assert __file__ in str(refused.value)
