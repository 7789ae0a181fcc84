"""Selecting ops by op id, module path or glob, as users write them."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable

import networkx as nx

from graphs.graph import attributes_of


class ConstraintError(ValueError):
    """A user constraint that cannot be met; the message says why and what to do."""


def matching(graph: nx.DiGraph[str], pattern: str) -> list[str]:
    """Return the ops that a pattern matches, in the graph's order.

    A pattern is an op id, a module path, or a glob of either (``*``, ``?``, ``[...]``). A module
    stands for all ops inside it, and ``layers.3.*`` matches the module ``layers.3`` itself, too.

    Raises:
        ConstraintError: nothing matches; the message suggests similar names.
    """
    whole_module = pattern.removesuffix(".*")
    glob = re.compile(fnmatch.translate(pattern))
    known: dict[str, bool] = {}

    def in_module(path: str) -> bool:
        if path not in known:
            outer, dot, _ = path.rpartition(".")
            named = path in (pattern, whole_module) or glob.match(path) is not None
            known[path] = named or (dot != "" and in_module(outer))
        return known[path]

    def named(op_id: str) -> bool:
        if op_id == pattern or glob.match(op_id) is not None:
            return True
        module = attributes_of(graph, op_id)["module"]
        return module != "" and in_module(module)

    found = [op_id for op_id in graph if named(op_id)]
    if not found:
        raise ConstraintError(_nothing_matches(graph, pattern))
    return found


def _nothing_matches(graph: nx.DiGraph[str], pattern: str) -> str:
    modules = dict.fromkeys(_and_outer(attributes_of(graph, op_id)["module"] for op_id in graph))
    near = difflib.get_close_matches(pattern.removesuffix(".*"), [*modules, *graph], 3)
    if near:
        return f"{pattern!r} matches no op and no module; did you mean {', '.join(near)}?"
    there = [path for path in modules if "." not in path] or list(graph)
    shown = ", ".join(there[:8]) + (", ..." if len(there) > 8 else "")
    return f"{pattern!r} matches no op and no module; there are {shown}"


def _and_outer(modules: Iterable[str]) -> Iterable[str]:
    """Yield every module path and those of the modules around it."""
    for path in dict.fromkeys(modules):
        parts = path.split(".") if path else []
        yield from (".".join(parts[: i + 1]) for i in range(len(parts)))
