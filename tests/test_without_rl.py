"""Placements are found, run and measured where no reinforcement-learning library is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CORES = sorted(os.sched_getaffinity(0))
BLOCKED = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("gymnasium", "stable_baselines3", "sb3_contrib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, Absent())
"""
MODEL = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, (torch.randn(4, 8), torch.randn(4, 3)), nn.functional.mse_loss
"""
FROM_PYTHON = """
import placer
from model import build

model, inputs, loss = build()
found = placer.optimize(
    model, inputs, loss=loss, devices={devices!r}, budget="20e", progress=False
)
assert any(row.measurement is not None and row.measurement.ok for row in found.rows)
with placer.apply(model, found) as placed:
    assert placed.step(*inputs).isfinite()
found.save("placement.json")
"""
FROM_THE_COMMAND_LINE = """
from placer.cli.main import main

assert main(["measure", "model.py:build", "--placement", "placement.json"]) == 0
assert main(["show", "placement.json"]) == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(len(CORES) < 2, reason="two devices need two cores")
def test_placements_are_found_run_and_measured_without(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    devices = f"core:{CORES[0]},core:{CORES[1]}"
    code = BLOCKED + FROM_PYTHON.format(devices=devices) + FROM_THE_COMMAND_LINE
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=False,
        cwd=tmp_path,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "measured step: " in done.stdout
    assert "memory of core:" in done.stdout
