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

two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
pytestmark = pytest.mark.slow


def printed(name: str, folder: Path) -> str:
    """Return what an example prints, run in ``folder``."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
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
def test_a_model_is_placed_saved_and_trained(tmp_path: Path) -> None:
    text = printed("own_model.py", tmp_path)
    losses = numbers(r"step \d: loss ([\d.]+)", text)
    assert len(losses) == 3
    assert all(abs(loss - 2.303) < 0.1 for loss in losses)  # ten labels, hardly trained
    saved = placer.Placement.load(tmp_path / "placement.json")
    assert f"head: {saved.device_of('head')}, ops by device" in text


def test_knowing_that_devices_differ_is_faster(tmp_path: Path) -> None:
    text = printed("mixed_cluster.py", tmp_path)
    equal_ms, mixed_ms = numbers(r": step ([\d.]+) ms", text)
    [warm_start_ms] = numbers(r"takes ([\d.]+) ms there", text)
    assert mixed_ms < warm_start_ms <= equal_ms * 1.001  # no device became slower


def test_dear_devices_are_on_the_front_only_if_they_are_faster(tmp_path: Path) -> None:
    text = printed("which_devices.py", tmp_path)
    steps_ms, prices = numbers(r"step ([\d.]+) ms", text), numbers(r"([\d.]+) per hour", text)
    assert prices == [0.35, 0.7, 0.8, 1.15, 1.5]
    marks = ["Pareto" in line for line in text.splitlines()]
    assert marks == [ms == min(steps_ms[: i + 1]) for i, ms in enumerate(steps_ms)]


def test_what_is_offloaded_fits_and_is_exported(tmp_path: Path) -> None:
    text = printed("offload.py", tmp_path)
    [weights_mb], [cap_mb] = numbers(r"weights: (\d+) MB", text), numbers(r"use (\d+) MB", text)
    gpu = "cuda:0" if torch.cuda.is_available() else "gpu"
    [peak_mb] = numbers(rf"{gpu}: (\d+) MB at its peak", text)
    assert peak_mb <= cap_mb < weights_mb
    device_map = json.loads(re.findall(r"device_map: (.*)", text)[0])
    assert set(device_map.values()) == {0, "cpu"}
    assert {name.partition(".")[0] for name in device_map} == {str(n) for n in range(12)}


def test_a_map_by_time_is_no_slower_than_those_by_bytes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    text = printed("device_map.py", tmp_path)
    [own_ms] = numbers(r"this map: ([\d.]+) ms", text)
    assert own_ms <= min(numbers(r"(?:accelerate.*|single.*): ([\d.]+) ms", text))
    assert all(name in text for name in ("accelerate: ", "accelerate, balanced: ", "single cuda:2"))


@two_cores
def test_replicas_are_planned_and_two_of_them_learn(tmp_path: Path) -> None:
    text = printed("data_parallel.py", tmp_path)
    splits = re.findall(r"^(\d) x (\d): ", text, re.MULTILINE)
    assert {int(replicas) * int(each) for replicas, each in splits} == {8}
    losses = numbers(r"step +\d+  loss ([\d.]+)", text)
    assert losses[-1] < 0.7 * losses[0]


def test_a_placer_of_a_user_takes_part(tmp_path: Path) -> None:
    own, default = printed("own_placer.py", tmp_path).split("portfolio, 500e:")
    [own_ms] = numbers(r"hill climbing: ([\d.]+) ms", own)
    assert own_ms < numbers(r"single gpu:0: ([\d.]+) ms", own)[0]
    assert "hill climbing" not in default
    assert numbers(r"lower bound: ([\d.]+) ms", default)[0] <= own_ms


def test_a_small_policy_is_trained_and_proposes(tmp_path: Path) -> None:
    text = printed("small_policy.py", tmp_path)
    assert (tmp_path / "policies" / "small.safetensors").exists()
    own_ms, shipped_ms = numbers(r"(?:small|generalist): ([\d.]+) ms", text)
    heft_ms = numbers(r"HEFT: ([\d.]+) ms", text)[0]
    assert own_ms < 2 * heft_ms
    assert shipped_ms <= heft_ms


@pytest.mark.parametrize(
    ("name", "baseline", "most"),
    [
        ("train_placement_env.py", "best single device", 1.0),
        ("train_scheduler_env.py", "HEFT or ETF", 1.2),
    ],
)
def test_reinforcement_learning_comes_near_a_baseline(
    name: str, baseline: str, most: float, tmp_path: Path
) -> None:
    text = printed(name, tmp_path)
    assert "two-towers: 14 of 14 ops placed" in text
    [(step_ms, baseline_ms)] = re.findall(rf"step: ([\d.]+) ms, {baseline}: ([\d.]+)", text)
    assert float(step_ms) < most * float(baseline_ms)
