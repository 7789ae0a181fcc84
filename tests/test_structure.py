"""Limits on the shape of the code base: import cycles, sizes of modules, folders and signatures."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Final

import grimp
import networkx as nx

from tests.helpers.folders import ROOT

PACKAGES: Final = ("graphs", "envs", "placer")
MOST_LINES: Final = 400
MOST_MODULES: Final = 14
MOST_PARAMETERS: Final = 12
LEAST_LINES: Final = 60
"""Shorter modules have more than one importer."""


@cache
def imports() -> nx.DiGraph[str]:
    """Return module -> imported module, those for type checkers and inside functions included."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    return nx.DiGraph(
        (module, imported)
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    )


@cache
def sources(*folders: str) -> dict[Path, str]:
    """Return {path from the root: text} of the Python files in the folders."""
    files = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return {path.relative_to(ROOT): path.read_text() for path in files}


@cache
def lengths(*folders: str) -> dict[Path, int]:
    return {path: len(text.splitlines()) for path, text in sources(*folders).items()}


def test_no_modules_import_each_other_in_a_cycle() -> None:
    cycles = nx.strongly_connected_components(imports())
    assert [sorted(cycle) for cycle in cycles if len(cycle) > 1] == []


def test_no_file_is_too_long() -> None:
    assert {p: n for p, n in lengths(*PACKAGES, "tests").items() if n > MOST_LINES} == {}


def test_no_folder_holds_too_many_modules() -> None:
    sizes = Counter(path.parent for path in sources(*PACKAGES) if path.name != "__init__.py")
    assert {folder: n for folder, n in sizes.items() if n > MOST_MODULES} == {}


def test_a_short_module_has_more_than_one_importer() -> None:
    short = {
        ".".join(path.with_suffix("").parts)
        for path, n in lengths(*PACKAGES).items()
        if path.name != "__init__.py" and n < LEAST_LINES
    }
    importers = {
        module: {*imports().predecessors(module)} - {module.rpartition(".")[0]}  # its package
        for module in short & {*imports()}
    }
    assert {module: used for module, used in importers.items() if len(used) == 1} == {}


def test_public_functions_have_few_parameters() -> None:
    counts = {
        f"{path}:{node.name}": len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
        for path, text in sources(*PACKAGES).items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        if not any("compiled" in ast.unparse(one) for one in node.decorator_list)  # array arguments
    }
    assert {name: n for name, n in counts.items() if n > MOST_PARAMETERS} == {}
