"""Trials of replicas by new processes: on cores by gloo, on fake GPUs, and by NCCL on real ones.

They are apart from those of forks, which cannot use autograd where there is a second torch device.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from envs.hardware.discover import present
from envs.placement import Placement
from envs.replication import Replication
from envs.runtime import runtime_for
from graphs.graph import GraphArrays
from graphs.optimizer import Optimizer
from placer.parallel.collectives import NCCL, transport_of
from placer.parallel.trials import Trial, loaded, run_trials
from placer.sources.target import Target
from tests.fake_cuda import fake_cuda
from tests.helpers.processes import all_end, descendants
from tests.helpers.second_devices import HAS_CUDA, on_gpus

CORES = [f"core:{core}" for core in sorted(os.sched_getaffinity(0))[:2]]
TARGET = """
import os, signal, torch
from torch import nn
from torch.nn import functional as F

def build():
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    return model, (torch.randn(8, 6), torch.randn(8, 4)), F.mse_loss

def wider():
    if os.getpid() != {pid}:
        return nn.Linear(6, 5), (torch.randn(8, 6), torch.randn(8, 5)), F.mse_loss
    return build()

def deadly():
    if os.getpid() != {pid}:
        os.kill(os.getpid(), signal.SIGKILL)
    return build()

def fake(memory_bytes=1 << 30):
    if os.getpid() != {pid}:
        from tests.fake_cuda import fake_cuda
        opened.append(fake_cuda(memory_bytes=memory_bytes))
        opened[-1].__enter__()
    return build()

def full():
    return fake(memory_bytes=1024)

opened = []
"""


def new_trial(folder: Path, names: Sequence[str], function: str, *, unplaced: bool) -> Trial:
    """Return replicas on one device each, whose ranks are new processes that load a target."""
    path = folder / "target.py"
    path.write_text(TARGET.format(pid=os.getpid()))
    make = partial(loaded, Target(name=f"{path}:{function}", optimizer=Optimizer.of("adam")), 2)
    extraction, cluster = make("auto"), present(names[:1])
    graph = GraphArrays.from_graph(runtime_for(extraction, cluster).graph)
    priority = -np.arange(float(len(graph)))
    placement = Placement.of(graph, cluster, np.zeros(len(graph), np.int32), priority)
    replicas = Replication(
        groups=tuple((name,) for name in names), batch="global", unplaced=unplaced
    )
    transport = transport_of(names)
    return Trial(
        make=partial(make, extraction.extractor),
        placement=replace(placement, replicas=replicas),
        optimizer="adam",
        transport=replace(transport, forked=False),
    )


@pytest.mark.slow
@pytest.mark.parametrize("names", [CORES, on_gpus(1, ["cuda:0"]), on_gpus(2, ["cuda:0", "cuda:1"])])
def test_ranks_that_are_new_processes_load_the_target_and_take_turns(
    names: list[str], tmp_path: Path
) -> None:
    before = descendants()
    trials = [new_trial(tmp_path, names, "build", unplaced=each) for each in (False, True)]
    for runs in run_trials(trials, rounds=2, turn_s=0.01):
        assert runs.failure == ""
        assert len(runs.step_s) == 2
        assert all(0 < a <= b for a, b in zip(runs.pass_s, runs.step_s, strict=True))
    assert all_end(descendants() - before)


@pytest.mark.slow
@pytest.mark.parametrize("names", [CORES[:1], on_gpus(1, ["cuda:0"])])
def test_new_processes_that_load_another_model_or_die_give_a_reason(
    names: list[str], tmp_path: Path
) -> None:
    trials = [
        new_trial(tmp_path, names, function, unplaced=False) for function in ("wider", "deadly")
    ]
    other, dead = run_trials(trials, rounds=2, turn_s=0.01)
    assert "was made for graph" in other.failure
    assert dead.failure == "a rank died"


@pytest.mark.slow
def test_a_rank_whose_gpu_is_full_gives_a_reason_and_the_others_continue(tmp_path: Path) -> None:
    with fake_cuda():
        trials = [
            new_trial(tmp_path, ["cuda:0"], function, unplaced=unplaced)
            for function, unplaced in (("full", False), ("fake", False), ("fake", True))
        ]
        on_gloo = [replace(each, transport=replace(NCCL, backend="gloo")) for each in trials]
        full, placed, unplaced = run_trials(on_gloo, rounds=2, turn_s=0.01)
    assert "out of memory" in full.failure
    assert placed.failure == unplaced.failure == ""
    assert [len(each.step_s) for each in (full, placed, unplaced)] == [0, 2, 2]


@pytest.mark.slow
@pytest.mark.skipif(HAS_CUDA, reason="NCCL finds a CUDA device")
def test_nccl_that_does_not_come_up_gives_a_reason(tmp_path: Path) -> None:
    one = new_trial(tmp_path, CORES[:1], "build", unplaced=False)
    [runs] = run_trials([replace(one, transport=NCCL)], rounds=1)
    assert "NCCL" in runs.failure
