"""Small runs of the benchmarks; without a GPU those of torch devices use a fake device."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import (
    extraction,
    instances,
    max_load,
    quality,
    search,
    simulator,
    startup,
)
from benchmarks.__main__ import build_parser, chosen_parts, main
from benchmarks.large_graphs import problems
from benchmarks.machine import overhead
from benchmarks.quality import Scores
from benchmarks.record import Effort, Record
from benchmarks.replicas import scaling, sync_methods, sync_quality
from benchmarks.simulator import PlainSimulator, placements
from benchmarks.tables import BEGIN, END, Table, merged, write_tables
from envs.problem import Problem
from envs.simulator import Simulator
from envs.simulator.bounds import lower_bound_ns, pace_ns
from graphs.graph import GraphArrays
from graphs.synthetic.shapes import layered
from placer.policies import load
from placer.policies.pool import Exercise
from placer.search.portfolio import Portfolio
from placer.search.registry import placer_named
from placer.search.request import Budget, SearchRequest
from tests.helpers.clusters import nodes
from tests.helpers.docs_pages import PAGES
from tests.helpers.folders import ROOT

TABLE = Table("Gaps", "above the optimum", ("problem", "gap"), (("small", "0.0%"), ("big", "2.0%")))
QUOTED = re.compile(r"`python -m benchmarks((?: [^`]+)?)`")


@pytest.fixture(scope="module")
def inception() -> Exercise:
    return next(item for item in instances.judged() if item.family == "inception 4")


# What all benchmarks share


def test_a_part_that_fails_is_written_down_and_the_next_one_runs(tmp_path: Path) -> None:
    def broken(found: dict[str, Any]) -> None:
        found["before"] = 1
        raise RuntimeError("it broke")

    def infinite(found: dict[str, Any]) -> Table:
        found["rate"] = float("inf")
        return TABLE

    record = Record(tmp_path / "found.json", limit_s=60.0)
    assert record.part("first", broken) is None
    assert record.part("second", infinite) == TABLE
    record.limit_s = 0.0
    record.part("third", broken)
    parts = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert parts["first"]["failure"] == "RuntimeError: it broke"
    assert "it broke" in parts["first"]["traceback"]
    assert parts["first"]["before"] == 1
    assert parts["second"]["rate"] is None
    assert record.data["parts"]["third"].keys() == {"skipped"}
    assert record.failed == ["first"]


def test_whatever_a_part_keeps_is_saved(tmp_path: Path) -> None:
    def kept(found: dict[str, Any]) -> None:
        found["array"] = np.array([[0.5, np.nan], [np.inf, 2.0]])
        found["nested"] = {3: (np.arange(2, dtype=np.int32), np.float32(0.25), np.bool_(True))}
        found["path"] = Path("folder/file")

    record = Record(tmp_path / "found.json")
    record.part("kept", kept)
    part = json.loads((tmp_path / "found.json").read_text())["parts"]["kept"]
    assert part["array"] == [[0.5, None], [None, 2.0]]
    assert part["nested"] == {"3": [[0, 1], 0.25, True]}
    assert part["path"] == "folder/file"


def test_a_part_that_takes_longer_than_is_left_is_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr("benchmarks.record.time.perf_counter", lambda: now_s)
    record = Record(None, limit_s=100.0)
    # 30 s are left for the third, and its kind took up to 40 s
    seconds = {"one: profile": 40, "two: 50%": 30, "three: profile": 20, "four: 50%": 30}
    for name, duration_s in {**seconds, "five: overhead": 0}.items():

        def work(found: dict[str, Any], duration_s: float = duration_s) -> None:
            nonlocal now_s
            now_s += duration_s
            found["done"] = True

        record.part(name, work)
    parts = record.data["parts"]
    assert "takes 40 s, and 30 s" in parts["three: profile"]["skipped"]
    assert [name[:5] for name in parts if "done" not in parts[name]] == ["three", "five:"]
    assert record.left_s == 0


def test_tables_replace_what_is_between_the_markers_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_tables(page, "new\n")
    write_tables(page, "newer\n")
    assert page.read_text() == f"before\n{BEGIN}\nnewer\n{END}\nafter\n"
    write_tables(tmp_path / "new.md", "table\n")
    assert (tmp_path / "new.md").read_text() == f"{BEGIN}\ntable\n{END}\n"


def test_tables_of_one_title_are_joined() -> None:
    other = replace(TABLE, title="Speed")
    [joined, last] = merged([TABLE, other, replace(TABLE, rows=(("huge", "12.0%"),))])
    assert [row[0] for row in joined.rows] == ["small", "big", "huge"]
    assert last == other


def test_the_command_runs_what_is_named_and_fails_if_a_part_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(found: dict[str, Any]) -> None:
        raise OSError("no network")

    monkeypatch.setattr(
        scaling, "parts", lambda effort: {"a": fail, "b": lambda found: TABLE, "c": fail}
    )
    out, page = tmp_path / "found.json", tmp_path / "page.md"
    with pytest.raises(SystemExit, match=r"failed: scaling: a$"):
        main(["scaling:a", "scaling:b", "--out", str(out), "--markdown", str(page)])
    parts = json.loads(out.read_text())["parts"]
    assert set(parts) == {"scaling: a", "scaling: b"}
    assert parts["scaling: a"]["failure"] == "OSError: no network"
    assert "| big | 2.0% |" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["speed"], "there is no benchmark 'speed'"),
        (["search:speed"], "search has no part 'speed'"),
        (["--markdown", "page.md"], "has no lines"),
    ],
)
def test_a_wrong_name_or_page_is_reported_before_anything_is_measured(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("page.md").write_text("mine\n")
    with pytest.raises(SystemExit):
        main(arguments)
    assert told in capsys.readouterr().err
    assert Path("page.md").read_text() == "mine\n"


def test_benchmarks_that_the_docs_quote_exist() -> None:
    pages = [*PAGES, ROOT / "benchmarks" / "results" / "README.md"]
    quoted = [rest for page in pages for rest in QUOTED.findall(page.read_text())]
    assert len(quoted) > 5
    for rest in quoted:
        if rest.split() != ["--help"]:
            asked = build_parser().parse_args(rest.replace("--out", "").split())
            chosen_parts(asked.names, Effort("full"))


# What each of them measures


@pytest.mark.slow
def test_gaps_are_those_between_plans_and_their_bound(inception: Exercise) -> None:
    problem = inception.evaluator.problem
    gaps = quality.bound_gaps(placer_named("heft"), [inception], Budget(evaluations=10), seeds=2)
    plan = placer_named("heft").place(SearchRequest(problem, Budget(evaluations=10)))[0]
    assert gaps == {"inception 4": [plan.step_ns / lower_bound_ns(problem) - 1.0] * 2}


def test_every_placer_that_can_takes_part(inception: Exercise) -> None:
    compared = quality.every_placer([inception], load("generalist"), Budget(evaluations=20), 1)
    ratios = {scores.name: scores.median() for scores in compared}
    assert {"portfolio", "heft", "annealing", "single-device"} <= set(ratios)
    assert "exact" not in ratios
    assert min(ratios["heft"], ratios["etf"], ratios["single-device"]) == pytest.approx(1.0)
    table = quality.placer_table({"20e": compared}, 1)
    assert ("heft", f"{ratios['heft']:.3f}") in table.rows


def test_planted_problems_reach_their_optimum_and_nothing_known_passes_it() -> None:
    for item, made in instances.planted_instances(2):
        optimum_ns = round(1e9 * made.step_s)
        order = np.arange(len(made.devices), 0, -1.0)
        planted_ns = item.evaluator.costs(np.array([made.devices], np.int32), order[None])[0]
        assert planted_ns == pytest.approx(optimum_ns, rel=1e-6)
        assert min(plan.step_ns for plan in item.known) >= optimum_ns
    gaps = quality.planted_gaps(Portfolio(), Budget(evaluations=20), seeds=1, count=2)
    assert all(gap >= -1e-6 for of_seeds in gaps.values() for gap in of_seeds)


def test_planted_problems_of_unequal_devices_reach_their_optimum() -> None:
    for item, made in problems.planted_unequal(3):
        optimum_ns = round(1e9 * made.step_s)
        order = np.arange(len(made.devices), 0, -1.0)
        planted_ns = item.evaluator.costs(np.array([made.devices], np.int32), order[None])[0]
        assert planted_ns == pytest.approx(optimum_ns, rel=1e-6)
        assert pace_ns(item.evaluator.problem) <= planted_ns
        assert min(plan.step_ns for plan in item.known) >= optimum_ns * (1 - 1e-6)


def test_searches_are_compared_problem_by_problem(inception: Exercise) -> None:
    found: dict[str, Any] = {}
    policies = {"generalist": load("generalist")}
    table = search.at_budget([inception], Budget(evaluations=30), policies, 2, found)
    assert [row[0] for row in table.rows] == [name for name in found if name != "problems"]
    own = Scores("own", np.array([[0.5, 0.9]]))
    other = Scores("other", np.array([[1.0, 0.9]]))
    assert search.relative(own, other, [inception, inception])["worst"] == 1.0
    shares: dict[str, Any] = {}
    search.of_policies(policies, [inception], 1, shares)
    assert shares["generalist, one decode"]["median"] >= shares["generalist, best of 16"]["median"]


def test_rates_are_those_of_random_placements_that_cross_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(work: Callable[[], object], *_: object) -> list[float]:
        work()
        return [2.0, 4.0]

    monkeypatch.setattr(simulator, "seconds", seconds)
    assert simulator.evaluations_per_s(50, 3, 20, 2) == [10.0, 5.0]
    devices, _ = placements(50, 3, 20)
    assert set(devices.flat) == {0, 1, 2}


@pytest.mark.parametrize("seed", range(2))
def test_the_plain_simulator_that_speed_is_compared_with_gives_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = layered(rng, ops=60, width=6)
    cluster = nodes(1, 3, inside_s=1e-6, inside_bytes_per_s=1e9)
    devices, priority = rng.integers(0, 3, len(graph)).astype(np.int32), rng.random(len(graph))
    problem = Problem.of(GraphArrays.from_graph(graph), cluster)
    schedule = Simulator(problem).run(devices, priority)
    plain = PlainSimulator(graph, cluster).step(devices.tolist(), priority.tolist())
    assert plain == (schedule.step_ns, schedule.peak_bytes.tolist())


@pytest.mark.slow
def test_the_max_load_lies_between_its_bound_and_the_best_single_device() -> None:
    budgets = max_load.Budgets(search_s=0.05, seeds=2, proof_s=1.0)
    found: dict[str, Any] = {}
    table = max_load.profile("alexnet", budgets, found)
    assert found["bound_ns"] <= found["search_ns"][0] <= found["single_ns"]
    assert table.rows[0][0] == "alexnet"


@pytest.mark.slow
def test_extraction_is_compared_with_export_alone() -> None:
    found: dict[str, Any] = {}
    extraction.reference("two_towers.py:build", found)
    assert found["ops"] > 0
    assert found["extract_s"] > 0 < found["export_s"]


def test_losses_are_means_over_seeds_and_the_best_learning_rate_counts() -> None:
    task = replace(sync_quality.SHORT, methods=("synchronous", "averaging"))
    jobs = sync_quality.jobs(task, range(2))
    losses = {job: 1.0 + job.seed + job.lr_factor for job in jobs}
    synchronous, averaging = sync_quality.means(task, losses)
    assert synchronous["mean_loss"] == 2.5  # 1 of 1, 2 and 4 times the learning rate
    assert averaging["mean_loss"] == 2.5
    assert not averaging["holds"]  # it must be worse by 3 %
    tiny = replace(task, steps=32, period=8)
    assert sync_quality.trained(sync_quality.jobs(tiny, [0])[0]) > 0


def test_methods_are_compared_with_synchronous_sgd() -> None:
    runs = [
        {"method": "allreduce", "loss": 1.0, "bytes_per_step": 100.0},
        {"method": "allreduce", "loss": 3.0, "bytes_per_step": 100.0},
        {"method": "onebit", "loss": 3.0, "bytes_per_step": 4.0},
    ]
    _, onebit = sync_methods.means(runs)
    assert (onebit["times_less"], onebit["gap"]) == (25.0, 0.5)
    _, onebit = sync_methods.means([{**run, "bytes_per_step": None} for run in runs])
    assert onebit["times_less"] is None


@pytest.mark.slow
def test_overhead_and_startup_are_measured(tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    overhead.on_one_core(
        "two towers", overhead.BY_WORKERS["two towers"], overhead.NO_MEASURING, 1, found
    )
    assert not found["kept"]
    overhead.in_process("two towers", overhead.BY_WORKERS["two towers"], 1, found)
    assert found["placed_over_plain"] > 0
    overhead.in_loop("two towers", overhead.IN_LOOP["two towers"], 1, found)
    assert found["placed_over_plain"] > 0
    startup.warm(found, 1)
    assert 0 < found["help_s"] < found["first_evaluation_s"]
    assert not found["with_torch"]
