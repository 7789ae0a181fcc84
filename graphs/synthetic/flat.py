"""Graphs made from arrays, without networkx, for a million ops and more."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphs.graph import ANY_KIND, SIZES, GraphArrays, adjacency, frozen


def flat_graph(
    name: str,
    *,
    cost_s: NDArray[np.float64],
    source: NDArray[np.integer[Any]],
    target: NDArray[np.integer[Any]],
    output_bytes: NDArray[np.int64],
    parameter_bytes: NDArray[np.int64] | None = None,
) -> GraphArrays:
    """Build a graph of N forward ops, "0", "1", ..., and E distinct edges of whole outputs.

    ``cost_s`` (N,) holds on every device kind; each ``source`` (E,) is an op before its ``target``.
    """
    count = len(cost_s)
    if not ((source >= 0) & (source < target) & (target < count)).all():
        raise ValueError(f"graph {name!r}: an edge does not lead from one op to a later one")
    columns: dict[str, Any] = {size: frozen(np.zeros(count, np.int64)) for size in SIZES}
    columns["output_bytes"] = frozen(output_bytes.astype(np.int64))
    if parameter_bytes is not None:
        columns["parameter_bytes"] = frozen(parameter_bytes.astype(np.int64))
    edges = adjacency(source, target, columns["output_bytes"][source], count)
    digest = hashlib.sha256(b"placer-graph/flat")
    for array in (columns["output_bytes"], columns["parameter_bytes"], *edges.values()):
        digest.update(array.data)
    return GraphArrays(
        name=name,
        hash=digest.hexdigest(),
        ids=tuple(map(str, range(count))),
        ops=("op",) * count,
        modules=("",) * count,
        phase=frozen(np.zeros(count, np.int8)),
        group=frozen(np.full(count, -1, np.int32)),
        allowed=(None,) * count,
        cost_s={ANY_KIND: frozen(cost_s.astype(np.float64))},
        topological=frozen(np.arange(count, dtype=np.int32)),
        **columns,
        **edges,
    )
