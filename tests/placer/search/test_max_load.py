"""The search for the smallest largest load, against the optimum."""

from __future__ import annotations

import math

import pytest

from benchmarks.instances import profiled
from envs.problem import Problem
from envs.simulator.max_load import max_load_ns
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from placer.search.annealing.max_load import minimize_max_load
from placer.search.request import Budget, SearchRequest
from tests.helpers.random_problems import every_placement, keeps_groups, random_problem
from tests.helpers.simulator_cases import one_kind


@pytest.mark.parametrize("seed", range(4))
def test_the_search_finds_the_optimum_of_small_graphs(seed: int) -> None:
    problem = random_problem(
        seed,
        ops=9,
        devices=2 + seed % 2,
        groups=seed % 3 == 0,
        pins=seed % 4 == 1,
        unequal=seed % 2 == 1,
        memory_bytes=10_000_000 if seed % 5 == 2 else 10**12,
    )
    found = minimize_max_load(SearchRequest(problem, Budget(evaluations=60_000), seed=seed))
    best = max_load_ns(problem, found[0].devices)[0]
    assert best == max_load_ns(problem, every_placement(problem)).min()
    assert keeps_groups(problem, found[0].devices)


def test_a_pipeline_of_equal_stages_is_cut_into_equal_parts() -> None:
    graph = new_graph("chain")
    for i in range(40):
        add_op(graph, f"op{i}", cost_s={"*": 1e-6}, output_bytes=1)
        if i:
            add_edge(graph, f"op{i - 1}", f"op{i}")
    cluster = one_kind(4, latency_s=1e-7, bandwidth_bytes_per_s=math.inf)
    problem = Problem.of(GraphArrays.from_graph(graph), cluster)
    found = minimize_max_load(SearchRequest(problem, Budget(evaluations=60_000)))
    # Inner parts pay for two transfers of 0.1 us: ten ops each, 10.2 us.
    assert max_load_ns(problem, found[0].devices).tolist() == [10_200]


@pytest.mark.parametrize(
    ("name", "proven_ns"),
    [("alexnet", 651_326_067), ("squeezenet1_0", 490_061_067), ("vgg16", 284_421_213)],
)
def test_the_search_finds_the_proven_optimum_of_published_profiles(
    name: str, proven_ns: int
) -> None:
    problem = profiled(name)
    found = minimize_max_load(SearchRequest(problem, Budget(evaluations=200_000)))
    assert max_load_ns(problem, found[0].devices).tolist() == [proven_ns]
