"""The benchmark of a GPU beside a CPU, on a fake GPU: small models do not fill a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import accelerated, comparisons, offload, plan
from benchmarks.gpu import models as benchmark_models
from benchmarks.gpu.__main__ import Parts
from benchmarks.gpu.accelerated import Accelerated
from benchmarks.gpu.models import models, two_devices
from benchmarks.gpu.process import in_processes, trained
from benchmarks.gpu.single_ops import BACKWARD, CALL, by_call, single_ops
from benchmarks.gpu.workbench import Workbench
from benchmarks.record import Record
from envs.hardware import torch_devices
from envs.hardware.cluster import Cluster
from envs.measured import TimedStep
from graphs.graph import GraphArrays
from graphs.graph_file import graph_from_dict
from tests.helpers.folders import ROOT

MODEL = "recommendation"
FAKE = {"CUDA_VISIBLE_DEVICES": ""}  # without a GPU the benchmark uses a fake one


@pytest.mark.slow
def test_everything_that_needs_a_gpu_is_measured_without_a_failure(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--limit", "500"]
    subprocess.run(
        [*command, "--models", MODEL, "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, **FAKE, "PLACER_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=600,
    )
    parts = json.loads(out.read_text())["parts"]
    assert [name for name, part in parts.items() if "failure" in part] == []
    assert {*parts} == {"calibration", "compiled code", *(f"{MODEL}: {k}" for k in plan.FIRST)}
    assert {path.name for path in tmp_path.glob("*.json")} == {out.name}
    graph = GraphArrays.from_graph(graph_from_dict(parts[f"{MODEL}: {plan.PROFILE}"]["graph"]))
    assert graph.hash == parts[f"{MODEL}: {plan.NO_LIMIT}"]["graph"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with two_devices(fake=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def bench(cluster: Cluster) -> Workbench:
    return Workbench(models(small=True)[MODEL](), cluster)


@pytest.mark.slow
def test_accelerate_has_turns_in_the_rounds_of_placements(
    cluster: Cluster, bench: Workbench
) -> None:
    results: dict[str, Any] = {}
    offload.inference(Record(), cluster, bench.extraction.step, results)
    on_host, *placed, beside = results["rows"]
    assert on_host["name"] == "all on cpu"
    assert beside["name"] == accelerated.NAME
    assert beside["device_map"]
    assert [len(row["repeats_s"]) for row in results["rows"]] == [3, *[7] * len(placed), 7]
    assert any(row["tied_with_fastest"] for row in results["rows"])


@pytest.mark.slow
def test_accelerate_gets_less_weights_until_it_fits(cluster: Cluster) -> None:
    step = models(small=True)["language model"]()
    state_bytes = sum(tensor.nbytes for tensor in step.named_state().values())
    device = torch_devices.torch_device(cluster.names[0])
    limit_bytes = int(0.89 * state_bytes)
    roomy, tight = (Accelerated(step, cluster, limit_bytes) for _ in range(2))
    assert isinstance(roomy.run(), TimedStep)
    with torch_devices.limited({device: limit_bytes}):
        assert isinstance(tight.run(), TimedStep)
    assert roomy.shares[0] == 0.9
    assert {*roomy.device_map.values()} == {0, "cpu"}
    assert tight.shares[0] < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("part", [comparisons.overhead, comparisons.compiled])
def test_two_ways_to_run_the_model_are_compared(
    cluster: Cluster, bench: Workbench, part: Any
) -> None:
    results: dict[str, Any] = {}
    part(bench, cluster, results, **({"backend": "eager"} if part is comparisons.compiled else {}))
    other = "compiled" if part is comparisons.compiled else "placed"
    assert len(results["eager"]["repeats_s"]) == len(results[other]["repeats_s"]) >= 3
    assert results[f"{other}_over_eager"] > 0
    assert isinstance(results["tied"], bool)


@pytest.mark.slow
def test_single_ops_are_timed_within_the_step(cluster: Cluster, bench: Workbench) -> None:
    results: dict[str, Any] = {}
    single_ops(bench, cluster, results)
    assert len(results["rows"]) == 20
    times = [row["in_step_s"] for row in results["rows"]]
    assert times == sorted(times, reverse=True)
    assert times[0] > 0
    assert results["profiled_over_in_step"] > 0


@pytest.mark.slow
def test_copies_in_line_and_overlapped_are_compared(cluster: Cluster, bench: Workbench) -> None:
    results: dict[str, Any] = {}
    comparisons.overlapping(bench, cluster, results)
    names = [row["name"] for row in results["rows"]]
    assert names == ["random, 50% of groups", "random, 90% of groups", "half the memory"]
    for row in results["rows"]:
        assert len(row["in line"]["repeats_s"]) == len(row["overlapping"]["repeats_s"]) >= 3
        assert row["overlapping_over_in_line"] > 0
        assert isinstance(row["tied"], bool)


@pytest.mark.slow
def test_one_thread_and_a_process_for_each_device_are_compared(
    cluster: Cluster, bench: Workbench
) -> None:
    results: dict[str, Any] = {}
    comparisons.process_each(bench, cluster, results)
    assert [row["name"] for row in results["rows"]] == ["all on cuda:0", "random, 97% of groups"]
    for row in results["rows"]:
        assert len(row["one thread"]["repeats_s"]) == len(row["processes"]["repeats_s"]) == 4
        assert isinstance(row["tied"], bool)


@pytest.mark.slow
def test_three_processes_run_the_same_step_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**FAKE, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    results: dict[str, Any] = {}
    in_processes(MODEL, results, small=True)
    assert [len(run["repeats_s"]) for run in results["runs"]] == [15] * 3
    assert any(run["tied_with_fastest"] for run in results["runs"])
    assert results["slowest_over_fastest"] >= 1


@pytest.mark.slow
def test_the_baseline_is_tried_under_the_limit(bench: Workbench) -> None:
    problem = bench.problem()
    devices = offload.layers_that_fit(bench, 2_000_000, 1_500_000)
    assert 0 < (devices == 0).sum() < problem.op_count
    assert offload.fits(bench, problem, devices, 1_500_000)


@pytest.mark.slow
def test_a_model_whose_whole_step_fails_has_no_other_parts(
    cluster: Cluster, bench: Workbench
) -> None:
    """Speeds and costs are known from ``bench``."""
    record = Record()
    parts = Parts(record, cluster, small=True, is_real=False)
    with torch_devices.limited({torch_devices.torch_device(cluster.names[0]): 100_000}):
        for kind in (plan.PROFILE, *plan.SHARES):
            parts.run(MODEL, kind)
    [failed] = record.data["parts"].values()
    assert "out of memory" in failed["failure"]
    assert "peak_bytes" not in failed
    assert "in profiled" in failed["traceback"]


def test_two_devices_may_be_fake_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark_models, "cuda_devices", lambda: ["cuda:0"])
    with two_devices(fake=True) as cluster:
        assert cluster.names == ("cuda:0", "cpu")
        assert torch.cuda.get_device_name("cuda:0") == "fake"


def event(name: str, start: int, device: str = "CPU", **fields: Any) -> SimpleNamespace:
    """Return an event as torch's profiler has it, of 2 s on the host."""
    defaults = {
        "cpu_time_total": 2e6,
        "device_time_total": 0.0,
        "time_range": SimpleNamespace(start=start),
        "device_type": SimpleNamespace(name=device),
        "sequence_nr": -1,
        "cpu_parent": None,
    }
    return SimpleNamespace(name=name, **(defaults | fields))


@pytest.mark.parametrize(("kernels", "seconds"), [(0, (2.0, 2.0)), (1, (5.0, 3.0))])
def test_calls_take_the_time_of_their_kernels_or_of_the_host_if_there_are_none(
    kernels: int, seconds: tuple[float, float]
) -> None:
    call = event(f"{CALL}mm", 0, device_time_total=5e6 * kernels)
    op = event("aten::mm", 1, cpu_parent=call, sequence_nr=7)
    node = event(f"{BACKWARD}: MmBackward0", 4, sequence_nr=7, device_time_total=3e6 * kernels)
    events = [node, call, op, *[event("gemm", 2, "CUDA")] * kernels]
    assert by_call(events) == {"mm": seconds}


def test_a_timed_step_ends_when_all_devices_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    devices = [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")]
    model = torch.nn.Linear(2, 1, bias=False)
    model.register_forward_hook(lambda *_: done.append("step"))
    monkeypatch.setattr(torch_devices, "synchronize", lambda device: done.append(str(device)))
    trained(model, [torch.ones(2)], {}, devices)
    every = ["cuda:0", "cuda:1", "cpu"]
    assert done == [*every, "step", *every]
