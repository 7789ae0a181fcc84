"""Benchmarks of torch devices run through, on a fake second device where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.heapq_simulator import HeapqSimulator
from envs.cluster import Cluster, Device, Link
from envs.problem import Problem
from envs.simulator import Simulator
from graphs.graph import GraphArrays
from graphs.synthetic import layered

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
    assert parts["calibration"]["links"]
    for share in ("75%", "50%", "30%"):
        rows = parts[f"recommendation: {share}"]["rows"]
        assert rows[0]["name"] == "first layers that fit"
        assert all(row["median_s"] > 0 for row in rows)
    assert parts["recommendation: overhead"]["placed_over_eager"] > 0


def test_a_part_that_fails_is_written_down_and_the_next_one_runs(tmp_path: Path) -> None:
    from benchmarks.record import Record

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
    assert record.data["parts"]["third"] == {"skipped": "the limit of 0 s was reached"}


@pytest.mark.parametrize("seed", range(5))
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
