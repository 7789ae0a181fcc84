"""Small problems with one difficulty each, for :mod:`placer.placers.contract`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import networkx as nx
import numpy as np

from envs.cluster import Cluster, Device, Link, Sharing
from envs.problem import Problem
from graphs.graph import GraphArrays, add_edge, add_op, new_graph


@cache
def contract_problems() -> tuple[Problem, ...]:
    """Return problems with one op, one device, no edges, separate parts, pins and groups, ..."""
    mixed = _random("pins and groups", pins=True, groups=True)
    return (
        _problem(_random("one op", ops=1), devices=3),
        _problem(_random("one device", ops=9), devices=1),
        _problem(_random("no edges", degree=0), devices=3),
        _problem(_random("two parts", parts=2), devices=3),
        _problem(_chain("chain"), devices=3),
        _problem(mixed, devices=3),
        _problem(mixed, devices=3, unequal=True, sharing="bus"),
        _problem(_random("short of memory"), devices=3, memory_bytes=6_000_000),
        _problem(_random("fits nowhere"), devices=2, memory_bytes=1_000),
        _problem(_random("free"), devices=4, sharing="none", unequal=True),
    )


def _random(
    name: str,
    *,
    ops: int = 14,
    degree: int = 2,
    parts: int = 1,
    pins: bool = False,
    groups: bool = False,
) -> nx.DiGraph[str]:
    """Return ops that read some of the ops before them, in parts without edges between them."""
    rng = np.random.default_rng(len(name))
    graph = new_graph(name)
    for i in range(ops):
        limited = pins and i % 4 == 1
        add_op(
            graph,
            str(i),
            cost_s={"fast": float(rng.uniform(1e-4, 1e-3)), "slow": float(rng.uniform(1e-3, 2e-3))},
            output_bytes=int(rng.integers(1, 500_000)),
            parameter_bytes=int(rng.integers(1, 1_000_000)),
            colocate=f"group {i % 2}" if groups and i % 3 == 2 else None,
            devices=("device:1", "device:2") if limited else None,
        )
        before = np.arange(i % parts, i, parts)[-4:]
        for source in sorted(set(rng.choice(before, degree).tolist())) if len(before) else ():
            add_edge(graph, str(source), str(i))
    return graph


def _chain(name: str) -> nx.DiGraph[str]:
    graph = new_graph(name)
    for i in range(12):
        add_op(
            graph,
            str(i),
            cost_s={"*": 1e-4 * (1 + i % 3)},
            output_bytes=1000 * (1 + i % 5),
            parameter_bytes=100_000,
        )
        if i:
            add_edge(graph, str(i - 1), str(i))
    return graph


def _problem(
    graph: nx.DiGraph[str],
    *,
    devices: int,
    unequal: bool = False,
    memory_bytes: int = 10**12,
    sharing: Sharing = "egress",
) -> Problem:
    names = tuple(f"device:{d}" for d in range(devices))
    kinds: Sequence[str] = ("fast", "slow") if unequal else ("fast", "fast")
    links = (
        [Link(between=names, latency_s=1e-5, bandwidth_bytes_per_s=1e9, sharing=sharing)]
        if devices > 1
        else []
    )
    cluster = Cluster(
        name="contract",
        devices=tuple(
            Device(name=name, kind=kinds[d % 2], memory_bytes=memory_bytes)
            for d, name in enumerate(names)
        ),
        links=tuple(links),
    )
    return Problem.of(GraphArrays.from_graph(graph), cluster)
