"""The product's waits, events and records of streams, found in its source, and removed in turn.

A site is a call that orders streams, or the host and a stream, or keeps memory for a stream; or a
condition under which a copy may not be ``non_blocking``. Code without it replaces that of the
module's functions, wherever these are held.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from tests.helpers.folders import ROOT

FOLDERS: Final = ("envs/executors", "envs/torch_runtime", "placer/parallel")
CALLS: Final = frozenset(
    {
        *("wait_event", "wait_stream", "record_event", "record_stream", "synchronize"),
        *("_wait", "result", "enter_context"),
    }
)
"""Names of functions and methods, those of a future too; of contexts only those of a stream."""
GUARDS: Final = ("_may_overlap", "_is_stable")
"""Functions that say whether a copy needs no wait: they always do."""
MARKS: Final = ("stream(", "Stream(", "non_blocking", "torch_devices.synchronize")
"""A module without any of these has nothing to do with streams."""


@dataclass(frozen=True, slots=True)
class Site:
    """One expression of a module, by its place in the source."""

    path: str
    line: int
    column: int
    text: str

    def __str__(self) -> str:
        return f"{Path(self.path).name}:{self.line}: {self.text}"

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(self.path.removesuffix(".py").replace("/", "."))


def sites() -> list[Site]:
    """Return all sites of the product's code that runs placements, in the order of the source.

    Those that worker processes run have a test of their own.
    """
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if "device_workers" not in path.parts and any(mark in text for mark in MARKS):
                name = str(path.relative_to(ROOT))
                found += [_site(name, node) for node in ast.walk(ast.parse(text)) if _counts(node)]
    return sorted(found, key=lambda site: (site.path, site.line, site.column))


def _site(path: str, node: Any) -> Site:
    text = node.name if isinstance(node, ast.FunctionDef) else ast.unparse(node)
    return Site(path, node.lineno, node.col_offset, text)


def _counts(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name in GUARDS
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return name in CALLS and (name != "enter_context" or "stream(" in ast.unparse(node))
    if isinstance(node, ast.keyword):
        return node.arg == "non_blocking" and ast.unparse(node.value) != "True"
    return isinstance(node, ast.IfExp) and "non_blocking=True" in ast.unparse(node)


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
            return node
        if isinstance(node, ast.keyword):
            return ast.keyword("non_blocking", ast.Constant(True))
        if isinstance(node, ast.IfExp):
            branches = (node.body, node.orelse)
            return next(b for b in branches if "non_blocking=True" in ast.unparse(b))
        if "record_event" in ast.unparse(node):  # an event that marks nothing
            return ast.parse("torch.cuda.Event()", mode="eval").body
        return ast.Constant(None)


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


def killers(site: Site, scenarios: Sequence[tuple[str, Any, int]]) -> str:
    """Return the first scenario (name, work, seed) that fails without a site, "" if none does."""
    with without(site):
        for name, work, seed in scenarios:
            try:
                work(seed)
            except Exception:  # noqa: BLE001  # whatever shows that something is wrong
                return f"{name}, seed {seed}"
    return ""
