"""Trials of replicas on GPUs: by new processes, with fake GPUs of their own or real ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from envs.collectives import MeasuredAllReduce
from envs.hardware.cluster import Cluster
from envs.hardware.discover import present
from envs.replication import Replication
from graphs.extract import Workload, extract
from placer.job import Job
from placer.parallel import collectives
from placer.parallel.collectives import NCCL
from placer.parallel.local_ranks import RankError
from placer.replicate.messages import remarks_of
from placer.replicate.plan import plan_job
from placer.replicate.result import ReplicaPlan
from placer.replicate.trials import (
    HOST,
    NO_ROOM,
    RANK_BYTES,
    model_bytes,
    ranks_bytes,
)
from placer.sources.target import Target
from tests.fake_cuda import fake_cuda
from tests.helpers.clusters import nodes
from tests.helpers.replica_plans import SEARCH, layers, planned, training, with_rates
from tests.helpers.second_devices import on_gpus

MODEL_BYTES = 4 * (16 * 32 + 32 + 32 * 4 + 4)  # of training()
TARGET = """
import os, torch
from torch import nn
from torch.nn import functional as F

if os.getpid() != {pid}:
    from tests.fake_cuda import fake_cuda
    opened = fake_cuda(len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")))
    opened.__enter__()

def build():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return model, (torch.randn(8, 16), torch.randn(8, 4)), F.mse_loss
"""


@contextmanager
def fake_gpus(folder: Path, memory_bytes: int) -> Iterator[Cluster]:
    """Yield two fake GPUs between which gloo reduces, with assumed times."""

    def unknown(*_: object) -> MeasuredAllReduce:
        raise RankError("not measured here")

    with fake_cuda(2, memory_bytes=memory_bytes), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLACER_CACHE", str(folder))
        patch.setattr(collectives, "NCCL", replace(NCCL, backend="gloo"))
        patch.setattr(collectives, "known_collectives", unknown)
        yield with_rates(present(["cuda:0", "cuda:1"]))


def planned_target(folder: Path, cluster: Cluster, wanted: Replication) -> ReplicaPlan:
    """Plan replicas of a target whose ranks see fake GPUs of their own."""
    path = folder / "target.py"
    path.write_text(TARGET.format(pid=os.getpid()))
    job = Job(source=Target(name=f"{path}:build"), cluster=cluster, search=SEARCH, replicas=wanted)
    return plan_job(job).result.replication


def test_ranks_on_gpus_take_the_memory_of_each_and_of_the_host() -> None:
    groups = (("cuda:0", "cpu"), ("cuda:1", "cpu"))
    found = planned(layers(), nodes(1, 1)).best
    assert found.result is not None
    best = found.result.best
    assert best.prediction is not None
    peaks_bytes = {"cuda:0": 1000, "cpu": 10}
    prediction = replace(best.prediction, peak_memory_bytes=peaks_bytes)
    result = replace(found.result, best=replace(best, prediction=prediction))
    on_gpus = replace(found, groups=groups, result=result)
    assert ranks_bytes(on_gpus, extract(training()), forked=False) == {
        "cuda:0": RANK_BYTES + 1000,
        "cuda:1": RANK_BYTES + 1000,
        HOST: 2 * (RANK_BYTES + MODEL_BYTES + 10),
    }


def test_a_tied_parameter_takes_memory_once() -> None:
    linear = nn.Linear(4, 4)
    model = nn.Sequential(linear, nn.ReLU(), nn.Linear(4, 4, bias=False))
    model[2].weight = linear.weight
    step = Workload.of(model, (torch.zeros(1, 4),), training=False)
    assert model_bytes(extract(step)) == 4 * (4 * 4 + 4)


def test_gpus_with_nearly_equal_free_memory_share_a_plan_for_the_least() -> None:
    cluster = nodes(1, 2)
    first, second = cluster.devices
    uneven = replace(cluster, devices=(replace(first, memory_bytes=95 * 10**13), second))
    plan = planned(layers(), uneven, Replication(replicas=2))
    assert plan.best.replicas == 2
    assert plan.problem.memory_bytes.tolist() == [95 * 10**13] * 2


@pytest.mark.slow
def test_on_gpus_plans_and_the_unplaced_model_are_run_by_new_processes(tmp_path: Path) -> None:
    with fake_gpus(tmp_path, 1 << 40) as cluster:
        plan = planned_target(tmp_path, cluster, Replication(replicas=2))
    tried = {each.name: each.measurement for each in plan.splits if each.measurement}
    # DistributedDataParallel scales gradients in C++, which fake GPUs do not take
    assert tried.pop("2 x 1 unplaced").failure.startswith("Expected all tensors")
    assert set(tried) == {"2 x 1", "1 x 2", "1 x 1 unplaced"}
    assert [runs.failure for runs in tried.values()] == [""] * 3
    assert plan.best.name == "2 x 1"
    assert plan.result.placement.measured is not None


@pytest.mark.slow
def test_plans_that_do_not_fit_on_the_gpus_beside_each_other_are_not_run(tmp_path: Path) -> None:
    with fake_gpus(tmp_path, 1 << 28) as cluster:
        plan = planned_target(tmp_path, cluster, Replication(replicas=2))
    assert not plan.was_run
    assert {each.measurement.failure for each in plan.splits if each.measurement} == {NO_ROOM}
    assert any("Nothing was run" in remark for remark in remarks_of(plan))


@pytest.mark.slow
def test_on_gpus_a_model_without_a_target_is_not_run(tmp_path: Path) -> None:
    with fake_gpus(tmp_path, 1 << 40) as cluster:
        plan = planned(training(), cluster, Replication(replicas=2))
    assert not any(each.measurement for each in plan.splits)
    assert any("load the model from a target" in remark for remark in remarks_of(plan))


@pytest.mark.parametrize("count", [on_gpus(1, 1), on_gpus(2, 2)])
def test_on_real_gpus_plans_and_the_unplaced_model_are_run(count: int, tmp_path: Path) -> None:
    names = [f"cuda:{index}" for index in range(count)]
    (tmp_path / "target.py").write_text(TARGET.format(pid=0).replace("!= 0", "== 0"))
    job = Job.of(
        f"{tmp_path}/target.py:build", ",".join(names), search=SEARCH, replicas=Replication()
    )
    plan = plan_job(job).result.replication
    tried = {each.name: each.measurement for each in plan.splits if each.measurement}
    assert {f"{count} x 1", f"{count} x 1 unplaced", "1 x 1 unplaced"} <= set(tried)
    assert [runs.failure for runs in tried.values()] == [""] * len(tried)
    assert plan.was_run
