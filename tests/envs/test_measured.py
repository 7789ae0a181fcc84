"""The Measured backend: measurements, ties, and failures that it survives."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from envs.backend import measurements
from envs.core_runtime import FEWEST_ROUNDS, CoreRuntime
from envs.executors.cores.errors import WorkerError
from envs.executors.cores.pool import StepRun, WorkerPool
from envs.hardware.cluster import Link
from envs.hardware.discover import discover
from envs.measured.core_backend import UNCOUNTED_BYTES, Measured, UnplacedStep
from envs.measurement import Measurement, MemoryExcess, contended, tied
from envs.placement import Placement
from envs.problem import Problem
from envs.runtime import evaluate
from envs.simulator import Simulated, Simulator
from envs.simulator.schedule import run_order
from graphs.costs import with_costs
from graphs.extract import Extraction, Workload, extract
from graphs.graph import GraphArrays
from tests.helpers import tiny_models

torch.set_num_threads(1)

CORES = sorted(os.sched_getaffinity(0))


def measurement(wall_s: list[float], cpu_s: list[float] | None = None) -> Measurement:
    return Measurement(wall_s=np.array(wall_s), cpu_clock_s=np.array(cpu_s or wall_s))


# --- arithmetic


def test_the_numbers_of_a_measurement() -> None:
    seen = measurement([4.0, 2.0, 3.0, 10.0, 3.0], [2.0, 2.0, 2.0, 2.0, 3.0])
    assert seen.ok
    assert seen.counts
    assert seen.median_s == 3.0
    assert seen.min_s == 2.0
    assert seen.spread == pytest.approx((4 - 3) / 3)
    assert seen.cpu_clock_median_s == 2.0
    assert seen.contention == 1.5
    assert seen.step_s() == 3.0
    assert seen.step_s(contended=True) == 2.0


def test_a_failure_counts_as_infinitely_slow() -> None:
    failed = Measurement(wall_s=np.array([]), cpu_clock_s=np.array([]), failure="it died")
    assert failed.counts
    assert not failed.ok
    assert failed.median_s == failed.min_s == failed.step_s() == np.inf
    assert np.isnan(failed.spread)


def test_what_was_never_run_does_not_count() -> None:
    never = measurement([])
    assert not never.counts
    assert not never.ok


def test_the_machine_is_contended_by_the_median_of_all() -> None:
    quiet, loaded = measurement([1.0], [1.0]), measurement([2.0], [1.0])
    assert not contended([])
    assert not contended([quiet, loaded, quiet])
    assert contended([loaded, loaded, quiet])


def test_a_difference_in_every_round_is_no_tie_however_the_rounds_vary() -> None:
    slow = measurement([1.0, 5.0, 2.0, 9.0, 3.0])
    fast = measurement([0.9, 4.5, 1.8, 8.1, 2.7])
    assert not tied(slow, fast)
    assert not tied(fast, slow)


def test_noise_as_large_as_the_difference_is_a_tie() -> None:
    a = measurement([1.0, 1.3, 0.9, 1.2, 1.0, 1.1])
    b = measurement([1.1, 1.0, 1.2, 1.0, 0.9, 1.1])
    assert tied(a, b)
    assert tied(b, a)


def test_less_than_half_a_percent_is_a_tie_however_sure() -> None:
    a = measurement([1.0] * 9)
    assert tied(a, measurement([1.004] * 9))
    assert not tied(a, measurement([1.006] * 9))


def test_under_load_the_rebuilt_times_are_compared() -> None:
    a = measurement([1.0, 2.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0])
    b = measurement([2.0, 1.0, 2.0, 1.0], [2.0, 2.0, 2.0, 2.0])
    assert tied(a, b)
    assert not tied(a, b, loaded=True)


def test_one_round_shows_no_noise_and_decides_nothing() -> None:
    assert tied(measurement([1.0]), measurement([2.0]))


def test_a_failure_ties_with_failures_only() -> None:
    failed = Measurement(wall_s=np.array([]), cpu_clock_s=np.array([]), failure="it died")
    assert tied(failed, failed)
    assert not tied(failed, measurement([1.0]))


# --- real runs

needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


def small_problem() -> tuple[Extraction, Problem]:
    extraction = extract(tiny_models.conv_net())
    return extraction, priced(extraction)


def priced(extraction: Extraction, memory_bytes: int | None = None) -> Problem:
    """Return the step with made-up costs on two cores."""
    graph = with_costs(
        extraction.graph, {"core": np.full(len(extraction.graph), 1e-5)}, {"core": "made up"}
    )
    cluster = discover(f"core:{CORES[0]},core:{CORES[-1]}")
    link = Link(between=cluster.names, latency_s=1e-5, bandwidth_bytes_per_s=1e10)
    devices = tuple(
        device if memory_bytes is None else replace(device, memory_bytes=memory_bytes)
        for device in cluster.devices
    )
    linked = replace(cluster, devices=devices, links=(link,))
    return Problem.of(GraphArrays.from_graph(graph), linked)


@pytest.fixture(scope="module")
def backend() -> Iterator[Measured]:
    extraction, problem = small_problem()
    with Measured(extraction, problem, rounds=3, warm_up=1, step_timeout_s=60) as measured:
        yield measured


def candidates(backend: Measured) -> list[Placement]:
    """Return three placements: all on the first device; alternating; all on the second."""
    problem = backend.problem
    index = np.arange(problem.op_count)
    arrays = [np.zeros_like(index), index % 2, np.ones_like(index)]
    return [
        Placement.of(problem.graph, problem.cluster, devices, -index.astype(float))
        for devices in arrays
    ]


def kill_a_worker(backend: Measured) -> None:
    os.kill(backend._pool._workers[0].process.pid, signal.SIGKILL)


@needs_two_cores
def test_placements_are_really_run(backend: Measured) -> None:
    heard: list[tuple[int, int]] = []
    seen = measurements(
        backend.evaluate(candidates(backend), lambda done, total: heard.append((done, total)))
    )
    assert heard == [(i + 1, 12) for i in range(12)]
    assert not backend.interrupted
    for one in seen:
        assert one.ok
        assert one.wall_s.shape == one.cpu_clock_s.shape == (3,)


@needs_two_cores
def test_evaluate_tells_time_memory_and_noise(backend: Measured) -> None:
    alone, split, _ = backend.evaluate(candidates(backend))
    assert alone.feasible
    assert split.feasible
    assert alone.parts.keys() == {"median_s", "min_s", "spread", "rebuilt_s", "contention"}
    first, second = backend.problem.cluster.names
    assert alone.peak_memory_bytes[second] < UNCOUNTED_BYTES, "its worker has nothing to do"
    assert alone.peak_memory_bytes[first] > 0
    assert split.peak_memory_bytes.keys() == {first, second}


def wide_problem(memory_bytes: int) -> tuple[Extraction, Problem]:
    """Return two products of 8 MB each that both read 16 MB of inputs, and their sum."""

    def forward(_: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ y + (x.t() @ y).sin()).sum()

    inputs = (torch.randn(1448, 1448), torch.randn(1448, 1448))
    extraction = extract(Workload.of(tiny_models.Plain(forward), inputs, training=False))
    return extraction, priced(extraction, memory_bytes)


@pytest.mark.slow
@needs_two_cores
def test_the_memory_that_workers_held_is_near_the_prediction() -> None:
    extraction, problem = wide_problem(1 << 30)
    with Measured(extraction, problem, rounds=1, warm_up=1, step_timeout_s=60) as measured:
        everything, alternating, other = candidates(measured)
        for placement in (everything, alternating, other, everything):
            [seen] = measurements(measured.evaluate([placement]))
            schedule = Simulator(problem).run(*placement.arrays())
            for name, predicted in zip(problem.cluster.names, schedule.peak_bytes, strict=True):
                held = seen.peak_memory_bytes[name]
                tensor_bytes = 1448 * 1448 * 4
                # Predictions exclude inputs, the shared copy of sent tensors, and gaps.
                most = predicted + (2 + 1 + 5) * tensor_bytes + UNCOUNTED_BYTES
                assert predicted <= held <= (most if predicted else UNCOUNTED_BYTES)


@needs_two_cores
def test_a_placement_that_held_more_than_it_may_is_infeasible_with_the_amount() -> None:
    extraction, problem = wide_problem(12 << 20)
    first, second = problem.cluster.names
    with Measured(extraction, problem, rounds=1, warm_up=0, step_timeout_s=60) as measured:
        placement = candidates(measured)[0]
        [seen] = measurements(measured.evaluate([placement]))
        assert seen.overfull
        assert seen.excess == MemoryExcess(
            device=first, held_bytes=seen.peak_memory_bytes[first], limit_bytes=12 << 20
        )
        assert not seen.ok
        [result] = measured.evaluate([placement])
        assert not result.feasible
        assert first in result.why
        assert result.peak_memory_bytes[first] > 12 << 20, "the amount, for who reads no sentences"
        held = seen.peak_memory_bytes[first]
        assert held > 12 << 20
        assert seen.peak_memory_bytes[second] < UNCOUNTED_BYTES
    with Measured(extraction, problem, limits={first: 2 * held}, rounds=1, warm_up=0) as measured:
        assert measured.evaluate([placement])[0].feasible


@needs_two_cores
def test_a_candidate_whose_worker_dies_fails_and_the_others_go_on(backend: Measured) -> None:
    def progress(done: int, total: int) -> None:
        if done == 4:  # second round: the second candidate is done, the third is next
            kill_a_worker(backend)

    first, second, third = measurements(backend.evaluate(candidates(backend), progress))
    assert f"{backend.problem.cluster.names[0]} died" in third.failure
    assert not third.ok
    for other in (first, second):
        assert other.ok
        assert len(other.wall_s) == 3


@needs_two_cores
def test_a_placement_of_another_graph_is_infeasible_and_the_others_go_on(
    backend: Measured,
) -> None:
    good, *_ = candidates(backend)
    foreign = replace(good, graph="0" * 64)
    in_parts = replace(good, micro_batches=4)
    found = backend.evaluate([foreign, good, in_parts])
    assert [result.feasible for result in found] == [False, True, False]
    assert "made for graph 000000" in found[0].why
    assert "4 micro-batches" in found[2].why
    assert found[0].step_s == np.inf


@needs_two_cores
def test_ctrl_c_keeps_the_rounds_that_are_complete_and_measuring_can_go_on(
    backend: Measured,
) -> None:
    def progress(done: int, total: int) -> None:
        if done == 8:  # one warm-up and one round of three, two of the next
            raise KeyboardInterrupt

    seen = measurements(backend.evaluate(candidates(backend), progress))
    assert backend.interrupted
    assert [len(one.wall_s) for one in seen] == [1, 1, 1]
    again = measurements(backend.evaluate(candidates(backend)[:1]))
    assert again[0].ok
    assert len(again[0].wall_s) == 3
    assert not backend.interrupted


@needs_two_cores
def test_ctrl_c_in_the_warm_up_leaves_nothing(backend: Measured) -> None:
    def progress(done: int, total: int) -> None:
        raise KeyboardInterrupt

    seen = measurements(backend.evaluate(candidates(backend), progress))
    assert not any(one.counts for one in seen)


@needs_two_cores
def test_workers_of_which_one_dies_while_they_start_are_started_once_more(
    backend: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = [WorkerError("the worker of core:0 died (signal 9)")]

    def start(*args: Any, **options: Any) -> WorkerPool:
        if deaths:
            raise deaths.pop()
        return WorkerPool(*args, **options)

    monkeypatch.setattr("envs.measured.core_backend.WorkerPool", start)
    backend.close()
    assert measurements(backend.evaluate(candidates(backend)[:1]))[0].ok
    assert not deaths


@needs_two_cores
def test_without_new_workers_what_was_measured_counts_and_the_rest_failed(
    backend: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def progress(done: int, total: int) -> None:
        if done == 4:  # first counted round: the second candidate is done, the third is next
            kill_a_worker(backend)

    def refuse() -> WorkerPool:
        raise OSError("too many open files")

    backend.evaluate(candidates(backend)[:1])  # start workers
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_new_pool", refuse)
        first, second, third = measurements(backend.evaluate(candidates(backend), progress))
    assert second.ok
    assert len(second.wall_s) == 1
    assert "died" in third.failure
    assert "too many open files" in first.failure
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_new_pool", refuse)
        assert not any(one.ok for one in measurements(backend.evaluate(candidates(backend))))
    assert not backend.interrupted
    assert measurements(backend.evaluate(candidates(backend)[:1]))[0].ok


@needs_two_cores
def test_the_unplaced_step_on_all_cores_runs_in_the_same_rounds(backend: Measured) -> None:
    heard: list[tuple[int, int]] = []
    placements = candidates(backend)[:2]
    seen = measurements(backend.evaluate(placements))
    unplaced = backend.measure_unplaced(lambda *at: heard.append(at))
    assert unplaced is not None
    assert unplaced.ok
    assert unplaced.wall_s.shape == seen[0].wall_s.shape == (3,)
    assert heard == [(i + 1, 4) for i in range(4)]


@needs_two_cores
def test_a_runtime_measures_placements_and_then_the_unplaced_step() -> None:
    extraction, problem = small_problem()
    runtime = CoreRuntime(extraction, problem.cluster)
    index = np.arange(problem.op_count)
    placement = Placement.of(problem.graph, problem.cluster, index % 2, -index.astype(float))
    heard: list[tuple[int, int]] = []
    found = runtime.measure(problem, [placement], [1.0], lambda *at: heard.append(at))
    assert [len(one.wall_s) for one in found.measurements] == [FEWEST_ROUNDS]
    assert found.unplaced is not None
    assert len(found.unplaced.wall_s) == FEWEST_ROUNDS
    assert not found.interrupted
    total = 2 * (FEWEST_ROUNDS + 2)
    assert heard == [(i + 1, total) for i in range(total)]


def test_a_backend_of_a_user_is_evaluated_without_noise() -> None:
    _, problem = small_problem()
    index = np.arange(problem.op_count)
    placements = [
        Placement.of(problem.graph, problem.cluster, devices, -index.astype(float))
        for devices in (np.zeros_like(index), index % 2)
    ]
    simulated = Simulated(problem)
    found = evaluate(simulated, problem, placements, [1.0, 1.0])
    steps_s = [result.step_s for result in simulated.evaluate(placements)]
    assert [one.step_s() for one in found.measurements] == steps_s
    assert steps_s[0] != steps_s[1]
    assert not tied(*found.measurements), "a single exact time is compared, unlike a single run"


@needs_two_cores
def test_an_unplaced_step_that_fails_leaves_the_placements_alone(
    backend: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> WorkerPool:
        raise WorkerError("it did not come up")

    monkeypatch.setattr("envs.measured.core_backend.WorkerPool", refuse)
    unplaced = backend.measure_unplaced()
    assert unplaced is not None
    assert unplaced.failure == "it did not come up"
    assert backend.evaluate(candidates(backend)[:1])[0].feasible


@needs_two_cores
def test_the_unplaced_step_has_the_cores_of_all_devices() -> None:
    extraction, problem = small_problem()
    step = UnplacedStep(extraction, problem.cluster, step_timeout_s=60)
    try:
        assert step._pool is not None
        (worker,) = step._pool._workers
        assert os.sched_getaffinity(worker.process.pid) == {CORES[0], CORES[-1]}
        step.run(keep=False)
        step.run(keep=True)
        assert len(step.runs) == 1
        os.kill(worker.process.pid, signal.SIGKILL)
        step.run(keep=True)
        step.run(keep=True)
    finally:
        step.close()
    assert len(step.runs) == 1
    assert "died" in step.failure


def test_workers_end_when_their_state_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[WorkerPool] = []

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    class Seen(WorkerPool):
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            started.append(self)

    monkeypatch.setattr("envs.measured.core_backend.WorkerPool", Seen)
    monkeypatch.setattr("envs.measured.core_backend.load_example", fail)
    with pytest.raises(KeyboardInterrupt):
        Measured(*small_problem())
    assert started[0].closed


def test_ops_that_start_at_once_run_after_what_they_read() -> None:
    _, problem = small_problem()
    order = run_order(problem, np.zeros(problem.op_count, np.int64))
    assert order == problem.graph.topological.tolist()


def test_no_place_in_a_round_is_always_the_same_candidates_and_the_unplaced_step_comes_last(
    backend: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[object] = []
    run = WorkerPool.run

    def recorded(pool: WorkerPool, number: int, *, give: bool = False) -> StepRun:
        order.append("reference" if len(pool.devices) == 1 else number)
        return run(pool, number, give=give)

    monkeypatch.setattr(WorkerPool, "run", recorded)
    monkeypatch.setattr("envs.measured.core_backend.SHORT_STEP_S", 0.0)
    monkeypatch.setattr(backend, "rounds", 4)
    backend.evaluate([candidates(backend)[0]] * 3)
    backend.measure_unplaced()
    own = [number for number in order if number != "reference"]
    assert order[len(own) :] == ["reference"] * (4 + backend.warm_up)
    rounds = [own[at : at + 3] for at in range(len(own) - 12, len(own), 3)]
    assert {frozenset(r) for r in rounds} == {frozenset(own)}
    for place in range(3):
        assert len({r[place] for r in rounds}) == 3


def test_a_short_step_runs_once_more_before_it_counts(
    backend: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    run = WorkerPool.run

    def recorded(pool: WorkerPool, number: int, *, give: bool = False) -> StepRun:
        runs.append(number)
        return run(pool, number, give=give)

    monkeypatch.setattr(WorkerPool, "run", recorded)
    counts = []
    for shortest_s in (0.0, 1e9):
        monkeypatch.setattr("envs.measured.core_backend.SHORT_STEP_S", shortest_s)
        runs.clear()
        [seen] = measurements(backend.evaluate([candidates(backend)[0]]))
        assert len(seen.wall_s) == backend.rounds
        counts.append(len(runs))
    assert counts[1] - counts[0] == backend.rounds + backend.warm_up
