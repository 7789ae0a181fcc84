"""The wheel: what it holds, and that it is enough, in an environment and a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from built_wheel import ROOT

from placer.report.html.page import SCRIPTS

Run: TypeAlias = Callable[..., str]
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(64, 256), nn.Linear(64, 256), nn.Linear(256, 8)

    def forward(self, x):
        return self.head(F.relu(self.left(x)) + F.relu(self.right(x)))


def build():
    torch.manual_seed(0)
    return Branches(), (torch.randn(32, 64), torch.randint(8, (32,))), F.cross_entropy
"""
FROM_PYTHON = """
import pathlib, placer
from model import build

model, inputs, loss = build()
found = placer.optimize(
    model, inputs, loss=loss, devices="core:0,core:1", budget="20e", measure=False, progress=False
)
found.save("from_python.json")
print(pathlib.Path(placer.__file__).parent)
"""


def shipped_files() -> set[str]:
    """Policies, their configurations and the suites, without what trainings leave beside them."""
    folder = ROOT / "trained_policies"
    return {p.name for p in folder.iterdir() if p.suffix in (".json", ".safetensors", ".toml")}


def test_the_wheel_holds_the_three_packages_trained_policies_and_scripts_of_the_report(
    wheel: Path,
) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"placer", "envs", "graphs"}
    policies = {name for name in names if name.startswith("placer/trained_policies/")}
    assert {Path(name).name for name in policies} == shipped_files()
    assets = {Path(name).name for name in names if name.startswith("placer/report/assets/")}
    assert assets == {"report.css", *SCRIPTS}


def test_the_wheel_forgets_no_policy_and_takes_no_log_of_a_training() -> None:
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    listed = hatch["targets"]["wheel"]["force-include"]
    assert listed == {
        f"trained_policies/{name}": f"placer/trained_policies/{name}" for name in shipped_files()
    }


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Run:
    """Runs a command in an environment where only the wheel is installed, in an empty folder.

    What the wheel depends on is lent by this environment, through a .pth file: a folder on such a
    list does not bring its own .pth files, and with them the editable checkout.
    """
    home, folder = tmp_path / "environment", tmp_path / "elsewhere"
    venv.create(home, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = home / "lib" / version / "site-packages"
    (site / "lent.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(home / "bin" / "python")]
    install = [*pip, "install", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    folder.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}

    def run(program: str, *arguments: str) -> str:
        done = subprocess.run(
            [str(home / "bin" / program), *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_the_quickstart_runs_with_nothing_but_the_wheel(installed: Run, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    (folder / "model.py").write_text(MODEL)
    devices = ["--devices", "core:0,core:1"]

    options = [*devices, "--budget", "2s", "--report", "report.html", "--json"]
    found = json.loads(installed("placer", "optimize", "model.py:build", *options))
    assert found["measured"]["step_s"] > 0
    used = sorted(set(json.loads((folder / "placement.json").read_text())["devices"].values()))
    assert set(used) <= {"core:0", "core:1"}
    page = (folder / "report.html").read_text()
    assert "<html" in page
    assert found["best"] in page
    assert "<script src=" not in page

    renamed = ",".join(f"{name}={name.replace('core', 'cuda')}" for name in used)
    options = ["--format", "device-map", "--as", renamed]
    told = installed("placer", "export", "placement.json", "model.py:build", *options)
    assert set(json.loads(told).values()) <= {int(name[-1]) for name in used}

    home = installed("python", "-c", FROM_PYTHON).strip()
    assert Path(home).is_relative_to(tmp_path / "environment")
    assert json.loads((folder / "from_python.json").read_text())["made_by"]["budget"] == "20e"
