"""Placements are searched, run and measured without any reinforcement-learning library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.folders import ROOT

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
from pathlib import Path

import placer
from model import build

model, inputs, loss = build()
workload = placer.Workload.of(model, inputs, loss)
found = placer.optimize(workload, {devices!r}, budget="20e")
ran = [row for row in found.candidates if row.measurement is not None and row.measurement.ok]
with placer.apply(model, found) as placed:
    assert placed.step(*inputs).isfinite()
found.save("found.json")
next(row for row in ran if not row.is_unplaced).placement.save(Path("placement.json"))
"""
FROM_THE_COMMAND_LINE = """
from placer.cli.main import main

assert main(["evaluate", "model.py:build", "--placement", "placement.json"]) == 0
assert main(["show", "placement.json"]) == 0
"""


def done_without(code: str, folder: Path) -> str:
    """Return the output of code that cannot import any reinforcement-learning library."""
    (folder / "model.py").write_text(MODEL)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + code],
        capture_output=True,
        check=False,
        cwd=folder,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_placements_are_found_run_and_measured_without(tmp_path: Path) -> None:
    devices = f"core:{CORES[0]},core:{CORES[1]}"
    code = FROM_PYTHON.format(devices=devices)
    printed = done_without(code + FROM_THE_COMMAND_LINE, tmp_path)
    assert "measured step: " in printed
    assert "memory of core:" in printed
