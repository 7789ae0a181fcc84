"""Coarsening speed in ops per second, compared with contracting a networkx graph edge by edge.

    python -m benchmarks.coarsen

One core. A random layered graph of 100,000 ops with about two inputs per op is coarsened to 1,000
groups. The plain algorithm runs on a graph a hundredth as large, to as many ops per group: it takes
edges in a fixed order and contracts every edge that no other path runs parallel to. It is
quadratic, so the ratio grows with size.
"""

from __future__ import annotations

import statistics

import networkx as nx

from benchmarks.simulator import layered
from graphs.coarsen import coarsen
from placer.bench.speed import seconds

OPS, GROUPS, SHARE = 100_000, 1_000, 100


def contracted(graph: nx.DiGraph[str], most: int) -> nx.DiGraph[str]:
    """Contract one edge after the other until at most ``most`` nodes are left."""
    plain: nx.DiGraph[str] = nx.DiGraph(graph.edges)
    while len(plain) > most:
        source, target = next((u, v) for u, v in plain.edges if not _runs_beside(plain, u, v))
        nx.contracted_nodes(plain, source, target, self_loops=False, copy=False)
    return plain


def _runs_beside(graph: nx.DiGraph[str], source: str, target: str) -> bool:
    others = (reader for reader in graph.succ[source] if reader != target)
    return any(nx.has_path(graph, reader, target) for reader in others)


def main() -> None:
    graph = layered(OPS, 50, seed=0)
    times = seconds(lambda: coarsen(graph, most_groups=GROUPS), repeats=3)
    middle = statistics.median(times)
    print(f"coarsening {OPS:,} ops, {graph.number_of_edges():,} edges, to {GROUPS:,} groups")
    print(f"  {middle:.2f} s ({times[0]:.2f} to {times[-1]:.2f}), {OPS / middle:,.0f} ops/s")
    small = layered(OPS // SHARE, 50, seed=0)
    found = coarsen(small, most_groups=GROUPS // SHARE)
    if not nx.is_directed_acyclic_graph(found.graph) or len(found) > GROUPS // SHARE:
        raise AssertionError("the groups are on a cycle, or too many")
    own = statistics.median(seconds(lambda: coarsen(small, most_groups=GROUPS // SHARE)))
    plain = seconds(lambda: contracted(small, GROUPS // SHARE), repeats=1)[0]
    print(f"  {OPS // SHARE:,} ops, plain networkx: {OPS // SHARE / plain:,.0f} ops/s, ", end="")
    print(f"takes {plain / own:,.0f} times as long")


if __name__ == "__main__":
    main()
