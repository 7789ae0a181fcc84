"""A folder with the files that README and docs name, with small contents."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import nn

from placer.cli.main import main
from tests.helpers.docs_pages import PAGES, Block, blocks
from tests.helpers.folders import ROOT
from tests.helpers.onnx_files import exported


def file_blocks() -> list[Block]:
    """Return the blocks of all pages that are files."""
    return [block for page in PAGES for block in blocks(page) if block.file]


def furnish(folder: Path) -> None:
    """Write the files that every page requires: its own, and the results of the quickstart.

    ``placement.json`` belongs to ``graph.json``, the graph of ``model.py:build``.
    """
    for block in file_blocks():
        (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
        (folder / block.file).write_text(block.text)
    for name in ("examples", "graphs", "trained_policies"):
        (folder / name).symlink_to(ROOT / name)
    _run("extract", "model.py:build", "--out", "graph.json")
    _run("optimize", "graph.json", "--cluster", "cluster.toml", "--budget", "50e")


def furnish_models(folder: Path) -> None:
    """Write models of other formats, and a file in a nested folder."""
    (folder / "path" / "to").mkdir(parents=True)
    shutil.copy(folder / "model.py", folder / "path" / "to" / "model.py")
    model, inputs = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)), torch.ones(2, 32)
    torch.export.save(torch.export.export(model, (inputs,)), folder / "model.pt2")
    exported(model, (inputs,), folder / "model.onnx", dynamic_axes={"x0": {0: "batch"}})


def _run(*arguments: str) -> None:
    code = main(arguments)
    assert code == 0, f"placer {' '.join(arguments)} ended with {code}"
