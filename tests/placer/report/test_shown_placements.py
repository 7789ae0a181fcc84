"""Reports of placement files: the verdict, recorded times, and the devices of commands."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envs.placement import Placement
from envs.problem import Problem
from envs.replication import Replication
from graphs.graph import GraphArrays, add_op, new_graph
from placer.cli import show
from placer.cli.main import build_parser
from placer.evaluation import reviewed
from placer.report.html import report_data
from tests.helpers.simulator_cases import one_kind
from tests.placer.report.test_report import data_of


def two_speeds() -> Problem:
    graph = new_graph("two speeds")
    add_op(graph, "a", cost_s={"fast": 1e-3, "slow": 3e-3})
    cluster = one_kind(2)
    devices = [
        replace(d, kind=kind) for d, kind in zip(cluster.devices, ("fast", "slow"), strict=True)
    ]
    return Problem.of(GraphArrays.from_graph(graph), replace(cluster, devices=tuple(devices)))


def on_device(problem: Problem, device: int) -> Placement:
    devices = np.full(problem.op_count, device)
    return Placement.of(problem.graph, problem.cluster, devices, np.zeros(problem.op_count))


def test_a_placement_on_the_slower_device_has_headroom() -> None:
    problem = two_speeds()
    for device, found in ((0, True), (1, False)):
        placement = on_device(problem, device)
        data = report_data(reviewed(problem, placement))
        assert data["verdict"].startswith("No headroom" if found else "0.33x as fast as")
        assert data["speed_up"] == pytest.approx(1.0 if found else 1 / 3)


def test_what_a_file_records_of_other_steps_is_not_shown() -> None:
    problem = two_speeds()
    measured = {"step_s": 0.5, "single_device_step_s": 0.25}
    placement = on_device(problem, 0)
    plain = replace(placement, measured=measured)
    of_replicas = replace(plain, replicas=Replication(groups=(("d0",), ("d1",))))
    unplaced = replace(plain, unplaced=True)
    for own, times in ((plain, [0.5]), (unplaced, [0.5]), (of_replicas, [])):
        rows = report_data(reviewed(problem, own))["candidates"]
        assert [row["measured"]["step_s"] for row in rows if row["measured"]] == times


@pytest.mark.parametrize(("unplaced", "given"), [(True, True), (True, False), (False, False)])
def test_a_report_searches_the_devices_that_were_searched(
    unplaced: bool, given: bool, tmp_path: Path
) -> None:
    words = ["--target", "model.py:build", "--memory", "d0=8,d7=8"]
    words += ["--devices", "d0,d1,d7"] * given
    args = build_parser().parse_args(["show", "p.json", "--html", "page.html", *words])
    problem = two_speeds()
    placement = on_device(problem, 0)
    result = reviewed(problem, replace(placement, unplaced=unplaced))
    show.write_report(result, args, Path("p.json"), tmp_path / "page.html")
    commands = [
        shlex.split(each["command"]) for each in data_of(tmp_path / "page.html")["commands"]
    ]
    [search] = [words for words in commands if words[1] == "optimize"]
    assert search[search.index("--memory") + 1] == "d0=8,d7=8"
    names = search[search.index("--devices") + 1] if "--devices" in search else ""
    assert names == ("d0,d1,d7" if given else "" if unplaced else "d0,d1")
