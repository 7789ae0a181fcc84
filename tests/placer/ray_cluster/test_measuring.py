"""Measuring on nodes: who loads the model, who runs what, and what is left when nodes fail."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from envs.hardware.cluster import Cluster, Device
from envs.hardware.discover import discover, present
from envs.hardware.errors import DeviceWarning
from envs.measured import DevicesLostError
from envs.measurement import Measurement
from envs.placement import Placement
from envs.problem import Problem
from envs.runtime import calibrated, costed, extraction_for, runtime_for
from graphs.extract import Workload
from graphs.graph import GraphArrays
from placer.ray_cluster.connection import LostError, Node, NodeProcess, RayCluster
from placer.ray_cluster.device_sets import Machine
from placer.ray_cluster.measuring import MeasuringNodes
from placer.ray_cluster.node_step import NodeStep, OtherDevicesError, Runs
from tests.helpers.ray_nodes import kill, ray_nodes

two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
MOST_S = 10.0
NODE = Node(key="a", name="10.0.0.5:9", cpus=8, gpus=4)


class Locked(nn.Linear):
    """A model that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.lock = threading.Lock()


def test_a_model_that_cannot_be_pickled_is_refused() -> None:
    pytest.importorskip("ray")
    step = Workload.of(Locked(), torch.randn(2, 4), training=False)
    problem: Any = None
    with pytest.raises(ValueError, match=r"Locked cannot be sent .* pickle .*lock"):
        NodeStep.of(step, problem, present(("core:0", "core:1")))


@two_cores
def test_what_is_sent_runs_on_other_devices() -> None:
    pytest.importorskip("ray")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    workload = Workload.of(
        model, torch.randn(16, 64), lambda y, t: (y - t).square().mean(), target=torch.randn(16, 64)
    )
    cluster = discover("core:0,core:1")
    runtime = runtime_for(extraction_for(workload, cluster.names), cluster)
    joined = runtime.joined(cluster)
    assert joined is not None
    linked = calibrated(cluster)
    graph = GraphArrays.from_graph(costed(runtime, runtime.graph, linked))
    problem = Problem.of(graph, runtime.planned(linked))
    half = np.arange(len(graph)) % 2 if (graph.group < 0).all() else np.zeros(len(graph), int)
    order = -np.arange(len(graph), dtype=float)
    placements = [
        Placement.of(graph, problem.cluster, half, order),
        Placement.of(graph, problem.cluster, np.ones(len(graph), int), order),
        replace(Placement.of(graph, joined, np.zeros(len(graph), int), order), unplaced=True),
    ]
    loaded = NodeStep.of(workload, problem, cluster).loaded(("core:1", "core:0"))
    try:
        runs = loaded.measure(placements, Runs((1e-3,), rounds=3))
        assert [run.failure for run in runs] == ["", "", ""]
        assert [len(run.wall_s) for run in runs] == [3, 3, 3]
        peaks = runs[1].peak_memory_bytes  # all of it on the second device, by our names
        assert peaks["core:1"] > peaks["core:0"]
    finally:
        loaded.close()


class Processes:
    """Stands for a Ray cluster: calls run in this process, one answer at a time."""

    def __init__(self, *lost: int, cores: int = 2, unreachable: str = "") -> None:
        self.lost = lost  # the calls, by number, whose process dies
        self.cores = cores  # of each node
        self.unreachable = unreachable  # a node that does not answer to any call
        self.started: list[str] = []
        self.answers: list[Any] = []
        self.killed: list[str] = []
        self.most_at_once = 0

    def ask(self, function: object) -> dict[Node, Machine]:
        del function
        machine = Machine("", tuple(range(self.cores)))
        return {NODE._replace(key=key, name=key): machine._replace(boot=key) for key in "abc"}

    def share(self, step: Any, prepare: Any) -> Any:
        return step, prepare

    def start(self, node: Node, shared: Any, *arguments: Any, cpus: int, gpus: int) -> Any:
        assert (cpus, gpus) == (2, 0)
        if node.name == self.unreachable == "a":
            raise LostError("node a does not answer")
        self.started.append(node.name)
        return Process(self, node, shared[0]), self.answered(None)

    def answered(self, value: object) -> int:
        self.answers.append(value)
        return len(self.answers) - 1

    def done(self, waiting: Sequence[int], *, timeout_s: float = 0.0) -> list[int]:
        self.most_at_once = max(self.most_at_once, len(waiting))
        return [*waiting][:1]

    def result(self, answer: int) -> Any:
        if answer in self.lost:
            raise LostError("it died")
        if isinstance(value := self.answers[answer], Exception):
            raise value
        return value


class Process:
    def __init__(self, cluster: Processes, node: Node, step: Any) -> None:
        self.cluster = cluster
        self.node = node
        self.step = step

    def call(self, function: object, *arguments: Any) -> int:
        if self.node.name == self.cluster.unreachable:
            raise LostError("it does not answer")
        try:
            value = self.step(self.node.name, *arguments) if arguments else None
        except DevicesLostError as error:
            value = error
        return self.cluster.answered(value)

    def kill(self) -> None:
        self.cluster.killed.append(self.node.name)


def run_of(node: str, group: Sequence[Any], runs: Runs, broken: str = "") -> list[Measurement]:
    """Return runs of placements, which stand for their step times; all fail on a broken node."""
    times = [np.array([] if node == broken else [each]) for each in group]
    failure = "no shared memory" if node == broken else ""
    return [Measurement(wall_s=one, cpu_clock_s=one, failure=failure) for one in times]


def measured_on(cluster: Any, step: Any, groups: Any) -> list[list[tuple[str, float]]]:
    with MeasuringNodes(cluster, present(("core:0", "core:1"))) as nodes:
        nodes.load(step, len(groups))
        found = nodes.measure(groups, Runs())
    return [[(one.node, one.median_s) for one in group] for group in found]


@two_cores
def test_groups_take_turns_and_run_again_if_a_process_dies() -> None:
    groups = [[1.0, 2.0], [3.0], [4.0], [5.0], [6.0]]
    cluster = Processes()
    found = measured_on(cluster, run_of, groups)
    assert cluster.most_at_once == 3
    assert [group[0][0] for group in found[:3]] == ["a", "b", "c"]
    dying = Processes(4)  # three have loaded the step: the second group
    again = measured_on(dying, run_of, groups)
    assert dying.killed[0] == "b"
    assert {node for group in again for node, _ in group} == {"a", "c"}
    for one, other in zip(found, again, strict=True):
        assert [step_s for _, step_s in one] == [step_s for _, step_s in other]


@two_cores
def test_if_all_nodes_die_it_is_an_error() -> None:
    with pytest.raises(ConnectionError, match="no node of the Ray cluster is left"):
        measured_on(Processes(3, 4, 5, 6, 7), run_of, [[1.0], [2.0], [3.0]])


@two_cores
@pytest.mark.parametrize(("groups", "loaded"), [(1, "ab"), (2, "ab"), (4, "abca"), (9, "abcabc")])
def test_as_many_sets_load_as_there_are_groups_and_at_least_two(groups: int, loaded: str) -> None:
    cluster = Processes(cores=4)
    found = measured_on(cluster, run_of, [[1.0]] * groups)
    assert "".join(cluster.started) == loaded
    assert len(found) == groups


@two_cores
def test_sets_in_reserve_load_where_one_cannot_and_when_all_are_lost() -> None:
    cluster = Processes(0)
    with pytest.warns(DeviceWarning, match="node a .* died while it loaded"):
        measured_on(cluster, run_of, [[1.0]])
    assert cluster.started == ["a", "b", "c"]
    cluster = Processes(2, 3)  # two have loaded the step: both die while they run the group
    assert measured_on(cluster, run_of, [[1.0]]) == [[("c", 1.0)]]
    assert cluster.started == ["a", "b", "c"]


@two_cores
@pytest.mark.parametrize("node", ["a", "b"])
def test_a_node_that_answers_to_no_call_is_left_out(node: str) -> None:
    cluster = Processes(unreachable=node)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = measured_on(cluster, run_of, [[1.0], [2.0], [3.0]])
    assert [group[0][1] for group in found] == [1.0, 2.0, 3.0]
    assert {group[0][0] for group in found} == {"a", "b", "c"} - {node}
    texts = [str(each.message) for each in caught]
    assert texts == ["node a does not answer; it measures nothing"] * (node == "a")


@two_cores
def test_a_node_with_other_sets_still_measures() -> None:
    cluster = Processes(1, cores=4)
    with pytest.warns(DeviceWarning, match="node b .* it died; other devices of it measure"):
        found = measured_on(cluster, run_of, [[float(number)] for number in range(6)])
    assert "b" in {node for group in found for node, _ in group}


def test_an_error_of_ray_is_one_that_names_the_node() -> None:
    ray: Any = pytest.importorskip("ray")

    class Actor:
        class call:  # noqa: N801 - as Ray has it
            @staticmethod
            def remote(*_: object) -> None:
                raise ray.exceptions.RaySystemError("socket closed")

    process = NodeProcess(ray, Actor(), NODE)
    with pytest.raises(LostError, match=r"node 10\.0\.0\.5:9 .* does not answer: .*socket closed"):
        process.call(len)


@two_cores
def test_a_node_on_which_everything_fails_is_left_out() -> None:
    groups = [[1.0, 2.0], [3.0], [4.0], [5.0]]
    with pytest.warns(DeviceWarning, match="node b .* fails to run a step on core:0, core:1"):
        found = measured_on(Processes(), partial(run_of, broken="b"), groups)
    assert [step_s for group in found for _, step_s in group] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert "b" not in {node for group in found for node, _ in group}


@two_cores
def test_a_node_that_cannot_start_workers_is_left_out() -> None:
    def starts(node: str, group: Sequence[Any], runs: Runs) -> list[Measurement]:
        if node == "b":
            raise DevicesLostError("no new workers could be started: no space left on device")
        return run_of(node, group, runs)

    with pytest.warns(DeviceWarning, match="node b .* cannot run steps: no new workers"):
        found = measured_on(Processes(), starts, [[1.0], [2.0], [3.0]])
    assert [group[0][1] for group in found] == [1.0, 2.0, 3.0]


@two_cores
def test_a_process_that_dies_while_it_loads_is_named() -> None:
    with pytest.warns(DeviceWarning, match="node b .* died while it loaded the model: it died"):
        found = measured_on(Processes(1), run_of, [[1.0], [2.0]])
    assert {group[0][0] for group in found} == {"a", "c"}


@two_cores
def test_placements_that_fail_everywhere_leave_out_nothing() -> None:
    def fails(node: str, group: Sequence[Any], runs: Runs) -> list[Measurement]:
        return run_of(node, group, runs, broken=node if group == [3.0] else "")

    found = measured_on(Processes(), fails, [[1.0], [3.0], [4.0]])
    assert [group[0][1] for group in found] == [1.0, np.inf, 4.0]


@two_cores
def test_the_last_devices_are_kept_if_a_group_failed_on_them_only_once() -> None:
    seen: list[Any] = []

    def fails_once(node: str, group: Sequence[Any], runs: Runs) -> list[Measurement]:
        seen.append(group)
        return run_of(node, group, runs, broken=node if len(seen) == 1 else "")

    with pytest.warns(DeviceWarning, match="died while it loaded") as caught:
        found = measured_on(Processes(1, 2), fails_once, [[1.0], [2.0]])  # b and c die
    assert found == [[("a", 1.0)], [("a", 2.0)]]
    assert ["died" in str(each.message) for each in caught] == [True, True]


class Unloadable:
    """A step that no node can load."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def loaded(self, names: Sequence[str]) -> Any:
        raise self.error


@two_cores
@pytest.mark.slow
def test_nodes_that_cannot_measure_are_named_in_time() -> None:
    devices = present(("core:0", "core:1"))
    with ray_nodes(2, processors=1) as (cluster, _), RayCluster(cluster.address) as connection:
        began = time.monotonic()
        with pytest.raises(ValueError, match=r"node \S+:\d+ .* offers 1, .* needs 2, and 1 other"):
            MeasuringNodes(connection, devices)
        assert time.monotonic() - began < MOST_S
        cluster.add_node(num_cpus=2)
        began = time.monotonic()
        with pytest.warns(DeviceWarning, match=r"node \S+:\d+ .* offers 1, .* measures nothing"):
            nodes = MeasuringNodes(connection, devices)
        assert time.monotonic() - began < MOST_S
        with nodes, pytest.raises(ValueError, match=r"node \S+:\d+ .* cannot measure: 'weights'"):
            nodes.load(Unloadable(KeyError("weights")))
        other = OtherDevicesError("its cuda:0 is another")
        with (
            pytest.warns(DeviceWarning, match=r"node \S+:\d+ .* cannot: its cuda:0 is another"),
            pytest.raises(ConnectionError, match="is left to measure"),
        ):
            nodes.load(Unloadable(other))


class Numbers:
    """A step whose placements stand for their step times."""

    def loaded(self, names: Sequence[str]) -> Numbers:
        return self

    def measure(self, placements: Sequence[Any], runs: Runs) -> list[Measurement]:
        return run_of("any", placements, runs)

    def close(self) -> None:
        """Do nothing."""


@two_cores
@pytest.mark.slow
def test_a_node_may_die_before_it_loads_before_it_runs_and_when_all_is_done() -> None:
    devices, groups = present(("core:0", "core:1")), [[1.0, 2.0], [3.0], [4.0]]
    with ray_nodes(1, processors=2) as (cluster, _), RayCluster(cluster.address) as connection:
        for dies in ("before loading", "before running", "at the end"):
            doomed = cluster.add_node(num_cpus=2)
            with MeasuringNodes(connection, devices) as nodes:
                assert len(nodes.names) == 2
                if dies == "before loading":
                    kill(cluster, doomed)
                    name = rf"node \S+:{doomed.node_manager_port} "
                    with pytest.warns(DeviceWarning, match=f"{name}.* died while it loaded"):
                        nodes.load(Numbers(), len(groups))
                else:
                    nodes.load(Numbers(), len(groups))
                if dies == "before running":
                    kill(cluster, doomed)
                found: Any = nodes.measure(groups, Runs())  # type: ignore[arg-type]
                assert [[one.median_s for one in group] for group in found] == groups
                if dies == "at the end":
                    kill(cluster, doomed)


class Seen:
    """Fails with the GPUs that its process has, once another process runs beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def loaded(self, names: Sequence[str]) -> Seen:
        assert names == ("cuda:0", "cuda:1")
        return self

    def measure(self, placements: Sequence[Placement], runs: Runs) -> list[Measurement]:
        visible = os.environ["CUDA_VISIBLE_DEVICES"]
        (self.folder / visible).touch()
        end = time.monotonic() + 60.0
        while len([*self.folder.iterdir()]) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        return [Measurement(wall_s=np.ones(0), cpu_clock_s=np.ones(0), failure=visible)]

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.slow
def test_sets_of_one_node_run_at_once_with_gpus_of_their_own(tmp_path: Path) -> None:
    devices = [Device(name=f"cuda:{number}", kind="gpu", memory_bytes=1) for number in range(2)]
    with ray_nodes(1) as (cluster, _):
        cluster.add_node(num_cpus=2, num_gpus=4)
        with RayCluster(cluster.address) as connection:
            with pytest.warns(DeviceWarning, match="offers 0 GPUs"):
                nodes = MeasuringNodes(connection, Cluster(name="two", devices=tuple(devices)))
            with nodes:
                assert nodes.at_once == 2
                nodes.load(Seen(tmp_path), groups=2)
                found = nodes.measure([[], []], Runs())
    visible = [set(one.failure.split(",")) for [one] in found]
    assert visible[0] | visible[1] == {"0", "1", "2", "3"}
    assert len({one.node for [one] in found}) == 1
