"""The benchmark of coverage: what it counts; wrong results, dead and hung models are seen."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.coverage.attempt import (
    Attempt,
    _batch,
    _is_equal_in_double,
    differences,
    tried,
    without_dropout,
)
from benchmarks.coverage.campaign import in_own_process, parts, reasons, row, totals
from benchmarks.coverage.case import Case, numbers
from benchmarks.coverage.models import PACKAGES, SAMPLE, cases_of, is_installed
from benchmarks.record import Effort

two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


class Counting(nn.Module):
    """Returns something else in every call, which no recorded program can."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.layer(x) * self.calls


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) + torch.rand_like(x)


def test_there_are_enough_models_and_the_sample_is_of_them() -> None:
    cases = {package: cases_of(package) for package in PACKAGES}
    assert sum(map(len, cases.values())) >= 150
    assert len({package.partition(":")[0] for package in PACKAGES}) >= 6
    assert sum(map(len, SAMPLE.values())) == 20
    for package, names in SAMPLE.items():
        assert set(names) <= set(cases[package])
    assert is_installed("torch")


def test_there_is_a_part_for_every_package_and_two_for_all() -> None:
    assert list(parts(Effort())) == [*PACKAGES, "all", "reasons"]
    assert list(parts(Effort("quick"))) == [*SAMPLE, "all", "reasons"]


def test_differences_are_seen_and_roundings_are_not() -> None:
    eager = {"a": torch.tensor([1.0, 2.0, torch.inf]), "b": torch.tensor([3, 4])}
    close = {"a": torch.tensor([1.0, 2.001, torch.inf]), "b": torch.tensor([3, 4])}
    far = {"a": torch.tensor([1.0, 2.1, torch.inf]), "b": torch.tensor([3, 4])}
    assert differences({"x": (eager, eager), "y": (close, eager)}) == []
    assert differences({"x": (far, eager)}) == ["x: 1 of 2 tensors differ, a by 0.1 of 2"]
    counted = {**eager, "b": torch.tensor([3, 5])}
    assert differences({"x": (counted, eager)}) == ["x: 1 of 2 tensors differ, b by 1 of 0"]
    missing = {"a": eager["a"]}
    assert differences({"x": (missing, eager)}) == ["x: b and 0 more are in one of both only"]
    assert differences({"x": (torch.tensor([torch.nan]), torch.tensor([1.0]))})
    assert differences({"x": (torch.zeros(2), torch.zeros(3))})


def test_a_gradient_that_cancels_may_differ_by_roundings_of_the_others() -> None:
    large = torch.tensor([100.0])
    assert not differences({"x": ((large, torch.tensor([1e-4])), (large, torch.tensor([2e-4])))})
    assert differences({"x": ((large, torch.tensor([1e-2])), (large, torch.tensor([2e-2])))})


def test_nothing_is_dropped_whatever_a_package_calls_it() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.LSTM(3, 3, 2, dropout=0.5), nn.Linear(3, 3))
    model.drop_path_rate = 0.5  # type: ignore[assignment]
    without_dropout(model)
    assert [model[0].p, model[1].dropout, model.drop_path_rate] == [0.0, 0.0, 0.0]


@pytest.mark.slow_repeats
@two_cores
@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_run_on_cores_and_equal_to_eager(training: bool) -> None:
    found = tried("mlp", cases_of("torch")["mlp with batch norm"], training=training)
    assert (found.extractor, found.ran, found.equal, found.reason) == ("export", True, True, "")


@pytest.mark.slow
@two_cores
def test_wrong_results_are_seen() -> None:
    found = tried("counting", Case(Counting, numbers((2, 3))), training=False)
    assert found.ran
    assert found.equal is False
    assert "tensors differ" in found.reason


@pytest.mark.slow
@two_cores
def test_rounding_alone_is_told_from_wrong_results_in_float64() -> None:
    for case, equal in (
        (cases_of("torch")["mlp with batch norm"], True),
        (Case(Counting, numbers((2, 3))), False),
    ):
        batches = [_batch(case, False, seed) for seed in range(2)]
        assert _is_equal_in_double(case, batches, training=False) is equal


@two_cores
def test_a_random_model_is_not_compared() -> None:
    found = tried("noisy", Case(Noisy, numbers((2, 3))), training=False)
    assert found.ran
    assert found.equal is None
    assert "random" in found.reason


@two_cores
@pytest.mark.parametrize("training", [True, False])
def test_what_depends_on_data_is_run_module_by_module(training: bool) -> None:
    found = tried("branch", cases_of("torch")["branch on data"], training=training)
    assert (found.extractor, found.depends_on_data) == ("modules", False)
    assert (found.ran, found.equal, found.reason) == (True, True, "")


def test_an_error_of_the_model_is_a_failure_and_no_refusal() -> None:
    def broken() -> nn.Module:
        raise OSError("no weights")

    found = tried("broken", Case(broken, numbers((2, 3))), training=True)
    assert found.failed
    assert found.reason == "OSError: no weights"


def _half_done(package: str, name: str, results: Connection) -> None:
    results.send(Attempt(name, True, extractor="export", ran=True, equal=True))
    os._exit(7)


def _hung(package: str, name: str, results: Connection) -> None:
    time.sleep(3600.0)


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_fails_what_it_did_not_send() -> None:
    training, inference = in_own_process(_half_done, "torch", "dies", 120.0)
    assert training.equal
    assert (inference.training, inference.failed) == (False, True)
    assert inference.reason == "its process ended with status 7"
    assert [each.reason for each in in_own_process(_hung, "torch", "hangs", 0.5)] == [
        "took more than 0.5 s"
    ] * 2


def test_attempts_are_counted_as_by_hand() -> None:
    tries = [
        Attempt("a", True, extractor="export", ran=True, equal=True),
        Attempt("b", True, extractor="dispatch", ran=True, equal=None, reason="random"),
        Attempt("c", True, extractor="dispatch", depends_on_data=True, reason="reads values"),
        Attempt("d", True, reason="refused"),
        Attempt("a", False, extractor="export", ran=True, equal=True),
    ]
    assert row("own", tries[:4]) == ("own", "4", "1", "2", "0", "1", "1", "2", "1")
    found: dict[str, Any] = {}
    table = totals({"one": tries[:2], "two": tries[2:]}, found)
    assert table is not None
    assert table.rows[0][2:4] == ("1 (25%)", "2 (50%)")
    assert found["inference"]["equal to eager"] == "1 (100%)"
    told = reasons({"one": tries}, found)
    assert told is not None
    assert [name for name, _ in told.rows] == [f"one: {name}, training" for name in "bcd"]


def test_wrong_results_and_failures_fail_the_benchmark() -> None:
    wrong = Attempt("a", True, extractor="export", ran=True, equal=False, reason="differs")
    with pytest.raises(RuntimeError, match="one: a, training: differs"):
        reasons({"one": [wrong]}, {})
    with pytest.raises(RuntimeError, match="took more"):
        reasons({"one": [Attempt("b", False, failed=True, reason="took more than 1 s")]}, {})


def test_a_model_of_the_sample_that_is_extracted_otherwise_fails_the_benchmark() -> None:
    def of(name: str, extractor: str) -> Attempt:
        return Attempt(name, True, extractor=extractor, ran=True, equal=True)

    as_before = [of("lstm", "export"), of("checkpointing", "dispatch")]
    assert reasons({"torch": [*as_before, of("not in the sample", "modules")]}, {}) is None
    with pytest.raises(RuntimeError, match="torch: lstm, training: extracted by modules, not expo"):
        reasons({"torch": [of("lstm", "modules")]}, {})
