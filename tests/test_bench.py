from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from envs.bounds import lower_bound_ns
from envs.discover import discover
from placer.bench import speed
from placer.bench.evidence import BEGIN, END, QUICK, Evidence, gather, put_into
from placer.bench.instances import judged
from placer.bench.quality import REFERENCE, bound_gaps, every_placer
from placer.bench.scores import Scores
from placer.bench.speed import placements
from placer.bench.table import Table
from placer.cli.main import main
from placer.placers.registry import placer_named
from placer.policies import load
from placer.policies.pool import Exercise
from placer.report.progress import Silent
from placer.search.budget import Budget
from placer.search.request import SearchRequest

TABLE = Table("Gaps", "above the optimum", ("problem", "gap"), (("small", "0.0%"), ("big", "2.0%")))


@pytest.fixture(scope="module")
def inception() -> Exercise:
    return next(item for item in judged() if item.family == "inception 4")


def test_gaps_are_those_between_plans_and_their_bound(inception: Exercise) -> None:
    problem = inception.judge.problem
    gaps = bound_gaps(placer_named("heft"), [inception], Budget(evaluations=10), seeds=2)
    plan = placer_named("heft").place(SearchRequest(problem, Budget(evaluations=10)))[0]
    assert gaps == {"inception 4": [plan.step_ns / lower_bound_ns(problem) - 1.0] * 2}


def test_every_placer_that_can_takes_part(inception: Exercise) -> None:
    heard: list[Scores] = []
    found = every_placer([inception], load("generalist"), Budget(evaluations=20), 1, heard.append)
    assert heard == found
    ratios = {scores.name: scores.median() for scores in found}
    assert {"portfolio", "heft", "annealing", "single-device"} <= set(ratios)
    assert "exact" not in ratios
    assert min(ratios["heft"], ratios["etf"], ratios["single-device"]) == pytest.approx(1.0)


def test_rates_are_those_of_random_placements_that_cross_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(work: Callable[[], object], **_: object) -> list[float]:
        work()
        return [2.0, 4.0]

    monkeypatch.setattr(speed, "seconds", seconds)
    assert speed.evaluations_per_s(50, 3, 20) == [10.0, 5.0]
    devices, _ = placements(50, 3, 20)
    assert set(devices.flat) == {0, 1, 2}


def test_tables_replace_what_is_between_the_marks_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    put_into(page, "new\n")
    put_into(page, "newer\n")
    assert page.read_text() == f"before\n{BEGIN}\nnewer\n{END}\nafter\n"


def test_tables_go_into_a_page_of_their_own_where_there_is_none(tmp_path: Path) -> None:
    put_into(tmp_path / "new.md", "table\n")
    assert (tmp_path / "new.md").read_text() == f"{BEGIN}\ntable\n{END}\n"


def test_a_page_without_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("mine\n")
    with pytest.raises(ValueError, match="has no lines"):
        put_into(page, "table\n")
    assert page.read_text() == "mine\n"


def test_a_file_in_a_folder_is_named_after_day_and_machine(tmp_path: Path) -> None:
    found = Evidence({"environment": {"cores": 2}, "gap": float("nan")}, (TABLE,))
    path = found.save(tmp_path)
    assert path.parent == tmp_path
    assert path.name[:2] == "20"
    assert path.suffix == ".json"
    assert json.loads(path.read_text())["gap"] is None


def test_a_page_that_cannot_take_tables_is_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "README.md"
    page.write_text("mine\n")
    assert main(["bench", "--quick", "--markdown", str(page)]) == 2
    told = capsys.readouterr()
    assert "has no lines" in told.err
    assert "Simulator" not in told.err


@pytest.mark.slow
def test_all_parts_have_figures_and_a_table() -> None:
    tiny = Budget(evaluations=20)
    effort = replace(QUICK, search=tiny, equal=(tiny,), planted=1, real_budget="50e")
    found = gather(effort, discover("core:0,core:1"), Silent())
    assert set(found.figures["placers"]) == {"20e"}
    assert set(found.figures["bounds"]) == set(REFERENCE)
    assert len(found.figures["steps"]) == 1
    assert len(found.tables) == 5
    text = found.markdown()
    assert all(table.title in text for table in found.tables)
