"""Topological order of ops, and the cycle that is reported if there is none."""

from __future__ import annotations

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.order import topological_order

INDICES = st.integers(0, 7)


@settings(max_examples=300)
@given(st.permutations(range(8)), st.lists(st.tuples(INDICES, INDICES), max_size=14))
def test_the_order_is_that_of_networkx_and_a_shown_cycle_is_one(
    added: list[int], pairs: list[tuple[int, int]]
) -> None:
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(map(str, added))
    graph.add_edges_from((str(a), str(b)) for a, b in pairs)
    place = {op_id: i for i, op_id in enumerate(graph)}
    try:
        found = topological_order(graph)
    except ValueError as error:
        assert not nx.is_directed_acyclic_graph(graph)
        head, _, shown = str(error).partition(": ")
        cycle = shown.split(" -> ")
        if cycle[-1] == "...":
            assert len(cycle) == 7
            cycle.pop()
        else:
            assert head == f"the graph has a cycle of {len(cycle) - 1} ops"
            assert cycle[0] == cycle[-1]
            assert cycle[0] == min(cycle, key=place.__getitem__)
        assert nx.is_path(graph, cycle)
    else:
        assert found == list(nx.lexicographical_topological_sort(graph, key=place.__getitem__))
