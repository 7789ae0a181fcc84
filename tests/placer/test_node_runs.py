"""Runs of candidates on nodes of a cluster: which go on, and what is left when nodes die."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from envs.backend import StepResult
from envs.hardware.discover import present
from envs.measured import FEWEST_ROUNDS, STARTING_S, runs_s
from envs.measurement import Measurement
from envs.placement import Placement
from graphs.extract import Workload
from placer.choose import MEASURED_CANDIDATES, choose, worth_running
from placer.costed_step import costed_step
from placer.interrupt import Interrupt
from placer.job import Job, SearchConfig
from placer.pipeline import optimize_job
from placer.pipeline.candidate_runs import CandidateRuns
from placer.pipeline.node_runs import NodeRuns, groups_of
from placer.progress import Silent
from placer.ray_cluster.connection import RayCluster
from placer.ray_cluster.measuring import MeasuringNodes
from placer.ray_cluster.node_step import Runs
from placer.search.candidate import Candidate, Kind, Prediction
from tests.helpers.measured_machine import HANGS, Machine, TimedStep
from tests.helpers.random_problems import random_problem
from tests.helpers.ray_nodes import kill, ray_nodes

two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
FACTORS = (1.0, 3.0)
PROBLEM = random_problem(3, ops=60, devices=2)
COUNT = 13


def candidates() -> list[Candidate]:
    """Return a single device, then placements at random, predicted the slower the later."""
    rng = np.random.default_rng(0)
    found = [_candidate(Kind.SINGLE_DEVICE, np.zeros(PROBLEM.op_count, np.int32), 0.001)]
    for number in range(COUNT):
        devices = rng.integers(0, 2, PROBLEM.op_count).astype(np.int32)
        for group in set(PROBLEM.graph.group.tolist()) - {-1}:
            devices[group == PROBLEM.graph.group] = group % 2
        found.append(_candidate(Kind.OTHER, devices, 0.01 + 0.001 * number))
    return found


def _candidate(kind: Kind, devices: Any, predicted_s: float) -> Candidate:
    order = -np.arange(PROBLEM.op_count, dtype=np.float64)
    placement = Placement.of(PROBLEM.graph, PROBLEM.cluster, devices, order)
    prediction = Prediction(placement=placement, objective_s=predicted_s, peak_memory_bytes={})
    return Candidate(
        kind=kind,
        name=f"{predicted_s:.3f}",
        devices=devices,
        priority=order,
        step_ns=round(predicted_s * 1e9),
        prediction=prediction,
    )


class Here(AbstractContextManager["Here", None]):
    """Stands for nodes: runs all groups in this process."""

    names = ("a", "b")
    at_once = 2

    def __init__(self, *, error: Exception | None = None, name: str = "") -> None:
        self.machine = Machine(PROBLEM, FACTORS, noise=0.0)
        self.error = error
        self.name = name
        self.runs: list[Runs] = []

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def load(self, step: object, groups: int, report: object) -> None:
        """Do nothing."""

    def measure(
        self, groups: Sequence[Sequence[Placement]], runs: Runs, progress: Any
    ) -> list[list[Measurement]]:
        self.runs.append(runs)
        if self.error is not None:
            raise self.error
        found = [self.machine.evaluate(group) for group in groups]
        return [
            [replace(each.measurement, node=self.name) for each in group if each.measurement]
            for group in found
        ]


class Remarks(Silent):
    def __init__(self) -> None:
        self.remarks: list[str] = []

    def remark(self, text: str) -> None:
        self.remarks.append(text)


def preselected(nodes: Any, seconds: float = 1e9, progress: Silent | None = None) -> Any:
    step: Any = TimedStep(PROBLEM, FACTORS, Path())
    runs = NodeRuns(nodes=nodes, step=lambda _: step, progress=progress or Silent())
    return runs.preselected(PROBLEM, candidates(), seconds)


def test_where_all_fails_on_the_nodes_nothing_is_eliminated() -> None:
    nodes = Here()
    nodes.machine.broken = True
    after = preselected(nodes)
    assert not any(each.eliminated or each.measurement for each in after)


def test_the_fastest_of_each_group_goes_on_to_this_machine() -> None:
    before = candidates()
    groups = groups_of(before)
    assert groups[0] == [1, 6, 11]
    assert groups[4] == [5, 10]
    machine = Machine(PROBLEM, FACTORS)
    steps = [machine.simulator.step_ns(*each.placement.arrays())[0] for each in before]
    least = [1.005 * min(steps[i] for i in group) for group in groups]  # within noise of it
    expected = [
        next(i for i in group if steps[i] <= most)
        for group, most in zip(groups, least, strict=True)
    ]
    after = preselected(Here())
    left = [i for i, each in enumerate(after) if not each.eliminated]
    assert left == sorted([0, *expected])
    assert all(after[i].measurement is None for i in left)
    assert all(each.measurement for each in after if each.eliminated)
    assert worth_running(after, PROBLEM.cluster) == [0, *sorted(expected)]


def test_where_all_placements_run_here_or_time_is_short_nodes_run_nothing() -> None:
    few = candidates()[: MEASURED_CANDIDATES + 1]
    assert all(len(group) == 1 for group in groups_of(few))
    nodes = Here()
    assert not any(each.eliminated for each in preselected(nodes, seconds=0.5))
    assert nodes.runs == []


def test_where_time_is_short_groups_are_smaller() -> None:
    def needed_s(size: int) -> float:
        """Return what three waves of the longest group take, of which two run at once."""
        before = candidates()
        longest_s = runs_s([before[3 + 5 * k].predicted_s for k in range(size)], FEWEST_ROUNDS)
        return STARTING_S + 3 * (longest_s - STARTING_S)

    nodes = Here()
    after = preselected(nodes, seconds=needed_s(3))
    assert sum(each.measurement is not None for each in after) == COUNT - MEASURED_CANDIDATES
    after = preselected(nodes, seconds=needed_s(3) - 0.01)
    assert sum(each.measurement is not None for each in after) == MEASURED_CANDIDATES
    assert [runs.seconds for runs in nodes.runs] == [
        (needed_s(3) - STARTING_S) / 3,
        (needed_s(3) - 0.01 - STARTING_S) / 3,
    ]
    assert not any(each.measurement for each in preselected(nodes, seconds=needed_s(2) - 0.01))


def test_a_group_that_fails_sends_nothing_on() -> None:
    spoilt = candidates()[5].placement
    nodes = Here()
    nodes.machine.spoilt = lambda own: own.devices == spoilt.devices
    after = preselected(nodes)
    assert after[5].eliminated
    assert after[10].eliminated
    assert after[5].failure == "it died"
    assert sum(not each.eliminated for each in after) == 1 + MEASURED_CANDIDATES - 1


def test_if_the_nodes_are_lost_all_candidates_are_left() -> None:
    progress = Remarks()
    after = preselected(Here(error=ConnectionError("all are lost")), progress=progress)
    assert not any(each.eliminated for each in after)
    assert progress.remarks == ["Candidates run on this machine only: all are lost."]


class ThisMachine(AbstractContextManager["ThisMachine", None]):
    """Stands for the runtime of this machine and its workers."""

    interrupted = False

    def __init__(self) -> None:
        self.machine = Machine(PROBLEM, (1.0, 1.0), noise=0.0)  # unlike the nodes

    def final_rounds(self, step_s: Sequence[float]) -> int:
        return 0

    def backend(self, *_: object, **__: object) -> ThisMachine:
        return self

    def evaluate(self, placements: Sequence[Placement], progress: object) -> list[StepResult]:
        return self.machine.evaluate(placements)

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


def test_only_runs_of_this_machine_decide() -> None:
    step: Any = TimedStep(PROBLEM, FACTORS, Path())
    here, nodes = ThisMachine(), Here(name="10.0.0.5:9")
    given = [replace(each, spare=i > 3) for i, each in enumerate(candidates())]
    runs = CandidateRuns(
        backend=here,  # type: ignore[arg-type]
        interrupt=Interrupt(),
        progress=Silent(),
        nodes=NodeRuns(nodes=nodes, step=lambda _: step, progress=Silent()),  # type: ignore[arg-type]
    )
    after = runs.best(PROBLEM, given)
    assert not any(each.spare for each in after)
    assert here.machine.batches == [1 + MEASURED_CANDIDATES]
    tried = [each for each in after if each.measurement is not None]
    assert len(tried) == len(after) == len(given)
    for each in tried:
        assert each.measurement is not None
        assert each.measurement.node == ("10.0.0.5:9" if each.eliminated else "")
    left = [each for each in after if not each.eliminated]
    assert len(left) == 1 + MEASURED_CANDIDATES
    assert choose(after) is choose(left)
    assert runs.final(PROBLEM, after) == after
    short = replace(runs, seconds=0.1)
    assert len(short.best(PROBLEM, given)) == 4  # without those that are for nodes


class Killer(Silent):
    """Kills a node when the first group of placements has run, and another one runs there."""

    def __init__(self, cluster: Any, node: Any, is_due: Callable[[], bool] = lambda: True) -> None:
        self.cluster = cluster
        self.node = node
        self.is_due = is_due
        self.title = ""
        self.killed_at = 0.0  # share of the groups that had run

    def stage(self, title: str) -> None:
        self.title = title

    def advance(self, share: float, text: str = "") -> None:
        is_running = self.title.startswith("Running placements") and share > 0.0
        if is_running and not self.killed_at and self.is_due():
            kill(self.cluster, self.node)
            self.killed_at = share


@two_cores
@pytest.mark.slow
def test_three_nodes_of_which_one_dies_send_on_the_same_as_two(tmp_path: Path) -> None:
    def on_nodes(address: str, progress: Silent, doomed: str = "") -> tuple[Any, set[str]]:
        step: Any = TimedStep(PROBLEM, FACTORS, tmp_path, doomed)
        with (
            RayCluster(address) as cluster,
            MeasuringNodes(cluster, present(("core:0", "core:1"))) as nodes,
        ):
            runs = NodeRuns(nodes=nodes, step=lambda _: step, progress=progress)
            after = runs.preselected(PROBLEM, candidates(), 1e9)
        measured = [each.measurement for each in after]
        times = [None if one is None else one.wall_s.tolist() for one in measured]
        return times, {one.node for one in measured if one is not None}

    with ray_nodes(3, processors=2) as (cluster, others):
        killer = Killer(cluster, others[1], (tmp_path / HANGS).exists)
        three, _ = on_nodes(cluster.address, killer, others[1].node_id)
        assert 0.0 < killer.killed_at < 1.0
        two, names = on_nodes(cluster.address, Silent())
    assert three == two
    assert sum(each is not None for each in two) == COUNT - MEASURED_CANDIDATES
    assert len(names) == 2


class Towers(nn.Module):
    """Towers side by side, which give the search many placements to choose from."""

    def __init__(self) -> None:
        super().__init__()
        layers = [[nn.Linear(256, 256) for _ in range(4)] for _ in range(4)]
        self.towers = nn.ModuleList(nn.Sequential(*each) for each in layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([tower(x) for tower in self.towers]).sum(0)


@two_cores
@pytest.mark.slow
def test_three_nodes_of_which_one_dies_run_the_same_placements_of_a_model_as_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    inputs, target = torch.randn(128, 256), torch.randn(128, 256)
    workload = Workload.of(Towers(), inputs, nn.functional.mse_loss, target=target)
    measure, ran = MeasuringNodes.measure, []
    steps: list[Any] = []

    def recorded(own: MeasuringNodes, groups: Any, *others: Any) -> Any:
        found = measure(own, groups, *others)
        lengths = [len(each) for each in found]
        ran.append(([[each.devices for each in group] for group in groups], lengths))
        return found

    def costed_once(*arguments: Any) -> Any:
        """Return the step with the same measured costs for both searches."""
        if not steps:
            steps.append(costed_step(*arguments))
        return steps[0]

    monkeypatch.setattr(MeasuringNodes, "measure", recorded)
    monkeypatch.setattr("placer.pipeline.optimization.costed_step", costed_once)
    first: list[Any] = []
    with ray_nodes(3, processors=2) as (cluster, others):
        search = SearchConfig(budget="2000e", workers=f"ray://{cluster.address}")
        job = Job.of(workload, "core:0,core:1", search=search)
        killer = Killer(cluster, others[1])
        for progress in (killer, Silent()):
            ran.clear()
            result = optimize_job(job, progress)
            first.append(ran[0])  # a second search starts from costs that fit to these runs
            tagged = [one for one in result.candidates if one.measurement and one.measurement.node]
            assert tagged
            assert all(each.eliminated for each in tagged)
            assert result.best.measurement is not None
            assert result.best.measurement.node == ""
    assert 0.0 < killer.killed_at < 1.0
    assert first[0] == first[1]
