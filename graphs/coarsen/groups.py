"""Coarsened graphs: ops merged into fewer groups that are placed as one, and expanded back to ops.

Ops that may not be split are merged first: co-location groups, and ops that the user keeps
together. Then cheap ops join their only neighbour, and a topological order is cut into at most the
requested number of pieces (:mod:`graphs.coarsen.merging`). Ops of different phases, allowed devices
or costed device kinds are never merged (:class:`Limits`). Where a path leaves a co-location group
and returns, merging the group would make a cycle: its ops stay separate, and ``colocate`` keeps
them on one device. A group of ops from several co-location groups unites them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from graphs.coarsen.merging import absorbed, colocated, cut, root_of
from graphs.coarsen.sizes import GroupSizes
from graphs.costs import cost_source
from graphs.graph import (
    ANY_KIND,
    PHASES,
    GraphArrays,
    add_edge,
    add_op,
    attributes_of,
    frozen,
)
from graphs.selection import keep_together as kept_together


def united_labels(graph: GraphArrays, group_of: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the co-location group of every op, (N,), -1 for none.

    Co-location groups become one, named by the first, where a merged group has ops of both. One
    that lies within a single merged group is dropped: there is nothing left to keep together.
    """
    label_of = graph.group.astype(np.int64)
    count = int(label_of.max(initial=-1)) + 1
    inside = np.flatnonzero(label_of >= 0)
    pairs = np.unique(label_of[inside] * len(graph) + group_of[inside])
    labels, groups = (pairs // len(graph)).tolist(), (pairs % len(graph)).tolist()
    spread = np.bincount(pairs // len(graph), minlength=count)
    root = list(range(count))
    holder: dict[int, int] = {}
    for label, g in zip(labels, groups, strict=True):
        if spread[label] > 1:
            one, other = root_of(root, holder.setdefault(g, label)), root_of(root, label)
            root[max(one, other)] = min(one, other)
    first = np.array([root_of(root, i) if spread[i] > 1 else -1 for i in range(count)], np.int64)
    # Ops without a label get that of their merged group.
    label_of_group = np.full(int(group_of.max()) + 1, -1, np.int64)
    np.maximum.at(label_of_group, group_of[inside], first[label_of[inside]])
    return label_of_group[group_of]


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """Classes of ops that may be merged, and the devices that each op's co-location group allows.

    Ops of one class (N,) have one phase, the same ``devices`` to choose from and costs for the same
    device kinds; classes are numbered in the order of the phases.
    """

    classes: NDArray[np.int64]
    devices: tuple[tuple[str, ...] | None, ...]

    @classmethod
    def of(cls, graph: GraphArrays) -> Limits:
        """Compute the limits of a graph's ops."""
        kinds = sorted({*graph.cost_s, ANY_KIND})
        known = np.stack([~np.isnan(graph.costs_for(kind)) for kind in kinds], axis=1)
        devices = list(graph.allowed)
        by_group = np.argsort(graph.group, kind="stable")
        by_group = by_group[np.searchsorted(graph.group[by_group], 0) :]
        bounds = np.flatnonzero(np.diff(graph.group[by_group])) + 1
        for members in np.split(by_group, bounds) if len(by_group) else ():
            shared = known[members].all(axis=0)
            if known[members].any() and not shared.any():
                raise ValueError(
                    f"{_named(graph, members)} must share a device, but there is no device kind "
                    "with costs for all of them; measure them on one"
                )
            known[members] = shared
            choice = _common(graph, members)
            for i in members.tolist():
                devices[i] = choice
        keys = [
            (phase, names if names is None else frozenset(names), tuple(row))
            for phase, names, row in zip(graph.phase.tolist(), devices, known.tolist(), strict=True)
        ]
        by_phase = sorted(dict.fromkeys(keys), key=lambda key: key[0])
        number = {key: i for i, key in enumerate(by_phase)}
        classes = [number[key] for key in keys]
        return cls(np.array(classes, np.int64), tuple(devices))


def _common(graph: GraphArrays, members: NDArray[np.int64]) -> tuple[str, ...] | None:
    """Return the devices that all members allow, None for all devices."""
    limited = [names for i in members.tolist() if (names := graph.allowed[i]) is not None]
    if not limited:
        return None
    shared = frozenset(limited[0]).intersection(*limited)
    if not shared:
        shown = " and ".join(dict.fromkeys(", ".join(names) for names in limited))
        raise ValueError(
            f"{_named(graph, members)} must share a device, but they are allowed on {shown}"
        )
    return tuple(name for name in limited[0] if name in shared)


def _named(graph: GraphArrays, members: NDArray[np.int64]) -> str:
    shown = ", ".join(repr(graph.ids[i]) for i in members[:3].tolist())
    return f"ops {shown}" + (f" and {len(members) - 3} more" if len(members) > 3 else "")


GROUP_OP: Final = "group"
"""``op`` of a node that stands for several ops."""


@dataclass(frozen=True, slots=True, eq=False)
class Coarsened:
    """N ops merged into G groups.

    Node ``i`` of ``graph`` is group ``i``; ``group_of`` (N,) int32 is the group of each op;
    ``running`` (N,) int32 lists the ops by group, those of a group in topological order.

    Costs and sizes are those of :class:`graphs.coarsen.sizes.GroupSizes`; a group of one op keeps
    its id and all of its numbers. A device's launch overhead counts once per group. Of two edges
    from one group the simulator sends only the larger to a device that needs both.
    """

    graph: nx.DiGraph[str]
    group_of: NDArray[np.int32]
    running: NDArray[np.int32]

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self.graph)

    def expand(
        self, devices_of_groups: NDArray[np.integer], priority_of_groups: NDArray[np.floating]
    ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """Return device and priority of every op, both (N,), from those of every group, both (G,).

        Priorities count down from N to 1: groups by descending priority, ties by index as in the
        simulator, and the ops of a group in topological order.
        """
        count = len(self)
        if devices_of_groups.shape != (count,) or priority_of_groups.shape != (count,):
            raise ValueError(
                f"devices of shape {devices_of_groups.shape} and priorities of shape "
                f"{priority_of_groups.shape} are not for {count} groups"
            )
        priority = priority_of_ops(priority_of_groups, self.group_of, self.running)
        return devices_of_groups[self.group_of].astype(np.int32), priority


def priority_of_ops(
    priority_of_groups: NDArray[np.floating],
    group_of: NDArray[np.integer],
    running: NDArray[np.integer],
) -> NDArray[np.float64]:
    """Return priorities from N to 1 as :meth:`Coarsened.expand` does, (N,)."""
    rank = np.empty(len(priority_of_groups), np.int64)
    rank[np.argsort(-priority_of_groups, kind="stable")] = np.arange(len(rank))
    ops = running[np.argsort(rank[group_of[running]], kind="stable")]
    priority = np.empty(len(ops))
    priority[ops] = np.arange(len(ops), 0, -1)
    return priority


def coarsen(
    graph: nx.DiGraph[str],
    *,
    most_groups: int | None = None,
    least_cost_s: float = 0.0,
    keep_together: Sequence[str] = (),
    kind: str | None = None,
) -> Coarsened:
    """Merge ops into groups, deterministically; the graph between groups is acyclic.

    Ops that cost at most ``least_cost_s`` join their only predecessor or successor. Ops that match
    one pattern of ``keep_together`` share a device, see :func:`graphs.selection.keep_together`. The
    costs on ``kind`` (default: the lowest known cost of each op) decide which ops are cheap, and
    balance the groups.
    """
    if most_groups is not None and most_groups < 1:
        raise ValueError(f"most_groups is {most_groups}; give 1 or more")
    if not least_cost_s >= 0:
        raise ValueError(f"least_cost_s is {least_cost_s}, not a time >= 0")
    if keep_together:
        graph = kept_together(graph, keep_together)
    ops = GraphArrays.from_graph(graph)
    limits = Limits.of(ops)
    cost_s = _costs(ops, kind)
    group_of = colocated(ops, np.arange(len(ops)), ops.group.astype(np.int64), limits.classes)
    group_of = absorbed(ops, group_of, limits.classes, cost_s, least_cost_s)
    if most_groups is not None and group_of.max() >= most_groups:
        group_of = _few(ops, group_of, limits.classes, cost_s, most_groups)
    return _built(graph, ops, limits, group_of)


def _costs(ops: GraphArrays, kind: str | None) -> NDArray[np.float64]:
    """Return the cost in seconds of every op, (N,), inf where it is unknown."""
    if kind is None:
        known = [np.where(np.isnan(s), np.inf, s) for s in ops.cost_s.values()]
        least: NDArray[np.float64] = np.min([np.full(len(ops), np.inf), *known], axis=0)
        return least
    cost_s = ops.costs_for(kind)
    if np.isnan(cost_s).all():
        raise ValueError(
            f"no op has a cost for kind {kind!r}; known are {', '.join(ops.cost_s) or 'none'}"
        )
    return np.where(np.isnan(cost_s), np.inf, cost_s)


def _few(
    ops: GraphArrays,
    group_of: NDArray[np.int64],
    classes: NDArray[np.int64],
    cost_s: NDArray[np.float64],
    most: int,
) -> NDArray[np.int64]:
    """Cut into at most ``most`` groups of similar cost, merging co-location groups only if needed.

    A piece with ops of several co-location groups ties all ops of these groups to one device. Where
    co-location groups must be merged, the first phase decides which, and the other phases follow;
    independent choices per phase would end up merging all of them.
    """
    weight = np.where(np.isfinite(cost_s), cost_s, 0.0)
    if not weight.any():
        weight = np.ones(len(ops))
    pieces = cut(ops, group_of, _by_label(ops, group_of, classes), weight, most)
    if pieces is None:
        by_phase = _first_phase(ops, group_of, classes, weight, most)
        pieces = cut(ops, by_phase, _by_label(ops, by_phase, classes), weight, most)
    if pieces is None:
        pieces = cut(ops, group_of, classes, weight, most)
    if pieces is None:
        raise ValueError(
            f"{most} groups are too few: ops of different phases, allowed devices and device kinds "
            f"({len(np.unique(classes))} combinations) stay apart; allow more groups"
        )
    return pieces


def _by_label(
    ops: GraphArrays, group_of: NDArray[np.int64], classes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return classes that separate co-location groups, too, (N,)."""
    label_of = united_labels(ops, group_of)
    _, finer = np.unique(classes * (len(ops) + 1) + label_of + 1, return_inverse=True)
    return np.asarray(finer, np.int64)


def _first_phase(
    ops: GraphArrays,
    group_of: NDArray[np.int64],
    classes: NDArray[np.int64],
    weight: NDArray[np.float64],
    most: int,
) -> NDArray[np.int64]:
    """Cut the first phase to its share of the groups, and merge accordingly in the other phases."""
    is_first = ops.phase == ops.phase.min()
    count = int(group_of.max()) + 1
    others = len(np.unique(group_of[~is_first]))
    allowed = most * (count - others) // count
    apart = np.where(is_first, classes, int(classes.max()) + 1 + group_of)
    pieces = cut(ops, group_of, apart, weight, max(allowed, 1) + others)
    if pieces is None:
        return group_of
    return colocated(ops, pieces, united_labels(ops, pieces), classes)


def _built(
    graph: nx.DiGraph[str], ops: GraphArrays, limits: Limits, group_of: NDArray[np.int64]
) -> Coarsened:
    position = np.empty(len(ops), np.int64)
    position[ops.topological] = np.arange(len(ops))
    running = np.lexsort((position, group_of))
    sizes = GroupSizes.of(ops, group_of, running)
    label_of = united_labels(ops, group_of)
    named = dict.fromkeys(attributes_of(graph, op_id)["colocate"] for op_id in graph)
    label_names = [label for label in named if label is not None]  # numbered by their first op
    coarse: nx.DiGraph[str] = nx.DiGraph(**graph.graph)
    bounds = np.flatnonzero(np.diff(group_of[running])) + 1
    for g, members in enumerate(part.tolist() for part in np.split(running, bounds)):
        first = members[0]
        alone = len(members) == 1
        add_op(
            coarse,
            ops.ids[first] if alone else _group_id(graph, ops.ids[first], len(members)),
            op=ops.ops[first] if alone else GROUP_OP,
            phase=PHASES[ops.phase[first]],
            module=_common_module(dict.fromkeys(ops.modules[i] for i in members)),
            colocate=None if label_of[first] < 0 else label_names[label_of[first]],
            devices=limits.devices[first],
            cost_source=_sources(graph, [ops.ids[i] for i in members]),
            **sizes.attributes(g),
        )
    names = list(coarse)
    for (source, target), size in sizes.edges.items():
        add_edge(coarse, names[source], names[target], size)
    return Coarsened(coarse, frozen(group_of.astype(np.int32)), frozen(running.astype(np.int32)))


def _sources(graph: nx.DiGraph[str], members: Sequence[str]) -> dict[str, str]:
    """Return the source of a group's summed costs, for kinds where a member has its own source."""
    kinds = {kind: None for op_id in members for kind in attributes_of(graph, op_id)["cost_source"]}
    return {
        kind: "; ".join(dict.fromkeys(cost_source(graph, op_id, kind) for op_id in members))
        for kind in kinds
    }


def _group_id(graph: nx.DiGraph[str], first: str, count: int) -> str:
    """Return an unused id: that of the first op, and the number of further ops."""
    group_id = f"{first} +{count - 1}"
    while group_id in graph:
        group_id += "+"
    return group_id


def _common_module(modules: Iterable[str]) -> str:
    """Return the path of the innermost module that contains all ``modules``.

    >>> _common_module(["layers.3.attention", "layers.3.mlp"])
    'layers.3'
    """
    first, *rest = (path.split(".") for path in modules)
    shared = len(first)
    for path in rest:
        same = (a == b for a, b in zip(first[:shared], path, strict=False))
        shared = next((i for i, is_same in enumerate(same) if not is_same), min(shared, len(path)))
    return ".".join(first[:shared])
