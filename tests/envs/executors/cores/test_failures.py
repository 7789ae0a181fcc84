"""Failures in a placed step are reported and leave nothing behind."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import placer
from envs.executors.cores.errors import WorkerError
from envs.executors.cores.fork_server import running_server
from envs.executors.cores.placed_model import PlacedModel
from envs.hardware.cluster import Device
from envs.placement import Placement
from graphs.extract import Workload, extract
from graphs.graph import GraphArrays
from tests.envs.executors.cores import test_executor
from tests.helpers import tiny_models
from tests.helpers.processes import becomes_true, descendants
from tests.helpers.tiny_models import assert_same, forward, state_of

torch.set_num_threads(1)

CORES = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


def own_shared_memory() -> set[str]:
    """Return our files in /dev/shm and the arenas that this process has mapped."""
    ours = ("placer", f"_{os.getpid()}_")
    names = (path.name for path in Path("/dev/shm").iterdir())
    named = {name for name in names if any(part in name for part in ours)}
    lines = Path("/proc/self/maps").read_text().splitlines()
    return named | {line.split()[0] for line in lines if "placer-" in line}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    gc.collect()
    running_server()
    before, memory = descendants(), own_shared_memory()
    yield
    gc.collect()
    assert becomes_true(lambda: descendants() <= before)
    assert own_shared_memory() - memory == set()


def test_training_ends_with_the_name_of_a_worker_that_was_killed() -> None:
    step = tiny_models.conv_net()
    extraction = extract(step)
    count = extraction.program.op_count
    cluster = test_executor.two_cores()
    placed = PlacedModel(extraction, cluster, [op % 2 for op in range(count)], range(count))
    placed.step(*step.inputs)
    before = state_of(step)
    os.kill(test_executor.worker_ids(placed)[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match=f"core:{CORES[1]} died"):
        placed.step(*step.inputs)
    with pytest.raises(WorkerError, match="have ended"):
        placed.step(*step.inputs)
    placed.close()
    assert_same(state_of(step), before)
    assert forward(step).isfinite()
    step.model.zero_grad()


def test_a_placement_that_names_a_missing_device_starts_nothing() -> None:
    model, inputs = nn.Linear(4, 3), (torch.randn(5, 4), torch.randn(5, 3))
    step = Workload.of(model, inputs, nn.functional.mse_loss)
    graph = GraphArrays.from_graph(extract(step).graph)
    cluster = test_executor.two_cores()
    absent = replace(cluster, devices=(*cluster.devices[:1], missing_core()))
    placement = Placement.of(graph, absent, np.arange(len(graph)) % 2, np.zeros(len(graph)))
    with pytest.raises(ValueError, match=r"there is no device core:99999.*may run on cores"):
        placer.apply(model, placement, inputs, loss=nn.functional.mse_loss)


def missing_core() -> Device:
    return Device(name="core:99999", kind="core", memory_bytes=1 << 30)
