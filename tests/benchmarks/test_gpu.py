"""The benchmark of torch devices; without a GPU it uses a fake device."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks.gpu.__main__ import compiled
from benchmarks.gpu.process import trained
from benchmarks.gpu.workbench import Workbench
from envs.hardware import torch_devices
from envs.hardware.cluster import Cluster
from graphs.extract import Workload
from graphs.graph import GraphArrays
from graphs.graph_file import graph_from_dict
from tests.helpers.folders import ROOT


@pytest.mark.slow
def test_everything_that_needs_a_gpu_is_measured_without_a_failure(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--small", "--limit", "300", "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PLACER_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=600,
    )
    assert not re.findall(r'"failure": ".+"', out.read_text())
    parts = json.loads(out.read_text())["parts"]
    assert {name.partition(":")[0] for name in parts} >= {
        *("calibration", "mixture of experts", "language model", "recommendation", "translation")
    }
    graphs = json.loads((tmp_path / "gpu.graphs.json").read_text())
    for name, graph in graphs.items():
        found = GraphArrays.from_graph(graph_from_dict(graph))
        assert found.hash == parts[f"{name}: no limit"]["graph"]
    assert len(graphs) == 4
    runs = parts["mixture of experts: in 3 processes"]["runs"]
    assert [len(run["repeats_s"]) for run in runs] == [15] * 3


@pytest.mark.slow
def test_the_compiled_model_is_timed_beside_the_plain_one() -> None:
    step = Workload.of(torch.nn.Linear(8, 8), (torch.ones(4, 8),) * 2, torch.nn.MSELoss())
    bench = cast("Workbench", SimpleNamespace(extraction=SimpleNamespace(step=step)))
    cluster = cast("Cluster", SimpleNamespace(names=["cpu"]))
    found: dict[str, Any] = {}
    compiled(bench, cluster, found, backend="eager")
    assert len(found["eager"]["repeats_s"]) == len(found["compiled"]["repeats_s"]) >= 3
    assert found["compiled_over_eager"] > 0


def test_a_timed_step_ends_when_all_devices_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    devices = [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")]
    model = torch.nn.Linear(2, 1, bias=False)
    model.register_forward_hook(lambda *_: done.append("step"))
    monkeypatch.setattr(torch_devices, "synchronize", lambda device: done.append(str(device)))
    trained(model, [torch.ones(2)], {}, devices)
    every = ["cuda:0", "cuda:1", "cpu"]
    assert done == [*every, "step", *every]
