"""Placements that are run and timed on pinned cores, and failures that measuring survives."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from envs.backend import measurements
from envs.core_runtime import CoreExecutor, CoreRuntime
from envs.executors.cores.errors import WorkerError
from envs.executors.cores.hand_over import HandOver
from envs.executors.cores.instruction_lists import device_lists
from envs.executors.cores.memory import WorkerMemory
from envs.executors.cores.pool import StepRun, WorkerPool
from envs.hardware.cluster import Link
from envs.hardware.discover import discover
from envs.measured import FEWEST_ROUNDS, Failure, Measured, TimedStep
from envs.measurement import MemoryExcess
from envs.placement import Placement
from envs.problem import Problem
from envs.runtime import worker_memory
from envs.simulator import Simulator
from envs.simulator.schedule import issue_order, run_order
from graphs.costs import with_costs
from graphs.extract import Extraction, Workload, extract
from graphs.graph import GraphArrays
from tests.helpers import tiny_models

CORES = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


def small_problem() -> tuple[Extraction, Problem]:
    extraction = extract(tiny_models.conv_net())
    return extraction, priced(extraction)


def priced(extraction: Extraction, memory_bytes: int = 1 << 30) -> Problem:
    """Return the step with made-up costs on two cores."""
    graph = with_costs(
        extraction.graph, {"core": np.full(len(extraction.graph), 1e-5)}, {"core": "made up"}
    )
    cluster = discover(f"core:{CORES[0]},core:{CORES[-1]}")
    link = Link(between=cluster.names, latency_s=1e-5, bandwidth_bytes_per_s=1e10)
    devices = tuple(replace(device, memory_bytes=memory_bytes) for device in cluster.devices)
    linked = replace(cluster, devices=devices, links=(link,))
    return Problem.of(GraphArrays.from_graph(graph), linked)


@pytest.fixture(scope="module")
def backend() -> Iterator[Measured]:
    with Measured(CoreExecutor(*small_problem()), rounds=3, warm_up=1) as measured:
        yield measured


def candidates(problem: Problem) -> list[Placement]:
    """Return three placements: all on the first device; alternating; all on the second."""
    index = np.arange(problem.op_count)
    arrays = [np.zeros_like(index), index % 2, np.ones_like(index)]
    return [
        Placement.of(problem.graph, problem.cluster, devices, -index.astype(float))
        for devices in arrays
    ]


def pool_of(backend: Measured) -> WorkerPool:
    assert isinstance(backend.executor, CoreExecutor)
    return backend.executor.pool()


@pytest.mark.slow
def test_time_and_memory_of_both_workers_are_measured(backend: Measured) -> None:
    alone, split, _ = backend.evaluate(candidates(backend.problem))
    first, second = backend.problem.cluster.names
    assert all(size > 0 for size in alone.peak_memory_bytes.values()), "an idle worker holds some"
    assert split.peak_memory_bytes.keys() == {first, second}
    for seen in measurements([alone, split]):
        assert seen.wall_s.shape == seen.cpu_clock_s.shape == (3,)
        assert seen.has_cpu_clock
        assert (seen.cpu_clock_s > 0).all()


def test_workers_forget_placements_that_were_evaluated(backend: Measured) -> None:
    for _ in range(2):
        backend.evaluate(candidates(backend.problem)[:2])
        assert not pool_of(backend)._lists


def wide_problem(memory_bytes: int) -> tuple[Extraction, Problem]:
    """Return two products of 8 MB each that both read 16 MB of inputs, and their sum."""

    def forward(_: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * y + (x.t() * y).sin()).sum()

    inputs = (torch.randn(1448, 1448), torch.randn(1448, 1448))
    extraction = extract(Workload.of(tiny_models.Plain(forward), inputs, training=False))
    return extraction, priced(extraction, memory_bytes)


@pytest.mark.slow
def test_the_memory_that_workers_held_is_near_the_prediction() -> None:
    extraction, problem = wide_problem(1 << 30)
    with Measured(CoreExecutor(extraction, problem), rounds=1) as measured:
        everything, alternating, other = candidates(problem)
        [seen] = measurements(measured.evaluate([everything]))
        idle_bytes = seen.peak_memory_bytes[problem.cluster.names[1]]
        for placement in (everything, alternating, other, everything):
            [seen] = measurements(measured.evaluate([placement]))
            schedule = Simulator(problem).run(*placement.arrays())
            for name, predicted in zip(problem.cluster.names, schedule.peak_bytes, strict=True):
                held_bytes = seen.peak_memory_bytes[name] - idle_bytes
                tensor_bytes = 1448 * 1448 * 4
                # Simulations exclude inputs, the shared copy of sent tensors, gaps, and libraries.
                most = predicted + (2 + 1 + 5 + 4) * tensor_bytes
                assert predicted <= held_bytes + tensor_bytes
                assert held_bytes <= most


def test_predicted_memory_is_that_of_the_workers_lists() -> None:
    extraction, problem = wide_problem(1 << 30)
    runtime, placement = CoreRuntime(extraction, problem.cluster), candidates(problem)[1]
    order = issue_order(problem, Simulator(problem).run(*placement.arrays()))
    lists = device_lists(extraction.program, placement.devices, order, 2)
    memory = WorkerMemory(extraction.program)
    expected = dict(zip(problem.cluster.names, map(memory.peak_bytes, lists), strict=True))
    assert worker_memory(runtime, problem, placement) == expected
    assert worker_memory(None, problem, placement) is None


@pytest.mark.slow
def test_what_workers_hold_before_a_step_is_not_planned_with() -> None:
    extraction, problem = wide_problem(1 << 30)
    planned = CoreRuntime(extraction, problem.cluster).planned(problem.cluster)
    held_bytes = WorkerMemory(extraction.program).held_bytes()
    assert held_bytes > 0
    assert [each.memory_bytes for each in planned.devices] == [(1 << 30) - held_bytes] * 2
    small = wide_problem(1)[1].cluster
    fewest = CoreRuntime(extraction, small).planned(small)
    assert [each.memory_bytes for each in fewest.devices] == [0, 0]


@pytest.mark.slow
def test_a_placement_that_held_more_than_it_may_is_infeasible_with_the_amount() -> None:
    extraction, problem = wide_problem(12 << 20)
    first, second = problem.cluster.names
    placement = candidates(problem)[0]
    with Measured(CoreExecutor(extraction, problem), rounds=1, warm_up=0) as measured:
        [result] = measured.evaluate([placement])
    [seen] = measurements([result])
    held = result.peak_memory_bytes[first]
    assert not result.feasible
    assert seen.overfull
    assert seen.excess == MemoryExcess(device=first, held_bytes=held, limit_bytes=12 << 20)
    assert first in result.why
    assert held > 12 << 20, "the amount, for who reads no sentences"
    assert 0 < seen.peak_memory_bytes[second] < held
    enough = CoreExecutor(extraction, problem, limits={first: 2 * held})
    with Measured(enough, rounds=1, warm_up=0) as measured:
        assert measured.evaluate([placement])[0].feasible


def test_a_candidate_whose_worker_dies_fails_and_the_others_get_new_workers(
    backend: Measured,
) -> None:
    def progress(done: int, total: int) -> None:
        if done == 4:  # second round: the second candidate is done, the third is next
            os.kill(pool_of(backend)._workers[1].process.pid, signal.SIGKILL)

    seen = measurements(backend.evaluate(candidates(backend.problem), progress))
    assert f"{backend.problem.cluster.names[1]} died" in seen[2].failure
    assert [len(own.wall_s) for own in seen] == [3, 3, 0]


def limit_memory_of(process_id: int, more_bytes: int) -> None:
    """Limit the memory of a process to ``more_bytes`` above its current size."""
    status = Path(f"/proc/{process_id}/status").read_text()
    has = next(line.split()[1] for line in status.splitlines() if line.startswith("VmData"))
    limit = int(has) * 1024 + more_bytes
    resource.prlimit(process_id, resource.RLIMIT_DATA, (limit, limit))


@pytest.mark.slow
def test_a_worker_without_memory_says_so_and_its_placement_is_infeasible() -> None:
    extraction, problem = wide_problem(1 << 30)
    with Measured(CoreExecutor(extraction, problem), rounds=2, warm_up=0) as measured:
        on_first, _, on_second = candidates(problem)
        limit_memory_of(pool_of(measured)._workers[0].process.pid, 1 << 20)
        failed, seen = measurements(measured.evaluate([on_first, on_second]))
        assert failed.overfull
        assert failed.failure.startswith(f"the worker of core:{CORES[0]} failed: ")
        assert "allocate" in failed.failure
        assert seen.ok, "new workers run the other one"


def test_workers_of_which_one_dies_while_they_start_are_started_once_more(
    backend: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = [WorkerError("the worker of core:0 died (signal 9)")]

    def start(*args: Any, **options: Any) -> WorkerPool:
        if deaths:
            raise deaths.pop()
        return WorkerPool(*args, **options)

    monkeypatch.setattr("envs.core_runtime.executor.WorkerPool", start)
    backend.close()
    assert backend.evaluate(candidates(backend.problem)[:1])[0].feasible
    assert not deaths


def test_without_new_workers_all_fail_and_measuring_can_go_on_later(
    backend: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> WorkerPool:
        raise OSError("too many open files")

    pool_of(backend)  # where not even the first workers start, that is an error
    backend.close()
    with monkeypatch.context() as patch:
        patch.setattr("envs.core_runtime.executor.WorkerPool", refuse)
        results = backend.evaluate(candidates(backend.problem))
    assert all("too many open files" in result.why for result in results)
    assert not backend.interrupted
    assert backend.evaluate(candidates(backend.problem)[:1])[0].feasible


def test_workers_are_warmed_up_once_and_by_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    extraction, problem = small_problem()
    runs: list[int] = []
    plain = WorkerPool.run

    def counted(pool: WorkerPool, number: int) -> StepRun:
        runs.append(number)
        return plain(pool, number)

    monkeypatch.setattr(WorkerPool, "run", counted)
    executor = CoreExecutor(extraction, problem)
    try:
        step = executor.load(candidates(problem)[1])
        assert not isinstance(step, Failure)
        assert [step.warm_up(), step.warm_up()] == [None, None]
        assert len(runs) == 2
        assert isinstance(step.run(), TimedStep)
        assert len(runs) > 2
    finally:
        executor.close()


def test_workers_end_when_their_state_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[WorkerPool] = []

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    class Seen(WorkerPool):
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            started.append(self)

    monkeypatch.setattr("envs.core_runtime.executor.WorkerPool", Seen)
    monkeypatch.setattr("envs.core_runtime.executor.load_example", fail)
    extraction, problem = small_problem()
    executor = CoreExecutor(extraction, problem)
    with Measured(executor) as measured, pytest.raises(KeyboardInterrupt):
        measured.evaluate(candidates(problem))
    assert started[0].closed


def test_ops_that_start_at_once_run_after_what_they_read() -> None:
    _, problem = small_problem()
    at_once = np.zeros(problem.op_count, np.int64)
    order = run_order(problem, at_once, at_once)
    assert order == problem.graph.topological.tolist()


def test_a_measured_step_is_handed_over_like_a_placed_one(
    backend: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    cleared: list[bool] = []
    step = HandOver.step

    def watched(handed: HandOver, run: Callable[[], Any], *batch: Any) -> tuple[Any, Any]:
        def running() -> Any:
            threads.append(torch.get_num_threads())
            before = handed._step.named_state()
            cleared.extend(tensor.grad is None for tensor in before.values())
            return run()

        loss, ran = step(handed, running, *batch)
        assert loss.shape == ()
        return loss, ran

    monkeypatch.setattr(HandOver, "step", watched)
    [seen] = measurements(backend.evaluate(candidates(backend.problem)[1:2]))
    assert seen.ok, seen.failure
    assert len(threads) > backend.rounds
    assert set(threads) == {1}
    assert all(cleared), "gradients of the step before are gone"
    assert isinstance(backend.executor, CoreExecutor)
    own = backend.executor.extraction.step.named_state()
    assert all(tensor.grad is None for tensor in own.values())


def test_a_model_that_cannot_be_copied_is_measured_without_the_hand_over() -> None:
    class Single(tiny_models.Plain):
        def __deepcopy__(self, memo: object) -> Single:
            raise RuntimeError("there is one only")

    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sin().sum()

    extraction = extract(Workload.of(Single(forward), torch.ones(8), training=False))
    problem = priced(extraction)
    with CoreRuntime(extraction, problem.cluster).backend(problem, rounds=2) as measured:
        [seen] = measurements(measured.evaluate(candidates(problem)[:1]))
    assert seen.ok, seen.failure
    assert len(seen.wall_s) == 2


@pytest.mark.slow
def test_the_rounds_are_few_where_their_time_is_over() -> None:
    extraction, problem = small_problem()
    runtime = CoreRuntime(extraction, problem.cluster)
    with runtime.backend(problem, rounds=7, seconds=0.0) as measured:
        runs = measurements(measured.evaluate(candidates(problem)[:2]))
    assert [len(each.wall_s) for each in runs] == 2 * [FEWEST_ROUNDS]
