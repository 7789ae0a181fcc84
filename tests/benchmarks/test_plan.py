"""The plan of the benchmark of GPUs: order and time of its parts."""

from __future__ import annotations

import json

import pytest

from benchmarks.gpu import plan
from benchmarks.record import Record
from tests.helpers.folders import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def test_every_part_has_an_expected_time_and_all_fit_in_the_limit() -> None:
    seconds = [plan.expected_s(model, kind) for model, kind in plan.parts(plan.MODELS)]
    assert min(seconds) > 0
    assert sum(seconds) + plan.BEFORE_S <= plan.LIMIT_S


def test_all_kinds_come_for_the_first_model_before_the_second_has_its_turn() -> None:
    parts = list(plan.parts(plan.MODELS))
    models = [model for model, _ in parts]
    assert models == sorted(models, key=plan.MODELS.index)
    kinds = {kind for _, kind in parts}
    assert {kind for model, kind in parts if model == plan.MODELS[0]} == kinds
    assert kinds == {*plan.FIRST}
    assert sum(kind == plan.OVERLAP for _, kind in parts) == 2
    assert sum(kind == plan.COMPILED for _, kind in parts) == 1


@pytest.mark.parametrize("file", ["2026-11-26-h200-gpu.json", "2026-11-27-h200-gpu.json"])
def test_no_part_that_runs_as_recorded_is_expected_to_be_faster(file: str) -> None:
    recorded = json.loads((RESULTS / file).read_text())["parts"]
    shorter = (plan.NO_LIMIT, plan.PROCESS_EACH)  # less rounds and placements than recorded
    for model, kind in plan.parts(plan.MODELS):
        part_s = recorded.get(f"{model}: {kind}", {}).get("part_s", 0.0)
        assert plan.expected_s(model, kind) >= part_s * (0.5 if kind in shorter else 0.98)


def test_a_part_that_takes_longer_than_the_time_left_is_skipped() -> None:
    record = Record(limit_s=60.0)
    record.part("a: long", lambda found: found.update(ran=True), expected_s=100.0)
    record.part("a: short", lambda found: found.update(ran=True), expected_s=1.0)
    assert "such a part takes 100 s" in record.data["parts"]["a: long"]["skipped"]
    assert record.data["parts"]["a: short"]["ran"]
