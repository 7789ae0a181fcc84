"""Tuning a policy by measured steps."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from random_problems import random_problem
from tiny_training import TINY

from envs.placement import Placement
from placer.cli.main import main
from placer.policies import load
from placer.policies.measuring import Fitted
from placer.policies.params_env import ParamsBatch
from placer.policies.pool import exercise
from placer.policies.training.learner import Learner
from placer.policies.training.networks import exported, imported
from placer.search.decoder import HEFT

torch.set_num_threads(1)

two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
MODEL = """
import torch
from torch import nn

class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
        self.right = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))

    def forward(self, x):
        return (self.left(x) * self.right(x)).sum()

def build():
    torch.manual_seed(0)
    return Towers(), torch.randn(128, 256)
"""


def test_a_network_that_begins_with_a_policy_says_what_the_policy_says() -> None:
    policy = load("generalist")
    item = exercise(random_problem(2, ops=30, devices=3))
    scale = (policy.feature_mean, policy.feature_deviation)
    layers = tuple(len(bias) for _, bias in policy.layers[:-1])
    config = replace(TINY, ppo=replace(TINY.ppo, layers=layers))
    learner = Learner(config, 0, ParamsBatch([item], 4, 0, scale=scale))
    imported(learner.model, policy)
    ours = exported(learner.model, "", *scale).weights(item.summary)
    for one, other in zip(ours, policy.weights(item.summary), strict=True):
        assert (one == other).all()


def test_a_fitted_simulator_costs_relative_to_the_known_plan() -> None:
    item = exercise(random_problem(2, ops=30, devices=3))
    known = replace(item.known[-1], step_ns=7 * item.known[-1].step_ns)
    costs = Fitted(item.judge, known).costs(np.zeros(1, np.int64), HEFT[None])
    heft = item.judge.decoded(HEFT[None])[2][0]
    assert costs[0] == pytest.approx(7 * heft, rel=1e-6)


@two_cores
@pytest.mark.slow
def test_tuning_by_measured_steps_ends_no_worse_than_what_simulated_reward_chooses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "towers.py").write_text(MODEL)
    out = tmp_path / "tuned"
    arguments = ["train", "--reward", "measured", "--target", f"{tmp_path / 'towers.py'}:build"]
    arguments += ["--devices", "core:0,core:1", "--rounds", "2", "--plans", "3", "--budget", "200e"]
    assert main([*arguments, "--out", str(out)]) == 0
    assert "ms" in capsys.readouterr().out
    policy = load(str(out))
    card = policy.card
    assert card["tuned_from"] == "generalist"
    assert card["best"]["step_s"] <= card["simulated_choice"]["step_s"]
    assert set(card["simulator_factors"]) == {"core:0", "core:1", "transfers"}
    assert all(row["error_after_fit"] <= row["error_before_fit"] for row in card["rounds"])
    placement = Placement.load(tmp_path / "tuned.placement.json")
    assert placement.measured is not None
    assert placement.measured["step_s"] == card["best"]["step_s"]
    assert card == json.loads((tmp_path / "tuned.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--reward", "measured"], "give --target"),
        (["--target", "model.py:build"], "--target says nothing with --reward simulated"),
        (["--reward", "measured", "--target", "x.py:f", "--seeds", "2"], "--seeds says nothing"),
        (["--reward", "measured", "--target", "graph.json"], "cannot be run"),
        (["--reward", "measured", "--target", "x.py:f", "--plans", "1"], "of 2 or more"),
        (["--reward", "measured", "--target", "x.py:f", "--from", "generalst"], "generalist"),
        (["--reward", "measured", "--target", "x.py:f", "--budget", "1x"], "1x"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert main(["train", "--out", str(tmp_path / "tuned"), *arguments]) == 2
    assert told in capsys.readouterr().err
