"""Pipelines of replicas: two stages times two replicas give the gradients of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

from envs.hardware.cluster import Cluster, Device
from envs.placement import Placement
from graphs.extract import Extraction, Workload, extract
from graphs.graph import GraphArrays
from placer.parallel import SyncConfig, pipelined
from placer.parallel.pipelined import PipelinedReplica
from placer.parallel.rank_devices import stage_devices
from tests.helpers.ranks import RankError, each, on_ranks
from tests.helpers.replicas import backward, parameters
from tests.helpers.second_devices import on_gpus

MICRO_BATCHES = 4
STEPS = 3
LR = 0.2
SECOND_STAGE = ("2", "3", "4")
CLUSTER = Cluster(
    name="two",
    devices=tuple(Device(name=f"core:{i}", kind="core", memory_bytes=1 << 40) for i in range(2)),
)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def batch(number: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(number)
    return torch.randn(8, 6, generator=random), torch.randn(8, 4, generator=random)


def chain() -> tuple[Extraction, Placement]:
    """Place the model on two devices, one after the other."""
    extraction = extract(Workload.of(model(), batch(0), F.mse_loss))
    graph = GraphArrays.from_graph(extraction.graph)
    devices = np.array([int(module.startswith(SECOND_STAGE)) for module in graph.modules])
    for group in set(graph.group.tolist()) - {-1}:
        devices[graph.group == group] = devices[graph.group == group].max()
    return extraction, Placement.of(graph, CLUSTER, devices, np.zeros(len(graph)))


def trained(
    device_type: str, schedule: Any, config: SyncConfig
) -> tuple[dict[str, Tensor], list[Any]]:
    mesh = init_device_mesh(device_type, (2, 2), mesh_dim_names=("dp", "place"))
    extraction, placement = chain()
    if device_type == "cuda":
        placement = replace(placement, device_names=("cuda:0", "cuda:1"))
    replica = PipelinedReplica(
        extraction, placement, mesh, micro_batches=MICRO_BATCHES, schedule=schedule
    )
    assert {p.device.type for p in replica.module.parameters()} == {device_type}
    sync = replica.make_sync(partial(torch.optim.SGD, lr=LR), config)
    losses = []
    for number in range(STEPS):
        sync.zero_grad()
        losses.append(replica.backward(*batch(2 * number + mesh["dp"].get_local_rank())))
        sync.step()
    sync.finish()
    return parameters(replica.module), losses


def in_one_process() -> tuple[dict[str, Tensor], list[list[float]]]:
    plain = model()
    sgd = torch.optim.SGD(plain.parameters(), lr=LR)
    losses = []
    for number in range(STEPS):
        sgd.zero_grad()
        own = []
        for replica in range(2):
            inputs, target = batch(2 * number + replica)
            own.append(F.mse_loss(plain(inputs), target))
        losses.append([loss.item() for loss in own])
        backward(torch.stack(own).mean())
        sgd.step()
    return parameters(plain), losses


@pytest.mark.slow
@pytest.mark.parametrize("device_type", ["cpu", on_gpus(4, "cuda")])
def test_two_stages_of_two_replicas_train_as_one_process(device_type: str) -> None:
    cases = {
        "1f1b": (trained, device_type, Schedule1F1B, SyncConfig()),
        "gpipe": (trained, device_type, ScheduleGPipe, SyncConfig(method="ma", period=1)),
    }
    expected, losses = in_one_process()
    for rank, of_rank in enumerate(on_ranks(4, each, cases, device_type=device_type)):
        replica, stage = divmod(rank, 2)
        names = {n for n in expected if n.startswith(SECOND_STAGE) == bool(stage)}
        shown = [pair[replica] for pair in losses] if stage else [None] * STEPS
        for found, own in of_rank.values():
            assert set(found) == names
            torch.testing.assert_close(found, {n: expected[n] for n in found}, rtol=1e-5, atol=1e-6)
            assert own == pytest.approx(shown, abs=1e-6)


def gpu_of_stage(seen: int) -> list[str]:
    """Return the GPU that is made the current one, and the one that the stage is built on."""
    named, made = [], []
    patch = pytest.MonkeyPatch()
    patch.setattr(pipelined, "cuda_devices", lambda: [f"cuda:{i}" for i in range(seen)])
    patch.setattr(pipelined, "tensor_device", torch.device)
    patch.setattr(torch.cuda, "set_device", lambda device: named.append(str(device)))

    class Pipe:
        def build_stage(self, index: int, device: torch.device, group: object) -> None:
            made.append(str(device))
            raise KeyboardInterrupt

    patch.setattr(pipelined, "pipeline", lambda *_, **__: Pipe())
    extraction, placement = chain()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "place"))
    placement = replace(placement, device_names=("cuda:0", "cuda:1"))
    with pytest.raises(KeyboardInterrupt):
        PipelinedReplica(extraction, placement, mesh, micro_batches=MICRO_BATCHES)
    patch.undo()
    return named + made


@pytest.mark.slow
def test_every_rank_has_a_gpu_of_its_own_which_is_the_current_one() -> None:
    four, one = "4", "1"
    results = on_ranks(4, each, {four: (gpu_of_stage, 4), one: (gpu_of_stage, 1)})
    assert [result[four] for result in results] == [[f"cuda:{i}"] * 2 for i in range(4)]
    assert [result[one] for result in results] == [["cuda:0"] * 2] * 4, "each sees its own"


def test_stages_keep_their_gpus_in_the_first_replica_of_a_host_and_others_take_what_is_left() -> (
    None
):
    two = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert stage_devices(("cuda:1", "cuda:3"), two[:2], 4) == ("cuda:1", "cuda:3")
    assert stage_devices(("cuda:3", "cuda:1"), two, 4) == ("cuda:3", "cuda:1", "cuda:2", "cuda:0")
    assert stage_devices(("cuda:0", "cpu"), two, 2) == ("cuda:0", "cpu", "cuda:1", "cpu")
    assert stage_devices(("cuda:0", "cuda:1"), [(k, 0) for k in range(3)], 4) == (
        *("cuda:0", "cuda:1", "cuda:2"),
    )  # the second stages are on another host
    with pytest.raises(ValueError, match=r"4 ranks of this host .* there are 3"):
        stage_devices(("cuda:0", "cuda:1"), two, 3)


def replica_on(shape: tuple[int, int], micro_batches: int) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "place"))
    PipelinedReplica(*chain(), mesh, micro_batches=micro_batches)


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("shape", "micro_batches", "message"),
    [
        ((2, 1), MICRO_BATCHES, "the placement has 2 stages, the mesh 1"),
        ((1, 2), 3, r"shape \(8, 6\) in a batch cannot be cut into 3 equal parts"),
    ],
)
def test_what_does_not_fit_the_mesh_is_refused(
    shape: tuple[int, int], micro_batches: int, message: str
) -> None:
    with pytest.raises(RankError, match=message):
        on_ranks(2, replica_on, shape, micro_batches)
