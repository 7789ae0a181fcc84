"""README and docs are tested: commands run, and links are valid.

Every line of a ``sh`` block and every ``python`` snippet is run, page by page and in order, in a
folder with the files that the pages name. A block whose first line names a file (``# model.py``) is
that file. Lines that measure steps or start processes are slow tests, and those with ``cuda:`` need
a GPU; a preceding comment ``<!-- slow -->`` or ``<!-- gpu -->`` marks a whole block. Installations
and make targets are not run (the targets run tests themselves); targets must only exist.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from envs.hardware.cluster import Device, Link, cluster_from_dict
from envs.placement import Placement
from envs.replication import Replication
from graphs.graph import ATTRIBUTES
from graphs.graph_file import graph_from_dict
from placer.cli.main import build_parser, main
from tests.helpers.docs_pages import (
    DOCS,
    PAGES,
    Block,
    Command,
    anchors,
    blocks,
    commands,
    links,
)
from tests.helpers.folders import ROOT
from tests.helpers.tiny_models import export_onnx


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
    export_onnx(model, (inputs,), folder / "model.onnx", dynamic_axes={"x0": {0: "batch"}})


def _run(*arguments: str) -> None:
    code = main(arguments)
    assert code == 0, f"placer {' '.join(arguments)} ended with {code}"


RUN = "placer.run"
INTERNAL = re.compile(r"^\s*(?:from|import) (?:envs|graphs)\b", re.MULTILINE)
IN_TEXT = re.compile(r"`(placer|make) ([^`]*)`")


def runs(*pages: Path) -> list[Command]:
    return [command for page in pages for block in blocks(page) for command in commands(block)]


def with_snippets(*without: str) -> list[Path]:
    """Return the pages with anything to run, without those of these names."""
    return [
        page
        for page in PAGES
        if page.stem not in without and any(_is_run(block) for block in blocks(page))
    ]


def _is_run(block: Block) -> bool:
    return bool(commands(block)) or (block.language == "python" and not block.file)


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        furnish(folder)
    return folder


@pytest.fixture
def folder(
    furnished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Path]]:
    """Return a function that enters a folder of all files; modules from it are unloaded later."""
    known = set(sys.modules)

    def enter() -> Path:
        place = tmp_path / "place"
        shutil.copytree(furnished, place, symlinks=True)
        monkeypatch.chdir(place)
        monkeypatch.syspath_prepend(place)
        return place

    yield enter
    for name in {Path(block.file).stem for block in file_blocks()} - known:
        sys.modules.pop(name, None)


def run_page(page: Path, wanted: Callable[[Block, Command | None], bool]) -> int:
    """Run the wanted blocks and commands of a page in order; return their number."""
    names: dict[str, Any] = {"__name__": page.stem}
    count = 0
    for block in blocks(page):
        for command in commands(block):
            if not command.is_setup and wanted(block, command):
                run_command(command)
                count += 1
        if block.language == "python" and not block.file and wanted(block, None):
            source = "\n" * (block.line - 1) + block.text  # errors name lines of the page
            exec(compile(source, str(page), "exec"), names)
            count += 1
    return count


def run_command(command: Command) -> None:
    words = command.words
    errors = io.StringIO()
    if words[0] == "placer":
        with contextlib.redirect_stderr(errors):
            code = main(words[1:])
    else:
        program = {
            "mkdir": ["mkdir"],
            "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        }[words[0]]
        path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        code = subprocess.run(
            [*program, *words[1:]], env=environment, timeout=1200, check=False
        ).returncode
    assert code == 0, f"{command.where}: {' '.join(words)!r} ended with {code}: {errors.getvalue()}"


def is_quick(block: Block, command: Command | None) -> bool:
    if block.mark:
        return False
    return command is None or (command.is_quick and not command.needs_gpu)


def needs_gpu(block: Block, command: Command | None) -> bool:
    return block.mark == "gpu" or (command is not None and command.needs_gpu)


# README and simulator search for seconds even where they are quick; slow tests run all of them.


@pytest.mark.slow_repeats
@pytest.mark.parametrize("page", with_snippets("README", "simulator"), ids=lambda page: page.stem)
def test_what_is_quick_on_a_page_runs(page: Path, folder: Callable[[], Path]) -> None:
    folder()
    run_page(page, is_quick)


@pytest.mark.slow
@pytest.mark.parametrize("page", with_snippets(), ids=lambda page: page.stem)
def test_all_of_a_page_runs(page: Path, folder: Callable[[], Path]) -> None:
    furnish_models(folder())
    assert run_page(page, lambda block, command: not needs_gpu(block, command))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("page", with_snippets(), ids=lambda page: page.stem)
def test_what_needs_a_gpu_on_a_page_runs(page: Path, folder: Callable[[], Path]) -> None:
    furnish_models(folder())
    run_page(page, lambda block, command: is_quick(block, command) or needs_gpu(block, command))


@pytest.mark.parametrize("command", runs(*PAGES), ids=lambda command: command.where)
def test_command_lines_are_understood(command: Command) -> None:
    words = list(command.words)
    match words[0]:
        case "placer":
            parser().parse_args(words[1:])
        case "torchrun" if RUN in words:
            parser().parse_args(["run", *words[words.index(RUN) + 1 :]])
        case "make":
            assert set(words[1:]) <= targets_of_make()
        case "pip":
            extras = re.findall(r"device-placer\[([a-z,]+)\]", " ".join(words))
            assert {name for found in extras for name in found.split(",")} <= known_extras()
        case other:
            assert other in ("mkdir", "torchrun"), f"{command.where}: nobody runs {other}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_named_in_the_text_exist(page: Path) -> None:
    for program, rest in IN_TEXT.findall(page.read_text()):
        command, *words = rest.split()
        if program == "make":
            assert command in targets_of_make(), f"{page.name}: make {rest}"
        elif not command.startswith("-"):
            names = {word.partition("=")[0].rstrip(",.") for word in words if word[:2] == "--"}
            assert names <= known_options()[command], f"{page.name}: placer {rest}"


def test_a_file_of_the_docs_has_one_content() -> None:
    contents: dict[str, str] = {}
    for block in file_blocks():
        known = contents.setdefault(block.file, block.text)
        assert known == block.text, f"{block.where}: {block.file} is otherwise elsewhere"


def test_files_that_are_shown_can_be_read() -> None:
    formats = set()
    for block in blocks(DOCS / "file-formats.md"):
        if block.language == "json":
            data = json.loads(block.text)
            formats.add(form := data.get("format", "replicas"))
            match form:
                case "placer-placement/1":
                    assert Placement.from_dict(data).to_dict() == data
                case "placer-graph/1":
                    assert len(graph_from_dict(data)) == len(data["nodes"])
                case "replicas":
                    assert Replication.from_dict(data, "").to_dict() == data
    assert formats == {"placer-placement/1", "placer-graph/1", "replicas"}
    clusters = [block.text for block in file_blocks() if "placer-cluster/1" in block.text]
    assert clusters
    for text in clusters:
        cluster_from_dict(tomllib.loads(text))


def test_the_docs_name_every_key_of_a_file_every_command_and_every_option_of_optimize() -> None:
    replication = Replication(groups=(("a",),), algorithms=("ring",), levels=(1,)).to_dict()
    for page, names in (
        ("devices.md", [field.name for kind in (Device, Link) for field in fields(kind)]),
        ("file-formats.md", [*ATTRIBUTES, *replication, *replication["reduction"]]),
    ):
        text = (DOCS / page).read_text()
        assert [name for name in names if f"`{name}`" not in text and f'"{name}"' not in text] == []
    text = "\n".join(page.read_text() for page in PAGES)
    assert [name for name in known_options() if f"placer {name}" not in text] == []
    assert known_options()["optimize"] <= set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link} has no such heading"


def test_every_page_is_in_the_index_and_the_index_in_the_readme() -> None:
    pages = {path.name for path in DOCS.glob("*.md")} - {"README.md"}
    assert pages <= set(links(DOCS / "README.md"))
    assert any(link.startswith("docs/README.md") for link in links(ROOT / "README.md"))


def test_examples_and_snippets_import_public_packages_only() -> None:
    snippets = [(block.where, block.text) for page in PAGES for block in blocks(page)]
    examples = [(path.name, path.read_text()) for path in (ROOT / "examples").glob("*.py")]
    assert [where for where, text in snippets + examples if INTERNAL.search(text)] == []


parser = functools.cache(build_parser)


@functools.cache
def known_options() -> dict[str, set[str]]:
    """Return the long options of each command."""
    actions = parser()._actions
    [commands_action] = [a for a in actions if isinstance(a, argparse._SubParsersAction)]
    return {
        command: {name for name in own._option_string_actions if name.startswith("--")}
        for command, own in commands_action.choices.items()
    }


@functools.cache
def targets_of_make() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def known_extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])
