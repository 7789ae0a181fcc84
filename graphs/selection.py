"""Selections of ops by op id, module path or glob, and what users ask of them.

Ops can be pinned to a device (:func:`pin`) or kept together on one (:func:`keep_together`).
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import networkx as nx

from graphs.graph import attributes_of


class ConstraintError(ValueError):
    """A user constraint that cannot be met; the message says why and what to do."""


def matching(graph: nx.DiGraph[str], pattern: str) -> list[str]:
    """Return the ops that a pattern matches, in the graph's order.

    A pattern is an op id, a module path, or a glob of either (``*``, ``?``, ``[...]``). A module
    stands for all ops inside it, and ``layers.3.*`` matches the module ``layers.3`` itself, too.
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

    ops = [op_id for op_id in graph if named(op_id)]
    if not ops:
        raise ConstraintError(_nothing_matches(graph, pattern))
    return ops


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


KEPT: Final = "kept together: "
GROUP_REASONS: Final[Mapping[str, str]] = {
    "parameter ": "a parameter has one home, with all that read or update it",
    "state ": "a tied parameter or state that the step changes has one home",
    "tensor of ": "views of a part stay with their tensor",
    "call": "calls stay with their backward ops and with those that share their state",
    KEPT: "the user keeps them together",
}
"""Reasons for a co-location group, by the prefix of its name."""


def pin(graph: nx.DiGraph[str], devices: Mapping[str, str]) -> nx.DiGraph[str]:
    """Return a copy of a graph in which the matching ops may only run on the given device.

    ``devices`` is {op id, module path or glob: device name}, see :func:`matching`.
    """
    pinned: nx.DiGraph[str] = graph.copy()
    pinned_by: dict[str, str] = {}
    for pattern, device in devices.items():
        for op_id in matching(graph, pattern):
            other = pinned_by.setdefault(op_id, pattern)
            if devices[other] != device:
                raise ConstraintError(
                    f"op {op_id!r} is pinned to {devices[other]} by {other!r} and to {device} by "
                    f"{pattern!r}; give patterns that do not overlap"
                )
            allowed = attributes_of(graph, op_id)["devices"]
            if allowed is not None and device not in allowed:
                raise ConstraintError(
                    f"op {op_id!r} cannot be pinned to {device}: the graph allows only "
                    f"{', '.join(allowed)}"
                )
            pinned.nodes[op_id]["devices"] = (device,)
    _check_groups(pinned, devices, pinned_by)
    return pinned


def _check_groups(
    graph: nx.DiGraph[str], devices: Mapping[str, str], pinned_by: Mapping[str, str]
) -> None:
    """Raise if pins, {op id: pattern}, put one co-location group on different devices."""
    first: dict[str, str] = {}
    for op_id, pattern in pinned_by.items():
        group = attributes_of(graph, op_id)["colocate"]
        if group is None:
            continue
        other = first.setdefault(group, pattern)
        if devices[other] != devices[pattern]:
            reasons = (f" ({GROUP_REASONS[s]})" for s in GROUP_REASONS if group.startswith(s))
            raise ConstraintError(
                f"{other!r} is pinned to {devices[other]} and {pattern!r} to {devices[pattern]}, "
                f"but ops of both are in the co-location group {group!r}, which shares one "
                f"device{next(reasons, '')}; pin them to the same device"
            )


def keep_together(graph: nx.DiGraph[str], patterns: Sequence[str]) -> nx.DiGraph[str]:
    """Return a copy of a graph in which the ops that match one pattern share a device.

    Patterns that overlap, and co-location groups that a pattern touches, become one group.
    """
    kept: nx.DiGraph[str] = graph.copy()
    for pattern in patterns:
        chosen = matching(kept, pattern)
        touched = {attributes_of(kept, op_id)["colocate"] for op_id in chosen} - {None}
        chosen += [op_id for op_id in kept if attributes_of(kept, op_id)["colocate"] in touched]
        for op_id in chosen:
            kept.nodes[op_id]["colocate"] = KEPT + pattern
    return kept
