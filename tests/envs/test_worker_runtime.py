"""Clusters with a host for each device are measured and run by a process per device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import placer
from envs.backend import measurements
from envs.executors.device_workers import placed_step
from envs.executors.device_workers.placed_step import PlacedStep
from envs.executors.torch.placed_module import PlacedModule
from envs.hardware.cluster import Cluster, Link
from envs.hardware.discover import discover
from envs.hardware.host import Host
from envs.placement import Placement
from envs.problem import Problem
from envs.runtime import runtime_for
from envs.torch_runtime import TorchRuntime
from envs.torch_runtime.worker_executor import WorkerExecutor
from graphs.costs import with_costs
from graphs.extract import Extraction, Workload, extract
from graphs.graph import GraphArrays
from tests.fake_cuda import fake_cuda
from tests.fake_cuda.machine import machine
from tests.fake_cuda.sharing import LOST, FakeSharing, lost_when_placed
from tests.helpers import tiny_models
from tests.helpers.trained_alike import assert_close, torch_optimizer, with_optimizer

NAMES = ("cuda:0", "cuda:1", "cpu")
ONE_EACH = tuple(Host(devices=(name,)) for name in NAMES)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Return two fake GPUs and the CPU, each with a host."""
    monkeypatch.setattr(placed_step, "SHARING", FakeSharing(2))
    with fake_cuda(2):
        found = discover(",".join(NAMES), memory=dict.fromkeys(NAMES, 1 << 30))
        link = Link(between=NAMES, latency_s=1e-6, bandwidth_bytes_per_s=1e9)
        yield replace(found, links=(link,), hosts=ONE_EACH)


def trained() -> Workload:
    return with_optimizer(tiny_models.conv_net(), "sgd", learning_rate=0.01)


def problem_of(extraction: Extraction, cluster: Cluster) -> Problem:
    """Return the problem with equal costs."""
    graph = runtime_for(extraction, cluster).graph
    costs_s = {device.kind: np.full(len(graph), 1e-5) for device in cluster.devices}
    costed = with_costs(graph, costs_s, dict.fromkeys(costs_s, "made"))
    return Problem.of(GraphArrays.from_graph(costed), cluster)


def placed_on(problem: Problem, devices: NDArray[np.int64]) -> Placement:
    return Placement.of(problem.graph, problem.cluster, devices, -np.arange(len(devices)) * 1.0)


def alternating(problem: Problem) -> Placement:
    group = problem.graph.group
    return placed_on(problem, np.where(group >= 0, group % 3, 0))


@pytest.mark.slow
def test_placements_are_measured_by_processes_and_the_unplaced_model_here(cluster: Cluster) -> None:
    step = trained()
    extraction, before = extract(step), tiny_models.state_of(step)
    problem = problem_of(extraction, cluster)
    placement = alternating(problem)
    alone = replace(placed_on(problem, np.zeros(problem.op_count, np.int64)), unplaced=True)
    with runtime_for(extraction, cluster).backend(problem, rounds=2) as backend:
        assert isinstance(backend.executor, WorkerExecutor)
        for one in measurements(backend.evaluate([placement, alone])):
            assert one.ok, one.failure
            assert one.wall_s.shape == (2,)
            assert {"cuda:0", "cuda:1"} >= one.peak_memory_bytes.keys() > set()
            assert one.reserved_memory_bytes.keys() == one.peak_memory_bytes.keys()
            for name, size in one.peak_memory_bytes.items():
                assert one.reserved_memory_bytes[name] >= size
    tiny_models.assert_same(tiny_models.state_of(step), before)


def test_a_placement_that_does_not_fit_fails_and_the_others_go_on(cluster: Cluster) -> None:
    extraction = extract(trained())
    problem = problem_of(extraction, cluster)
    runtime = runtime_for(extraction, cluster)
    assert isinstance(runtime, TorchRuntime)
    runtime.limits = {"cuda:0": 1 << 30, "cuda:1": 1000}
    fits, full = (placed_on(problem, np.full(problem.op_count, device)) for device in (0, 1))
    with runtime.backend(problem, rounds=1) as backend:
        one, other = measurements(backend.evaluate([full, fits]))
    assert "the worker of cuda:1 failed: OutOfMemoryError" in (one.failure or "")
    assert {*one.peak_memory_bytes} == {*one.reserved_memory_bytes} == {"cuda:1"}
    assert other.ok


@pytest.mark.slow
def test_a_gpu_that_is_lost_fails_the_placements_on_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    extraction = extract(trained())
    problem = problem_of(extraction, cluster)
    lost_when_placed(machine(), 1, monkeypatch)
    there, other = (placed_on(problem, np.full(problem.op_count, device)) for device in (1, 0))
    unplaced = [replace(each, unplaced=True) for each in (there, other)]
    with runtime_for(extraction, cluster).backend(problem, rounds=1) as backend:
        lost, placed, *alone = measurements(backend.evaluate([there, other, *unplaced]))
    assert lost.failure == f"the worker of cuda:1 failed: AcceleratorError: CUDA error: {LOST}"
    assert alone[0].failure == f"cuda:1 cannot be used: CUDA error: {LOST}"
    assert placed.ok, placed.failure
    assert alone[1].ok, alone[1].failure


def test_applied_with_these_hosts_it_trains_as_torch_does(cluster: Cluster) -> None:
    step = trained()
    plain, extraction = copy.deepcopy(step), extract(step)
    placement = alternating(problem_of(extraction, cluster))
    assert plain.optimizer is not None
    optimizer = torch_optimizer(plain.model, plain.optimizer)
    with runtime_for(extraction, cluster).apply(placement) as placed:
        assert isinstance(placed, PlacedStep)
        loss = placed.step(*step.inputs)
    expected = tiny_models.forward(plain)
    expected.backward()
    optimizer.step()
    assert_close(loss, expected.detach(), 1e-6)
    for name, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(step.model.state_dict()[name], tensor)


@pytest.mark.slow_repeats
@pytest.mark.parametrize("hosts", [(), (Host(devices=NAMES),), ONE_EACH[:2]])
def test_with_other_hosts_one_process_runs_all_devices(
    hosts: tuple[Host, ...], cluster: Cluster
) -> None:
    extraction = extract(trained())
    placement = alternating(problem_of(extraction, cluster))
    with runtime_for(extraction, replace(cluster, hosts=hosts)).apply(placement) as placed:
        assert isinstance(placed, PlacedModule)


@pytest.mark.slow  # every turn of a candidate starts its processes
def test_a_result_on_such_a_cluster_is_measured_and_applied_so(cluster: Cluster) -> None:
    step = trained()
    constraints = placer.Constraints(pins={"0": "cuda:0", "7": "cpu"})
    result = placer.optimize(step, cluster, budget="30e", constraints=constraints)
    assert not result.placement.unplaced
    with placer.apply(step.model, result, optimizer=step.optimizer) as placed:
        assert isinstance(placed, PlacedStep)
        assert torch.isfinite(placed.step(*step.inputs))


def test_copies_overlap_in_the_prediction_at_the_speed_of_page_locked_memory(
    cluster: Cluster,
) -> None:
    links = (
        Link(between=("cuda:0", "cpu"), latency_s=1e-5, bandwidth_bytes_per_s=1e9),
        Link(between=NAMES, latency_s=1e-6, bandwidth_bytes_per_s=1e9),
    )
    known = replace(links[0], pinned_bandwidth_bytes_per_s=3e9)
    cluster, extraction = replace(cluster, links=(known, links[1])), extract(trained())
    faster = replace(links[0], bandwidth_bytes_per_s=3e9)
    planned = runtime_for(extraction, cluster).planned(cluster)
    assert all(host.overlap and host.autograd for host in planned.hosts)
    assert planned.links == (faster, links[1])
    one = replace(cluster, hosts=())
    assert runtime_for(extraction, one, overlap=True).planned(one).links == (faster, links[1])
    assert runtime_for(extraction, one).planned(one).links == (known, links[1])


def test_what_processes_cannot_run_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="give the step an optimizer, or let one"):
        runtime_for(extract(tiny_models.conv_net()), cluster)
    with pytest.raises(ValueError, match="a graph of modules runs in one process"):
        runtime_for(extract(replace(tiny_models.conv_net(), training=False), "modules"), cluster)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [(), ONE_EACH[:2], (Host(devices=NAMES[:2]), ONE_EACH[2])])
def test_a_cluster_without_a_host_for_each_is_simulated_as_the_one_process_that_runs_it(
    hosts: tuple[Host, ...], cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    step, search = trained(), placer.SearchConfig(measure=False, budget="30e")
    result = placer.optimize(step, replace(cluster, hosts=hosts), search=search, progress=True)
    assert "One process runs all devices of this-machine" in capsys.readouterr().err
    (host,) = result.problem.cluster.hosts
    assert host.devices == NAMES
    placer.optimize(step, result.problem.cluster, search=search, progress=True)
    assert "One process" not in capsys.readouterr().err
