"""The search for the smallest largest load, against the optimum."""

from __future__ import annotations

import pytest

from benchmarks.instances import profiled
from envs.simulator.max_load import max_load_ns
from placer.search.annealing.max_load import minimize_max_load
from placer.search.request import Budget, SearchRequest
from tests.helpers.random_problems import every_placement, keeps_groups, random_problem


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
