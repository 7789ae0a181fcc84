"""Small runs of the benchmarks; without a GPU those of torch devices use a fake device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import __main__ as everything
from benchmarks import placement, scaling
from benchmarks.heapq_simulator import HeapqSimulator
from benchmarks.record import Record
from envs.cluster import Cluster, Device, Link
from envs.problem import Problem
from envs.simulator import Simulator
from graphs.graph import GraphArrays
from graphs.synthetic import layered
from placer.bench import instances

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="vdev would take CUDA's place")
ROOT = Path(__file__).parents[1]


def failures(found: Any, where: str = "") -> list[str]:
    if isinstance(found, list):
        return [text for i, item in enumerate(found) for text in failures(item, f"{where}[{i}]")]
    if not isinstance(found, dict):
        return []
    own = [f"{where}: {found['failure']}"] if found.get("failure") else []
    return own + [text for key, item in found.items() for text in failures(item, f"{where}/{key}")]


@pytest.mark.slow
def test_everything_that_needs_a_gpu_is_measured_without_a_failure(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--small", "--limit", "300", "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PLACER_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=600,
    )
    found = json.loads(out.read_text())
    assert not failures(found)
    parts = found["parts"]
    assert {name.partition(":")[0] for name in parts} >= {
        *("calibration", "mixture of experts", "language model", "recommendation", "translation")
    }


def test_a_part_that_fails_is_written_down_and_the_next_one_runs(tmp_path: Path) -> None:
    def broken(found: dict[str, Any]) -> None:
        found["before"] = 1
        raise RuntimeError("it broke")

    record = Record(tmp_path / "found.json", limit_s=60.0)
    record.part("first", broken)
    record.part("second", lambda found: found.update(rate=float("inf")))
    record.limit_s = 0.0
    record.part("third", broken)
    parts = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert parts["first"]["failure"] == "RuntimeError: it broke"
    assert "it broke" in parts["first"]["traceback"]
    assert parts["first"]["before"] == 1
    assert parts["second"]["rate"] is None
    assert record.data["parts"]["third"].keys() == {"skipped"}


def test_a_part_that_takes_longer_than_is_left_is_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr("benchmarks.record.time.perf_counter", lambda: now_s)

    def lasting(seconds: float) -> Callable[[dict[str, Any]], None]:
        def work(found: dict[str, Any]) -> None:
            nonlocal now_s
            now_s += seconds
            found["done"] = True

        return work

    record = Record(None, limit_s=100.0)
    record.part("one: profile", lasting(40.0))
    record.part("two: 50%", lasting(30.0))
    record.part("three: profile", lasting(20.0))  # 30 s are left, this kind took up to 40 s
    record.part("four: 50%", lasting(30.0))
    record.part("five: overhead", lasting(0.0))
    parts = record.data["parts"]
    assert "took 40 s, and 30 s" in parts["three: profile"]["skipped"]
    assert parts["four: 50%"]["done"]
    assert "done" not in parts["five: overhead"]
    assert record.left_s == 0


@pytest.mark.parametrize("seed", range(2))
def test_the_plain_simulator_that_speed_is_compared_with_gives_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = layered(rng, ops=60, width=6)
    names = ("a", "b", "c")
    cluster = Cluster(
        name="three",
        devices=tuple(
            Device(name=name, kind="gpu", memory_bytes=10**12, launch_s=1e-6) for name in names
        ),
        links=(Link(between=names, latency_s=1e-6, bandwidth_bytes_per_s=1e9),),
    )
    devices, priority = rng.integers(0, 3, len(graph)).astype(np.int32), rng.random(len(graph))
    problem = Problem.of(GraphArrays.from_graph(graph), cluster)
    schedule = Simulator(problem).run(devices, priority)
    plain = HeapqSimulator(graph, cluster).step(devices.tolist(), priority.tolist())
    assert plain == (schedule.step_ns, schedule.peak_bytes.tolist())


def test_planted_problems_reach_their_optimum_and_nothing_known_passes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(instances, "PLANTED", instances.PLANTED[:2])
    for item, made in instances.planted_instances():
        optimum_ns = round(1e9 * made.step_s)
        order = np.arange(len(made.devices), 0, -1.0)
        planted_ns = item.judge.costs(np.array([made.devices], np.int32), order[None])[0]
        assert planted_ns == pytest.approx(optimum_ns, rel=1e-6)
        assert min(plan.step_ns for plan in item.known) >= optimum_ns


def test_all_benchmarks_are_run_though_one_fails_and_what_they_print_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        print("so far")
        raise OSError("no network")

    monkeypatch.setattr(scaling, "main", fail)
    monkeypatch.setattr(placement, "main", lambda: print("1.5x"))
    with pytest.raises(SystemExit, match="failed: scaling"):
        everything.main(["scaling", "placement"], out=tmp_path / "found.json")
    parts = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert parts["scaling"]["failure"] == "OSError: no network"
    assert parts["scaling"]["printed"] == ["so far"]
    assert parts["placement"]["printed"] == ["1.5x"]
    assert capsys.readouterr().out == "so far\n1.5x\n"
