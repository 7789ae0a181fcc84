"""Jobs: the command line and Python build the same ones, and contradictions are refused."""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import nn

import placer
from envs.executors.cores import fork_server
from envs.hardware.cluster import cluster_to_toml
from envs.hardware.discover import physical_cores
from graphs.graph import add_edge, add_op, new_graph
from graphs.graph_file import load_graph, save_graph
from graphs.selection import ConstraintError
from placer.api import run_job
from placer.cli.main import main
from placer.job import MOST_WORKERS, Job, SearchConfig
from placer.progress import Silent
from placer.search import registry
from placer.search.heuristics import Heft, RoundRobin
from placer.search.request import Budget
from tests.helpers.clusters import toy_pair

CLUSTER = toy_pair("a", "b")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Return the paths of a graph and of a cluster."""
    graph = new_graph("two chains")
    for i in range(12):
        add_op(graph, str(i), cost_s={"x": 1e-3}, output_bytes=100)
        if i > 1:
            add_edge(graph, str(i - 2), str(i))
    save_graph(graph, tmp_path / "graph.json")
    (tmp_path / "cluster.toml").write_text(cluster_to_toml(CLUSTER))
    return tmp_path / "graph.json", tmp_path / "cluster.toml"


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ("--seed 3 --placer annealing", {"search": {"seed": 3, "placer": "annealing"}}),
        ("--objective max-load", {"search": {"objective": "max-load"}}),
        ("--workers 2", {"search": {"workers": 2}}),
        (
            "--objective throughput --micro-batches 4",
            {"search": {"objective": "throughput", "micro_batches": 4}},
        ),
        (
            "--pin 0=b --keep-together [123]",
            {"kept": {"pins": {"0": "b"}, "keep_together": ["[123]"]}},
        ),
        ("--policy none --data-parallel 2", {"search": {"policy": None}, "replicas": 2}),
    ],
)
def test_a_graph_is_placed_from_python_as_from_the_command_line(
    options: str, arguments: dict[str, Any], files: tuple[Path, Path]
) -> None:
    graph, cluster = files
    out = graph.parent / "placement.json"
    command = ["optimize", str(graph), "--cluster", str(cluster), "--budget", "100e", "--quiet"]
    assert main([*command, "--out", str(out), *options.split()]) == 0
    for source, devices in ((graph, str(cluster)), (load_graph(graph), CLUSTER)):
        found = placer.optimize(
            source,
            devices,
            search=placer.SearchConfig(budget="100e", **arguments.get("search", {})),
            constraints=placer.Constraints(**arguments.get("kept", {})),
            replicas=arguments.get("replicas"),
            progress=False,
        )
        assert found.placement.to_dict() == json.loads(out.read_text())


def test_a_graph_made_by_hand_needs_costs_only() -> None:
    graph: placer.Graph = nx.DiGraph()
    graph.add_nodes_from(["read", "left", "right", "join"], cost_s={"*": 1e-3})
    graph.add_edges_from([("read", "left"), ("read", "right", {"bytes": 100})])
    graph.add_edges_from([("left", "join"), ("right", "join")])
    result = placer.optimize(graph, CLUSTER, budget="50e", progress=False)
    assert 3e-3 < result.best.predicted_s < 3.1e-3
    evaluation = placer.evaluate(result.placement, graph, CLUSTER, progress=False)
    assert evaluation.step_s == pytest.approx(result.best.predicted_s)
    graph.add_node("other", flop=1)
    with pytest.raises(ValueError, match="op 'other'"):
        placer.optimize(graph, CLUSTER, budget="50e", progress=False)


@pytest.mark.parametrize(
    ("arguments", "search", "message"),
    [
        ({"devices": "auto"}, {}, "no devices of its own"),
        ({"extractor": "export"}, {}, "are for models"),
        ({}, {"objective": "throughput"}, "give 2 or more"),
        ({}, {"objective": "throughput", "micro_batches": 2049}, "give 2048 or fewer"),
        ({}, {"seed": -1}, "seed is -1"),
        ({}, {"groups": 0}, "groups is 0"),
        ({}, {"seed": "a"}, "seed is .a., not a whole number"),
        ({}, {"groups": 2.5}, "groups is 2.5, not a whole number"),
        ({}, {"workers": 2.5}, "workers is 2.5, not a whole number"),
        ({}, {"seed": True}, "seed is True, not a whole number"),
        ({}, {"micro_batches": "2"}, "micro_batches is .2., not a whole number"),
        ({}, {"workers": 0}, "workers is 0"),
        ({}, {"placer": "heft", "policy": "generalist"}, "'heft' asks no policy"),
        ({}, {"placer": Heft(), "objective": "max-load"}, "not max-load"),
        ({"replicas": 2}, {"objective": "max-load"}, "objective max-load"),
        ({"memory": {"a": "much"}}, {}, "much"),
        ({"memory": {"a": 1}}, {}, "leave memory out"),
    ],
)
def test_contradictions_are_refused_when_a_job_is_made(
    arguments: dict[str, Any], search: dict[str, Any], message: str
) -> None:
    def make(devices: Any = CLUSTER, memory: Any = None, **named: Any) -> None:
        constraints = placer.Constraints(memory=memory or {})
        config = placer.SearchConfig(**search)
        Job.of(new_graph("any"), devices, search=config, constraints=constraints, **named)

    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_only_with_a_budget_in_seconds_workers_depend_on_the_machine() -> None:
    cores = min(len(physical_cores()), MOST_WORKERS)
    assert SearchConfig(budget="1s").worker_count == cores
    assert SearchConfig(budget="100e").worker_count == 1
    for budget in ("1s", "100e"):
        assert SearchConfig(budget=budget, workers=3).worker_count == 3


class LastIsFastest:
    """A backend that keeps what it runs; each placement is faster than the one before."""

    def __init__(self) -> None:
        self.ran: list[placer.Placement] = []

    def evaluate(
        self, placements: Sequence[placer.Placement], progress: Any = None
    ) -> list[placer.StepResult]:
        self.ran += placements
        steps_s = [1.0 / (1 + i) for i in range(len(placements))]
        return [placer.StepResult(step_s=step_s, peak_memory_bytes={}) for step_s in steps_s]


WORKLOAD = placer.Workload.of(nn.Linear(2, 2), torch.ones(1, 2), training=False)


@pytest.mark.parametrize(
    ("arguments", "search", "message"),
    [
        ({"budget": "1s"}, {}, "leave budget out"),
        ({"devices": "cpu"}, None, "given twice"),
        ({"loss": nn.MSELoss()}, None, "a workload has its own"),
        ({}, {"objective": "max-load"}, "other objectives"),
        ({"replicas": 2}, {"backend": LastIsFastest()}, "a backend is for a single placement"),
        ({}, {"backend": LastIsFastest(), "measure": False}, "measure=False runs none"),
        ({}, {"backend": LastIsFastest(), "objective": "max-load"}, "single steps, not max-load"),
    ],
)
def test_arguments_that_repeat_or_contradict_others_are_refused(
    arguments: dict[str, Any], search: dict[str, Any] | None, message: str
) -> None:
    def optimize() -> None:
        config = None if search is None else placer.SearchConfig(**search)
        placer.optimize(WORKLOAD, CLUSTER, search=config, **arguments)

    with pytest.raises(ValueError, match=message):
        optimize()


def test_empty_names_of_devices_are_no_default() -> None:
    placement = {"": "core:0"}
    for call in (
        lambda: placer.optimize(WORKLOAD, devices=""),
        lambda: placer.extract(WORKLOAD, devices=""),
        lambda: placer.evaluate(placement, WORKLOAD, devices=""),
    ):
        with pytest.raises(ValueError, match="no devices were named"):
            call()


def test_a_registered_placer_is_used_by_its_name(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    graph, cluster = files
    placer.register_placer("in turn", RoundRobin)
    search = placer.SearchConfig(budget="10e", placer="in turn")
    assert isinstance(search.placer, RoundRobin)
    found = placer.optimize(graph, cluster, search=search, progress=False)
    assert any(row.name.startswith("round robin") for row in found.candidates)
    with pytest.raises(ValueError, match="choose another name"):
        placer.register_placer("heft", RoundRobin)
    with pytest.raises(ValueError, match="objectives"):
        placer.register_placer("no class", dict)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize("name", placer.__all__)
def test_public_names_exist_and_functions_take_few_parameters(name: str) -> None:
    public = getattr(placer, name)
    if inspect.isfunction(public) or public in (placer.SearchConfig, placer.Constraints):
        assert len(inspect.signature(public).parameters) <= 13


def test_a_backend_of_the_user_decides_between_the_best_candidates(
    files: tuple[Path, Path],
) -> None:
    backend = LastIsFastest()
    search = placer.SearchConfig(budget="20e", policy=None, backend=backend)
    result = placer.optimize(*files, search=search, progress=False)
    ran = [row for row in result.candidates if row.measurement is not None]
    assert len(ran) == len(backend.ran) > 1
    assert result.placement.devices == backend.ran[-1].devices
    assert (result.placement.measured or {})["step_s"] == 1.0 / len(ran)
    assert result.best.predicted_s > min(row.predicted_s for row in ran)


def test_what_forks_workers_starts_before_a_model_that_is_run_on_cores_is_loaded(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[str] = []
    monkeypatch.setattr(fork_server, "running_server", lambda: started.append("server"))
    (tmp_path / "model.py").write_text("def build():\n    raise RuntimeError('loaded')\n")
    core = f"core:{min(os.sched_getaffinity(0))}"
    for devices, measure, count in ((core, True, 1), (core, False, 0), ("cpu", True, 0)):
        job = Job.of(
            f"{tmp_path / 'model.py'}:build", devices, search=SearchConfig(measure=measure)
        )
        started.clear()
        with pytest.raises(Exception, match="loaded"):
            run_job(job, Silent())
        assert len(started) == count
    graph, cluster = files
    run_job(Job.of(graph, cluster, search=SearchConfig(policy=None, budget="10e")), Silent())
    assert not started


@pytest.mark.parametrize(
    ("budget", "measure", "search", "measuring_s"),
    [
        ("20s", True, Budget(seconds=10.0), 10.0),
        ("4s", True, Budget(seconds=2.0), 6.0),
        ("20s", "5s", Budget(seconds=15.0), 5.0),
        ("20s", "1m", Budget(seconds=10.0), 60.0),
        ("4000e", True, Budget(evaluations=4000), math.inf),
    ],
)
def test_a_search_and_its_runs_share_the_budget(
    budget: str, measure: bool | str, search: Budget, measuring_s: float
) -> None:
    config = SearchConfig(budget=budget, measure=measure, policy=None)
    assert config.search_budget == search
    assert config.measuring_s == measuring_s


@pytest.mark.parametrize("measure", [30, 1, None])
def test_whether_candidates_are_run_is_no_number(measure: Any) -> None:
    with pytest.raises(TypeError, match=f"such as '10s', not {measure}"):
        SearchConfig(measure=measure)


def test_a_backend_without_evaluate_is_refused_when_it_is_given() -> None:
    backend: Any = "measured"
    with pytest.raises(TypeError, match=r"'measured' is no placer\.Backend"):
        SearchConfig(backend=backend)


def test_runs_are_not_limited_by_evaluations() -> None:
    with pytest.raises(ValueError, match="runs take wall time"):
        SearchConfig(measure="400e")


def test_pins_are_for_one_replica() -> None:
    pinned = placer.Constraints(pins={"a": CLUSTER.names[0]})
    with pytest.raises(ConstraintError, match="each of 2 replicas has devices of its own"):
        Job.of(new_graph("any"), CLUSTER, constraints=pinned, replicas=2)
    Job.of(new_graph("any"), CLUSTER, constraints=pinned, replicas="auto")
