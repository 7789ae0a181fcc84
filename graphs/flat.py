"""Graphs made from arrays, without networkx, for a million ops and more."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphs.graph import ANY_KIND, LARGEST_BYTES, PHASES, GraphArrays, csr, frozen

Longs = NDArray[np.int64]


def flat_graph(
    name: str,
    *,
    cost_s: NDArray[np.float64],
    source: NDArray[np.integer[Any]],
    target: NDArray[np.integer[Any]],
    output_bytes: Longs,
    edge_bytes: Longs | None = None,
    parameter_bytes: Longs | None = None,
) -> GraphArrays:
    """Build a graph of N forward ops, "0", "1", ..., and E edges.

    Args:
        name: name of the graph.
        cost_s: (N,), seconds on every device kind.
        source: (E,), indices of ops, each below its ``target``.
        target: (E,), indices of ops.
        output_bytes: (N,).
        edge_bytes: (E,), by default the whole output of the source.
        parameter_bytes: (N,), by default 0.

    Raises:
        ValueError: there are no ops, arrays differ in length, an edge does not lead to a later op
            or is repeated, or a number is negative, not finite or too large.
    """
    count = len(cost_s)
    if count == 0:
        raise ValueError(f"graph {name!r} has no ops")
    own = np.zeros(count, np.int64) if parameter_bytes is None else parameter_bytes
    sizes = len(source) if edge_bytes is None else len(edge_bytes)
    if not (len(output_bytes) == len(own) == count and len(source) == len(target) == sizes):
        raise ValueError(
            f"graph {name!r}: {count} costs, {len(output_bytes)} outputs and {len(own)} sizes of "
            f"parameters; {len(source)} sources, {len(target)} targets and {sizes} sizes"
        )
    wrong = np.flatnonzero(~((source >= 0) & (source < target) & (target < count)))
    if len(wrong):
        raise ValueError(
            f"edge {source[wrong[0]]} -> {target[wrong[0]]} does not lead from one of {count} ops "
            "to a later one"
        )
    read = output_bytes[source] if edge_bytes is None else edge_bytes
    if not (np.isfinite(cost_s) & (cost_s >= 0)).all():
        raise ValueError(f"graph {name!r}: a cost is not a time >= 0")
    for column in (output_bytes, read, own):
        if len(column) and not 0 <= column.min() <= column.max() <= LARGEST_BYTES:
            raise ValueError(f"graph {name!r}: a size is not within 0 .. 2**60")
    start, successors, order = csr(source.astype(np.int32), target.astype(np.int32), count)
    by_row = np.repeat(np.arange(count, dtype=np.int32), np.diff(start))
    if ((np.diff(by_row) == 0) & (np.diff(successors) == 0)).any():
        raise ValueError(f"graph {name!r} has an edge twice; add its bytes up")
    predecessor_start, predecessors, predecessor_edge = csr(successors, by_row, count)
    digest = hashlib.sha256(b"placer-graph/flat")
    for array in (output_bytes, own, start, successors, read[order]):
        digest.update(np.ascontiguousarray(array, np.int64).data)
    columns: dict[str, Any] = {
        f.name: frozen(np.zeros(count, np.int64))
        for f in fields(GraphArrays)
        if f.type == "NDArray[np.int64]"
    }
    columns |= {
        "name": name,
        "hash": digest.hexdigest(),
        "ids": tuple(map(str, range(count))),
        "ops": ("op",) * count,
        "modules": ("",) * count,
        "phase": frozen(np.full(count, PHASES.index("forward"), np.int8)),
        "output_bytes": frozen(output_bytes.astype(np.int64)),
        "parameter_bytes": frozen(own.astype(np.int64)),
        "group": frozen(np.full(count, -1, np.int32)),
        "allowed": (None,) * count,
        "cost_s": {ANY_KIND: frozen(cost_s.astype(np.float64))},
        "successor_start": frozen(start),
        "successors": frozen(successors),
        "edge_bytes": frozen(read[order].astype(np.int64)),
        "predecessor_start": frozen(predecessor_start),
        "predecessors": frozen(predecessors),
        "predecessor_edge": frozen(predecessor_edge),
        "topological": frozen(np.arange(count, dtype=np.int32)),
    }
    return GraphArrays(**columns)
