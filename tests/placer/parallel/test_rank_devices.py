"""The devices of a rank: its place on the host, GPUs that only it sees, and shared GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from envs.hardware.torch_devices import uuid_of
from envs.placement import Placement
from envs.replication import Replication
from placer.parallel import rank_devices, run
from placer.parallel.processes import joined, wire_device
from placer.parallel.rank_devices import on_own_devices, place_on_host
from tests.helpers.ranks import on_ranks

SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the variables of a launcher, and removes those of all others."""

    def launch(**variables: str) -> None:
        for name in list(os.environ):
            if name.startswith(("SLURM_", "OMPI_", "MPI_", "LOCAL_")):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return launch


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, (3, 4)),
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", **SRUN}, (3, 4)),
        ({"LOCAL_RANK": "3"}, (3, 8)),
        (SRUN, (1, 4)),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (1, 2)),
        ({"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, (0, 2)),
    ],
)
def test_launchers_say_which_rank_of_a_host_this_is(
    variables: dict[str, str], expected: tuple[int, int], launched: Callable[..., None]
) -> None:
    launched(RANK="5", WORLD_SIZE="8", **variables)
    assert place_on_host() == expected


@pytest.mark.parametrize("inherited", [{}, {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}])
def test_ranks_that_do_not_know_their_host_are_refused(
    inherited: dict[str, str], launched: Callable[..., None]
) -> None:
    launched(RANK="5", WORLD_SIZE="8", **inherited)
    with pytest.raises(ValueError, match=r"rank 5 of 8, but nothing .* set LOCAL_RANK"):
        place_on_host()
    launched(RANK="0", WORLD_SIZE="1", **inherited)
    assert place_on_host() == (0, 1)


def planned(*groups: tuple[str, ...]) -> Placement:
    names = groups[0]
    return Placement(
        graph="",
        cluster="",
        ops=names,
        device_names=names,
        devices=tuple(range(len(names))),
        priority=(0.0,) * len(names),
        replicas=Replication(groups=groups),
    )


def test_a_planned_replica_that_sees_only_its_own_gpus_numbers_them_from_0(
    monkeypatch: pytest.MonkeyPatch, launched: Callable[..., None]
) -> None:
    monkeypatch.setattr(rank_devices, "cuda_devices", lambda: ["cuda:0", "cuda:1"])
    monkeypatch.setattr(rank_devices, "check_devices", lambda names: None)
    launched(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    own, _ = on_own_devices(planned(("cuda:0", "cuda:1"), ("cuda:2", "cuda:3")))
    assert own.device_names == ("cuda:0", "cuda:1")
    monkeypatch.setattr(rank_devices, "cuda_devices", lambda: [f"cuda:{i}" for i in range(4)])
    own, _ = on_own_devices(planned(("cuda:0", "cuda:1"), ("cuda:2", "cuda:3")))
    assert own.device_names == ("cuda:2", "cuda:3")


def backend_of(gpus: list[list[str]]) -> tuple[str, list[int]]:
    """Return the backend that is asked for by a rank with these GPUs, and the ranks that share."""
    asked: list[str] = []
    begin = dist.init_process_group

    def gloo(backend: str | None = None, *_: Any, **options: Any) -> None:
        asked.append(str(backend))
        begin("gloo", **options)

    dist.init_process_group = gloo
    with joined(60.0, gpus=gpus[int(os.environ["RANK"])]) as (_, sharing):
        dist.barrier()
        return asked[0], list(sharing)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([["GPU-a"], ["GPU-b"]], ("cpu:gloo,cuda:nccl", [])),
        ([["GPU-a"], ["GPU-a"]], ("gloo", [0, 1])),
        ([[], []], ("gloo", [])),
    ],
)
def test_nccl_is_used_unless_ranks_see_the_same_gpu(
    gpus: list[list[str]], expected: tuple[str, list[int]]
) -> None:
    assert on_ranks(2, backend_of, gpus, joined=False) == [expected] * 2


def test_planned_replicas_that_share_a_gpu_are_refused() -> None:
    plan = planned(("cuda:0",), ("cuda:1",))
    ours: Any = SimpleNamespace(placement=plan)
    with pytest.raises(ValueError, match="ranks 0, 1 of this run share GPUs"):
        run.check_sharing(ours, [0, 1])
    run.check_sharing(ours, [])
    ours.placement = replace(plan, replicas=None)
    run.check_sharing(ours, [0, 1])


def test_gpus_are_told_apart_by_their_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"u{device.index}")
    )
    assert uuid_of(torch.device("cuda", 1)) == "u1"
    assert not uuid_of(torch.device("cpu"))


def test_nccl_sends_from_the_current_gpu_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert wire_device(None) == torch.device("cuda", 3)
