from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from envs.hardware.cluster import Cluster, Device, Link
from envs.problem import Problem
from graphs.graph import GraphArrays, add_edge, add_op, new_graph

pytest.importorskip("pymetis")

from placer.search.grouping import units
from placer.search.list_scheduler.arrays import scheduling_arrays
from placer.search.min_cut import min_cut


def on_pair(graph: nx.DiGraph[str], kinds: tuple[str, str]) -> Problem:
    names = ("a", "b")
    devices = tuple(
        Device(name=n, kind=k, memory_bytes=10**12) for n, k in zip(names, kinds, strict=True)
    )
    link = Link(between=names, latency_s=1e-6, bandwidth_bytes_per_s=1e9)
    return Problem.of(
        GraphArrays.from_graph(graph), Cluster(name="pair", devices=devices, links=(link,))
    )


def two_blocks() -> Problem:
    """Return two blocks of ten ops that exchange much within a block and little across."""
    graph = new_graph("blocks")
    for block in range(2):
        for i in range(10):
            add_op(graph, f"{block}.{i}", cost_s={"*": 1e-3}, output_bytes=10**8)
            for j in range(max(0, i - 3), i):
                add_edge(graph, f"{block}.{j}", f"{block}.{i}")
    add_edge(graph, "0.9", "1.0", 1000)
    return on_pair(graph, ("k", "k"))


def partition(problem: Problem) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return min_cut(units(problem), scheduling_arrays(problem), 0)


def test_the_light_edge_is_cut() -> None:
    found = partition(two_blocks())
    assert len(set(found[:10].tolist())) == len(set(found[10:].tolist())) == 1
    assert found[0] != found[10]


def test_a_device_gets_work_in_proportion_to_its_speed() -> None:
    graph = new_graph("free")
    for i in range(400):
        add_op(graph, str(i), cost_s={"fast": 1e-3, "slow": 3e-3}, output_bytes=1)
        if i:
            add_edge(graph, str(i - 1), str(i))
    problem = on_pair(graph, ("fast", "slow"))
    share = np.bincount(partition(problem), minlength=2) / 400
    assert share == pytest.approx([0.75, 0.25], abs=0.03)
    assert (np.diff(partition(problem)) != 0).sum() <= 3


def test_a_group_is_one_vertex_and_goes_as_one() -> None:
    graph = new_graph("tied")
    for i in range(12):
        add_op(graph, str(i), cost_s={"*": 1e-3}, colocate="ends" if i in (0, 11) else None)
        if i:
            add_edge(graph, str(i - 1), str(i), 1)
    found = partition(on_pair(graph, ("k", "k")))
    assert found[0] == found[11]
    assert np.bincount(found).tolist() == [6, 6]
