"""The time of a step beside its ops: measured once, cached, and part of predictions on workers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from envs.core_runtime import CoreRuntime
from envs.costs.cache import CostCache, Session
from envs.costs.cached_costs import conditions_of, first_of_kinds
from envs.costs.hand_over import hand_over_costs, hand_over_signature, profile_hand_over
from envs.hardware.discover import discover
from envs.placement import Placement
from envs.problem import Problem, toy_problem
from envs.replicas.step import ReplicaSimulator
from envs.runtime import costed
from envs.simulator import Simulated
from graphs.extract import Extraction, Workload, extract
from graphs.graph import GraphArrays
from placer.search.objectives import Objective

CORES = sorted(os.sched_getaffinity(0))


def of(*shape: int, training: bool = False) -> Extraction:
    model = nn.Sequential(nn.Linear(shape[-1], 3), nn.BatchNorm1d(3))
    loss = _mean if training else None
    inputs = (torch.randn(*shape), torch.zeros(())) if training else (torch.randn(*shape),)
    return extract(Workload(model.train(training), inputs, loss=loss, training=training))


def _mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


@pytest.mark.slow_repeats
@pytest.mark.parametrize("training", [False, True])
def test_hand_overs_are_measured_on_a_copy_of_the_model(training: bool) -> None:
    extraction = of(4, 5, training=training)
    state = {name: tensor.clone() for name, tensor in extraction.step.named_state().items()}
    [device] = discover(f"core:{CORES[0]}").devices
    times_s = profile_hand_over(extraction, [device])[device.kind]
    assert times_s.shape == (5, 1)
    assert (times_s > 0).all()
    now = extraction.step.named_state()
    assert all(torch.equal(now[name], tensor) for name, tensor in state.items())
    assert all(tensor.grad is None for tensor in now.values())


def test_a_model_that_cannot_be_copied_has_no_time() -> None:
    class Single(nn.Linear):
        def __deepcopy__(self, memo: object) -> Single:
            raise RuntimeError("there is one only")

    extraction = extract(Workload(Single(5, 3), (torch.randn(4, 5),), training=False))
    [device] = discover(f"core:{CORES[0]}").devices
    assert not profile_hand_over(extraction, [device])[device.kind].any()


@pytest.mark.slow
def test_the_time_depends_on_the_tensors_that_are_handed_over() -> None:
    first, same, larger = of(4, 5), of(4, 5), of(8, 5)
    assert hand_over_signature(first) == hand_over_signature(same)
    assert hand_over_signature(first) != hand_over_signature(larger)
    assert hand_over_signature(first) != hand_over_signature(of(4, 5, training=True))


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_the_cached_time_belongs_to_the_graph_of_workers_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path))
    extraction = of(4, 5)
    cluster = discover(f"core:{CORES[0]},core:{CORES[1]}")
    runtime = CoreRuntime(extraction, cluster)
    unplaced = runtime.joined(cluster)
    assert unplaced is not None
    costs = hand_over_costs(extraction)
    assert costs.known(first_of_kinds(cluster.devices)) is None
    session = Session(
        cost_s={hand_over_signature(extraction): 0.25}, runs=5, spread=0.0, measured="2026-01-31"
    )
    CostCache().store(conditions_of(cluster.devices[0]), session)
    assert costs.known(first_of_kinds(cluster.devices)) is not None
    graph = costed(runtime, runtime.graph, cluster)
    assert GraphArrays.from_graph(graph).hand_over_s == 0.25
    assert GraphArrays.from_graph(costed(runtime, graph, unplaced)).hand_over_s == 0.0
    rated = (
        replace(d, name=f"far/{d.name}", peak_flop_per_s=1e12, bandwidth_bytes_per_s=1e11)
        for d in cluster.devices
    )
    elsewhere = replace(cluster, devices=tuple(rated))
    assert runtime.costs(elsewhere).hand_over_s == 0.0


def test_predictions_and_bounds_include_it_once() -> None:
    plain = toy_problem()
    slower = Problem.of(replace(plain.graph, hand_over_s=0.25), plain.cluster)
    devices = np.arange(plain.op_count) % 2
    found = []
    for problem in (plain, slower):
        placement = Placement.of(
            problem.graph, problem.cluster, devices, -np.arange(problem.op_count, dtype=float)
        )
        result, _ = Simulated(problem).result(placement)
        assert sum(result.parts.values()) == pytest.approx(result.step_s)
        predicted = Objective().predict(Simulated(problem), placement)
        assert predicted.times_s["step_s"] == predicted.objective_s == result.step_s
        replica = ReplicaSimulator(problem).step(placement)
        found.append(
            [
                result.step_s,
                Objective().lower_bound_s(problem),
                replica.step_ns * 1e-9,
                replica.pass_ns * 1e-9,
                Objective(micro_batches=2).lower_bound_s(problem),
                Simulated(problem).evaluate([replace(placement, micro_batches=2)])[0].step_s,
            ]
        )
    before, after = map(np.array, found)
    assert after - before == pytest.approx(0.25)
