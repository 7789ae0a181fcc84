"""Synthetic graphs by family, from a seeded generator, to train and to test policies.

The families are the shapes and motifs of :mod:`graphs.synthetic.shapes`, in random sizes with
random costs, and the models of :mod:`graphs.synthetic.sketches`, in random sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import networkx as nx
import numpy as np

from graphs.synthetic import sketches
from graphs.synthetic.inception import inception
from graphs.synthetic.shapes import (
    Weights,
    cells,
    chain,
    fork_join,
    grid,
    layered,
    recurrence,
    sequence,
)
from graphs.text import suggestion

Family: TypeAlias = Callable[[np.random.Generator, int], "nx.DiGraph[str]"]
"""Draws a graph of at most the given number of ops."""

FEWEST_OPS: Final = 80
"""Smallest ``max_ops`` that every family can keep to."""

USUAL_OPS: Final = 2000
"""Largest ``max_ops`` at which models have their usual sizes; above, they are larger."""

MIN_OPS: Final = 8
"""Fewest ops of a drawn graph."""


def draw(
    rng: np.random.Generator, family: str | None = None, *, max_ops: int = 360
) -> nx.DiGraph[str]:
    """Draw a random graph of MIN_OPS to ``max_ops`` ops, of one family (default: any)."""
    if max_ops < FEWEST_OPS:
        raise ValueError(f"max_ops is {max_ops}, below the {FEWEST_OPS} that every family can keep")
    if family is None:
        family = str(rng.choice(list(FAMILIES)))
    if family not in FAMILIES:
        hint = suggestion(family, FAMILIES)
        raise ValueError(f"there is no family {family!r}: there are {', '.join(FAMILIES)}{hint}")
    return FAMILIES[family](rng, max_ops)


def _weighted(
    shape: Callable[[np.random.Generator, int, Weights], nx.DiGraph[str]],
    backward_share: float = 0.6,
) -> Family:
    """Return the family of a shape, given room for so many forward ops, with random weights."""

    def family(rng: np.random.Generator, max_ops: int) -> nx.DiGraph[str]:
        weights = Weights(
            mean_cost_s=_log_uniform(rng, 30e-6, 1e-3),
            ratio=_log_uniform(rng, 0.2, 1.5),
            spread=rng.uniform(0.2, 1.5),
            backward=bool(rng.random() < backward_share),
        )
        return shape(rng, max_ops // 2 if weights.backward else max_ops, weights)

    return family


def _fewest_forward(weights: Weights) -> int:
    return math.ceil(MIN_OPS / 2) if weights.backward else MIN_OPS


def _draw_chain(rng: np.random.Generator, room: int, weights: Weights) -> nx.DiGraph[str]:
    return chain(rng, ops=int(rng.integers(MIN_OPS, room + 1)), weights=weights)


def _draw_layered(rng: np.random.Generator, room: int, weights: Weights) -> nx.DiGraph[str]:
    ops = int(rng.integers(room // 3, room + 1))
    return layered(
        rng,
        ops=ops,
        width=int(rng.integers(6, max(7, min(32, ops // 3) + 1))),
        degree=rng.uniform(1.2, 3.0),
        skip=rng.uniform(0.0, 0.3),
        weights=weights,
    )


def _draw_fork_join(rng: np.random.Generator, room: int, weights: Weights) -> nx.DiGraph[str]:
    width = int(rng.integers(6, min(24, room - 2) + 1))
    depth = min(int(rng.integers(1, 5)), (room - 2) // width)
    stages = int(rng.integers(1, max(1, room // (width * depth + 2)) + 1))
    return fork_join(rng, stages=stages, width=width, depth=depth, weights=weights)


def _draw_grid(rng: np.random.Generator, room: int, weights: Weights) -> nx.DiGraph[str]:
    rows = int(rng.integers(4, 15))
    return grid(rng, rows=rows, columns=int(rng.integers(2, room // rows + 1)), weights=weights)


def _draw_cells(rng: np.random.Generator, room: int, weights: Weights) -> nx.DiGraph[str]:
    nodes = int(rng.integers(4, 17))
    repeats = int(rng.integers(1, (room - 1) // (nodes + 1) + 1))
    repeats = max(repeats, math.ceil((_fewest_forward(weights) - 1) / (nodes + 1)))
    return cells(rng, repeats=repeats, nodes=nodes, weights=weights)


def _draw_recurrence(rng: np.random.Generator, room: int, weights: Weights) -> nx.DiGraph[str]:
    layers = int(rng.integers(2, 9))
    steps = int(rng.integers(2, room // layers))
    steps = max(steps, math.ceil(_fewest_forward(weights) / layers) - 1)  # the weights add one row
    reuse = _log_uniform(rng, 1.0, 30.0)
    return recurrence(rng, layers=layers, steps=steps, reuse=reuse, weights=weights)


def _draw_sequence(rng: np.random.Generator, room: int, weights: Weights) -> nx.DiGraph[str]:
    stacks, heads = int(rng.integers(1, 3)), int(rng.integers(0, 4))
    layers = int(rng.integers(1, min(8, (room // 3 - heads - 1) // stacks) + 1))
    # Each step has one op per layer and head; the rest are weights, the join and the total.
    rows, others = stacks * layers + heads, stacks
    steps = int(rng.integers(2, (room - 2) // rows))
    steps = max(steps, math.ceil((_fewest_forward(weights) - others) / rows) - 1)
    return sequence(
        rng,
        layers=layers,
        steps=steps,
        stacks=stacks,
        heads=heads,
        reuse=_log_uniform(rng, 1.0, 200.0),
        weights=weights,
    )


def _draw_nmt(rng: np.random.Generator, max_ops: int) -> nx.DiGraph[str]:
    layers, steps = int(rng.integers(2, 6)), int(rng.integers(5, 24 * _times(max_ops) + 1))
    batch = int(rng.integers(64, 257))
    return _fitting(
        lambda size: sketches.nmt(layers=size[0], steps=size[1], batch=batch),
        (layers, steps),
        (1, 2),
        max_ops,
    )


def _draw_moe(rng: np.random.Generator, max_ops: int) -> nx.DiGraph[str]:
    layers, experts = int(rng.integers(2, 6 * _times(max_ops) + 1)), int(rng.integers(6, 17))
    tokens, seed = int(rng.integers(1024, 4097)), int(rng.integers(2**32))
    return _fitting(
        lambda size: sketches.moe(
            np.random.default_rng(seed), layers=size[0], experts=size[1], tokens=tokens
        ),
        (layers, experts),
        (1, 3),
        max_ops,
    )


def _draw_transformer(rng: np.random.Generator, max_ops: int) -> nx.DiGraph[str]:
    layers = int(rng.integers(2, 13))
    micro_batches = int(rng.integers(2, 8 * _times(max_ops) + 1))
    tokens = int(rng.integers(256, 2049))
    return _fitting(
        lambda size: sketches.transformer(layers=size[0], micro_batches=size[1], tokens=tokens),
        (layers, micro_batches),
        (1, 1),
        max_ops,
    )


def _draw_inception(rng: np.random.Generator, max_ops: int) -> nx.DiGraph[str]:
    blocks, batch = int(rng.integers(3, 12)), int(rng.integers(4, 65))
    return _fitting(lambda size: inception(batch=batch, blocks=size[0]), (blocks,), (1,), max_ops)


def _draw_sharded(rng: np.random.Generator, max_ops: int) -> nx.DiGraph[str]:
    programs = (sketches.matrix_chain, sketches.sharded_feed_forward, sketches.sharded_layer)
    program = programs[int(rng.integers(len(programs)))]
    shards, size = int(rng.integers(2, 6)), int(rng.integers(512, 4097))
    return _fitting(lambda sizes: program(shards=sizes[0], size=size), (shards,), (1,), max_ops)


def _times(max_ops: int) -> int:
    """Return how many times as many steps, layers or micro-batches models of this size have."""
    return max_ops // 1000 if max_ops > USUAL_OPS else 1


def _fitting(
    build: Callable[[tuple[int, ...]], nx.DiGraph[str]],
    sizes: tuple[int, ...],
    smallest: tuple[int, ...],
    max_ops: int,
) -> nx.DiGraph[str]:
    """Build at the given sizes, or at the largest scaled-down ones with at most max_ops ops."""
    graph = build(sizes)
    while len(graph) > max_ops and sizes != smallest:
        sizes = tuple(max(low, int(0.85 * size)) for size, low in zip(sizes, smallest, strict=True))
        graph = build(sizes)
    if len(graph) > max_ops:
        raise ValueError(f"max_ops is {max_ops}; the smallest graph here has {len(graph)} ops")
    return graph


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(math.exp(rng.uniform(math.log(low), math.log(high))))


FAMILIES: Final[Mapping[str, Family]] = {
    "chain": _weighted(_draw_chain),
    "layered": _weighted(_draw_layered, backward_share=0.3),
    "fork-join": _weighted(_draw_fork_join),
    "grid": _weighted(_draw_grid),
    "cells": _weighted(_draw_cells),
    "recurrence": _weighted(_draw_recurrence),
    "sequence": _weighted(_draw_sequence),
    "nmt": _draw_nmt,
    "moe": _draw_moe,
    "transformer": _draw_transformer,
    "inception": _draw_inception,
    "sharded": _draw_sharded,
}
