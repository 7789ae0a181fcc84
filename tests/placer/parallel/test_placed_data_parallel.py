"""DistributedDataParallel around placed modules, in two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import one_replica
from tests.helpers.folders import ROOT
from tests.helpers.one_replica import REPLICAS, STEPS, of_replica, shard
from tests.helpers.tiny_models import forward

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch lacks distributed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="vdev would take CUDA's place"),
]


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("replicas")
    paths = os.pathsep.join([str(ROOT), *sys.path])
    processes = [
        subprocess.Popen(
            [sys.executable, one_replica.__file__, str(rank), str(folder)],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(REPLICAS)
    ]
    try:
        said = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * REPLICAS, said
    return [torch.load(folder / f"{rank}.pt") for rank in range(REPLICAS)]


def in_one_process() -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Return the last gradients, averaged over the replicas, and the final state of each.

    All start from the state of the first replica, whose buffers are copied before every step.
    """
    models = [of_replica(0) for _ in range(REPLICAS)]
    for number in range(STEPS):
        before = {name: own.clone() for name, own in models[0].model.named_buffers()}
        for rank, step in enumerate(models):
            for name, buffer in step.model.named_buffers():
                buffer.copy_(before[name])
            step.model.zero_grad()
            forward(replace(step, inputs=shard(number, rank))).backward()
        gradients = {
            name: torch.stack([s.model.get_parameter(name).grad for s in models]).mean(0)  # type: ignore[misc]  # all have one
            for name, _ in models[0].model.named_parameters()
        }
        with torch.no_grad():
            for step in models:
                for name, parameter in step.model.named_parameters():
                    parameter.sub_(0.1 * gradients[name])
    return gradients, [step.model.state_dict() for step in models]


def test_gradients_and_state_are_those_of_one_process(replicas: list[dict[str, Any]]) -> None:
    gradients, states = in_one_process()
    for replica, state in zip(replicas, states, strict=True):
        torch.testing.assert_close(replica["gradients"], gradients, rtol=1e-5, atol=1e-6)
        named = {f"module.{name}": tensor for name, tensor in state.items()}
        torch.testing.assert_close(dict(replica["state"]), named, rtol=1e-5, atol=1e-6)
    means = [state["1.running_mean"] for state in states]
    assert not torch.equal(*means), "each has seen another batch since the last broadcast"


def test_parameters_on_two_types_of_device_are_refused_by_torch(
    replicas: list[dict[str, Any]],
) -> None:
    for replica in replicas:
        assert "must be on the same type of devices" in replica["mixed types"]
