"""Examples run as their first line says and print consistent results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import placer
from tests.helpers.folders import ROOT

EXAMPLES = ROOT / "examples"
two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
pytestmark = pytest.mark.slow


def printed(name: str, folder: Path) -> str:
    """Return what an example prints, run in ``folder``."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    found = [float(number) for number in re.findall(pattern, text)]
    assert found, f"{pattern} is not in\n{text}"
    return found


@two_cores
def test_an_own_model_is_placed_saved_and_trained(tmp_path: Path) -> None:
    text = printed("own_model.py", tmp_path)
    losses = numbers(r"step \d: loss ([\d.]+)", text)
    assert len(losses) == 3
    assert all(abs(loss - 2.303) < 0.1 for loss in losses)  # ten labels, hardly trained
    saved = placer.Placement.load(tmp_path / "placement.json")
    for module in ("left", "right", "head"):
        assert f"{module}: {saved.device_of(module)}, ops by device" in text


def test_knowing_that_devices_differ_is_faster(tmp_path: Path) -> None:
    text = printed("mixed_cluster.py", tmp_path)
    equal_ms, mixed_ms = numbers(r": step ([\d.]+) ms", text)
    [given_ms] = numbers(r"takes ([\d.]+) ms there", text)
    assert mixed_ms < given_ms <= equal_ms * 1.001  # no device became slower
    [gain] = numbers(r"is ([\d.]+)x faster", text)
    assert gain == pytest.approx(given_ms / mixed_ms, abs=0.01)
    assert set(re.findall(r"expert \d, width \d+: (\S+)", text)) == {"gpu:0", "gpu:1", "gpu:2"}


def test_dear_devices_are_on_the_front_only_if_they_are_faster(tmp_path: Path) -> None:
    text = printed("which_devices.py", tmp_path)
    steps_ms, prices = numbers(r"step ([\d.]+) ms", text), numbers(r"([\d.]+) per hour", text)
    assert prices == [0.35, 0.7, 0.8, 1.15, 1.5]
    shortest = [min(steps_ms[: i + 1]) for i in range(len(steps_ms))]
    marks = ["Pareto" in line for line in text.splitlines()]
    assert marks == [ms == least for ms, least in zip(steps_ms, shortest, strict=True)]
    per_step = numbers(r"([\d.e-]+) per step", text)
    expected = [ms / 3.6e6 * price for ms, price in zip(steps_ms, prices, strict=True)]
    assert per_step == pytest.approx(expected, rel=0.01)


def test_what_is_offloaded_fits_and_is_exported(tmp_path: Path) -> None:
    text = printed("offload.py", tmp_path)
    [weights_mb], [cap_mb] = numbers(r"weights: (\d+) MB", text), numbers(r"use (\d+) MB", text)
    gpu = "cuda:0" if torch.cuda.is_available() else "gpu"
    [peak_mb] = numbers(rf"{gpu}: (\d+) MB at its peak", text)
    assert peak_mb <= cap_mb < weights_mb
    [told] = re.findall(r"device_map: (.*)", text)
    device_map = json.loads(told)
    assert set(device_map.values()) == {0, "cpu"}
    assert {name.partition(".")[0] for name in device_map} == {str(n) for n in range(12)}


@two_cores
def test_replicas_are_planned_and_two_of_them_learn(tmp_path: Path) -> None:
    text = printed("data_parallel.py", tmp_path)
    splits = re.findall(r"^(\d) x (\d): ", text, re.MULTILINE)
    assert {int(replicas) * int(each) for replicas, each in splits} == {8}
    assert len(splits) == 4
    losses = numbers(r"step +\d+  loss ([\d.]+)", text)
    assert len(losses) == 10
    assert losses[-1] < 0.7 * losses[0]
    replicas = json.loads((tmp_path / "replicas.json").read_text())["replicas"]
    assert len(replicas["groups"]) == 2


def test_an_own_placer_takes_part(tmp_path: Path) -> None:
    own, default = printed("own_placer.py", tmp_path).split("portfolio, 500e:")
    [own_ms] = numbers(r"hill climbing: ([\d.]+) ms", own)
    [single_ms] = numbers(r"single gpu:0: ([\d.]+) ms", own)
    assert own_ms < single_ms
    assert "hill climbing" not in default
    [bound_ms] = numbers(r"lower bound: ([\d.]+) ms", default)
    assert bound_ms <= min(own_ms, *numbers(r"(?:annealing|evolution): ([\d.]+) ms", default))


def test_a_small_policy_is_trained_and_proposes(tmp_path: Path) -> None:
    text = printed("small_policy.py", tmp_path)
    assert (tmp_path / "policies" / "small.safetensors").exists()
    own_ms, shipped_ms = numbers(r"(?:small|generalist): ([\d.]+) ms", text)
    first_ms, second_ms = numbers(r"HEFT: ([\d.]+) ms", text)
    assert first_ms == second_ms
    assert own_ms < 2 * first_ms
    assert shipped_ms <= first_ms


def test_reinforcement_learning_finds_a_placement_better_than_one_device(tmp_path: Path) -> None:
    text = printed("train_placement_env.py", tmp_path)
    assert "two-towers: 14 of 14 ops placed" in text
    [(step_ms, single_ms)] = re.findall(r"step: ([\d.]+) ms, best single device: ([\d.]+)", text)
    assert float(step_ms) < float(single_ms)


def test_reinforcement_learning_sets_scheduler_weights(tmp_path: Path) -> None:
    text = printed("train_scheduler_env.py", tmp_path)
    assert "two-towers: 14 of 14 ops placed" in text
    [(step_ms, heft_ms)] = re.findall(r"step: ([\d.]+) ms, HEFT or ETF: ([\d.]+)", text)
    assert float(step_ms) < 1.2 * float(heft_ms)
