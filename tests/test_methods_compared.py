"""The benchmark of all methods trains by ranks what the one of losses trains in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from ranks import on_ranks

from benchmarks import sync_methods
from benchmarks.sync_methods import table
from benchmarks.sync_quality import Job, Students, Task, judging
from benchmarks.sync_quality import trained as stacked
from placer.parallel.registry import METHODS

TASK = Task(workers=2, period=5, steps=40)


def every_method() -> list[dict[str, Any]]:
    return [sync_methods.trained(method.name, TASK, 0) for method in METHODS]


@cache
def found() -> list[list[dict[str, Any]]]:
    """By rank."""
    return on_ranks(TASK.workers, every_method)


def test_the_student_of_a_rank_is_one_of_those_that_are_stacked() -> None:
    inputs, labels = judging(seed=1)
    plain = torch.nn.functional.cross_entropy(sync_methods.student(1)(inputs[0]), labels[0])
    assert float(plain.detach()) == pytest.approx(Students(1, 1).test_loss(1), rel=1e-6)


def test_every_method_learns_something_and_leaves_all_ranks_with_one_loss() -> None:
    start = Students(1, 0).test_loss(0)
    for one, other in zip(*found(), strict=True):
        assert one["loss"] == other["loss"] < start
        assert one["bytes_per_step"] > 0


@pytest.mark.parametrize(
    ("sync", "method", "lr_factor"),
    [
        ("allreduce", "synchronous", 2.0),
        ("hierarchical", "synchronous", 2.0),
        ("ma", "averaging", 1.0),
        ("bmuf", "BMUF", 1.0),
    ],
)
def test_ranks_have_the_losses_of_workers_stacked_in_one_process(
    sync: str, method: str, lr_factor: float
) -> None:
    [own] = [row for row in found()[0] if row["method"] == sync]
    assert own["loss"] == pytest.approx(stacked(Job(TASK, method, 0, lr_factor)), rel=1e-4)


def test_the_table_compares_bytes_and_mean_losses_with_synchronous_sgd(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = [
        {"method": "allreduce", "loss": 1.0, "bytes_per_step": 3000.0},
        {"method": "allreduce", "loss": 3.0, "bytes_per_step": 5000.0},
        {"method": "ma", "loss": 2.5, "bytes_per_step": 250.0},
        {"method": "asgd", "loss": 1.9, "bytes_per_step": 4000.0},
    ]
    rows = table(TASK, runs)
    assert [row["gap"] for row in rows] == pytest.approx([0.0, 0.25, -0.05])
    assert [row["times_less"] for row in rows] == pytest.approx([1.0, 16.0, 1.0])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert lines[0] == ["allreduce", "4.0", "1.00x", "2.0000", "+0.0%"]
    assert lines[1] == ["ma", "0.2", "16.00x", "2.5000", "+25.0%"]
    assert lines[2][5:] == ["otherwise", "in", "each", "run"]


def test_the_table_has_losses_where_bytes_are_not_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = table(TASK, [{"method": "allreduce", "loss": 1.0, "bytes_per_step": None}])
    assert rows[0]["bytes_per_step"] is None
    assert capsys.readouterr().out.splitlines()[2].split() == [
        *("allreduce", "-", "-", "1.0000", "+0.0%"),
    ]
