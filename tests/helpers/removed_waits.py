"""The product's waits, events and records of streams, found in its source, and removed in turn.

A site is a call that orders streams, or the host and a stream, or keeps memory for a stream; a
condition under which a copy may not be ``non_blocking``; or the order of copies on a stream. Code
without it replaces that of the module's functions, wherever these are held.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from tests.helpers.folders import ROOT

FOLDERS: Final = ("envs", "graphs", "placer")
INSTEAD: Final = {
    **dict.fromkeys(("wait", "_wait", "wait_event", "wait_stream", "synchronize"), "None"),
    **dict.fromkeys(("record", "record_stream", "result", "_look_at_device"), "None"),
    "record_event": "torch.cuda.Event()",  # an event that marks nothing
    "stream": "torch.cuda.stream(None)",
    "query": "True",  # as if it were over
}
"""Replacements of calls, by the name of the function or method (``result`` is that of a future)."""
GUARDS: Final = ("_may_overlap", "_is_stable")
"""Functions that say whether a copy needs no wait: they always do."""
HIT: Final = re.compile(
    r"(?<!def )\b((_?wait|wait_event|wait_stream|synchronize|query|_look_at_device)\("
    r"|(?<=\.)record\(|record_event\(|record_stream\(|(?<=\.)result\(\)|(set_)?stream\()"
    r"|non_blocking|\bseen\["
)
"""Pattern of lines that may wait or use streams, independent of how sites are found."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Lines with such words from which nothing is removed: those of a path with a text."""

    path: str
    text: str
    reason: str

    def covers(self, path: str, line: str) -> bool:
        return path.startswith(self.path) and self.text in line


PROCESSES: Final = "waits for processes, which have tests of their own; no stream takes part"
THREADS: Final = "waits for threads of the host; without it there is no result"
KEPT: Final = (
    Kept("envs/executors/cores/", "wait(", PROCESSES),
    Kept("envs/executors/device_workers/pool.py", "wait(", PROCESSES),
    Kept("placer/parallel/local_ranks.py", "wait(", PROCESSES),
    Kept("placer/ray_cluster/", "wait(", PROCESSES),
    Kept("envs/executors/torch/watchdog.py", "over.wait(", "a clock that ends hung steps"),
    Kept("placer/parallel/liveness.py", "_ended.wait(", "pause between two heartbeats"),
    Kept("placer/progress.py", "stopped.wait(", "pause between two lines of progress"),
    Kept("envs/costs/modules.py", "pool.submit(run).result()", THREADS),
    Kept("placer/policies/decoders.py", "task.result()", THREADS),
    Kept("placer/search/", "wait(", THREADS),
    Kept("placer/search/", ".result()", THREADS),
    Kept("envs/", "non_blocking=True)", "such a copy waits for nothing"),
    Kept(
        "envs/costs/torch_speeds.py",
        "non_blocking=pinned or destination != CPU",
        "the copy is only timed, from and until idle devices: nobody reads it",
    ),
    Kept(
        "envs/executors/device_workers/transport.py",
        ".seen[edge] = self.step",
        "the thread that copies writes it after the copy; no other thread of a test comes between",
    ),
)


@dataclass(frozen=True, slots=True)
class Site:
    """One expression or statement of a module, by its place in the source."""

    path: str
    line: int
    column: int
    text: str

    def __str__(self) -> str:
        return f"{Path(self.path).name}:{self.line}: {self.text}"

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(self.path.removesuffix(".py").replace("/", "."))


def product_files() -> Iterator[tuple[str, str]]:
    """Yield path and text of the modules of the product."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()


def hits() -> list[tuple[str, int, str]]:
    """Return path, number and text of all lines that have to do with waits, by text alone."""
    return [
        (path, number, line)
        for path, text in product_files()
        for number, line in enumerate(text.splitlines(), 1)
        if HIT.search(line.split("  #")[0])
    ]


@cache
def sites() -> list[Site]:
    """Return all sites of the product, in the order of the source."""
    found = []
    for path, text in product_files():
        if HIT.search(text):
            lines = text.splitlines()
            for node in ast.walk(ast.parse(text)):
                site = _site(path, node) if _counts(node) else None
                if site and not any(kept.covers(path, lines[site.line - 1]) for kept in KEPT):
                    found.append(site)
    return sorted(found, key=lambda site: (site.path, site.line, site.column))


def _site(path: str, node: Any) -> Site:
    text = node.name if isinstance(node, ast.FunctionDef) else ast.unparse(node)
    if isinstance(node, ast.While):
        text = f"while {ast.unparse(node.test)}"
    elif isinstance(node, ast.With):
        text = f"order of {' and '.join(map(ast.unparse, node.body))}"
    elif isinstance(node, ast.Call):  # at its name, whatever the lines before it
        return Site(path, node.func.end_lineno or 0, node.func.end_col_offset or 0, text)
    return Site(path, node.lineno, node.col_offset, text)


def _name(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def _counts(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name in GUARDS
    if isinstance(node, ast.Call):
        is_function = isinstance(node.func, ast.Name)
        if _name(node) in ("result", "record") and (is_function or node.args):
            return False
        return _name(node) in INSTEAD
    if isinstance(node, ast.keyword):
        return node.arg == "non_blocking" and ast.unparse(node.value) != "True"
    if isinstance(node, ast.While):  # that looks whether something has come
        return "_look_at_device" in ast.unparse(node)
    if isinstance(node, ast.With):
        return len(node.body) > 1 and any(_is_stream(item.context_expr) for item in node.items)
    return isinstance(node, ast.IfExp) and "non_blocking=True" in ast.unparse(node)


def _is_stream(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _name(node) == "stream"


class _Removal(ast.NodeTransformer):
    def __init__(self, site: Site) -> None:
        self._site = site
        self.count = 0

    def visit(self, node: ast.AST) -> Any:
        if _counts(node) and _site(self._site.path, node) == self._site:
            self.count += 1
            return self._without(node)
        return self.generic_visit(node)

    def _without(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.FunctionDef):
            node.body = [ast.Return(ast.Constant(True))]
        elif isinstance(node, ast.While):
            node.test = ast.Constant(False)
        elif isinstance(node, ast.With):
            node.body.reverse()
        elif isinstance(node, ast.keyword):
            return ast.keyword("non_blocking", ast.Constant(True))
        elif isinstance(node, ast.IfExp):
            branches = (node.body, node.orelse)
            return next(b for b in branches if "non_blocking=True" in ast.unparse(b))
        else:
            assert isinstance(node, ast.Call)
            return ast.parse(INSTEAD[_name(node)], mode="eval").body
        return node


@contextmanager
def without(site: Site) -> Iterator[None]:
    """Run the module of a site without it."""
    module = site.module
    removal = _Removal(site)
    tree = ast.fix_missing_locations(removal.visit(ast.parse(inspect.getsource(module))))
    assert removal.count == 1, f"{site} is there {removal.count} times"
    file = module.__file__ or ""
    changed = dict(_codes(compile(tree, file, "exec")))
    functions = [f for f in _functions(vars(module)) if f.__code__.co_filename == file]
    before = [function.__code__ for function in functions]
    try:
        for function in functions:
            function.__code__ = changed[function.__qualname__]
        yield
    finally:
        for function, code in zip(functions, before, strict=True):
            function.__code__ = code


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """Yield qualified name and code of all functions in the code of a module."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_qualname, constant
            yield from _codes(constant)


def _functions(names: Mapping[str, Any]) -> Iterator[FunctionType]:
    """Yield functions of a module or class, those of its classes and under decorators too."""
    for value in list(names.values()):
        held = getattr(value, "__func__", getattr(value, "fget", value))
        inner = inspect.unwrap(held) if callable(held) else held
        if isinstance(inner, FunctionType):
            yield inner
        elif isinstance(value, type) and value.__module__ == names.get("__name__"):
            yield from _functions({**vars(value), "__name__": value.__module__})


def killer(site: Site, scenarios: Sequence[tuple[str, Callable[[int], None], int]]) -> str:
    """Return the first scenario (name, work, seed) that fails without a site, "" if none does."""
    with without(site):
        for name, work, seed in scenarios:
            try:
                work(seed)
            except Exception:  # noqa: BLE001  # whatever shows that something is wrong
                return f"{name}, seed {seed}"
    return ""
