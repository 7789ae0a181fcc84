"""Searches on machines whose ops cost other than known: the second search, with fitted costs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest

import placer
from envs.backend import ProgressCallback, StepResult
from envs.core_runtime import CoreRuntime
from envs.costs.cache import CostCache, Session
from envs.costs.cached_costs import conditions_of
from envs.costs.factors import CLASSES, FITTED
from envs.costs.hand_over import hand_over_signature
from envs.costs.ops import op_signatures
from envs.executors.cores.errors import WorkerError
from envs.hardware.cluster import Cluster, Device, Link
from envs.measured import DevicesLostError
from envs.placement import Placement
from envs.problem import Problem
from envs.runtime import costed, runtime_for
from envs.simulator import Simulated
from envs.simulator.fitting import scaled_problem
from graphs.extract import Workload, extract
from graphs.graph import GraphArrays, add_op, new_graph
from placer.pipeline import optimize_problem
from placer.result import Result
from tests.helpers import tiny_models
from tests.helpers.clusters import toy_pair

CONVOLUTIONS_MS = (9, 5, 8, 3, 11, 2)
PRODUCTS_MS = (4, 8, 2, 6, 3, 11)
SLOW = {"x": {"convolution": 1.3}}


def independent_ops() -> nx.DiGraph[str]:
    graph = new_graph("independent", {"*": "by hand"})
    for op, costs_ms in (("convolution", CONVOLUTIONS_MS), ("addmm", PRODUCTS_MS)):
        for i, cost_ms in enumerate(costs_ms):
            add_op(graph, f"{op}.{i}", op=op, cost_s={"*": cost_ms / 1e3}, output_bytes=10)
    return graph


PROBLEM = Problem.of(GraphArrays.from_graph(independent_ops()), toy_pair("a", "b"))


class Machine:
    """Runs placements on a simulator whose ops cost other than those of the problem."""

    def __init__(self, factors: Any) -> None:
        self.simulated = Simulated(scaled_problem(PROBLEM, factors))
        self.runs: list[list[Placement]] = []

    def evaluate(
        self, placements: Sequence[Placement], progress: ProgressCallback | None = None
    ) -> list[StepResult]:
        self.runs.append(list(placements))
        return self.simulated.evaluate(placements, progress)


def optimized(machine: Any, **search: Any) -> Result:
    config = {"budget": "600e", "policy": None, "backend": machine, **search}
    return optimize_problem(PROBLEM, placer.SearchConfig(**config))


def test_the_second_search_finds_a_better_placement_and_predicts_it() -> None:
    machine = Machine(SLOW)
    result = optimized(machine)
    first, second = machine.runs
    steps_s = [step.step_s for step in machine.simulated.evaluate(first)]
    best = result.best
    assert best.measurement is not None
    assert best.measurement.median_s < 0.95 * min(steps_s)
    assert best.predicted_s == pytest.approx(best.measurement.median_s, rel=0.03)
    assert best.name.endswith(", fitted")
    (again,) = Simulated(result.problem).evaluate([result.placement])
    assert again.step_s == best.predicted_s
    assert result.lower_bound_s <= best.predicted_s

    # Speed-ups are by the same rounds: the best of the first search and one device ran again.
    ran = [each for each in result.candidates if each.measurement is not None]
    assert len(ran) == len(second)
    assert min(steps_s) in [each.measurement.median_s for each in ran if each.measurement]
    assert result.single is not None
    assert result.single.measurement is not None

    assert result.mispredicted is not None
    assert result.mispredicted.predicted_s < 0.9 * min(steps_s)
    assert sum("fitted" in remark for remark in result.remarks) == 1


def test_results_by_evaluations_are_the_same_every_time() -> None:
    first, again = optimized(Machine(SLOW)), optimized(Machine(SLOW))
    assert first.placement.devices == again.placement.devices
    assert first.placement.predicted == again.placement.predicted
    assert [each.name for each in first.candidates] == [each.name for each in again.candidates]


def test_a_prediction_within_a_tenth_is_enough() -> None:
    machine = Machine({"x": {"convolution": 1.05}})
    result = optimized(machine)
    assert len(machine.runs) == 1
    assert result.mispredicted is None
    assert result.problem is PROBLEM
    assert not any("fitted" in remark for remark in result.remarks)


def test_without_a_better_placement_the_first_runs_count_with_new_predictions() -> None:
    machine = Machine(
        {"x": dict.fromkeys(CLASSES, 1.3)}
    )  # all costs: the best placement stays the best
    result = optimized(machine, placer="exact")
    assert len(machine.runs) == 1
    assert result.mispredicted is not None
    for each in result.candidates:
        if each.measurement is not None:
            assert each.predicted_s == pytest.approx(each.measurement.median_s, rel=0.03)


def test_sources_say_that_costs_are_fitted() -> None:
    search = placer.SearchConfig(budget="200e", policy=None, backend=Machine(SLOW))
    result = placer.optimize(independent_ops(), PROBLEM.cluster, search=search, progress=False)
    assert set(result.cost_source.values()) == {f"by hand{FITTED}"}


def test_placements_that_failed_are_not_what_the_second_search_has_to_beat() -> None:
    class Forgetful(Machine):
        """Fails to run the fastest placements, when it runs the first ones."""

        def evaluate(
            self, placements: Sequence[Placement], progress: ProgressCallback | None = None
        ) -> list[StepResult]:
            results = super().evaluate(placements, progress)
            if len(self.runs) > 1:
                return results
            fastest_s = min(result.step_s for result in results)
            died = StepResult.infeasible("its worker died", {})
            return [died if each.step_s < 1.02 * fastest_s else each for each in results]

    machine = Forgetful({"x": dict.fromkeys(CLASSES, 1.3)})
    result = optimized(machine)
    assert len(machine.runs) == 2
    assert {each.failure for each in result.candidates} == {"", "its worker died"}
    steps_s = [step.step_s for step in machine.simulated.evaluate(machine.runs[0])]
    assert result.best.measurement is not None
    assert result.best.measurement.median_s < 1.02 * min(steps_s)


@pytest.mark.parametrize("error", [WorkerError, DevicesLostError, KeyboardInterrupt])
def test_the_first_runs_count_if_the_second_do_not_end(error: type[BaseException]) -> None:
    class Ending(Machine):
        def evaluate(
            self, placements: Sequence[Placement], progress: ProgressCallback | None = None
        ) -> list[StepResult]:
            if self.runs:
                raise error("the end")
            return super().evaluate(placements, progress)

    machine = Ending(SLOW)
    result = optimized(machine)
    assert result.stopped == (error is KeyboardInterrupt)
    steps_s = [step.step_s for step in machine.simulated.evaluate(machine.runs[0])]
    assert result.best.measurement is not None
    assert result.best.measurement.median_s == min(steps_s)
    assert result.trouble == ""


def test_groups_are_searched_again_with_the_costs_of_their_ops() -> None:
    search = placer.SearchConfig(budget="200e", policy=None, backend=Machine(SLOW), groups=8)
    result = placer.optimize(independent_ops(), PROBLEM.cluster, search=search, progress=False)
    assert result.mispredicted is not None
    assert result.best.measurement is not None
    assert result.best.predicted_s == pytest.approx(result.best.measurement.median_s, rel=0.03)


class Stopwatch:
    """Times placements of a step as a machine would whose ops cost other than measured."""

    interrupted = False

    def __init__(self, problem: Problem) -> None:
        self.simulated = Simulated(problem)

    def __enter__(self) -> Stopwatch:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def evaluate(
        self, placements: Sequence[Placement], progress: ProgressCallback | None = None
    ) -> list[StepResult]:
        results = []
        for placement in placements:
            if placement.unplaced:
                results.append(StepResult(step_s=UNPLACED_S, peak_memory_bytes={}))
            else:
                results += self.simulated.evaluate([placement], progress)
        return results


UNPLACED_S = 100.0


@dataclass(frozen=True)
class Cores:
    """A step on two cores, with costs that were measured before: 1 ms for each op."""

    workload: Workload
    cluster: Cluster
    runtime: CoreRuntime
    problem: Problem

    def optimized(self) -> Result:
        search = placer.SearchConfig(budget="200e", policy=None)
        return placer.optimize(self.workload, self.cluster, search=search, progress=False)


@pytest.fixture
def cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cores:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path))
    workload = tiny_models.conv_net()
    devices = tuple(
        Device(name=name, kind="core", memory_bytes=1 << 34) for name in ("core:0", "core:1")
    )
    link = Link(between=("core:0", "core:1"), latency_s=1e-5, bandwidth_bytes_per_s=1e10)
    cluster = Cluster(name="two cores", devices=devices, links=(link,))
    extraction = extract(workload)
    signatures = op_signatures(extraction.program)
    costs_s = {**dict.fromkeys(signatures, 1e-3), hand_over_signature(extraction): 1e-9}
    for kind in ("core", "core*2", "core, 2 at once"):
        session = Session(cost_s=costs_s, runs=5, spread=0.0, measured="2026-01-01")
        conditions = replace(conditions_of(devices[0]), kind=kind)
        CostCache().store(conditions, session)
    runtime = runtime_for(extraction, cluster)
    assert isinstance(runtime, CoreRuntime)
    graph = GraphArrays.from_graph(costed(runtime, runtime.graph, cluster))
    return Cores(workload, cluster, runtime, Problem.of(graph, cluster))


@pytest.mark.slow
def test_fitted_costs_are_kept_with_the_costs_of_the_step(
    cores: Cores, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = scaled_problem(cores.problem, {"core": dict.fromkeys(CLASSES, 1.3)})
    monkeypatch.setattr(CoreRuntime, "backend", lambda *_, **__: Stopwatch(slow))
    first, again = cores.optimized(), cores.optimized()
    assert first.mispredicted is not None
    assert again.mispredicted is None
    for each in (first, again):
        assert each.best.measurement is not None
        assert each.best.predicted_s == pytest.approx(each.best.measurement.median_s, rel=0.03)
        assert each.cost_source["core"].endswith(FITTED)
        assert each.unplaced is not None
        order = np.argsort(-each.best.placement.arrays()[1])
        workers_bytes = cores.runtime.peak_memory_bytes(each.best.placement, order.tolist())
        assert each.best.peak_memory_bytes == workers_bytes
    assert again.unplaced is not None
    unplaced_s = len(op_signatures(extract(cores.workload).program)) * 1e-3
    assert again.unplaced.predicted_s == pytest.approx(min(UNPLACED_S, 4 * unplaced_s))
    evaluation = placer.evaluate(again.placement, cores.workload, cores.cluster, progress=False)
    assert evaluation.step_s == pytest.approx(again.best.predicted_s, rel=0.01)


@pytest.mark.slow
def test_costs_are_fitted_to_the_last_runs(cores: Cores, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = scaled_problem(cores.problem, {"core": dict.fromkeys(CLASSES, 1.4)})
    turns = iter([slow])  # disturbed runs of all candidates; then the final, on a quiet machine
    monkeypatch.setattr(
        CoreRuntime, "backend", lambda *_, **__: Stopwatch(next(turns, cores.problem))
    )
    result = cores.optimized()
    finalists = [each for each in result.candidates if each.measurement and not each.eliminated]
    assert len(finalists) > 1
    for each in finalists:
        assert each.measurement is not None
        if not each.is_unplaced:
            assert each.predicted_s == pytest.approx(each.measurement.median_s, rel=0.03)
    again = cores.optimized()
    assert again.mispredicted is None
