"""The baseline of the offload benchmark: the most first layers that fit when they are run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.gpu import offload
from benchmarks.gpu.workbench import Workbench
from envs.problem import Problem
from graphs.extract import Workload, extract
from graphs.extract.placeable import placeable
from tests.fake_cuda import fake_cuda
from tests.helpers.clusters import equal_costs

LAYERS, WIDTH = 6, 256


@pytest.mark.parametrize("most", [1, 2, 7, 40])
def test_the_most_that_fit_are_found_from_any_guess_with_few_trials(most: int) -> None:
    for guess in range(most + 1):
        for expected in range(most + 1):
            tried: list[int] = []

            def fits(count: int, expected: int = expected, tried: list[int] = tried) -> bool:
                tried.append(count)
                return count <= expected

            assert offload.most_that_fit(fits, guess, most) == expected
            assert len(set(tried)) == len(tried), "none is tried twice"
            assert all(1 <= count <= most for count in tried)
            assert len(tried) <= 2 * np.log2(abs(guess - expected) + 1) + 3


@pytest.mark.slow_repeats
@pytest.mark.parametrize("share", [0.4, 0.75, 1.2])
def test_layers_are_tried_on_the_device_under_the_limit(share: float) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    inputs = (torch.randn(2, WIDTH), torch.randn(2, WIDTH))
    extraction = extract(Workload.of(model, inputs, nn.MSELoss()))
    calls = placeable(extraction)
    with fake_cuda():
        problem = equal_costs(calls.graph)
        bench = cast(
            "Workbench",
            SimpleNamespace(
                extraction=extraction,
                runtime=SimpleNamespace(calls=calls),
                problem=lambda limit_bytes=None: limited(problem, limit_bytes),
            ),
        )
        layer_bytes = 2 * WIDTH * WIDTH * 4  # with its gradient
        whole_bytes = LAYERS * layer_bytes
        limit_bytes = int(share * whole_bytes)
        devices = offload.layers_that_fit(bench, whole_bytes, limit_bytes)
        assert offload.fits(bench, problem, devices, limit_bytes)
        ids = list(calls.graph)
        there = {ids[i].partition(":")[0] for i in np.flatnonzero(devices == 0)} - {"loss"}
        expected = min(limit_bytes // layer_bytes, LAYERS)
        assert there == {str(number) for number in range(len(there))}
        assert len(there) in (expected - 1, expected)  # what is computed takes some, too
        more = devices.copy()
        more[[i for i, op_id in enumerate(ids) if op_id.startswith(f"{len(there)}:")]] = 0
        assert len(there) == LAYERS or not offload.fits(bench, problem, more, limit_bytes)
        assert torch.cuda.get_per_process_memory_fraction(0) == 1.0
        assert torch.cuda.memory_allocated(0) == 0


def limited(problem: Problem, limit_bytes: int | None) -> Problem:
    """Return the problem with this memory on its first device."""
    if limit_bytes is None:
        return problem
    first, *others = problem.cluster.devices
    first = replace(first, memory_bytes=limit_bytes)
    return Problem.of(problem.graph, replace(problem.cluster, devices=(first, *others)))
