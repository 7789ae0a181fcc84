"""The baseline that fills devices with layers in order, as people do by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from envs.hardware.cluster import Cluster, Device, Link
from envs.problem import Problem
from envs.simulator import Simulator
from graphs.graph import GraphArrays, add_edge, add_op, new_graph
from placer.search.evaluator import Evaluator
from placer.search.heuristics import first_layers, heuristics, layer_numbers, layer_of
from tests.helpers.random_problems import keeps_groups, keeps_limits, random_problem


def chain(memory_bytes: tuple[int, ...], *, tied: bool = False) -> Problem:
    """Return six layers of two ops with 10 bytes of parameters each, and no outputs."""
    graph = new_graph("chain")
    names = [f"layers.{i}.{part}:op" for i in range(6) for part in ("a", "b")]
    for name in names:
        own = "tie" if tied and name in (names[0], names[-1]) else None
        add_op(
            graph,
            name,
            module=name.partition(":")[0],
            cost_s={"*": 1e-3},
            parameter_bytes=10,
            colocate=own,
        )
    for source, target in pairwise(names):
        add_edge(graph, source, target)
    devices = tuple(
        Device(name=f"d{i}", kind="x", memory_bytes=size) for i, size in enumerate(memory_bytes)
    )
    link = Link(between=tuple(d.name for d in devices), latency_s=1e-6, bandwidth_bytes_per_s=1e9)
    cluster = Cluster(name="few", devices=devices, links=(link,))
    return Problem.of(GraphArrays.from_graph(graph), cluster)


def filled(problem: Problem) -> list[int]:
    found: list[int] = first_layers(problem, -np.arange(problem.op_count, dtype=float)).tolist()
    return found


@pytest.mark.parametrize(
    ("memory_bytes", "layers"),
    [
        ((59, 1000), [0, 0, 1, 1, 1, 1]),
        ((60, 1000), [0, 0, 0, 1, 1, 1]),
        ((1000, 1000), [0, 0, 0, 0, 0, 0]),
        ((0, 1000), [1, 1, 1, 1, 1, 1]),
        ((25, 45, 1000), [0, 1, 1, 2, 2, 2]),
    ],
)
def test_whole_layers_fill_device_after_device(
    memory_bytes: tuple[int, ...], layers: list[int]
) -> None:
    assert filled(chain(memory_bytes)) == [d for d in layers for _ in range(2)]


def test_a_group_goes_with_its_first_layer_and_takes_room_there() -> None:
    problem = chain((59, 1000), tied=True)
    assert filled(problem) == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0]
    assert layer_numbers(problem).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 0]


@pytest.mark.parametrize("seed", range(3))
def test_limits_and_groups_are_kept_and_memory_too(seed: int) -> None:
    problem = random_problem(seed, groups=True, pins=True, memory_bytes=12_000_000)
    devices = first_layers(problem, -np.arange(problem.op_count, dtype=float))
    assert keeps_limits(problem, devices)
    assert keeps_groups(problem, devices)
    free = random_problem(seed, groups=True, memory_bytes=12_000_000)
    order = -np.arange(free.op_count, dtype=float)
    peaks = Simulator(free).run(first_layers(free, order), order).peak_bytes
    assert (peaks[:-1] <= free.memory_bytes[:-1]).all()


def test_it_is_a_candidate_only_where_a_device_is_too_small() -> None:
    small, ample = Evaluator(chain((60, 1000))), Evaluator(chain((1000, 1000)))
    assert "first layers" in {candidate.name for candidate in heuristics(small)}
    assert "first layers" not in {candidate.name for candidate in heuristics(ample)}
    alone = replace(small.problem.cluster, devices=small.problem.cluster.devices[:1], links=())
    names = [c.name for c in heuristics(Evaluator(Problem.of(small.problem.graph, alone)))]
    assert names == ["single d0"]


def test_layers_are_named_up_to_their_first_number() -> None:
    assert layer_of("") == ""
    assert layer_of("encoder.layer10") == "encoder.layer10"
    assert layer_of("h.10.mlp.2") == "h.10"
