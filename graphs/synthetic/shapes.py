"""Graphs of a simple shape or a repeated motif, with random costs for any device kind (``"*"``).

Costs and sizes of a motif are drawn once and repeated with a little noise. Weights of ops that are
unrolled over time cost nothing, and are sent to their readers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import networkx as nx
import numpy as np

from graphs.graph import ANY_KIND, add_edge, add_op, new_graph
from graphs.synthetic.mirror import WEIGHT, with_backward


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


def chain(
    rng: np.random.Generator, *, ops: int = 20, weights: Weights | None = None
) -> nx.DiGraph[str]:
    """Generate ops in sequence: more than one device can only be slower."""
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

    The last layer takes the rest of the ``ops``. A share ``skip`` of the inputs comes from any
    earlier layer instead.
    """
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
    """Generate stages of one fork, ``width`` branches of ``depth`` ops, and one join."""
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
    """Generate a wavefront: each op reads the op above it and the op before it."""
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


NOISE: Final = 0.1
"""Standard deviation of the logarithm of costs and sizes between repetitions."""


def cells(
    rng: np.random.Generator,
    *,
    repeats: int = 6,
    nodes: int = 8,
    weights: Weights | None = None,
) -> nx.DiGraph[str]:
    """Generate repetitions of one random cell; each reads the outputs of the two before it.

    A node of a cell reads one or two earlier nodes or inputs of the cell; nodes that no other node
    reads are joined to the cell's output, as in the search spaces of Zoph et al. (arXiv
    1707.07012).
    """
    motif = _Motif(rng, "cells", weights)
    # An input of a node is an earlier node, or -1 or -2 for the outputs of the last two cells.
    inputs = [
        sorted(set(rng.integers(-2, node, size=1 + int(rng.random() < 0.5)).tolist()))
        for node in range(nodes)
    ]
    loose = sorted(set(range(nodes)).difference(*inputs))
    shape = [motif.draw() for _ in range(nodes + 1)]
    last = motif.add("stem", [], shape[nodes])
    before = last
    for number in range(repeats):
        ids: list[str] = []
        for node in range(nodes):
            read = [(before if k == -2 else last) if k < 0 else ids[k] for k in inputs[node]]
            ids.append(motif.add(f"cells.{number}.{node}", read, shape[node]))
        before, last = last, motif.add(f"cells.{number}.out", [ids[k] for k in loose], shape[nodes])
    return motif.finished()


def recurrence(
    rng: np.random.Generator,
    *,
    layers: int = 3,
    steps: int = 8,
    reuse: float = 4.0,
    weights: Weights | None = None,
) -> nx.DiGraph[str]:
    """Generate layers unrolled over time.

    An op reads the layer below, its own layer at the previous step, and its weights, which are
    ``reuse`` times as large as its output.
    """
    motif = _Motif(rng, "recurrence", weights)
    shape = [motif.draw() for _ in range(layers)]
    shared = [
        motif.add(f"layers.{i}", [], (0.0, reuse * shape[i][1]), kind=WEIGHT) for i in range(layers)
    ]
    state: list[str] = []
    for t in range(steps):
        below: list[str] = []
        new: list[str] = []
        for i in range(layers):
            below = [motif.add(f"layers.{i}@{t}", [*below, *state[i : i + 1], shared[i]], shape[i])]
            new += below
        state = new
    return motif.finished()


def sequence(
    rng: np.random.Generator,
    *,
    layers: int = 2,
    steps: int = 8,
    stacks: int = 2,
    heads: int = 2,
    reuse: float = 30.0,
    weights: Weights | None = None,
) -> nx.DiGraph[str]:
    """Generate stacks of layers unrolled over time, in sequence, and one total over all steps.

    A stack starts from the last states of the one before. The outputs of the last stack pass
    through ``heads`` ops, the first of which also reads the joined outputs of the stack before.
    The weights of a layer or head are ``reuse`` times as large as its output.
    """
    motif = _Motif(rng, "sequence", weights)
    state: list[str] = []
    before: list[str] = []
    tops: list[str] = []
    for stack in range(stacks):
        before = tops
        inputs: list[list[str]] = [[] for _ in range(steps)]
        for i in range(layers):
            path = f"stacks.{stack}.{i}"
            tops = motif.repeat(path, inputs, reuse, state=state[i : i + 1])
            inputs = [[top] for top in tops]
            state[i : i + 1] = tops[-1:]
    joined = [motif.add("joined", before, motif.draw(), kind="join")] if before else []
    for head in range(heads):
        tops = motif.repeat(f"heads.{head}", [[top, *joined] for top in tops], reuse)
        joined = []
    motif.add("total", [*tops, *joined], (0.0, 0.0), kind="sum")
    return motif.finished()


class _Motif:
    """Adds ops of drawn costs and sizes, with noise."""

    def __init__(self, rng: np.random.Generator, name: str, weights: Weights | None) -> None:
        self.rng = rng
        self.weights = weights or Weights()
        self.graph = new_graph(name, {ANY_KIND: "drawn at random"})

    def draw(self) -> tuple[float, float]:
        """Return seconds and bytes, log-normal; a mean transfer takes ``ratio`` mean costs."""
        weights = self.weights
        mean = np.exp(weights.spread**2 / 2.0)
        cost, size = self.rng.lognormal(0.0, weights.spread, 2) / mean
        cost_s = float(weights.mean_cost_s * cost)
        sent_s = weights.ratio * weights.mean_cost_s * float(size)
        return cost_s, sent_s * weights.bandwidth_bytes_per_s

    def add(
        self, path: str, inputs: list[str], shape: tuple[float, float], kind: str = "op"
    ) -> str:
        """Add an op with the cost and output size of ``shape``, with noise."""
        noisy = np.array(shape) * self.rng.lognormal(0.0, NOISE, 2)
        op_id = f"{path}:{kind}"
        size = round(float(noisy[1]))
        add_op(
            self.graph,
            op_id,
            cost_s={ANY_KIND: float(noisy[0])},
            op=kind,
            module=path.partition("@")[0],
            output_bytes=size,
            saved_bytes=0 if kind == WEIGHT else size,
            parameter_bytes=size,
        )
        for source in dict.fromkeys(inputs):
            add_edge(self.graph, source, op_id)
        return op_id

    def repeat(
        self, path: str, inputs: list[list[str]], reuse: float, state: list[str] | None = None
    ) -> list[str]:
        """Add an op per step, all with the same weights; with a state, each reads the op before."""
        shape = self.draw()
        shared = self.add(path, [], (0.0, reuse * shape[1]), kind=WEIGHT)
        outputs: list[str] = []
        for t, read in enumerate(inputs):
            before = [] if state is None else outputs[-1:] or state
            outputs.append(self.add(f"{path}@{t}", [*read, *before, shared], shape))
        return outputs

    def finished(self) -> nx.DiGraph[str]:
        return with_backward(self.graph) if self.weights.backward else self.graph
