"""Trials of replicas: real ranks of small models that take turns."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn import functional as F

from envs.executors.unplaced import UnplacedModel
from envs.hardware.discover import physical_cores, present
from envs.placement import Placement
from envs.replication import Replication
from graphs.extract import Workload, extract
from graphs.graph import GraphArrays
from placer.parallel.data import Batch
from placer.parallel.trials import Trial, copied, run_trials, under_ddp
from tests.helpers.processes import all_end, descendants
from tests.helpers.ranks import on_ranks

CORE = f"core:{physical_cores()[0]}"


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


def trial(
    *,
    unplaced: bool = False,
    accumulate: int = 1,
    payload: str = "fp32",
    optimizer: str = "sgd",
    model: nn.Module | None = None,
) -> Trial:
    """Return one replica on one core."""
    extraction = extract(
        Workload.of(model or plain(), (torch.randn(4, 6), torch.randn(4, 4)), F.mse_loss)
    )
    graph = GraphArrays.from_graph(extraction.graph)
    devices = np.zeros(len(graph), np.int32)
    placement = Placement.of(graph, present([CORE]), devices, -np.arange(float(len(graph))))
    replicas = Replication(
        groups=((CORE,),), accumulate=accumulate, payload=payload, unplaced=unplaced
    )
    placement = replace(placement, replicas=replicas)
    return Trial(make=partial(copied, extraction), placement=placement, optimizer=optimizer)


def taken_turns() -> list[tuple[int, bool, str]]:
    model = plain()
    trials = [
        trial(model=model),
        trial(unplaced=True, optimizer="adam"),
        trial(accumulate=2, payload="1-bit", optimizer="momentum"),
    ]
    before = [tensor.clone() for tensor in model.state_dict().values()]
    runs = run_trials(trials, rounds=3, turn_s=0.01)
    for tensor, was in zip(model.state_dict().values(), before, strict=True):
        torch.testing.assert_close(tensor, was, rtol=0, atol=0)  # buffers included
    return [
        (
            len(each.step_s),
            all(0 < a <= b for a, b in zip(each.pass_s, each.step_s, strict=True)),
            each.failure,
        )
        for each in runs
    ]


@pytest.mark.slow
def test_placed_and_unplaced_replicas_take_turns_and_leave_the_model_alone() -> None:
    [found] = on_ranks(1, taken_turns, joined=False, timeout_s=600.0)
    assert found == [(3, True, "")] * 3


class HalfUsed(nn.Module):
    """A layer beside one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)  # type: ignore[no-any-return]  # modules are untyped in torch


def gradients_under_ddp() -> tuple[Tensor, Tensor]:
    """Return the gradient of a step of two passes on this rank, and this rank's part of it."""
    torch.manual_seed(0)  # the same model on both ranks
    model = HalfUsed()
    torch.manual_seed(dist.get_rank())
    batches: list[Batch] = [((torch.randn(4, 6), torch.randn(4, 4)), {}) for _ in range(2)]
    extraction = extract(Workload.of(model, batches[0][0], F.mse_loss))
    own = [grad(F.mse_loss(model(x), y), model.used.weight)[0] for (x, y), _ in batches]
    unplaced = UnplacedModel(extraction, cores=[min(os.sched_getaffinity(0))])
    trained = under_ddp(unplaced, lambda each: torch.optim.SGD(each, lr=0.0), batches[0])
    for _ in range(2):  # DDP notices unused parameters in the second step
        trained.zero_grad()
        trained.backward(batches)
        trained.update()
    assert model.used.weight.grad is not None
    return model.used.weight.grad, sum(own, torch.zeros(4, 6))


@pytest.mark.slow
def test_unplaced_replicas_reduce_their_gradients_by_ddp() -> None:
    (first, of_first), (second, of_second) = on_ranks(2, gradients_under_ddp, timeout_s=600.0)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, (of_first + of_second) / 2)
    assert not torch.allclose(of_first, of_second)


class Deadly(nn.Linear):
    """A layer that can be extracted, and kills its process where it runs unplaced."""

    def forward(self, x: Tensor) -> Tensor:
        if os.environ.get("DEADLY"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def with_one_that_dies() -> list[tuple[int, str]]:
    deadly = trial(unplaced=True, model=Deadly(6, 4))
    os.environ["DEADLY"] = "1"
    runs = run_trials([deadly, trial()], rounds=2, turn_s=0.01)
    return [(len(each.step_s), each.failure) for each in runs]


@pytest.mark.slow
def test_a_trial_whose_rank_dies_fails_and_the_others_continue() -> None:
    [[dead, alive]] = on_ranks(1, with_one_that_dies, joined=False, timeout_s=600.0)
    assert dead == (0, "a rank died")
    assert alive == (2, "")


def interrupted() -> tuple[list[int], bool]:
    before = descendants()

    def progress(done: int, total: int) -> None:
        if done == 3:  # in the second round
            raise KeyboardInterrupt

    runs = run_trials([trial(), trial()], progress, rounds=5, turn_s=0.01)
    return [len(each.step_s) for each in runs], all_end(descendants() - before)


@pytest.mark.slow
def test_ctrl_c_keeps_complete_rounds_and_ends_the_ranks() -> None:
    [(rounds, ended)] = on_ranks(1, interrupted, joined=False, timeout_s=600.0)
    assert rounds == [1, 1]
    assert ended


@pytest.mark.slow
def test_a_model_that_cannot_be_trained_so_is_a_failure() -> None:
    one = trial()
    name = f"core:{max(os.sched_getaffinity(0)) + 1}"
    missing = Replication(groups=((name,),))
    placement = replace(one.placement, replicas=missing)
    [runs] = run_trials([replace(one, placement=placement)], rounds=1)
    assert name in runs.failure
