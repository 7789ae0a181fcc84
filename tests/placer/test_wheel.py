"""The wheel: its files, and that it suffices in its own environment and folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from placer.report.html.page import SCRIPTS
from tests.helpers.docs_pages import DOCS, Block, blocks, commands
from tests.helpers.folders import ROOT

Run: TypeAlias = Callable[..., str]
FROM_PYTHON = """
import pathlib, placer
from model import build

model, inputs, loss = build()
search = placer.SearchConfig(budget="20e", measure=False)
found = placer.optimize(
    model, inputs, loss=loss, devices="core:0,core:1", search=search, progress=False
)
found.save("from_python.json")
print(pathlib.Path(placer.__file__).parent)
"""


def shipped_files() -> set[str]:
    """Return policies, their configurations and the suites, without other results of trainings."""
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


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Run:
    """Return a function that runs a command where only the wheel is installed, in an empty folder.

    The dependencies come from this environment through a .pth file: a folder that is listed there
    does not process its own .pth files, and so not the editable checkout.
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


def steps_of_the_quickstart() -> list[Block]:
    """Return the steps of a new user, from the model to the training; the rest is reference."""
    page = DOCS / "quickstart.md"
    end = page.read_text().splitlines().index("## What next")
    return [block for block in blocks(page) if block.line < end]


@pytest.mark.slow
def test_the_quickstart_runs_with_nothing_but_the_wheel(installed: Run, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    done: list[str] = []
    for block in steps_of_the_quickstart():
        if block.file:
            (folder / block.file).write_text(block.text)
        elif block.language == "python":
            lines = installed("python", "-c", block.text).splitlines()
            if "optimizer" in block.text:
                assert float(lines[-1]) < float(lines[0])
            else:
                assert lines[-1] == "torch.Size([256, 10])"
        for command in commands(block):
            if not command.is_setup:
                installed(*command.words)
                done.append(command.words[1])
    assert done == ["optimize", "show", "show"]
    page = (folder / "report.html").read_text()
    assert "<html" in page
    assert "<script src=" not in page

    used = sorted(set(json.loads((folder / "placement.json").read_text())["devices"].values()))
    renamed = ",".join(f"{name}=cuda:{number}" for number, name in enumerate(used))
    options = ["--format", "device-map", "--as", renamed]
    told = installed("placer", "export", "placement.json", "model.py:build", *options)
    assert set(json.loads(told).values()) <= set(range(len(used)))

    home = installed("python", "-c", FROM_PYTHON).strip()
    assert Path(home).is_relative_to(tmp_path / "environment")
    assert json.loads((folder / "from_python.json").read_text())["made_by"]["budget"] == "20e"
