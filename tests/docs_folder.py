"""A folder with the files that README and docs name, real and small."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from docs_pages import PAGES, ROOT, Block, blocks
from onnx_files import exported
from torch import nn

from placer.cli.main import main


def file_blocks() -> list[Block]:
    """Blocks of all pages that are files."""
    return [block for page in PAGES for block in blocks(page) if block.file]


def furnish(folder: Path) -> None:
    """What every page takes for granted: its own files, and what the quickstart makes of them.

    ``placement.json`` is of ``graph.json`` and of ``model.py:build``, whose graph that is.
    """
    for block in file_blocks():
        (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
        (folder / block.file).write_text(block.text)
    for name in ("examples", "trained_policies"):
        (folder / name).symlink_to(ROOT / name)
    _run("extract", "model.py:build", "--out", "graph.json")
    _run("optimize", "graph.json", "--cluster", "cluster.toml", "--budget", "50e")


def furnish_models(folder: Path) -> None:
    """Models of other forms, and a file in a folder of its own."""
    (folder / "path" / "to").mkdir(parents=True)
    shutil.copy(folder / "model.py", folder / "path" / "to" / "model.py")
    model, inputs = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)), torch.ones(2, 32)
    torch.export.save(torch.export.export(model, (inputs,)), folder / "model.pt2")
    exported(model, (inputs,), folder / "model.onnx", dynamic_axes={"x0": {0: "batch"}})


def _run(*arguments: str) -> None:
    code = main(arguments)
    assert code == 0, f"placer {' '.join(arguments)} ended with {code}"
