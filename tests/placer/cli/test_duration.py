"""Estimates of the duration of an optimization, and the stages named after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from envs.hardware.cache_folder import cache_folder
from envs.hardware.cluster import cluster_to_toml
from graphs.files import write_whole
from graphs.graph import add_op, new_graph
from placer.cli.duration import CALIBRATING_S, COMPILING_S, LOADING_S, duration, estimate, taken
from placer.job import Job, SearchConfig
from tests.helpers.clusters import toy_pair

CORES = "core:0,core:1"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.3, "0.3 s"), (59.44, "59.4 s"), (300.0, "5 min"), (86400.0, "24 h")]
)
def test_a_duration_has_a_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    is_cached = getattr(request, "param", True)
    monkeypatch.setattr("placer.search.compilation.is_cached", lambda _: is_cached)


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path))
    (tmp_path / "cores-damaged.toml").write_text("[[")
    write_whole(cache_folder() / "cores-1.toml", cluster_to_toml(toy_pair("core:0", "core:1")))


def estimated(source: Any = "model.py:build", devices: Any = CORES, **search: Any) -> str:
    return estimate(Job.of(source, devices, search=SearchConfig(**search)))


@pytest.mark.usefixtures("compiled", "calibrated")
def test_an_estimate_has_a_total_and_its_parts() -> None:
    assert estimated(budget="20s") == (
        f"This takes about {20 + LOADING_S:.0f} s on a quiet machine: loading, extraction and op "
        "costs (more for large models) 10 s, search 10 s, runs of the best candidates 10 s."
    )
    assert "about 12 s" in estimated(budget="2s", measure=False)
    assert "about 13 s" in estimated(budget="2s", measure="2s")
    assert estimated(budget="50e") == (
        "This takes about 10 s plus a search of 50 evaluations plus runs of the best candidates on "
        "a quiet machine: loading, extraction and op costs (more for large models) 10 s."
    )


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("compiled", [False], indirect=True)
def test_what_is_not_cached_yet_is_in_the_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path))
    text = estimated(budget="2s")
    assert f"about {7 + LOADING_S + COMPILING_S + CALIBRATING_S:.0f} s" in text
    assert "compilation (once) 10 s, calibration of devices (once) 14 s, search 1 s" in text


@pytest.mark.usefixtures("compiled")
def test_a_graph_file_takes_as_long_as_its_search() -> None:
    graph = new_graph("one")
    add_op(graph, "a", cost_s={"*": 1.0})
    pair = toy_pair("a", "b")
    assert estimated(graph, pair, budget="2s") == (
        "This takes about 2 s on a quiet machine: search 2 s."
    )
    assert estimated(graph, pair, budget="50e") == (
        "This takes as long as a search of 50 evaluations."
    )


def test_the_stages_that_took_a_tenth_of_the_time_are_named() -> None:
    stages_s = {
        "Loading the model": 6.0,
        "Calibrating devices": 5.9,
        "Compiling code (once, 10 s)": 20.0,
        "Predictions were off: searching again with fitted costs": 7.0,
    }
    assert taken(60.0, stages_s) == (
        "took 60 s, of which loading the model 6 s, compiling code 20 s, searching again with "
        "fitted costs 7 s"
    )
    assert taken(60.0, {"Loading the model": 1.0}) == "took 60 s"
