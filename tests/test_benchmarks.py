"""Benchmarks run through, in small; those of torch devices on a fake one where there is no GPU."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import __main__ as everything
from benchmarks import max_load, offload, placed_module, placement, scaling, torch_models
from benchmarks.heapq_simulator import HeapqSimulator
from benchmarks.record import Record
from benchmarks.search import at_budget
from envs.cluster import Cluster, Device, Link
from envs.problem import Problem
from envs.simulator import Simulator
from graphs.extract import Step
from graphs.graph import GraphArrays
from graphs.synthetic import layered
from placer.bench import instances
from placer.policies import load
from placer.policies.pool import Exercise
from placer.search.budget import Budget

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="vdev would take its place")
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
    for model in ("mixture of experts", "language model"):
        inference = parts[f"{model}: inference, 50% of the weights"]
        assert inference["accelerate"]["median_s"] > 0
    for share in ("75%", "50%", "30%"):
        rows = parts[f"recommendation: {share}"]["rows"]
        assert rows[0]["name"] == "first layers that fit"
        assert all(row["median_s"] > 0 for row in rows)
    assert parts["recommendation: overhead"]["placed_over_eager"] > 0
    names = list(parts)
    for model in ("mixture of experts", "language model", "recommendation", "translation"):
        rows = parts[f"{model}: overlap"]["rows"]
        assert rows[0]["transfers"] > 0
        assert all(row["overlapping_over_in_line"] > 0 for row in rows)
        assert names.index(f"{model}: overlap") < names.index("mixture of experts: overhead")


@without_cuda
def test_copies_of_the_fake_device_of_benchmarks_take_their_time() -> None:
    host = torch.ones(1 << 20)
    with torch_models.two_devices():
        start = time.perf_counter()
        there = host.to("vdev:0")
        there.to("cpu")
        least_s = 2 * host.nbytes / torch_models.FAKE_LINK_BYTES_PER_S
        assert time.perf_counter() - start >= least_s


@without_cuda
@pytest.mark.parametrize("make", [torch_models.language, torch_models.experts])
def test_accelerate_runs_its_own_map_of_the_fake_device_and_the_host(
    make: Callable[..., Step],
) -> None:
    pytest.importorskip("accelerate")
    step = replace(make(small=True), training=False)
    state_bytes = sum(t.nbytes for t in {id(t): t for t in step.named_state().values()}.values())
    with torch_models.two_devices() as cluster:
        found = offload.accelerated(step, cluster, state_bytes // 2)
    assert set(found["device_map"].values()) == set(cluster.names)
    assert len(found["repeats_s"]) == offload.REPEATS


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
    assert record.data["parts"]["third"] == {"skipped": "the limit of 0 s was reached"}


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
    record.part("three: profile", lasting(20.0))  # 30 s are left: enough for no second of 40
    record.part("four: 50%", lasting(30.0))
    record.part("five: overhead", lasting(0.0))
    parts = record.data["parts"]
    assert parts["three: profile"] == {
        "skipped": "such a part took 40 s, and 30 s of the limit of 100 s were left"
    }
    assert parts["four: 50%"]["done"]
    assert parts["five: overhead"] == {"skipped": "the limit of 100 s was reached"}
    assert record.left_s == 0


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


@pytest.fixture(scope="module")
def judged() -> list[Exercise]:
    return instances.judged()


def test_placers_are_judged_on_problems_of_the_sizes_that_are_told(judged: list[Exercise]) -> None:
    problems = [item.judge.problem for item in judged]
    assert len({item.family for item in judged}) == len(judged) == 17
    assert {problem.device_count for problem in problems} == {2, 4, 8}
    assert min(problem.op_count for problem in problems) == 430
    assert max(problem.op_count for problem in problems) == 3270
    for item, problem in zip(judged, problems, strict=True):
        *_, size = item.family.split()
        assert size.removesuffix("u") == str(problem.device_count)
        kinds = {device.kind for device in problem.cluster.devices}
        assert len(kinds) == (2 if size.endswith("u") else 1)


def test_communicating_problems_send_four_times_as_long_as_they_compute() -> None:
    for item in instances.communicating():
        problem = item.judge.problem
        [link] = problem.cluster.links
        sent_s = problem.graph.output_bytes.sum() / link.bandwidth_bytes_per_s
        assert sent_s == pytest.approx(4 * problem.graph.costs_for("fast").sum(), rel=1e-6)


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


def test_the_benchmark_of_search_compares_all_ways_at_a_budget(
    judged: list[Exercise], capsys: pytest.CaptureFixture[str]
) -> None:
    smallest = sorted(judged, key=lambda item: item.judge.problem.op_count)[:2]
    policies = {"synthetic-only": load("synthetic-only")}
    found: dict[str, Any] = {}
    at_budget(smallest, Budget(evaluations=20), policies, 2, found)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "20e, 2 seeds"
    ways = [line.rsplit("   ", 1)[0] for line in lines[:5]]
    names, means = zip(*(way.strip().rsplit(maxsplit=1) for way in ways), strict=True)
    assert names == (
        "annealing",
        "with the portfolio's moves",
        "portfolio without a policy",
        "portfolio with initial weights",
        "portfolio with synthetic-only",
    )
    assert all(0.5 < float(mean) <= 1.0 for mean in means)
    assert "/ annealing: " in lines[5]


def test_the_benchmark_of_loads_tells_what_is_proven(capsys: pytest.CaptureFixture[str]) -> None:
    effort = max_load.Effort(search_s=0.05, seeds=1, states=1000, sweeps=1, solver_s=0.1)
    max_load.main(["resnet18"], effort)
    told = capsys.readouterr().out
    assert "sweep: optimal" in told
    assert told.endswith("1 of 1 within 2% of what is proven\n")


def test_the_overhead_of_placed_modules_is_recorded_with_all_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "model.py", tmp_path / "found.json"
    model.write_text(
        "import torch\n"
        "def build():\n"
        "    return torch.nn.Linear(4, 2), (torch.ones(3, 4), torch.ones(3, 2)), "
        "torch.nn.MSELoss()\n"
    )
    placed_module.main([f"{model}:build"], out)
    [(name, found)] = json.loads(out.read_text())["parts"].items()
    assert name == "model.py:build"
    pairs = list(zip(found["eager"]["repeats_s"], found["placed"]["repeats_s"], strict=True))
    assert len(pairs) == placed_module.ROUNDS
    ratio = statistics.median(placed_s / eager_s for eager_s, placed_s in pairs)
    assert found["placed_over_eager"] == ratio > 0
    assert len(found["placing_again"]["repeats_s"]) == placed_module.ROUNDS
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == [name, str(found["calls"])]


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
