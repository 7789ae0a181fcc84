"""Costs and sizes of groups of ops, computed exactly from the arrays of their ops."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from graphs.coarsen.merging import edge_sources
from graphs.graph import ANY_KIND, LARGEST_BYTES, SIZES, GraphArrays

SUMMED: Final = tuple(name for name in SIZES if name not in ("output_bytes", "workspace_bytes"))


@dataclass(frozen=True, slots=True, eq=False)
class GroupSizes:
    """Costs and sizes of G groups, as Python numbers: sums of large sizes must not overflow.

    ``sums`` holds, for each name of ``SUMMED``, the sum over the group's ops. ``output_bytes``
    leave the group: outputs of its ops that another group reads, or that nothing reads (results of
    the step). ``workspace_bytes`` is other memory that the group needs while it runs, op by op in
    topological order: the peak of scratch memory plus outputs that only the group reads, from the
    op that writes one to the last that reads it. ``edges`` {(source, target): bytes} count every
    output once for each group that reads it; of unequal edges the largest counts.
    """

    sums: Mapping[str, list[int]]
    output_bytes: list[int]
    workspace_bytes: list[int]
    cost_s: list[dict[str, float]]
    loaded_cost_s: list[dict[str, float]]
    launch_s: list[dict[str, float]]
    edges: Mapping[tuple[int, int], int]

    @classmethod
    def of(
        cls, graph: GraphArrays, group_of: NDArray[np.int64], running: NDArray[np.int64]
    ) -> GroupSizes:
        """Compute the sizes of groups 0..G-1; ``running`` (N,) lists the ops by group, in order."""
        starts = np.searchsorted(group_of[running], np.arange(int(group_of.max()) + 1))
        costs = _costs(graph, running, starts)
        columns: Mapping[str, NDArray[np.int64]] = {n: getattr(graph, n) for n in SUMMED}
        internal = _internal(graph, group_of)
        return cls(
            sums={n: _sums(column[running], starts) for n, column in columns.items()},
            output_bytes=_sums(np.where(internal, 0, graph.output_bytes)[running], starts),
            workspace_bytes=_workspace(graph, internal, running, starts),
            cost_s=costs,
            loaded_cost_s=_loaded_costs(graph, running, starts, costs),
            launch_s=_launches(graph, running, starts, costs),
            edges=_edges(graph, group_of),
        )

    def attributes(self, group: int) -> dict[str, Any]:
        """Return costs and sizes of a group as attributes of an op, at most LARGEST_BYTES each."""
        return {
            "cost_s": self.cost_s[group],
            "loaded_cost_s": self.loaded_cost_s[group],
            "launch_s": self.launch_s[group],
            "output_bytes": min(self.output_bytes[group], LARGEST_BYTES),
            "workspace_bytes": min(self.workspace_bytes[group], LARGEST_BYTES),
            **{name: min(column[group], LARGEST_BYTES) for name, column in self.sums.items()},
        }


def _sums(values: NDArray[np.int64], starts: NDArray[np.intp]) -> list[int]:
    whole: list[int] = np.add.reduceat(values.astype(object), starts).tolist()
    return whole


def _internal(graph: GraphArrays, group_of: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether an op's output is read, and only by its own group, (N,)."""
    source = edge_sources(graph)
    internal = np.diff(graph.successor_start) > 0
    internal[source[group_of[source] != group_of[graph.successors]]] = False
    return internal


def _workspace(
    graph: GraphArrays,
    internal: NDArray[np.bool_],
    running: NDArray[np.int64],
    starts: NDArray[np.intp],
) -> list[int]:
    count = len(graph)
    position = np.empty(count, np.int64)
    position[running] = np.arange(count)
    source = edge_sources(graph)
    last_read = np.zeros(count, np.int64)
    np.maximum.at(last_read, source, position[graph.successors])
    change = np.zeros(count + 1, object)
    sizes = graph.output_bytes[internal].astype(object)
    np.add.at(change, position[internal], sizes)
    np.subtract.at(change, last_read[internal] + 1, sizes)
    held = np.cumsum(change[:-1]) + graph.workspace_bytes[running].astype(object)
    whole: list[int] = np.maximum.reduceat(held, starts).tolist()
    return whole


def _costs(
    graph: GraphArrays, running: NDArray[np.int64], starts: NDArray[np.intp]
) -> list[dict[str, float]]:
    """Return seconds by kind where they are known for all ops of a group."""
    costs: list[dict[str, float]] = [{} for _ in starts]
    for kind, cost_s in graph.cost_s.items():
        named = np.maximum.reduceat(~np.isnan(cost_s[running]), starts)
        seconds = (cost_s if kind == ANY_KIND else graph.costs_for(kind))[running]
        known = ~np.maximum.reduceat(np.isnan(seconds), starts)
        for g, total_s in _sums_in(seconds, starts, named & known):
            costs[g][kind] = total_s
    return costs


def _loaded_costs(
    graph: GraphArrays,
    running: NDArray[np.int64],
    starts: NDArray[np.intp],
    costs: list[dict[str, float]],
) -> list[dict[str, float]]:
    """Return loaded seconds by kind where some op of a group has them; others cost the same."""
    loaded: list[dict[str, float]] = [{} for _ in starts]
    for kind in graph.loaded_cost_s:
        cost_s, loaded_s = graph.costs_for(kind)[running], graph.loaded_costs_for(kind)[running]
        some = np.maximum.reduceat(~np.isnan(loaded_s), starts)
        seconds = np.where(np.isnan(loaded_s), cost_s, loaded_s)
        for g, total_s in _sums_in(seconds, starts, some):
            if kind in costs[g]:
                loaded[g][kind] = max(total_s, costs[g][kind])
    return loaded


def _launches(
    graph: GraphArrays,
    running: NDArray[np.int64],
    starts: NDArray[np.intp],
    costs: list[dict[str, float]],
) -> list[dict[str, float]]:
    """Return the seconds that issuing all ops of a group takes, by kind where all are known."""
    launches: list[dict[str, float]] = [{} for _ in starts]
    for kind in graph.launch_s:
        launch_s = graph.launches_for(kind)[running]
        known = ~np.maximum.reduceat(np.isnan(launch_s), starts)
        for g, total_s in _sums_in(launch_s, starts, known):
            if kind in costs[g]:
                launches[g][kind] = total_s
    return launches


def _sums_in(
    seconds: NDArray[np.float64], starts: NDArray[np.intp], chosen: NDArray[np.bool_]
) -> Iterator[tuple[int, float]]:
    """Yield the chosen groups with the sums over their ops, each rounded once."""
    bounds, values = [*starts.tolist(), len(seconds)], seconds.tolist()
    for g in np.flatnonzero(chosen).tolist():
        yield g, math.fsum(values[bounds[g] : bounds[g + 1]])


def _edges(graph: GraphArrays, group_of: NDArray[np.int64]) -> dict[tuple[int, int], int]:
    source = edge_sources(graph)
    target_group = group_of[graph.successors]
    between = np.flatnonzero(group_of[source] != target_group)
    if not len(between):
        return {}
    by_output = between[np.lexsort((target_group[between], source[between]))]
    output, readers = source[by_output], target_group[by_output]
    first = _run_starts(output, readers)
    sent = np.maximum.reduceat(graph.edge_bytes[by_output], first)
    sender, reader = group_of[output[first]], readers[first]
    by_pair = np.lexsort((reader, sender))
    first = _run_starts(sender[by_pair], reader[by_pair])
    sizes = [min(size, LARGEST_BYTES) for size in _sums(sent[by_pair], first)]
    pairs = zip(sender[by_pair][first].tolist(), reader[by_pair][first].tolist(), strict=True)
    return dict(zip(pairs, sizes, strict=True))


def _run_starts(*keys: NDArray[Any]) -> NDArray[np.intp]:
    """Return where each run of equal entries starts, in arrays that are sorted together."""
    changed = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return np.concatenate(([0], np.flatnonzero(changed) + 1))
