"""Graphs of a simple shape with random costs, which hold for any device kind (``"*"``)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx
import numpy as np

from graphs.graph import ANY_KIND, add_edge, add_op, new_graph
from graphs.synthetic.mirror import with_backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Random costs of the ops and edges of a shape, and whether it has a backward pass.

    ``ratio`` is the communication-to-computation ratio of Topcuoglu et al. (IEEE TPDS 13(3), 2002):
    the mean time of a forward edge at ``bandwidth_bytes_per_s``, over the mean cost of a forward
    op. Costs and output sizes are log-normal; ``spread`` is the standard deviation of their
    logarithms.
    """

    mean_cost_s: float = 100e-6
    ratio: float = 0.5
    bandwidth_bytes_per_s: float = 12e9
    spread: float = 0.7
    backward: bool = False

    def __post_init__(self) -> None:
        for name in ("mean_cost_s", "bandwidth_bytes_per_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}, not a number above 0")
        for name in ("ratio", "spread"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}, not a number >= 0")


def chain(
    rng: np.random.Generator, *, ops: int = 20, weights: Weights | None = None
) -> nx.DiGraph[str]:
    """Generate ops in sequence: more than one device can only be slower.

    Raises:
        ValueError: a size is below 1.
    """
    _at_least_one(ops=ops)
    paths = [f"chain.{i}" for i in range(ops)]
    return _weighted(rng, "chain", paths, zip(range(ops), range(1, ops), strict=False), weights)


def layered(
    rng: np.random.Generator,
    *,
    ops: int = 100,
    width: int = 10,
    degree: float = 2.0,
    skip: float = 0.1,
    weights: Weights | None = None,
) -> nx.DiGraph[str]:
    """Generate layers of ``width`` ops, each reading about ``degree`` ops of the layer before.

    Args:
        rng: source of randomness.
        ops: number of forward ops.
        width: ops per layer; the last layer takes the rest.
        degree: mean number of inputs, at least 1.
        skip: share of inputs that come from any earlier layer instead.
        weights: costs and sizes.

    Raises:
        ValueError: a size is below 1, or skip is not within 0 .. 1.
    """
    _at_least_one(ops=ops, width=width, degree=degree)
    if not 0 <= skip <= 1:
        raise ValueError(f"skip is {skip}, not within 0 .. 1")
    edges: set[tuple[int, int]] = set()
    for i in range(width, ops):
        start = i // width * width
        for _ in range(1 + rng.poisson(degree - 1)):
            first = 0 if rng.random() < skip else start - width
            edges.add((int(rng.integers(first, start)), i))
    paths = [f"layers.{i // width}.{i % width}" for i in range(ops)]
    return _weighted(rng, "layered", paths, sorted(edges), weights)


def fork_join(
    rng: np.random.Generator,
    *,
    stages: int = 3,
    width: int = 8,
    depth: int = 3,
    weights: Weights | None = None,
) -> nx.DiGraph[str]:
    """Generate stages of one fork, ``width`` branches of ``depth`` ops, and one join.

    Raises:
        ValueError: a size is below 1.
    """
    _at_least_one(stages=stages, width=width, depth=depth)
    paths: list[str] = []
    edges: list[tuple[int, int]] = []
    for stage in range(stages):
        fork = len(paths)
        paths.append(f"stages.{stage}.fork")
        join = fork + width * depth + 1
        for branch in range(width):
            last = fork
            for step in range(depth):
                edges.append((last, len(paths)))
                last = len(paths)
                paths.append(f"stages.{stage}.branches.{branch}.{step}")
            edges.append((last, join))
        paths.append(f"stages.{stage}.join")
        if stage:
            edges.append((fork - 1, fork))
    return _weighted(rng, "fork-join", paths, edges, weights)


def grid(
    rng: np.random.Generator, *, rows: int = 6, columns: int = 10, weights: Weights | None = None
) -> nx.DiGraph[str]:
    """Generate a wavefront: each op reads the op above it and the op before it.

    Raises:
        ValueError: a size is below 1.
    """
    _at_least_one(rows=rows, columns=columns)
    edges: list[tuple[int, int]] = []
    for i in range(rows * columns):
        row, column = divmod(i, columns)
        if row:
            edges.append((i - columns, i))
        if column:
            edges.append((i - 1, i))
    paths = [f"rows.{i // columns}.{i % columns}" for i in range(rows * columns)]
    return _weighted(rng, "grid", paths, edges, weights)


def _weighted(
    rng: np.random.Generator,
    name: str,
    paths: list[str],
    edges: Iterable[tuple[int, int]],
    weights: Weights | None,
) -> nx.DiGraph[str]:
    weights = weights or Weights()
    edges = list(edges)
    costs_s = rng.lognormal(0.0, weights.spread, len(paths))
    costs_s *= weights.mean_cost_s / costs_s.mean()
    sizes = rng.lognormal(0.0, weights.spread, len(paths))
    mean = sizes[[source for source, _ in edges]].mean() if edges else sizes.mean()
    sizes *= weights.ratio * weights.mean_cost_s * weights.bandwidth_bytes_per_s / mean
    parameters = rng.lognormal(0.0, weights.spread, len(paths)) * sizes.mean()
    graph = new_graph(name, {ANY_KIND: "drawn at random"})
    ids = [f"{path}:op" for path in paths]
    for i, op_id in enumerate(ids):
        add_op(
            graph,
            op_id,
            cost_s={ANY_KIND: float(costs_s[i])},
            op="op",
            module=paths[i],
            output_bytes=round(sizes[i]),
            saved_bytes=round(sizes[i]),
            parameter_bytes=round(parameters[i]),
        )
    for source, target in edges:
        add_edge(graph, ids[source], ids[target])
    return with_backward(graph) if weights.backward else graph


def _at_least_one(**sizes: float) -> None:
    for name, size in sizes.items():
        if not size >= 1:
            raise ValueError(f"{name} is {size}, below 1")
